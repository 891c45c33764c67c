//! Passing a verdict: looked at first, so that a refusal has its reason; then compared and set, with audit and event.
//!
//! Refuses to take a job from a request that is on the wire. A job that a worker has in hand unsent is taken from it: the
//! fence moves on, so whatever that worker writes or begins afterwards is lost.

use std::sync::Arc;

use super::list::of;
use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::operator::{Actor, JobResolution, ResolutionRefusal};
use crate::ledger::sql::audit_context::AuditContext;
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Engine, Sql, Step, Value};
use crate::ledger::sql::storable;

/// How often a verdict looks again when a worker took the job between its statements.
const LOOKS_MAX: u32 = 4;

pub struct ResolutionStatements {
    look: Sql,
    passing: ResolutionSql,
    charged: Sql,
    signature: AuditContext,
}

/// How a verdict is written.
enum ResolutionSql {
    /// By a function of the owner's: whoever may call it needs no right to the tables.
    Function(Sql),
    /// A database file knows no roles.
    Statements { settle: Sql, revive: Sql, event: Sql },
}

impl ResolutionSql {
    fn new(dialect: Dialect) -> Self {
        if dialect == Dialect::Postgres {
            return Self::Function(dialect.render("SELECT jobs_decide($1, $2, $4, $5, $6, $3) AS id"));
        }
        Self::Statements {
            settle: dialect.render(
                "UPDATE jobs SET state = $4, fence = fence + 1, lease_owner = NULL, lease_until = NULL, reason = $5, \
                     provider_reference = COALESCE($6, provider_reference), scrubbed_at = NULL, updated_at = {now} \
                 WHERE id = $1 AND state = $2 AND fence = $3 RETURNING id",
            ),
            // What was sent when stays: the provider may have begun to remember the key then. The reference goes: the next
            // answer brings its own, and what it was until now may be another payment's.
            revive: dialect.render(
                "UPDATE jobs SET state = $4, fence = fence + 1, reason = $5, maybe_charged = 0, attempts = 0, \
                     lookups = 0, resend = NULL, lost_holders = 0, provider_reference = NULL, wake_at = {now}, \
                     revived_at = {now}, copy = copy + 1, delayed_copy = NULL, delayed_until = NULL, \
                     updated_at = {now} \
                 WHERE id = $1 AND state = $2 AND fence = $3 AND lease_until IS NULL \
                     AND (state = 'review' OR NOT maybe_charged) RETURNING id",
            ),
            event: dialect.render(
                "INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at) \
                 SELECT id, provider, state, provider_reference, reason, attempts, updated_at FROM jobs WHERE id = $1",
            ),
        }
    }

    /// `change`: id, state, fence, the state that it becomes, reason, the provider's reference.
    fn steps(&self, verdict: &JobResolution, id: &JobId, change: Args) -> Vec<Step> {
        let step = |sql: &Sql, args: Args| Step { sql: sql.clone(), args, must_affect: true };
        match self {
            Self::Function(decide) => vec![step(decide, change)],
            Self::Statements { revive, .. } if verdict.needs_resend() => vec![step(revive, change)],
            Self::Statements { settle, event, .. } => vec![step(settle, change), step(event, of(id))],
        }
    }
}

impl ResolutionStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            look: dialect.render(
                "SELECT state, fence, maybe_charged, \
                     CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END AS expired, \
                     CASE WHEN scrubbed_at IS NOT NULL OR (frozen_method IS NOT NULL AND length(frozen_body) = 0) \
                         THEN 1 ELSE 0 END AS emptied, \
                     (SELECT count(*) FROM attempts WHERE job_id = jobs.id AND ended_at IS NULL) AS attempts_open \
                 FROM jobs WHERE id = $1",
            ),
            passing: ResolutionSql::new(dialect),
            charged: dialect.render(
                "SELECT other.id FROM jobs JOIN jobs AS other ON other.provider = jobs.provider \
                 WHERE jobs.id = $1 AND other.id <> $1 AND other.state = 'succeeded' \
                     AND other.provider_reference = COALESCE($2, jobs.provider_reference)",
            ),
            signature: AuditContext::new(dialect),
        }
    }

    /// The fence of a job that the verdict can be passed on, or why it cannot.
    pub async fn look(
        &self,
        engine: &dyn Engine,
        id: &JobId,
        verdict: &JobResolution,
    ) -> Result<Result<i64, ResolutionRefusal>, LedgerError> {
        let rows = engine.query(&self.look, of(id)).await?;
        let Some(row) = rows.first() else { return Ok(Err(ResolutionRefusal::NoSuchJob)) };
        let state = row.text("state")?;
        if state != verdict.required_state() {
            return Ok(Err(ResolutionRefusal::WrongState {
                state,
                wanted: verdict.required_state(),
                done: verdict.past_participle(),
            }));
        }
        if row.int("attempts_open")? > 0 {
            return Ok(Err(ResolutionRefusal::AttemptInProgress));
        }
        if verdict.needs_resend() && row.int("expired")? != 0 {
            return Ok(Err(ResolutionRefusal::Expired));
        }
        if verdict.needs_resend() && row.int("emptied")? != 0 {
            return Ok(Err(ResolutionRefusal::Scrubbed));
        }
        let fence = row.int("fence")?;
        if let JobResolution::Succeeded { reference } = verdict {
            let args = Arc::from([id.as_str().into(), reference.as_deref().map(storable).into()]);
            if let Some(row) = engine.query(&self.charged, args).await?.first() {
                return Ok(Err(ResolutionRefusal::ReferenceTaken { by: row.text("id")? }));
            }
        }
        Ok(Ok(fence))
    }

    pub async fn resolve(
        &self,
        engine: &dyn Engine,
        id: &JobId,
        verdict: &JobResolution,
        seen_fence: Option<i64>,
        by: &Actor,
    ) -> Result<Result<(), ResolutionRefusal>, LedgerError> {
        for _ in 0..LOOKS_MAX {
            let fence = match self.look(engine, id, verdict).await? {
                Ok(fence) => fence,
                Err(refusal) => return Ok(Err(refusal)),
            };
            if seen_fence.is_some_and(|seen| seen != fence) {
                break;
            }
            if engine.atomically(self.steps(id, verdict, fence, by, &reason(verdict, by, ""))).await?.is_some() {
                return Ok(Ok(()));
            }
        }
        Ok(Err(ResolutionRefusal::Changed))
    }

    /// What cancels a row that is written in the same stroke, with fence 0.
    pub fn precancel_steps(&self, id: &JobId, by: &Actor) -> Vec<Step> {
        self.steps(id, &JobResolution::Cancel, 0, by, &precancel_reason(by))
    }

    /// The change of one job, signed.
    pub fn audited(&self, id: &JobId, change: Vec<Step>, by: &Actor) -> Vec<Step> {
        self.signature.wrap_job_change(id, change, by)
    }

    fn steps(&self, id: &JobId, verdict: &JobResolution, fence: i64, by: &Actor, reason: &str) -> Vec<Step> {
        let reference = match verdict {
            JobResolution::Succeeded { reference } => reference.as_deref().map(storable),
            _ => None,
        };
        let change: [Value; 6] = [
            id.as_str().into(),
            verdict.required_state().into(),
            fence.into(),
            verdict.resulting_state().into(),
            storable(reason).into(),
            reference.into(),
        ];
        self.audited(id, self.passing.steps(verdict, id, Arc::from(change)), by)
    }
}

/// Why a payment is cancelled of which no message has come.
pub fn precancel_reason(by: &Actor) -> String {
    reason(&JobResolution::Cancel, by, " before its message came")
}

fn reason(verdict: &JobResolution, by: &Actor, when: &str) -> String {
    let done = verdict.past_participle();
    match by.reason.as_deref().map(storable) {
        Some(because) => format!("{done} by a person{when}: {because}"),
        None => format!("{done} by a person{when}"),
    }
}
