//! The sweeper's SQL: duties, expiry, the move to review, scrubbing, and jobs whose messages are published again.
//!
//! Each statement finds its rows by a partial index of `migrations/*/0002_ledger.sql`. It repeats the index's
//! expression and condition exactly, because SQLite uses such an index for nothing else. See
//! `docs/decisions/0028-query-plans-are-pinned.md`.
//!
//! A job that may have been charged never expires, and keeps that mark when it moves to review.
//!
//! A message is published again by the right to publish one copy, with the job as it was recorded.
//! An active job is left alone. Two sweepers never get the right for the same job: the update that takes it also moves
//! the instant from which it may be taken again. See `docs/decisions/0002-republish-lost-messages.md`.

use std::time::Duration;

use super::attempt::{CLOSE_LEFT_OPEN, WRITE_EVENT, WRITTEN_COLUMNS};
use super::dialect::{JobWriteText, Returning, Template, WriteTemplate};
use super::engine::{Args, Value, args};
use super::result::{from_row, read_each, read_or_log};
use super::{fenced_write, storable};
use crate::domain::backoff::RetryPolicy;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::provider::ProviderName;
use crate::domain::wait_reason::{LIMIT_CODES, PROVIDER_WAIT_CODES};
use crate::ledger::database::Database;
use crate::ledger::upkeep::{JobToRepublish, MessageState, OverduePolicy, ScrubScope, WaitCause, WakeFilter};
use crate::ledger::{FencedWrite, LeaseToken, LedgerError};

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
const EXPIRED: &str = "state = 'waiting' AND expires_at IS NOT NULL AND expires_at <= {now} AND NOT maybe_charged \
     AND (lease_until IS NULL OR lease_until <= {now})";

/// No limit counts a request that began longer ago: a window has at most 31 days (docs/providers.md).
pub const LIMIT_WINDOW_MAX: Duration = Duration::from_secs(32 * 86_400);

static EXPIRED_JOBS: Template =
    Template::made(|_| format!("SELECT id FROM jobs WHERE {EXPIRED} ORDER BY expires_at LIMIT $1"));

static EXPIRE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET state = 'expired', reason = $2, fence = fence + 1, lease_owner = NULL, lease_until = NULL, \
             updated_at = {{now}} {{from}} \
         WHERE id = $1 AND {EXPIRED}"
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![WRITE_EVENT.into()],
    returning: Returning::Job("id"),
});

static SET_ASIDE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET state = 'review', reason = $2, maybe_charged = (maybe_charged OR state = 'sending'), \
             attempts = attempts + CASE WHEN state = 'sending' THEN 1 ELSE 0 END, fence = fence + 1, \
             lease_owner = NULL, lease_until = NULL, updated_at = {{now}} {{from}} \
         WHERE id = $1 AND {OPEN} AND (lease_until IS NULL OR lease_until <= {{now}})"
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_LEFT_OPEN.into(), WRITE_EVENT.into()],
    returning: Returning::Job("id"),
});

static SCRUB: Template =
    Template::made(|_| scrub_text("state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')"));
static SCRUB_REVIEW: Template = Template::made(|_| scrub_text("state = 'review'"));

/// A request's address may hold the reference.
fn scrub_text(state: &str) -> String {
    format!(
        "UPDATE jobs SET payload = NULL, reference = NULL, scrubbed_at = {{now}}, delayed_copy = NULL, \
             delayed_until = NULL, frozen_url = CASE WHEN frozen_url IS NULL THEN NULL ELSE '' END, \
             frozen_body = CASE WHEN frozen_body IS NULL THEN NULL ELSE $3 END \
         WHERE id IN (\
             SELECT id FROM jobs \
             WHERE scrubbed_at IS NULL AND {state} AND updated_at <= {{after:(0 - $1)}} \
             ORDER BY updated_at LIMIT $2 {{unlocked}}) \
         RETURNING id"
    )
}

/// An erased job is scrubbed, and its message may be in the lane's queue still: the condition of index
/// `jobs_with_a_message_left`.
static LEFT_MESSAGES: Template = Template::new(
    "UPDATE jobs SET delayed_copy = NULL, delayed_until = NULL \
     WHERE id IN (\
         SELECT id FROM jobs \
         WHERE delayed_until <= created_at AND scrubbed_at IS NOT NULL AND updated_at <= {after:(0 - $1)} \
         LIMIT $2 {unlocked}) \
     RETURNING id",
);

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

    /// Moves an open job to review. [`FencedWrite::Stale`] when it is finished, or a worker holds its lease. If its
    /// request was in flight, its outcome is unknown from then on.
    pub async fn move_to_review(&self, id: &JobId, reason: &str) -> Result<FencedWrite, LedgerError> {
        let steps = self.write_steps(&SET_ASIDE, args![id, storable(reason)]);
        Ok(fenced_write(self.engine.atomically(steps).await?.is_some()))
    }

    /// Empties payload, reference, and the address and body of the request of jobs that finished, or entered review,
    /// longer than this ago; returns how many. Id and hash stay. A job that was emptied in review can still be
    /// resolved, but not be sent again.
    pub async fn scrub(&self, which: ScrubScope, older_than: Duration, at_most: u32) -> Result<u32, LedgerError> {
        let sql = match which {
            ScrubScope::Finished => &SCRUB,
            ScrubScope::InReview => &SCRUB_REVIEW,
        };
        let emptied = self.query_count(sql, args![older_than, at_most, Value::Bytes(Vec::new())]).await?;
        match which {
            ScrubScope::Finished => {
                Ok(emptied.max(self.query_count(&LEFT_MESSAGES, args![older_than, at_most]).await?))
            }
            ScrubScope::InReview => Ok(emptied),
        }
    }

    /// Empties the references of requests that no limit can count any more; returns how many.
    pub async fn forget_references(&self, at_most: u32) -> Result<u32, LedgerError> {
        self.query_count(&FORGET, args![LIMIT_WINDOW_MAX, at_most]).await
    }
}

/// The instant from which one more copy could be published; the expression of index `jobs_open_by_sweep`.
const SWEPT_FROM: &str = "CASE WHEN sweep_after > wake_at THEN sweep_after ELSE wake_at END";

/// The instant since which a job is due and without a lease.
const DUE_SINCE: &str = "(CASE WHEN lease_until > wake_at THEN lease_until ELSE wake_at END)";

/// The start of a job's wait; for a row of a program without the column, its last write.
const BEGUN: &str = "COALESCE(wait_begun_at, updated_at)";

/// The last change of a row of the lane's quota, as far as the rows show it: they share their limits. A row that has
/// left the quota is not found, and a long transaction appears with the time of its statement.
const LAST_CHANGE: &str = "SELECT max(sharing.updated_at) FROM providers AS sharing \
     WHERE COALESCE(sharing.quota, sharing.name) = \
         (SELECT COALESCE(own.quota, own.name) FROM providers AS own WHERE own.name = $1)";

/// The instant from which a job's age counts.
const BORN: &str = "(CASE WHEN not_before > COALESCE(revived_at, created_at) THEN not_before \
     ELSE COALESCE(revived_at, created_at) END)";

/// `not_before` and `expires_at` are read as epoch milliseconds.
pub const RECORDED: &str = "id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, \
     cost, priority, {ms:not_before} AS not_before_ms, {ms:expires_at} AS expires_at_ms, payload, sweeps, copy";

/// What a job's message and its claim read of a row besides. A row that no claim can read stays due and first in the order.
pub const CLAIMABLE: &str = "(revived_at IS NULL OR {readable:revived_at}) \
     AND (first_sent_at IS NULL OR {readable:first_sent_at}) \
     AND last_attempt >= 0 AND lookups >= 0 AND lost_holders >= 0 AND sweeps >= 0 AND cost BETWEEN 0 AND 65535 \
     AND priority BETWEEN 0 AND 255 AND length(content_hash) = 32";

/// A job may have messages in its lane: they count like this one, or it would go to the end of the lane. The
/// copy in a delay queue must have another number. "Overdue for twice as long as now" is `now + (now - due)`, in
/// either database's arithmetic of instants. Bounds first: PostgreSQL cannot subtract infinite instants.
static OVERDUE: Template = Template::made(|_| {
    format!(
        "UPDATE jobs SET sweeps = sweeps + 1, unqueued = false, \
             copy = copy + CASE WHEN delayed_copy = copy AND delayed_until > {{now}} THEN 1 ELSE 0 END, \
             sweep_after = CASE \
             WHEN {DUE_SINCE} < {{after:(0 - $4)}} THEN {{after:$4}} \
             WHEN {DUE_SINCE} > {{after:(0 - $3)}} THEN {{after:$3}} \
             ELSE {{now}} + ({{now}} - {DUE_SINCE}) END \
         WHERE id IN (\
             SELECT id FROM jobs \
             WHERE provider = $1 AND {OPEN} AND {SWEPT_FROM} <= {{after:(0 - $2)}} AND NOT backlog \
                 AND (lease_until IS NULL OR lease_until <= {{after:(0 - $2)}}) \
                 AND (not_before IS NULL OR not_before <= {{now}}) \
             ORDER BY {SWEPT_FROM} LIMIT $5 {{unlocked}}) \
         RETURNING {RECORDED}"
    )
});

static KEEP: Template = Template::new(
    "UPDATE jobs SET unqueued = true, delayed_copy = NULL, delayed_until = NULL \
     WHERE id = $1 AND fence = $2 AND lease_until IS NULL AND state = 'waiting' AND NOT backlog \
     RETURNING id",
);

static UNQUEUED: Template = Template::made(|_| {
    format!(
        "UPDATE jobs SET sweeps = sweeps + 1, unqueued = false, copy = copy + 1, sweep_after = {{after:$3}} \
         WHERE id IN (\
             SELECT id FROM jobs \
             WHERE unqueued AND state = 'waiting' AND provider = $1 AND wake_at <= {{after:$2}} \
                 AND (lease_until IS NULL OR lease_until <= {{now}}) \
             ORDER BY wake_at LIMIT $4 {{unlocked}}) \
         RETURNING {RECORDED}"
    )
});

/// The condition of index `jobs_unknown_by_wake`, and the rule of `disposition::before_request`: a charge that
/// is sent again to a deduplicating provider waits for the limits of charges. The message in the lane's queue is
/// the one that came back last, or the newest one.
static LOOKUPS: Template = Template::made(|_| {
    format!(
        "SELECT {}, COALESCE(delayed_copy, copy) AS copy FROM jobs \
         WHERE provider = $1 AND state = 'unknown' AND wake_at <= {{now}} AND NOT backlog \
             AND (lease_until IS NULL OR lease_until <= {{now}}) \
             AND (delayed_until IS NULL OR delayed_until <= {{now}}) AND {READABLE} AND {CLAIMABLE} \
             AND NOT ($3 AND COALESCE(first_sent_at > {{after:(0 - $4)}}, true) \
                 AND (attempts < $5 OR COALESCE(resend, '') = 'granted') AND {BORN} >= {{after:(0 - $6)}}) \
         ORDER BY wake_at LIMIT $2",
        RECORDED.trim_end_matches(", copy")
    )
});

static WAKE_FOR_LIMITS: Template = Template::made(|_| wake_text(LIMIT_CODES));
static WAKE_FOR_PROVIDERS: Template = Template::made(|_| wake_text(PROVIDER_WAIT_CODES));

/// The conditions of indexes `jobs_waiting_for_limits` and `jobs_waiting_for_providers`. An unknown outcome without a
/// message is overdue: only a job that was certainly not sent may be without a message in a queue.
fn wake_text(codes: [&str; 2]) -> String {
    format!(
        "UPDATE jobs SET wake_at = {{now}}, unqueued = (state = 'waiting'), updated_at = {{now}} \
         WHERE id IN (\
             SELECT id FROM jobs \
             WHERE provider = $1 AND state IN ('waiting', 'unknown') AND wait_reason IN ('{}') \
                 AND wake_at > {{after:$3}} AND NOT backlog AND (lease_until IS NULL OR lease_until <= {{now}}) \
                 AND (not_before IS NULL OR not_before <= {{now}}) \
                 AND ({BEGUN} < {{after:($2 - $5)}} OR {BEGUN} < ({LAST_CHANGE}) + ({{after:$2}} - {{now}})) \
             ORDER BY wake_at LIMIT $4 {{unlocked}}) \
         RETURNING id",
        codes.join("', '")
    )
}

static MESSAGE_STATE: Template =
    Template::new("SELECT provider, content_hash, state, copy, delayed_copy FROM jobs WHERE id = $1");

impl Database {
    async fn take_jobs(&self, sql: &Template, args: impl Into<Args>) -> Result<Vec<JobToRepublish>, LedgerError> {
        Ok(read_or_log(&self.query(sql, args).await?, "jobs", "id"))
    }

    /// Takes the right to publish one copy of each overdue job of a lane, longest overdue first.
    pub async fn take_overdue(
        &self,
        lane: &ProviderName,
        which: &OverduePolicy,
    ) -> Result<Vec<JobToRepublish>, LedgerError> {
        let OverduePolicy { grace, republish_after, republish_interval_max, at_most } = *which;
        self.take_jobs(&OVERDUE, args![lane, grace, republish_after, republish_interval_max, at_most]).await
    }

    /// Records that no queue has a message for a delayed job. [`FencedWrite::Stale`] when a worker claimed it
    /// meanwhile.
    pub async fn keep_unqueued(&self, hold: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        Ok(fenced_write(!self.query(&KEEP, args![&hold.id, hold.fence]).await?.is_empty()))
    }

    /// Takes the right to publish the messages of jobs that no queue has and that are due within `ahead`. From then on
    /// they are like any other job, and are not overdue before `again_after`.
    pub async fn take_unqueued(
        &self,
        lane: &ProviderName,
        ahead: Duration,
        again_after: Duration,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError> {
        let args = args![lane, ahead, ahead.saturating_add(again_after), at_most];
        self.take_jobs(&UNQUEUED, args).await
    }

    /// Jobs that are due for a look-up by this policy, longest due first. They have no lease, and their message, the
    /// copy that `copy` names, is in no delay queue. The call claims none of them.
    pub async fn due_lookups(
        &self,
        lane: &ProviderName,
        policy: &RetryPolicy,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError> {
        let remembered = policy.idempotency_retention.map(|retention| retention / 2);
        let (remembers, retention) = (remembered.is_some(), remembered.unwrap_or_default());
        let args = args![lane, at_most, remembers, retention, policy.max_attempts, policy.max_age];
        // Called every second: an unreadable row is reported when it is overdue, and takes no other row's place here.
        Ok(read_each(&self.query(&LOOKUPS, args).await?, "id").rows)
    }

    /// Ends delays for a limit or a named wait: the jobs are due now, and those that were certainly never sent have no
    /// message in a queue. Returns how many.
    pub async fn wake_waiting(&self, lane: &ProviderName, which: &WakeFilter) -> Result<u32, LedgerError> {
        let WakeFilter { changed_ago, cause: by, propagation_time: settles, due_within: soon, at_most } = *which;
        let sql = match by {
            WaitCause::Limit => &WAKE_FOR_LIMITS,
            WaitCause::RetryAfter => &WAKE_FOR_PROVIDERS,
        };
        self.query_count(sql, args![lane, settles, soon, at_most, changed_ago]).await
    }

    /// `copy` is the number of the message.
    pub async fn message_state(&self, job: &Job, hash: ContentHash, copy: i64) -> Result<MessageState, LedgerError> {
        let Some(row) = self.query_one(&MESSAGE_STATE, args![&job.id]).await? else {
            return Ok(MessageState::NotRecorded);
        };
        let recorded: Vec<u8> = row.get("content_hash")?;
        let alike = [hash, ContentHash::UNSEEN].iter().any(|hash| recorded == hash.0);
        if row.get::<String>("provider")? != job.provider.as_str() || !alike {
            return Ok(MessageState::Conflict);
        }
        Ok(match row.get::<String>("state")?.as_str() {
            "waiting" | "sending" | "unknown"
                if row.get::<i64>("copy")? > copy && row.get::<Option<i64>>("delayed_copy")? != Some(copy) =>
            {
                MessageState::Superseded
            }
            "waiting" | "sending" | "unknown" => MessageState::Open,
            _ => MessageState::Finished,
        })
    }
}

from_row!(row => JobToRepublish {
    sweeps, copy;
    job: Job::from_row(row)?,
    hash: row.get("content_hash")?,
});

from_row!(row => Job {
    id, provider, amount, currency, account, reference, cost, priority, not_before, expires_at, payload;
    idempotency_key: row.get::<bool>("key_given")?.then(|| row.get("idempotency_key")).transpose()?,
});
