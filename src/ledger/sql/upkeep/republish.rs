//! Jobs whose messages are to be published again: the right to publish one copy, and the job as it was recorded.
//!
//! An active job is left alone. Two sweepers never get the right for the same job: the update that takes it also moves
//! the instant from which it may be taken again. See `docs/decisions/0002-republish-lost-messages.md`.

use std::sync::Arc;
use std::time::Duration;

use super::super::dialect::Dialect;
use super::super::engine::{Args, Engine, Sql, Value};
use super::super::fenced_write;
use super::super::row::{SqlRow, corrupt, read_each, read_or_log};
use super::{OPEN, READABLE};
use crate::domain::backoff::RetryPolicy;
use crate::domain::job::{ContentHash, Identifier, Job};
use crate::domain::provider::ProviderName;
use crate::domain::wait_reason::{LIMIT_CODES, PROVIDER_WAIT_CODES};
use crate::ledger::database::Database;
use crate::ledger::upkeep::{JobToRepublish, MessageState, OverduePolicy, WaitCause, WakeFilter};
use crate::ledger::{FencedWrite, LeaseToken, LedgerError};

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
pub(in crate::ledger::sql) const RECORDED: &str = "id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, \
     cost, priority, {ms:not_before} AS not_before_ms, {ms:expires_at} AS expires_at_ms, payload, sweeps, copy";

/// What a job's message and its claim read of a row besides. A row that no claim can read stays due and first in the order.
pub(in crate::ledger::sql) const CLAIMABLE: &str = "(revived_at IS NULL OR {readable:revived_at}) \
     AND (first_sent_at IS NULL OR {readable:first_sent_at}) \
     AND last_attempt >= 0 AND lookups >= 0 AND lost_holders >= 0 AND sweeps >= 0 AND cost BETWEEN 0 AND 65535 \
     AND priority BETWEEN 0 AND 255 AND length(content_hash) = 32";

pub struct RepublishStatements {
    overdue: Sql,
    keep: Sql,
    unqueued: Sql,
    lookups: Sql,
    waiting: Sql,
    named_wait: Sql,
    standing: Sql,
}

impl RepublishStatements {
    pub fn new(dialect: Dialect) -> Self {
        // A job may have messages in its lane: they count like this one, or it would go to the end of the lane. The
        // copy in a delay queue must have another number. "Overdue for twice as long as now" is `now + (now - due)`, in
        // either database's arithmetic of instants. Bounds first: PostgreSQL cannot subtract infinite instants.
        let overdue = format!(
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
        );
        let unqueued = format!(
            "UPDATE jobs SET sweeps = sweeps + 1, unqueued = false, copy = copy + 1, sweep_after = {{after:$3}} \
             WHERE id IN (\
                 SELECT id FROM jobs \
                 WHERE unqueued AND state = 'waiting' AND provider = $1 AND wake_at <= {{after:$2}} \
                     AND (lease_until IS NULL OR lease_until <= {{now}}) \
                 ORDER BY wake_at LIMIT $4 {{unlocked}}) \
             RETURNING {RECORDED}"
        );
        // The condition of index `jobs_unknown_by_wake`, and the rule of `disposition::before_request`: a charge that
        // is sent again to a deduplicating provider waits for the limits of charges. The message in the lane's queue is
        // the one that came back last, or the newest one.
        let lookups = format!(
            "SELECT {}, COALESCE(delayed_copy, copy) AS copy FROM jobs \
             WHERE provider = $1 AND state = 'unknown' AND wake_at <= {{now}} AND NOT backlog \
                 AND (lease_until IS NULL OR lease_until <= {{now}}) \
                 AND (delayed_until IS NULL OR delayed_until <= {{now}}) AND {READABLE} AND {CLAIMABLE} \
                 AND NOT ($3 AND COALESCE(first_sent_at > {{after:(0 - $4)}}, true) \
                     AND (attempts < $5 OR COALESCE(resend, '') = 'granted') AND {BORN} >= {{after:(0 - $6)}}) \
             ORDER BY wake_at LIMIT $2",
            RECORDED.trim_end_matches(", copy")
        );
        // The conditions of indexes `jobs_waiting_for_limits` and `jobs_waiting_for_providers`. An unknown outcome
        // without a message is overdue: only a job that was certainly not sent may be without a message in a queue.
        let refused = |codes: [&str; 2]| {
            let reason = format!("wait_reason IN ('{}')", codes.join("', '"));
            format!(
                "UPDATE jobs SET wake_at = {{now}}, unqueued = (state = 'waiting'), updated_at = {{now}} \
             WHERE id IN (\
                 SELECT id FROM jobs \
                 WHERE provider = $1 AND state IN ('waiting', 'unknown') AND {reason} \
                     AND wake_at > {{after:$3}} AND NOT backlog AND (lease_until IS NULL OR lease_until <= {{now}}) \
                     AND (not_before IS NULL OR not_before <= {{now}}) \
                     AND ({BEGUN} < {{after:($2 - $5)}} OR {BEGUN} < ({LAST_CHANGE}) + ({{after:$2}} - {{now}})) \
                 ORDER BY wake_at LIMIT $4 {{unlocked}}) \
             RETURNING id"
            )
        };
        let by_limit = refused(LIMIT_CODES);
        let by_named_wait = refused(PROVIDER_WAIT_CODES);
        Self {
            overdue: dialect.render(&overdue),
            keep: dialect.render(
                "UPDATE jobs SET unqueued = true, delayed_copy = NULL, delayed_until = NULL \
                 WHERE id = $1 AND fence = $2 AND lease_until IS NULL AND state = 'waiting' AND NOT backlog \
                 RETURNING id",
            ),
            unqueued: dialect.render(&unqueued),
            lookups: dialect.render(&lookups),
            waiting: dialect.render(&by_limit),
            named_wait: dialect.render(&by_named_wait),
            standing: dialect
                .render("SELECT provider, content_hash, state, copy, delayed_copy FROM jobs WHERE id = $1"),
        }
    }

    async fn take(&self, engine: &dyn Engine, sql: &Sql, args: Args) -> Result<Vec<JobToRepublish>, LedgerError> {
        Ok(read_or_log(&engine.query(sql, args).await?, "jobs", "id", job_to_republish))
    }
}

impl Database {
    /// Takes the right to publish one copy of each overdue job of a lane, longest overdue first.
    pub async fn take_overdue(
        &self,
        lane: &ProviderName,
        which: &OverduePolicy,
    ) -> Result<Vec<JobToRepublish>, LedgerError> {
        let args: [Value; 5] = [
            lane.as_str().into(),
            which.grace.into(),
            which.republish_after.into(),
            which.republish_interval_max.into(),
            which.at_most.into(),
        ];
        self.sql.upkeep.republish.take(&*self.engine, &self.sql.upkeep.republish.overdue, Arc::from(args)).await
    }

    /// Records that no queue has a message for a delayed job. [`FencedWrite::Stale`] when a worker claimed it
    /// meanwhile.
    pub async fn keep_unqueued(&self, hold: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        let args: [Value; 2] = [hold.id.as_str().into(), hold.fence.into()];
        Ok(fenced_write(!self.engine.query(&self.sql.upkeep.republish.keep, Arc::from(args)).await?.is_empty()))
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
        let args: [Value; 4] =
            [lane.as_str().into(), ahead.into(), ahead.saturating_add(again_after).into(), at_most.into()];
        self.sql.upkeep.republish.take(&*self.engine, &self.sql.upkeep.republish.unqueued, Arc::from(args)).await
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
        let args: [Value; 6] = [
            lane.as_str().into(),
            at_most.into(),
            remembered.is_some().into(),
            remembered.unwrap_or_default().into(),
            policy.max_attempts.into(),
            policy.max_age.into(),
        ];
        // Called every second: an unreadable row is reported when it is overdue, and takes no other row's place here.
        Ok(read_each(
            &self.engine.query(&self.sql.upkeep.republish.lookups, Arc::from(args)).await?,
            "id",
            job_to_republish,
        )
        .rows)
    }

    /// Ends delays for a limit or a named wait: the jobs are due now, and those that were certainly never sent have no
    /// message in a queue. Returns how many.
    pub async fn wake_waiting(&self, lane: &ProviderName, which: &WakeFilter) -> Result<u32, LedgerError> {
        let WakeFilter { changed_ago, cause: by, propagation_time: settles, due_within: soon, at_most } = *which;
        let changed_ago = changed_ago.map_or(Value::Int(None), Value::from);
        let args: [Value; 5] = [lane.as_str().into(), settles.into(), soon.into(), at_most.into(), changed_ago];
        let sql = match by {
            WaitCause::Limit => &self.sql.upkeep.republish.waiting,
            WaitCause::RetryAfter => &self.sql.upkeep.republish.named_wait,
        };
        let rows = self.engine.query(sql, Arc::from(args)).await?;
        Ok(u32::try_from(rows.len()).unwrap_or(u32::MAX))
    }

    /// `copy` is the number of the message.
    pub async fn message_state(&self, job: &Job, hash: ContentHash, copy: i64) -> Result<MessageState, LedgerError> {
        let rows = self.engine.query(&self.sql.upkeep.republish.standing, Arc::from([job.id.as_str().into()])).await?;
        let Some(row) = rows.first() else { return Ok(MessageState::NotRecorded) };
        let recorded = row.bytes("content_hash")?;
        let alike = recorded == hash.0 || recorded == ContentHash::UNSEEN.0;
        if row.text("provider")? != job.provider.as_str() || !alike {
            return Ok(MessageState::Conflict);
        }
        Ok(match row.text("state")?.as_str() {
            "waiting" | "sending" | "unknown"
                if row.int("copy")? > copy && row.opt_int("delayed_copy")? != Some(copy) =>
            {
                MessageState::Superseded
            }
            "waiting" | "sending" | "unknown" => MessageState::Open,
            _ => MessageState::Finished,
        })
    }
}

pub(in crate::ledger::sql) fn job_to_republish(row: &SqlRow) -> Result<JobToRepublish, LedgerError> {
    let token =
        |column: &str, text: String| Identifier::new(text).map_err(|problem| corrupt(column, &problem.to_string()));
    let key = row.bool("key_given")?.then(|| row.text("idempotency_key")).transpose()?;
    let small = |column: &str| row.count(column);
    let hash: [u8; 32] =
        row.bytes("content_hash")?.try_into().map_err(|_| corrupt("content_hash", "is not 32 bytes"))?;
    Ok(JobToRepublish {
        job: Job {
            id: token("id", row.text("id")?)?,
            provider: ProviderName::new(row.text("provider")?)
                .map_err(|problem| corrupt("provider", &problem.to_string()))?,
            amount: row.int("amount")?,
            currency: row.text("currency")?,
            account: row.opt_text("account")?.map(|text| token("account", text)).transpose()?,
            reference: row.opt_text("reference")?,
            idempotency_key: key.map(|text| token("idempotency_key", text)).transpose()?,
            cost: u16::try_from(small("cost")?).map_err(|_| corrupt("cost", "is out of range"))?,
            priority: u8::try_from(small("priority")?).map_err(|_| corrupt("priority", "is out of range"))?,
            not_before: row.opt_instant("not_before_ms")?,
            expires_at: row.opt_instant("expires_at_ms")?,
            payload: row.opt_text("payload")?,
        },
        hash: ContentHash(hash),
        sweeps: row.count("sweeps")?,
        copy: row.int("copy")?,
    })
}
