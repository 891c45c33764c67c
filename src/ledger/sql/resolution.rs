//! An operator's decision in SQL, and the erasure of an account's personal data. Workers call neither.
//!
//! For a decision the job is read first, so that a rejection has its reason, then compared and updated.
//! Audit row and event are written in the same transaction. A job with a request in flight is left to its worker. An
//! active job without a request is taken from its worker: the fencing token rises, so the worker's later writes are
//! rejected. See `docs/decisions/0030-leases-and-operator-decisions.md`.
//!
//! A payment may be cancelled before its message comes: a row for its id, so that the message is acknowledged. The
//! content is unknown, so the row has the hash that no message has ([`ContentHash::UNSEEN`]), amount 1 and currency XXX.
//! A job that is sent again is read back in the form of its message, with the recorded hash for comparison.
//!
//! An erasure empties finished payments, in batches. Unfinished payments stay as they are, and so do those whose outcome
//! event is not published. Id, idempotency key and hash stay: the same message is recognised forever. Requests keep the
//! account for as long as a limit may count them.

use super::dialect::{Dialect, Template};
use super::engine::{Args, Step, Value, args};
use super::events::{WRITE_EVENT, is_published};
use super::fleet::LANES;
use super::result::{FromRow, SqlRow, read};
use super::settings::actor_args;
use super::upkeep::{LIMIT_WINDOW_MAX, OPEN, RECORDED};
use super::{no_row, storable, texts};
use crate::domain::job::{ContentHash, Identifier, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{
    Actor, Charge, DatabaseTime, ErasureCounts, ErasureResult, JobResolution, ReloadedJob, ResolutionError,
    ResolutionRefusal,
};
use crate::ledger::upkeep::RecordedJob;

/// How often a decision retries when a worker claimed the job between its statements.
pub(super) const LOOKS_MAX: u32 = 4;

/// By a function of the owner's: its caller needs no right to the tables. PostgreSQL alone.
static DECIDE: Template = Template::new("SELECT jobs_decide($1, $2, $4, $5, $6, $3, $7) AS id");

/// For SQLite, like the next two: a database file has no roles.
static FINALIZE: Template = Template::new(
    "UPDATE jobs SET state = $4, fence = fence + 1, holder = NULL, response_by = NULL, reason = $5, \
         provider_reference = COALESCE($6, provider_reference), charged_amount = $7, scrubbed_at = NULL, \
         updated_at = {now} \
     WHERE id = $1 AND state = $2 AND fence = $3 RETURNING id",
);

static EVENT: Template = Template::new(WRITE_EVENT);

/// The time of the first request stays: the provider may have remembered the key since then. The reference is cleared:
/// the next response brings its own, and the former one may belong to another payment.
static REVIVE: Template = Template::new(
    "UPDATE jobs SET state = $4, fence = fence + 1, reason = $5, maybe_charged = 0, attempts = 0, \
         lookups = 0, resend = NULL, lost_holders = 0, provider_reference = NULL, charged_amount = NULL, wake_at = {now}, \
         wait_reason = NULL, wait_limit = NULL, wait_detail = NULL, \
         revived_at = {now}, updated_at = {now} \
     WHERE id = $1 AND state = $2 AND fence = $3 AND holder IS NULL \
         AND (state = 'review' OR NOT maybe_charged) RETURNING id",
);

/// What a decision depends on.
pub(super) const CONDITION: &str = "state, fence, maybe_charged, \
     CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END AS expired, \
     CASE WHEN scrubbed_at IS NOT NULL OR (frozen_method IS NOT NULL AND length(frozen_body) = 0) \
         THEN 1 ELSE 0 END AS emptied, \
     (SELECT count(*) FROM attempts WHERE job_id = jobs.id AND ended_at IS NULL) AS attempts_open";

static LOOK: Template = Template::made(|_| format!("SELECT {CONDITION} FROM jobs WHERE id = $1"));

static SAME_CHARGE: Template = Template::new(
    "SELECT other.id FROM jobs JOIN jobs AS other ON other.provider = jobs.provider \
     WHERE jobs.id = $1 AND other.id <> $1 AND other.state = 'succeeded' \
         AND other.provider_reference = COALESCE($2, jobs.provider_reference)",
);

/// On PostgreSQL by a function of the owner's, and the row is `cancelled` at once. On SQLite as a waiting job with
/// fencing token 0, which the next step cancels.
static PRECANCEL: Template = Template::by_dialect(
    "SELECT jobs_cancel_ahead($1, $2, $3) AS id",
    "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, \
         priority, state, wake_at, fence, created_at, updated_at) \
     VALUES ($1, $2, $1, 0, $3, 1, 'XXX', 1, 0, 'waiting', {now}, 0, {now}, {now}) \
     ON CONFLICT DO NOTHING RETURNING id",
);

static PROVIDER_OF: Template = Template::new("SELECT provider FROM jobs WHERE id = $1");

static RELOAD: Template = Template::made(|_| format!("SELECT {RECORDED}, fence FROM jobs WHERE id = $1"));

impl Database {
    /// The fencing token of a job to which the decision can be applied, or why it cannot.
    pub(super) async fn decidable(&self, id: &JobId, resolution: &JobResolution) -> Result<i64, ResolutionError> {
        let row = self.query_one(&LOOK, args![id]).await?.ok_or(ResolutionRefusal::NoSuchJob)?;
        if let Some(refusal) = refusal_of(&row, resolution)? {
            return Err(refusal.into());
        }
        if let JobResolution::Succeeded(charge) = resolution {
            let args = args![id, charge.reference.as_deref().map(storable)];
            if let Some(row) = self.query_one(&SAME_CHARGE, args).await? {
                return Err(ResolutionRefusal::ReferenceTaken { by: row.get("id")? }.into());
            }
        }
        Ok(row.get("fence")?)
    }

    pub(super) fn decision_steps(
        &self,
        id: &JobId,
        resolution: &JobResolution,
        fence: i64,
        by: &Actor,
        reason: &str,
    ) -> Vec<Step> {
        let charge = match resolution {
            JobResolution::Succeeded(charge) => charge.clone(),
            _ => Charge::default(),
        };
        let reference = charge.reference.as_deref().map(storable);
        let (from, to) = (resolution.required_state(), resolution.resulting_state());
        let change: Args = args![id, from, fence, to, storable(reason), reference, charge.amount].into();
        let change = match self.dialect() {
            Dialect::Postgres => vec![self.must_affect(&DECIDE, change)],
            Dialect::Sqlite if resolution.needs_resend() => {
                let change: Args = args![id, from, fence, to, storable(reason)].into();
                vec![self.must_affect(&REVIVE, change)]
            }
            Dialect::Sqlite => {
                vec![self.must_affect(&FINALIZE, change), self.must_affect(&EVENT, args![id])]
            }
        };
        self.job_change_by(by, id, change)
    }

    /// Applies a decision: the job's new state, its audit row and, if the state is final, its outcome event, all or
    /// nothing. With `seen_fence`, it fails if a worker claimed the job since it was read.
    pub async fn resolve_job(
        &self,
        id: &JobId,
        resolution: &JobResolution,
        seen_fence: Option<i64>,
        by: &Actor,
    ) -> Result<(), ResolutionError> {
        for _ in 0..LOOKS_MAX {
            let fence = self.decidable(id, resolution).await?;
            if seen_fence.is_some_and(|seen| seen != fence) {
                break;
            }
            let steps = self.decision_steps(id, resolution, fence, by, &reason(resolution, by, ""));
            if self.engine.atomically(steps).await?.is_some() {
                return Ok(());
            }
        }
        Err(ResolutionRefusal::Changed.into())
    }

    /// Cancels a payment of this provider, whether its message has come or not. Without a message, a row is inserted
    /// for the id. Every later message with this id, whatever its content, is acknowledged and nothing is sent.
    pub async fn precancel(&self, id: &JobId, provider: &ProviderName, by: &Actor) -> Result<(), ResolutionError> {
        let reason = reason(&JobResolution::Cancel, by, " before its message came");
        let recorded =
            |third: Value| self.must_affect(&PRECANCEL, [id.as_str().into(), provider.as_str().into(), third]);
        let steps = match self.dialect() {
            Dialect::Postgres => self.job_change_by(by, id, vec![recorded(storable(&reason).into())]),
            Dialect::Sqlite => {
                let mut steps = vec![recorded(ContentHash::UNSEEN.0.as_slice().into())];
                steps.extend(self.decision_steps(id, &JobResolution::Cancel, 0, by, &reason));
                steps
            }
        };
        if self.engine.atomically(steps).await?.is_some() {
            return Ok(());
        }
        let row = self.query_one(&PROVIDER_OF, args![id]).await?.ok_or(ResolutionRefusal::KeyTaken)?;
        let recorded: String = row.get("provider")?;
        if recorded != provider.as_str() {
            return Err(ResolutionRefusal::OtherProvider { provider: recorded }.into());
        }
        self.resolve_job(id, &JobResolution::Cancel, None, by).await
    }

    /// The data for sending a job again, if this decision could be applied now.
    pub async fn reload_job(&self, id: &JobId, resolution: &JobResolution) -> Result<ReloadedJob, ResolutionError> {
        self.decidable(id, resolution).await?;
        let row = self.query_one(&RELOAD, args![id]).await?.ok_or(ResolutionRefusal::NoSuchJob)?;
        let RecordedJob { job, hash } = RecordedJob::from_row(&row)?;
        Ok(ReloadedJob { job, hash, fence: row.get("fence")? })
    }
}

/// Why a decision cannot be applied to the job whose [`CONDITION`] this is, except for another payment's charge.
pub(super) fn refusal_of(row: &SqlRow, resolution: &JobResolution) -> Result<Option<ResolutionRefusal>, LedgerError> {
    let state: String = row.get("state")?;
    let wanted = resolution.required_state();
    Ok(if state != wanted {
        Some(ResolutionRefusal::WrongState { state, wanted, done: resolution.past_participle() })
    } else if row.get::<i64>("attempts_open")? > 0 {
        Some(ResolutionRefusal::AttemptInProgress)
    } else if resolution.needs_resend() && row.get("expired")? {
        Some(ResolutionRefusal::Expired)
    } else if resolution.needs_resend() && row.get("emptied")? {
        Some(ResolutionRefusal::Scrubbed)
    } else {
        None
    })
}

pub(super) fn reason(resolution: &JobResolution, by: &Actor, when: &str) -> String {
    let done = resolution.past_participle();
    match by.reason.as_deref().map(storable) {
        Some(because) => format!("{done} by an operator{when}: {because}"),
        None => format!("{done} by an operator{when}"),
    }
}

/// The states that `jobs_erase()` of PostgreSQL erases. A payment in review has not finished.
const FINISHED: &str = "state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')";

/// Asked of each payment: for `EXISTS` PostgreSQL may read all events, of all accounts.
fn has_unpublished(dialect: Dialect) -> String {
    let published = is_published(dialect);
    format!("((SELECT count(*) FROM events AS event WHERE event.job_id = jobs.id AND NOT {published}) > 0)")
}

/// As many payments, and as many requests, are counted. An account may have half of a large ledger.
const COUNTED_MAX: u64 = 100_000;

/// By a function of the owner's: its caller needs no right to the tables. PostgreSQL alone.
static ERASE: Template = Template::new("SELECT erased_jobs, erased_requests FROM jobs_erase($1, $2)");

// A database file has no roles: the statements for SQLite.

const ERASED_REASON: &str = "reason = CASE WHEN reason = 'accepted' THEN reason ELSE 'erased' END";
const CHOSEN: &str = "IN ({texts:$1})";
const DONE: &str = "EXISTS (SELECT 1 FROM jobs WHERE jobs.id = job_id AND jobs.account IS NULL)";

static CHOOSE: Template = Template::made(|dialect| {
    let unpublished = has_unpublished(dialect);
    format!("SELECT id FROM jobs WHERE account = $1 AND {FINISHED} AND NOT {unpublished} ORDER BY created_at LIMIT $2")
});

/// The totals of finished jobs do not include the last minutes yet, and find those jobs by `scrubbed_at`.
static ERASE_JOBS: Template = Template::made(|dialect| {
    let unpublished = has_unpublished(dialect);
    format!(
        "UPDATE jobs SET account = NULL, reference = NULL, provider_reference = NULL, payload = NULL, {ERASED_REASON}, \
             wait_reason = NULL, wait_limit = NULL, wait_detail = NULL, wait_since = NULL, wait_until = NULL, \
             wait_request = NULL, \
             frozen_url = CASE WHEN frozen_url IS NOT NULL THEN '' END, \
             frozen_body = CASE WHEN frozen_body IS NOT NULL THEN x'' END, frozen_account = NULL, \
             scrubbed_at = COALESCE(scrubbed_at, CASE \
                 WHEN state = 'dead' OR updated_at < (SELECT counted_before FROM finished_mark) \
                 THEN {{now}} END) \
         WHERE id {CHOSEN} AND account = $2 AND {FINISHED} AND NOT {unpublished} RETURNING id"
    )
});

static ERASE_EVENTS: Template = Template::made(|_| {
    format!("UPDATE events SET provider_reference = NULL, {ERASED_REASON} WHERE job_id {CHOSEN} AND {DONE}")
});

static ERASE_DETAILS: Template =
    Template::made(|_| format!("UPDATE attempts SET detail = '' WHERE job_id {CHOSEN} AND {DONE}"));

static COMPLETE_AUDIT: Template = Template::made(|_| {
    format!(
        "UPDATE job_audit SET os_user = $2, because = $3, program = COALESCE($4, program) \
         WHERE job_id {CHOSEN} AND erased AND os_user IS NULL"
    )
});

static ERASE_REQUESTS: Template = Template::made(|_| {
    format!(
        "{LANES} UPDATE attempts SET account = NULL, reference = NULL WHERE (job_id, number) IN (\
             SELECT attempts.job_id, attempts.number \
             FROM lanes {{join}} attempts ON attempts.provider = lanes.provider AND attempts.account = $1 \
             JOIN jobs ON jobs.id = attempts.job_id AND jobs.account IS NULL \
             WHERE attempts.began_at <= {{after:(0 - $3)}} LIMIT $2) RETURNING job_id"
    )
});

static TRUNCATE_LOG: Template = Template::new("PRAGMA wal_checkpoint(TRUNCATE)");

/// The account as a range: for one value PostgreSQL would also read by id, and pass over all other accounts' jobs.
static COUNTS: Template = Template::made(|dialect| {
    let has_unpublished = has_unpublished(dialect);
    let of = |which: &str| format!("count(CASE WHEN {which} THEN 1 END)");
    let most = COUNTED_MAX + 1;
    let counting = "attempts.provider = lanes.provider AND attempts.account = $1 AND began_at > {after:(0 - $2)}";
    format!(
        "{LANES}, own AS ( \
             SELECT state, {FINISHED} AND {has_unpublished} AS unpublished FROM jobs \
             WHERE account >= $1 AND account <= $1 ORDER BY account, id LIMIT {most}), \
         counted AS (SELECT 1 AS one FROM lanes {{join}} attempts ON {counting} LIMIT {most}), \
         latest AS (SELECT max(at) AS at FROM ( \
             SELECT (SELECT max(began_at) FROM attempts WHERE {counting}) AS at FROM lanes) AS lately) \
         SELECT {} AS finished, {} AS open, {} AS review, {} AS unpublished, count(*) AS payments, \
             (SELECT count(*) FROM counted) AS requests, (SELECT {{ms:at}} FROM latest) AS latest_ms, \
             (SELECT count(*) FROM account_overrides WHERE account = $1) AS rules FROM own",
        of(&format!("{FINISHED} AND NOT unpublished")),
        of(OPEN),
        of("state = 'review'"),
        of("unpublished"),
    )
});

impl Database {
    /// Counts what the ledger holds of an account.
    pub async fn erasure_counts(&self, account: &Identifier) -> Result<ErasureCounts, LedgerError> {
        let rows = self.query_by_index(&COUNTS, args![account, LIMIT_WINDOW_MAX]).await?;
        let row = rows.first().ok_or_else(no_row)?;
        let counted_ms = i64::try_from(LIMIT_WINDOW_MAX.as_millis()).unwrap_or(i64::MAX);
        let latest: Option<DatabaseTime> = row.get("latest")?;
        Ok(read!(row => ErasureCounts {
            finished, open, review, unpublished, requests, rules;
            at_least: row.get::<u64>("payments")?.max(row.get("requests")?) > COUNTED_MAX,
            requests_until: latest.map(|DatabaseTime(ms)| DatabaseTime(ms.saturating_add(counted_ms)))
        }))
    }

    /// Erases account, references, payload, request and texts of at most this many finished payments of the account.
    /// Each is audited. Id, idempotency key, hash and amount stay.
    pub async fn erase_account(
        &self,
        account: &Identifier,
        at_most: u32,
        by: &Actor,
    ) -> Result<ErasureResult, LedgerError> {
        let of_account = args![account, at_most];
        if self.dialect() == Dialect::Postgres {
            let call = self.must_affect(&ERASE, of_account);
            let rows = self.engine.atomically(self.job_changes_by(by, vec![call])).await?;
            let row = rows.as_ref().and_then(|rows| rows.last()?.first()).ok_or_else(no_row)?;
            return Ok(ErasureResult { jobs: row.get("erased_jobs")?, requests: row.get("erased_requests")? });
        }
        let chosen = self.query(&CHOOSE, of_account).await?;
        let ids: Vec<String> = chosen.iter().map(|row| row.get("id")).collect::<Result<_, _>>()?;
        let list = texts(ids.iter().map(String::as_str));
        let [os_user, because, program] = actor_args(by);
        let steps = vec![
            self.step(&ERASE_JOBS, [list.clone(), account.as_str().into()]),
            self.step(&ERASE_EVENTS, [list.clone()]),
            self.step(&ERASE_DETAILS, [list.clone()]),
            self.step(&COMPLETE_AUDIT, [list, os_user, because, program]),
            self.step(&ERASE_REQUESTS, args![account, at_most, LIMIT_WINDOW_MAX]),
        ];
        let rows = self.engine.atomically(steps).await?.unwrap_or_default();
        let many = |at: usize| rows.get(at).map_or(0, |rows| rows.len() as u64);
        let erased = ErasureResult { jobs: many(0), requests: many(4) };
        if erased == ErasureResult::default() {
            // The log beside the file has what was overwritten there.
            self.query(&TRUNCATE_LOG, []).await?;
        }
        Ok(erased)
    }
}
