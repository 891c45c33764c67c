//! Decision batches in SQL: the check of a set, the start of a batch, each turn, and the lists.
//!
//! A turn is one transaction: the batch's counters, the payment's outcome, and the payment's own change, all or nothing.
//! The counters' statement comes first and requires the worker's lease and a running batch. So a stop holds from its
//! commit on, and a worker that lost its lease changes nothing. See `docs/decisions/0049-decisions-in-bulk.md`.

use std::time::Duration;

use serde_json::json;

use super::dialect::{Dialect, Template};
use super::engine::{Step, args};
use super::history::rows_of;
use super::job_search::PLAN_BY_INDEX;
use super::resolution::{CONDITION, LOOKS_MAX, reason, refusal_of};
use super::result::{FromRow, SqlRow, corrupt, from_row, read_or_log};
use super::{storable, texts};
use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::decision_batches::{
    BatchDecision, BatchJob, BatchJobPage, BatchMember, BatchPage, BatchRate, BatchStart, BatchSummary, BatchTurn,
    CheckedJob, LeasedBatch, NewBatch, OutcomeFilter, RefusalCount, TurnAt, TurnResult, set_digest,
};
use crate::ledger::operator::{LIST_MAX, ResolutionError, ResolutionRefusal};

/// Payments that one statement checks.
const CHECKED_AT_ONCE: usize = 5_000;
/// How long a statement about all payments of a batch may take.
const BEGIN_TIME: Duration = Duration::from_secs(10);
/// How long a worker has a batch without renewal. Each turn renews it.
pub const BATCH_LEASE: Duration = Duration::from_secs(10);
/// Most batches that a worker takes at once.
const LEASED_MAX: u32 = 16;

/// The charge's index has the provider as an expression.
static CHECK: Template = Template::made(|_| {
    format!(
        "SELECT jobs.id, jobs.provider, jobs.amount, jobs.currency, {CONDITION}, \
             CASE WHEN $2 THEN (SELECT min(other.id) FROM jobs AS other \
                 WHERE other.state = 'succeeded' AND other.provider_reference = jobs.provider_reference \
                     AND other.provider || '' = jobs.provider || '' AND other.id <> jobs.id) END AS taken_by \
         FROM ({{texts:$1}}) AS names {{join}} jobs ON jobs.id = names.value"
    )
});

/// For SQLite. `state || ''`: found by the id alone.
static ADD_MEMBERS: Template = Template::made(|dialect| {
    let given = rows_of(dialect, &[["number", "bigint"], ["id", "text"], ["seen_fence", "bigint"]]);
    format!(
        "INSERT INTO decision_batch_jobs (batch, number, job_id, seen_fence) \
         SELECT $2, given.number, given.id, given.seen_fence FROM {given} {{join}} jobs ON jobs.id = given.id \
         WHERE jobs.state || '' = $3 AND coalesce(given.seen_fence, jobs.fence) = jobs.fence"
    )
});

/// Only with all of its payments, and only if no batch of the same set runs. On PostgreSQL a function writes both: no
/// role may insert.
static BEGIN: Template = Template::by_dialect(
    "SELECT batches_begin($1, $2, {json:$3}, $4, $5, {json:$6}, $7, $8) AS id",
    "INSERT INTO decision_batches \
         (id, decision, jobs, rate, digest, sums, created_at, person, because, next_at) \
     SELECT $1, $2, json_array_length($3), $4, $5, $6, {now}, $7, $8, {now} \
     WHERE (SELECT count(*) FROM decision_batch_jobs WHERE batch = $1) = json_array_length($3) \
     ON CONFLICT DO NOTHING RETURNING id",
);

static RUNNING: Template = Template::new("SELECT id FROM decision_batches WHERE digest = $1 AND state = 'running'");

static LEASE: Template = Template::made(|_| {
    format!(
        "UPDATE decision_batches SET worker = $1, leased_until = {{after:$2}} \
         WHERE id IN (SELECT id FROM decision_batches WHERE state = 'running' \
             AND (leased_until IS NULL OR leased_until <= {{after:(CASE WHEN worker = $1 THEN $2 / 2 ELSE 0 END)}}) \
             ORDER BY id LIMIT {LEASED_MAX} {{unlocked}}) \
         RETURNING id, decision, rate, {{until:next_at}} AS wait_ms, person, database_user, because"
    )
});

static RELEASE: Template =
    Template::new("UPDATE decision_batches SET leased_until = NULL WHERE state = 'running' AND worker = $1");

static TURNS: Template = Template::new(
    "SELECT number, job_id, seen_fence FROM decision_batch_jobs WHERE batch = $1 AND outcome IS NULL \
     ORDER BY number LIMIT $2",
);

/// The last turn finishes the batch.
static COUNT_TURN: Template = Template::new(
    "UPDATE decision_batches SET applied = applied + $3, refused = refused + 1 - $3, next_at = {after:$4}, \
         leased_until = {after:$5}, \
         state = CASE WHEN applied + refused + 1 >= jobs THEN 'finished' ELSE state END, \
         finished_at = CASE WHEN applied + refused + 1 >= jobs THEN {now} END \
     WHERE id = $1 AND worker = $2 AND state = 'running' RETURNING id",
);

static WRITE_OUTCOME: Template = Template::new(
    "UPDATE decision_batch_jobs SET outcome = $3, refusal = $4, detail = $5, at = {now} \
     WHERE batch = $1 AND number = $2 AND outcome IS NULL RETURNING number",
);

static COUNT_REFUSAL: Template = Template::new(
    "INSERT INTO decision_batch_refusals (batch, refusal, jobs, example, detail) VALUES ($1, $2, 1, $3, $4) \
     ON CONFLICT (batch, refusal) DO UPDATE SET jobs = decision_batch_refusals.jobs + 1",
);

static STANDING: Template = Template::new(
    "SELECT CASE WHEN batch.state = 'running' AND batch.worker = $3 THEN 1 ELSE 0 END AS is_ours, \
         CASE WHEN turn.outcome IS NULL THEN 0 ELSE 1 END AS is_done \
     FROM decision_batches AS batch JOIN decision_batch_jobs AS turn ON turn.batch = batch.id \
     WHERE batch.id = $1 AND turn.number = $2",
);

static STOP: Template = Template::by_dialect(
    "SELECT batches_stop($1, $2) AS id",
    "UPDATE decision_batches SET state = 'stopped', finished_at = {now}, stopped_by = $2 \
     WHERE id = $1 AND state = 'running' RETURNING id",
);

const COLUMNS: &str = "id, decision, state, jobs, applied, refused, rate, {text:sums} AS sums, {ms:created_at} AS created_at_ms, \
     person, database_user, because, {ms:finished_at} AS finished_at_ms, stopped_by, stopped_database_user, \
     CASE WHEN state = 'running' AND leased_until > {now} THEN worker END AS worker";

static ONE: Template = Template::made(|_| format!("SELECT {COLUMNS} FROM decision_batches WHERE id = $1"));

/// No id has a letter after `f`.
static PAGE: Template = Template::made(|_| {
    format!("SELECT {COLUMNS} FROM decision_batches WHERE id < COALESCE($1, 'g') ORDER BY id DESC LIMIT $2")
});

static REFUSALS: Template = Template::new(
    "SELECT batch, refusal, jobs, example, detail FROM decision_batch_refusals WHERE batch IN ({texts:$1}) \
     ORDER BY jobs DESC, refusal",
);

static JOBS: Template = Template::made(|_| jobs_text(""));
static PENDING_JOBS: Template = Template::made(|_| jobs_text("AND outcome IS NULL"));
static REFUSED_JOBS: Template = Template::made(|_| jobs_text("AND outcome = 'refused'"));
/// By number, like all jobs: most of a batch is applied.
static APPLIED_JOBS: Template = Template::made(|_| jobs_text("AND outcome = 'applied'"));

fn jobs_text(which: &str) -> String {
    format!(
        "SELECT number, job_id, outcome, refusal, detail, {{ms:at}} AS at_ms FROM decision_batch_jobs \
         WHERE batch = $1 AND number > $2 {which} ORDER BY number LIMIT $3"
    )
}

const OLD: &str = "finished_at IS NOT NULL AND finished_at <= {after:(0 - $1)}";

static FORGET_JOBS: Template = Template::made(|_| {
    format!(
        "DELETE FROM decision_batch_jobs WHERE (batch, number) IN (\
             SELECT turn.batch, turn.number FROM (SELECT id FROM decision_batches WHERE {OLD}) AS old \
             {{join}} decision_batch_jobs AS turn ON turn.batch = old.id LIMIT $2) RETURNING number"
    )
});

const EMPTY: &str = "NOT EXISTS (SELECT 1 FROM decision_batch_jobs AS turn WHERE turn.batch = decision_batches.id)";

static FORGET_REFUSALS: Template = Template::made(|_| {
    format!(
        "DELETE FROM decision_batch_refusals WHERE batch IN \
             (SELECT id FROM decision_batches WHERE {OLD} AND {EMPTY})"
    )
});

static FORGET: Template =
    Template::made(|_| format!("DELETE FROM decision_batches WHERE {OLD} AND {EMPTY} RETURNING id"));

impl CheckedJob {
    fn from_checked_row(row: &SqlRow, decision: BatchDecision) -> Result<Self, LedgerError> {
        let mut refusal = refusal_of(row, &decision.resolution())?;
        if let (None, Some(by)) = (&refusal, row.get::<Option<String>>("taken_by")?) {
            refusal = Some(ResolutionRefusal::ReferenceTaken { by });
        }
        let fence: i64 = row.get("fence")?;
        let seen_fence = (!decision.is_about_open_jobs()).then_some(fence);
        Ok(Self {
            member: BatchMember { id: row.get("id")?, seen_fence },
            provider: row.get("provider")?,
            amount: row.get("amount")?,
            currency: row.get("currency")?,
            refusal,
        })
    }
}

impl Database {
    /// Checks whether a decision can be applied to these payments, which stay as they are. Unknown ids are left out.
    pub async fn check_jobs(&self, decision: BatchDecision, ids: &[JobId]) -> Result<Vec<CheckedJob>, LedgerError> {
        let mut checked = Vec::with_capacity(ids.len());
        for ids in ids.chunks(CHECKED_AT_ONCE) {
            let names = texts(ids.iter().map(JobId::as_str));
            let args = args![names, decision == BatchDecision::Succeeded];
            for row in self.query_by_index(&CHECK, args).await? {
                checked.push(CheckedJob::from_checked_row(&row, decision)?);
            }
        }
        Ok(checked)
    }

    /// Writes a batch with all of its payments, unless one of them has changed.
    pub async fn begin_batch(&self, batch: &NewBatch) -> Result<BatchStart, LedgerError> {
        let digest = set_digest(batch.decision, &batch.members);
        // One after the other: as JSON values they would need ten times the memory.
        let members = (1_i64..).zip(&batch.members).map(|(number, member)| {
            json!({"number": number, "id": member.id.as_str(), "seen_fence": member.seen_fence}).to_string()
        });
        let members = format!("[{}]", members.collect::<Vec<_>>().join(","));
        let because = batch.by.reason.as_deref().map(storable);
        let rate = batch.rate.to_string();
        let sums = json!(batch.sums).to_string();
        let first = match self.dialect() {
            Dialect::Postgres => self.step(&PLAN_BY_INDEX, []),
            Dialect::Sqlite => {
                let required = batch.decision.resolution().required_state();
                self.step(&ADD_MEMBERS, args![&members, &batch.id, required])
            }
        };
        let decision = batch.decision.name();
        let person = storable(&batch.by.os_user);
        let args = args![&batch.id, decision, members, rate, &digest, sums, person, because];
        let steps = vec![first, self.must_affect(&BEGIN, args)];
        if self.engine.atomically_within(BEGIN_TIME, steps).await?.is_some() {
            return Ok(BatchStart::Started);
        }
        let running = self.query_one(&RUNNING, args![digest]).await?;
        Ok(match running {
            Some(row) => BatchStart::Running(row.get("id")?),
            None => BatchStart::Changed,
        })
    }

    /// Leases running batches that no worker has, and renews those of this worker. Returns both.
    pub async fn lease_batches(&self, worker: &str) -> Result<Vec<LeasedBatch>, LedgerError> {
        let rows = self.query(&LEASE, args![worker, BATCH_LEASE]).await?;
        Ok(read_or_log(&rows, "decision_batches", "id"))
    }

    /// Ends the leases of this worker's batches, so that another worker goes on at once.
    pub async fn release_batches(&self, worker: &str) -> Result<(), LedgerError> {
        self.query(&RELEASE, args![worker]).await.map(drop)
    }

    /// The next payments of a batch that have no outcome.
    pub async fn next_turns(&self, batch: &str, at_most: u32) -> Result<Vec<BatchTurn>, LedgerError> {
        self.query_by_index(&TURNS, args![batch, at_most]).await?.iter().map(BatchTurn::from_row).collect()
    }

    /// Applies the decision to one payment, and writes its outcome in the same transaction. `seen_fence`: the version of
    /// the payment that the decision is about; `None`: any.
    pub async fn apply_turn(&self, at: &TurnAt<'_>, seen_fence: Option<i64>) -> Result<TurnResult, LedgerError> {
        let (id, resolution, by) = (&at.turn.member.id, at.batch.decision.resolution(), at.batch.actor());
        for _ in 0..LOOKS_MAX {
            let fence = match self.decidable(id, &resolution).await {
                Ok(fence) => fence,
                Err(ResolutionError::Refused(refusal)) => return self.refuse_turn(at, &refusal).await,
                Err(ResolutionError::Ledger(error)) => return Err(error),
            };
            if seen_fence.is_some_and(|seen| seen != fence) {
                break;
            }
            let mut steps = self.outcome_steps(at, None);
            steps.extend(self.decision_steps(id, &resolution, fence, &by, &reason(&resolution, &by, "")));
            if self.engine.atomically(steps).await?.is_some() {
                return Ok(TurnResult::Applied);
            }
            if let Some(ended) = self.ended_turn(at).await? {
                return Ok(ended);
            }
        }
        self.refuse_turn(at, &ResolutionRefusal::Changed).await
    }

    /// Writes why the decision is not applied to one payment, which stays as it is.
    pub async fn refuse_turn(&self, at: &TurnAt<'_>, refusal: &ResolutionRefusal) -> Result<TurnResult, LedgerError> {
        self.refuse_turn_as(at, refusal.code(), &refusal.to_string()).await
    }

    /// Writes a refusal by its code and in words.
    pub async fn refuse_turn_as(
        &self,
        at: &TurnAt<'_>,
        code: &'static str,
        detail: &str,
    ) -> Result<TurnResult, LedgerError> {
        let detail = storable(detail);
        let mut steps = self.outcome_steps(at, Some((code, &*detail)));
        steps.push(self.step(&COUNT_REFUSAL, args![&at.batch.id, code, &at.turn.member.id, &*detail]));
        if self.engine.atomically(steps).await?.is_some() {
            return Ok(TurnResult::Refused(code));
        }
        // Without an end, another worker has just written the outcome.
        Ok(self.ended_turn(at).await?.unwrap_or(TurnResult::Done))
    }

    /// The statements of an outcome; a refusal has its code and its words.
    fn outcome_steps(&self, at: &TurnAt<'_>, refusal: Option<(&str, &str)>) -> Vec<Step> {
        let (outcome, applied) = if refusal.is_some() { ("refused", 0_i64) } else { ("applied", 1) };
        let (code, detail) = refusal.unzip();
        let turn = args![&at.batch.id, at.turn.number, outcome, code, detail];
        let count = args![&at.batch.id, at.worker, applied, at.batch.rate.interval(), BATCH_LEASE];
        vec![self.must_affect(&COUNT_TURN, count), self.must_affect(&WRITE_OUTCOME, turn)]
    }

    /// Why no outcome could be written; `None`: for no reason of the batch.
    async fn ended_turn(&self, at: &TurnAt<'_>) -> Result<Option<TurnResult>, LedgerError> {
        let row = self.query_one(&STANDING, args![&at.batch.id, at.turn.number, at.worker]).await?;
        let Some(row) = row else { return Ok(Some(TurnResult::Lost)) };
        Ok(match (row.get("is_done")?, row.get("is_ours")?) {
            (true, _) => Some(TurnResult::Done),
            (false, false) => Some(TurnResult::Lost),
            (false, true) => None,
        })
    }

    /// Stops a running batch: no further payment is decided. False: it does not run.
    pub async fn stop_batch(&self, id: &str, by: &str) -> Result<bool, LedgerError> {
        Ok(self.query_one(&STOP, args![id, storable(by)]).await?.is_some())
    }

    /// `None`: there is no such batch.
    pub async fn batch(&self, id: &str) -> Result<Option<BatchSummary>, LedgerError> {
        let Some(row) = self.query_one(&ONE, args![id]).await? else { return Ok(None) };
        Ok(self.with_refusals(vec![BatchSummary::from_row(&row)?]).await?.pop())
    }

    /// Batches, newest first, after `after`; at most `at_most`, and never more than [`LIST_MAX`].
    pub async fn list_batches(&self, after: Option<&str>, at_most: u32) -> Result<BatchPage, LedgerError> {
        let at_most = at_most.min(LIST_MAX);
        let rows = self.query(&PAGE, args![after, at_most]).await?;
        let last = rows.last().filter(|_| rows.len() == at_most as usize);
        let next = last.and_then(|row| row.get("id").ok());
        let batches = self.with_refusals(read_or_log(&rows, "decision_batches", "id")).await?;
        Ok(BatchPage { batches, next })
    }

    async fn with_refusals(&self, mut batches: Vec<BatchSummary>) -> Result<Vec<BatchSummary>, LedgerError> {
        let ids = texts(batches.iter().map(|batch| batch.id.as_str()));
        for row in self.query_by_index(&REFUSALS, args![ids]).await? {
            let of: String = row.get("batch")?;
            if let Some(batch) = batches.iter_mut().find(|batch| batch.id == of) {
                batch.refused.push(RefusalCount::from_row(&row)?);
            }
        }
        Ok(batches)
    }

    /// The payments of a batch in the order of their turns, after a number; at most [`LIST_MAX`].
    pub async fn batch_jobs(
        &self,
        id: &str,
        outcome: Option<OutcomeFilter>,
        after: u64,
        at_most: u32,
    ) -> Result<BatchJobPage, LedgerError> {
        let at_most = at_most.min(LIST_MAX);
        let sql = match outcome {
            None => &JOBS,
            Some(OutcomeFilter::Pending) => &PENDING_JOBS,
            Some(OutcomeFilter::Refused) => &REFUSED_JOBS,
            Some(OutcomeFilter::Applied) => &APPLIED_JOBS,
        };
        let after = i64::try_from(after).unwrap_or(i64::MAX);
        let rows = self.query_by_index(sql, args![id, after, at_most]).await?;
        let jobs: Vec<BatchJob> = rows.iter().map(BatchJob::from_row).collect::<Result<_, _>>()?;
        let next = jobs.last().filter(|_| jobs.len() == at_most as usize).map(|job| job.number);
        Ok(BatchJobPage { jobs, next })
    }

    /// Deletes batches that ended longer ago than this, with at most so many of their payments; returns how many.
    pub async fn forget_batches(&self, older_than: Duration, at_most: u32) -> Result<u32, LedgerError> {
        let forgotten = self.query_count(&FORGET_JOBS, args![older_than, at_most]).await?;
        let steps = vec![self.step(&FORGET_REFUSALS, args![older_than]), self.step(&FORGET, args![older_than])];
        self.engine.atomically(steps).await?;
        Ok(forgotten)
    }
}

impl FromRow for LeasedBatch {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        let (decision, rate): (String, String) = (row.get("decision")?, row.get("rate")?);
        Ok(Self {
            id: row.get("id")?,
            decision: BatchDecision::from_name(&decision).ok_or_else(|| corrupt("decision", "has no known value"))?,
            rate: BatchRate::parse(&rate).map_err(|why| corrupt("rate", &why))?,
            wait: row.get("wait")?,
            person: row.get("person")?,
            database_user: row.get("database_user")?,
            because: row.get("because")?,
        })
    }
}

from_row!(row => BatchTurn {
    number;
    member: BatchMember { id: row.get("job_id")?, seen_fence: row.get("seen_fence")? },
});

impl FromRow for BatchSummary {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        let (jobs, applied, refused): (u64, u64, u64) = (row.get("jobs")?, row.get("applied")?, row.get("refused")?);
        let sums: String = row.get("sums")?;
        Ok(Self {
            id: row.get("id")?,
            decision: row.get("decision")?,
            state: row.get("state")?,
            jobs,
            applied,
            refused: Vec::new(),
            remaining: jobs.saturating_sub(applied + refused),
            rate: row.get("rate")?,
            created_at: row.get("created_at")?,
            person: row.get("person")?,
            database_user: row.get("database_user")?,
            because: row.get("because")?,
            finished_at: row.get("finished_at")?,
            stopped_by: row.get("stopped_by")?,
            stopped_database_user: row.get("stopped_database_user")?,
            sums: serde_json::from_str(&sums).map_err(|_| corrupt("sums", "is no list of sums"))?,
            worker: row.get("worker")?,
        })
    }
}

from_row!(row => RefusalCount { refusal, jobs, example; text: row.get("detail")?, });

from_row!(row => BatchJob {
    number, refusal, at;
    id: row.get("job_id")?,
    outcome: row.get::<Option<String>>("outcome")?.unwrap_or_else(|| "pending".to_owned()),
    text: row.get("detail")?,
});
