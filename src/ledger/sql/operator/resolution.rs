//! An operator's decision in SQL: the job is read first, so that a rejection has its reason, then compared and updated.
//!
//! Audit row and event are written in the same transaction. A job with a request in flight is left to its worker. An
//! active job without a request is taken from its worker: the fencing token rises, so the worker's later writes are
//! rejected. See `docs/decisions/0030-leases-and-operator-decisions.md`.

use std::sync::Arc;

use super::list::id_args;
use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, JobResolution, ResolutionRefusal};
use crate::ledger::sql::audit_context::AuditContext;
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Engine, Sql, Step, Value};
use crate::ledger::sql::storable;

/// How often a decision retries when a worker claimed the job between its statements.
const LOOKS_MAX: u32 = 4;

pub struct ResolutionStatements {
    look: Sql,
    statements: ResolutionSql,
    charged: Sql,
    audit_context: AuditContext,
}

/// The statements, by database.
enum ResolutionSql {
    /// By a function of the owner's: its caller needs no right to the tables.
    Function(Sql),
    /// A database file has no roles.
    Statements { finalize: Sql, revive: Sql, event: Sql },
}

impl ResolutionSql {
    fn new(dialect: Dialect) -> Self {
        if dialect == Dialect::Postgres {
            return Self::Function(dialect.render("SELECT jobs_decide($1, $2, $4, $5, $6, $3) AS id"));
        }
        Self::Statements {
            finalize: dialect.render(
                "UPDATE jobs SET state = $4, fence = fence + 1, lease_owner = NULL, lease_until = NULL, reason = $5, \
                     provider_reference = COALESCE($6, provider_reference), scrubbed_at = NULL, updated_at = {now} \
                 WHERE id = $1 AND state = $2 AND fence = $3 RETURNING id",
            ),
            // The time of the first request stays: the provider may have remembered the key since then. The reference
            // is cleared: the next response brings its own, and the former one may belong to another payment.
            revive: dialect.render(
                "UPDATE jobs SET state = $4, fence = fence + 1, reason = $5, maybe_charged = 0, attempts = 0, \
                     lookups = 0, resend = NULL, lost_holders = 0, provider_reference = NULL, wake_at = {now}, \
                     wait_reason = NULL, wait_limit = NULL, wait_detail = NULL, \
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

    /// `change`: id, state, fencing token, the state that it becomes, reason, the provider's reference.
    fn steps(&self, resolution: &JobResolution, id: &JobId, change: Args) -> Vec<Step> {
        let step = |sql: &Sql, args: Args| Step { sql: sql.clone(), args, must_affect: true };
        match self {
            Self::Function(decide) => vec![step(decide, change)],
            Self::Statements { revive, .. } if resolution.needs_resend() => vec![step(revive, change)],
            Self::Statements { finalize, event, .. } => vec![step(finalize, change), step(event, id_args(id))],
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
            statements: ResolutionSql::new(dialect),
            charged: dialect.render(
                "SELECT other.id FROM jobs JOIN jobs AS other ON other.provider = jobs.provider \
                 WHERE jobs.id = $1 AND other.id <> $1 AND other.state = 'succeeded' \
                     AND other.provider_reference = COALESCE($2, jobs.provider_reference)",
            ),
            audit_context: AuditContext::new(dialect),
        }
    }

    /// The fencing token of a job to which the decision can be applied, or why it cannot.
    pub async fn look(
        &self,
        engine: &dyn Engine,
        id: &JobId,
        resolution: &JobResolution,
    ) -> Result<Result<i64, ResolutionRefusal>, LedgerError> {
        let rows = engine.query(&self.look, id_args(id)).await?;
        let Some(row) = rows.first() else { return Ok(Err(ResolutionRefusal::NoSuchJob)) };
        let state = row.text("state")?;
        if state != resolution.required_state() {
            return Ok(Err(ResolutionRefusal::WrongState {
                state,
                wanted: resolution.required_state(),
                done: resolution.past_participle(),
            }));
        }
        if row.int("attempts_open")? > 0 {
            return Ok(Err(ResolutionRefusal::AttemptInProgress));
        }
        if resolution.needs_resend() && row.int("expired")? != 0 {
            return Ok(Err(ResolutionRefusal::Expired));
        }
        if resolution.needs_resend() && row.int("emptied")? != 0 {
            return Ok(Err(ResolutionRefusal::Scrubbed));
        }
        let fence = row.int("fence")?;
        if let JobResolution::Succeeded { reference } = resolution {
            let args = Arc::from([id.as_str().into(), reference.as_deref().map(storable).into()]);
            if let Some(row) = engine.query(&self.charged, args).await?.first() {
                return Ok(Err(ResolutionRefusal::ReferenceTaken { by: row.text("id")? }));
            }
        }
        Ok(Ok(fence))
    }

    /// Cancels a row that is written in the same transaction, with fencing token 0.
    pub fn precancel_steps(&self, id: &JobId, by: &Actor) -> Vec<Step> {
        self.steps(id, &JobResolution::Cancel, 0, by, &precancel_reason(by))
    }

    /// The change of one job, with its audit context.
    pub fn audited(&self, id: &JobId, change: Vec<Step>, by: &Actor) -> Vec<Step> {
        self.audit_context.wrap_job_change(id, change, by)
    }

    fn steps(&self, id: &JobId, resolution: &JobResolution, fence: i64, by: &Actor, reason: &str) -> Vec<Step> {
        let reference = match resolution {
            JobResolution::Succeeded { reference } => reference.as_deref().map(storable),
            _ => None,
        };
        let change: [Value; 6] = [
            id.as_str().into(),
            resolution.required_state().into(),
            fence.into(),
            resolution.resulting_state().into(),
            storable(reason).into(),
            reference.into(),
        ];
        self.audited(id, self.statements.steps(resolution, id, Arc::from(change)), by)
    }
}

impl Database {
    /// Applies a decision: the job's new state, its audit row and, if the state is final, its outcome event, all or
    /// nothing. With `seen_fence`, it fails if a worker claimed the job since it was read.
    pub async fn resolve_job(
        &self,
        id: &JobId,
        resolution: &JobResolution,
        seen_fence: Option<i64>,
        by: &Actor,
    ) -> Result<Result<(), ResolutionRefusal>, LedgerError> {
        for _ in 0..LOOKS_MAX {
            let fence = match self.sql.operator.resolution.look(&*self.engine, id, resolution).await? {
                Ok(fence) => fence,
                Err(refusal) => return Ok(Err(refusal)),
            };
            if seen_fence.is_some_and(|seen| seen != fence) {
                break;
            }
            if self
                .engine
                .atomically(self.sql.operator.resolution.steps(id, resolution, fence, by, &reason(resolution, by, "")))
                .await?
                .is_some()
            {
                return Ok(Ok(()));
            }
        }
        Ok(Err(ResolutionRefusal::Changed))
    }
}

/// Reason of a payment that is cancelled before its message came.
pub fn precancel_reason(by: &Actor) -> String {
    reason(&JobResolution::Cancel, by, " before its message came")
}

fn reason(resolution: &JobResolution, by: &Actor, when: &str) -> String {
    let done = resolution.past_participle();
    match by.reason.as_deref().map(storable) {
        Some(because) => format!("{done} by an operator{when}: {because}"),
        None => format!("{done} by an operator{when}"),
    }
}
