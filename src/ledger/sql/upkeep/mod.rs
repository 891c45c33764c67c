//! The sweeper's SQL: duties, expiry, scrubbing, and early ends of waits.
//!
//! Each statement finds its rows by a partial index of `migrations/*/0002_ledger.sql`. It repeats the index's
//! expression and condition exactly, because SQLite uses such an index for nothing else. See
//! `docs/decisions/0028-query-plans-are-pinned.md`.
//!
//! A job that may have been charged never expires.

use std::time::Duration;

use bytes::Bytes;

use super::attempt::WRITTEN_COLUMNS;
use super::claim::IS_UNHELD;
use super::dialect::{JobWriteText, Template, WriteTemplate};
use super::engine::{Value, args};
use super::events::WRITE_EVENT;
use super::result::from_row;
use super::storable;
use crate::domain::job::Job;
use crate::domain::provider::ProviderName;
use crate::domain::wait_reason::{LIMIT_CODES, PROVIDER_WAIT_CODES};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::upkeep::{RecordedJob, ScrubScope, WaitCause, WakeFilter};

mod reconciliation;

/// The states in which a job is not final.
pub const OPEN: &str = "state IN ('waiting', 'sending', 'unknown')";

/// What every list and every sweep reads of a row.
pub const READABLE: &str = "{readable:wake_at} AND {readable:created_at} AND {readable:updated_at} \
     AND (not_before IS NULL OR {readable:not_before}) AND (expires_at IS NULL OR {readable:expires_at}) AND attempts >= 0";

static DUTY: Template = Template::new(
    "INSERT INTO upkeep_turns (duty, taken_until) VALUES ($1, {after:$2}) \
     ON CONFLICT (duty) DO UPDATE SET taken_until = excluded.taken_until \
         WHERE upkeep_turns.taken_until <= {now} \
     RETURNING duty",
);

impl Database {
    /// Leases a duty for this long; false when another worker has it.
    pub async fn lease_duty(&self, duty: &str, lasts: Duration) -> Result<bool, LedgerError> {
        Ok(!self.query(&DUTY, args![duty, lasts]).await?.is_empty())
    }
}

/// The condition of index `jobs_waiting_by_expiry`, and the further conditions of an expired job.
fn expired() -> String {
    format!(
        "state = 'waiting' AND expires_at IS NOT NULL AND expires_at <= {{now}} AND NOT maybe_charged AND {IS_UNHELD}"
    )
}

/// No limit counts a request that began longer ago: a window has at most 31 days (docs/providers.md).
pub const LIMIT_WINDOW_MAX: Duration = Duration::from_secs(32 * 86_400);

static EXPIRED_JOBS: Template =
    Template::made(|_| format!("SELECT id FROM jobs WHERE {} ORDER BY expires_at LIMIT $1", expired()));

static EXPIRE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET state = 'expired', reason = $2, fence = fence + 1, holder = NULL, response_by = NULL, \
             updated_at = {{now}} {{from}} \
         WHERE id = $1 AND {}",
        expired()
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![WRITE_EVENT.into()],
    returning: "id",
});

static SCRUB: Template =
    Template::made(|_| scrub_text("state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')"));
static SCRUB_REVIEW: Template = Template::made(|_| scrub_text("state = 'review'"));

/// A request's address may hold the reference.
fn scrub_text(state: &str) -> String {
    format!(
        "UPDATE jobs SET payload = NULL, reference = NULL, scrubbed_at = {{now}}, \
             frozen_url = CASE WHEN frozen_url IS NULL THEN NULL ELSE '' END, \
             frozen_body = CASE WHEN frozen_body IS NULL THEN NULL ELSE $3 END \
         WHERE id IN (\
             SELECT id FROM jobs \
             WHERE scrubbed_at IS NULL AND {state} AND updated_at <= {{after:(0 - $1)}} \
             ORDER BY updated_at LIMIT $2 {{unlocked}}) \
         RETURNING id"
    )
}

/// As index `attempts_with_a_reference` has it.
static FORGET: Template = Template::new(
    "UPDATE attempts SET reference = NULL \
     WHERE (job_id, number) IN (\
         SELECT job_id, number FROM attempts \
         WHERE (reference || '') IS NOT NULL AND began_at <= {after:(0 - $1)} ORDER BY began_at LIMIT $2 {unlocked}) \
     RETURNING job_id",
);

impl Database {
    /// Expires waiting jobs whose `expires_at` has passed, with their events; returns how many. Jobs that may have been
    /// charged, and active jobs, stay as they are.
    pub async fn expire(&self, reason: &str, at_most: u32) -> Result<u32, LedgerError> {
        let rows = self.query(&EXPIRED_JOBS, args![at_most]).await?;
        let mut expired = 0;
        for row in rows {
            // One transaction for each job: it is as small as a worker's own, and an event is never without its state.
            let steps = self.write_steps(&EXPIRE, args![row.get::<String>("id")?, storable(reason)]);
            expired += u32::from(self.engine.atomically(steps).await?.is_some());
        }
        Ok(expired)
    }

    /// Empties payload, reference, and the address and body of the request of jobs that finished, or entered review,
    /// longer than this ago; returns how many. Id and hash stay. A job that was emptied in review can still be
    /// resolved, but not be sent again.
    pub async fn scrub(&self, which: ScrubScope, older_than: Duration, at_most: u32) -> Result<u32, LedgerError> {
        let sql = match which {
            ScrubScope::Finished => &SCRUB,
            ScrubScope::InReview => &SCRUB_REVIEW,
        };
        self.query_count(sql, args![older_than, at_most, Value::Bytes(Bytes::new())]).await
    }

    /// Empties the references of requests that no limit can count any more; returns how many.
    pub async fn forget_references(&self, at_most: u32) -> Result<u32, LedgerError> {
        self.query_count(&FORGET, args![LIMIT_WINDOW_MAX, at_most]).await
    }
}

/// The start of a job's wait; for a row of a program without the column, its last write.
const BEGUN: &str = "COALESCE(wait_begun_at, updated_at)";

/// The last change of a row of the lane's quota, as far as the rows show it: they share their limits. A row that has
/// left the quota is not found, and a long transaction appears with the time of its statement.
const LAST_CHANGE: &str = "SELECT max(sharing.updated_at) FROM providers AS sharing \
     WHERE COALESCE(sharing.quota, sharing.name) = \
         (SELECT COALESCE(own.quota, own.name) FROM providers AS own WHERE own.name = $1)";

/// `not_before` and `expires_at` are read as epoch milliseconds.
pub const RECORDED: &str = "id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, \
     cost, priority, {ms:not_before} AS not_before_ms, {ms:expires_at} AS expires_at_ms, payload";

/// What a claim reads of a row besides. A row that no claim can read stays due and first in the order.
pub const CLAIMABLE: &str = "(revived_at IS NULL OR {readable:revived_at}) \
     AND (first_sent_at IS NULL OR {readable:first_sent_at}) \
     AND last_attempt >= 0 AND lookups >= 0 AND lost_holders >= 0 AND cost BETWEEN 0 AND 65535 \
     AND priority BETWEEN 0 AND 255 AND length(content_hash) = 32";

static WAKE_FOR_LIMITS: Template = Template::made(|_| wake_text(LIMIT_CODES));
static WAKE_FOR_PROVIDERS: Template = Template::made(|_| wake_text(PROVIDER_WAIT_CODES));

/// The conditions of indexes `jobs_waiting_for_limits` and `jobs_waiting_for_providers`.
fn wake_text(codes: [&str; 2]) -> String {
    format!(
        "UPDATE jobs SET wake_at = {{now}}, updated_at = {{now}} \
         WHERE id IN (\
             SELECT id FROM jobs \
             WHERE provider = $1 AND state IN ('waiting', 'unknown') AND wait_reason IN ('{}') \
                 AND wake_at > {{after:$3}} AND NOT backlog AND holder IS NULL \
                 AND (not_before IS NULL OR not_before <= {{now}}) \
                 AND ({BEGUN} < {{after:($2 - $5)}} OR {BEGUN} < ({LAST_CHANGE}) + ({{after:$2}} - {{now}})) \
             ORDER BY wake_at LIMIT $4 {{unlocked}}) \
         RETURNING id",
        codes.join("', '")
    )
}

impl Database {
    /// Ends delays for a limit or a named wait: the jobs are due now. Returns how many.
    pub async fn wake_waiting(&self, lane: &ProviderName, which: &WakeFilter) -> Result<u32, LedgerError> {
        let WakeFilter { changed_ago, cause: by, propagation_time: settles, due_within: soon, at_most } = *which;
        let sql = match by {
            WaitCause::Limit => &WAKE_FOR_LIMITS,
            WaitCause::RetryAfter => &WAKE_FOR_PROVIDERS,
        };
        self.query_count(sql, args![lane, settles, soon, at_most, changed_ago]).await
    }
}

from_row!(row => RecordedJob {
    ;
    job: Job::from_row(row)?,
    hash: row.get("content_hash")?,
});

from_row!(row => Job {
    id, provider, amount, currency, account, reference, cost, priority, not_before, expires_at, payload;
    idempotency_key: row.get::<bool>("key_given")?.then(|| row.get("idempotency_key")).transpose()?,
});
