//! What the workers tell each other and operators: worker reports, leader rows, and counts for status and readiness.
//!
//! Each statement touches one small table, or a few entries of an index. Queries take no locks: their counts may be
//! outdated when they are read.
//!
//! All workers read the limiter leader's row of each quota, and a compare-and-set changes it. `limiter::leader_election`
//! decides who the leader should be. See `docs/decisions/0014-leader-row-in-sql.md`.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, timeout};

use super::dialect::{Dialect, Template};
use super::engine::args;
use super::result::{FromRow, SqlRow, corrupt, from_row, read_or_log};
use super::texts;
use crate::domain::backend_fault::BackendFault;
use crate::domain::clock_comparison::{ClockAttestation, ClockOffset, LeaderRow, QuotaAttestation};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::domain::time::{EpochMs, Micros};
use crate::ledger::committed_writes::COMMIT_MAX;
use crate::ledger::database::Database;
use crate::ledger::fleet::{Beat, DeploymentId, StoredReport, WORKERS_MAX, WorkerReport};
use crate::ledger::{LedgerError, StateCount};

/// Longest time of a statement of a beat: shorter than a beat may stand still.
const BEAT_MAX: Duration = Duration::from_secs(3);
/// Longest time that the check of commits waits for its row.
const ROW_WAIT_MAX: Duration = Duration::from_secs(2);

static DEPLOYMENT: Template = Template::new("SELECT {text:id} AS id FROM deployment");

static WRITE_REPORT: Template = Template::new(
    "INSERT INTO worker_reports (id, host, pid, version, started_at, reported_at, format, report) \
     VALUES ($1, $2, $3, $4, {after:(0 - $5)}, {now}, $6, {json:$7}) \
     ON CONFLICT (id) DO UPDATE SET reported_at = excluded.reported_at, format = excluded.format, \
         report = excluded.report",
);

static READ_REPORTS: Template = Template::made(|_| {
    format!(
        "SELECT id, host, pid, version, {{ms:started_at}} AS started_at_ms, {{ms:reported_at}} AS reported_at_ms, \
             {{aged:reported_at}} AS age_ms, format, {{text:report}} AS report \
         FROM worker_reports ORDER BY id LIMIT {WORKERS_MAX}"
    )
});

static REMOVE: Template = Template::new("DELETE FROM worker_reports WHERE id = $1");

static REMOVE_SILENT: Template =
    Template::new("DELETE FROM worker_reports WHERE reported_at <= {after:(0 - $1)} RETURNING id");

static WRITE_BEAT: Template = Template::new(
    "INSERT INTO workers (id, beat) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET beat = excluded.beat RETURNING id",
);

static BEATS: Template = Template::made(|_| format!("SELECT id, beat FROM workers ORDER BY id LIMIT {WORKERS_MAX}"));

static REMOVE_WORKER: Template = Template::new("DELETE FROM workers WHERE id = $1 RETURNING id");

static REMOVE_SILENT_WORKER: Template = Template::new("DELETE FROM workers WHERE id = $1 AND beat = $2 RETURNING id");

/// Condition and order are exactly those of index `jobs_open_by_wake`.
static OLDEST_OPEN: Template = Template::new(
    "SELECT names.value AS provider, (\
         SELECT {ms:min(since)} FROM (\
             SELECT CASE WHEN not_before > created_at AND {readable:not_before} THEN not_before \
                 WHEN {readable:created_at} THEN created_at END AS since FROM jobs \
             WHERE provider = names.value AND state IN ('waiting', 'sending', 'unknown') \
             ORDER BY wake_at LIMIT 100) AS longest\
     ) AS since_ms FROM ({texts:$1}) AS names",
);

impl Database {
    /// The id of the deployment whose database this is.
    pub async fn deployment(&self) -> Result<DeploymentId, LedgerError> {
        let row = self.query_one(&DEPLOYMENT, []).await?.ok_or_else(|| {
            LedgerError::StatementFailed(
                "table `deployment` has no row: insert one with a new UUID as its `id`".to_owned(),
            )
        })?;
        DeploymentId::parse(&row.get::<String>("id")?).map_err(|problem| corrupt("id", &problem))
    }

    /// Inserts or replaces the row of a process.
    pub async fn write_report(&self, report: &WorkerReport) -> Result<(), LedgerError> {
        let WorkerReport { id, host, pid, version, uptime, format, body } = report;
        self.query(&WRITE_REPORT, args![id, host, *pid, version, *uptime, *format, body]).await.map(drop)
    }

    /// The rows of all processes, by id; at most [`WORKERS_MAX`].
    pub async fn worker_reports(&self) -> Result<Vec<StoredReport>, LedgerError> {
        Ok(read_or_log(&self.query(&READ_REPORTS, []).await?, "worker_reports", "id"))
    }

    /// Deletes the row of a process that ends regularly.
    pub async fn remove_report(&self, id: &str) -> Result<(), LedgerError> {
        self.query(&REMOVE, args![id]).await.map(drop)
    }

    /// Deletes the rows of processes that have not reported for this long; returns how many.
    pub async fn remove_silent_reports(&self, silent_for: Duration) -> Result<u64, LedgerError> {
        self.query_count(&REMOVE_SILENT, args![silent_for]).await.map(u64::from)
    }

    /// Moves the beat of a worker process on to this number; its first one makes its row. Returns the beats of all
    /// worker processes, at most [`WORKERS_MAX`], by id.
    pub async fn write_beat(&self, worker: &str, number: i64) -> Result<Vec<Beat>, LedgerError> {
        let steps = vec![self.step(&WRITE_BEAT, args![worker, number]), self.step(&BEATS, [])];
        let rows = self.engine.atomically_within(BEAT_MAX, steps).await?;
        rows.iter().flatten().skip(1).flatten().map(Beat::from_row).collect()
    }

    /// Deletes the row of a worker process that ends.
    pub async fn remove_worker(&self, worker: &str) -> Result<(), LedgerError> {
        self.query(&REMOVE_WORKER, args![worker]).await.map(drop)
    }

    /// Deletes the row of a worker process if its beat still stands there; whether it did.
    pub async fn remove_silent_worker(&self, beat: &Beat) -> Result<bool, LedgerError> {
        Ok(!self.query(&REMOVE_SILENT_WORKER, args![&beat.worker, beat.number]).await?.is_empty())
    }

    /// Start of the longest wait of each provider, in milliseconds since the Unix epoch: since when its oldest due job
    /// could be processed. Providers without an open job are left out. Reads only the first hundred open jobs of each
    /// provider by an index, so a job that is delayed again and again may be older.
    pub async fn oldest_open(&self, providers: &[ProviderName]) -> Result<Vec<(String, i64)>, LedgerError> {
        if providers.is_empty() {
            return Ok(Vec::new());
        }
        let names = texts(providers.iter().map(ProviderName::as_str));
        let mut oldest = Vec::new();
        for row in self.query(&OLDEST_OPEN, [names]).await? {
            if let Some(since_ms) = row.get("since_ms")? {
                oldest.push((row.get("provider")?, since_ms));
            }
        }
        Ok(oldest)
    }
}

from_row!(row => Beat {
    ;
    worker: row.get("id")?,
    number: row.get("beat")?,
});

from_row!(row => StoredReport {
    id, host, pid, version, age, format;
    started_at_ms: row.get::<EpochMs>("started_at")?.0,
    reported_at_ms: row.get::<EpochMs>("reported_at")?.0,
    body: row.get("report")?,
});

const COLUMNS: &str = "quota, holder, term, {aged:since} AS age_ms, {now_ms} AS now_ms, \
     clock_ahead_least_us, clock_ahead_most_us, clock_since_us, {since:clock_said_at} AS clock_age_ms";

static STORED: Template =
    Template::made(|_| format!("SELECT {COLUMNS} FROM limiter_authority WHERE quota IN ({{texts:$1}})"));

/// A term is never used twice, even if the row was deleted: the clock is above every count of changes.
static TAKE: Template = Template::made(|_| {
    format!(
        "INSERT INTO limiter_authority (quota, holder, term, since) \
         VALUES ($1, $3, {{now_ms}}, {{now}}) \
         ON CONFLICT (quota) DO UPDATE SET holder = excluded.holder, since = excluded.since, \
             clock_ahead_least_us = NULL, clock_ahead_most_us = NULL, clock_since_us = NULL, \
             clock_said_at = NULL, \
             term = CASE WHEN excluded.term > limiter_authority.term THEN excluded.term \
                         ELSE limiter_authority.term + 1 END \
         WHERE limiter_authority.holder = $2 RETURNING {COLUMNS}"
    )
});

/// A row that another process writes now is left to the next poll, so that no two wait for each other.
static ATTEST: Template = Template::new(
    "UPDATE limiter_authority SET clock_ahead_least_us = attested.least_us, \
         clock_ahead_most_us = attested.most_us, clock_since_us = attested.since_us, clock_said_at = {now} \
     FROM {attested:$1} \
     WHERE limiter_authority.quota IN (\
             SELECT free.quota FROM limiter_authority AS free WHERE free.quota IN (SELECT quota FROM {attested:$1}) {unlocked}) \
         AND limiter_authority.quota = attested.quota AND limiter_authority.term = attested.term \
         AND COALESCE(clock_since_us, 0) <= attested.since_us",
);

impl Database {
    /// The limiter leaders of these quotas; a quota that never had a leader has no entry. Cheap enough for polling.
    pub async fn stored_leaders(
        &self,
        quotas: &[ProviderName],
    ) -> Result<HashMap<ProviderName, LeaderRow>, LedgerError> {
        if quotas.is_empty() {
            return Ok(HashMap::new());
        }
        let names = texts(quotas.iter().map(ProviderName::as_str));
        let rows = self.query_urgent(&STORED, [names]).await?;
        rows.iter().map(|row| Ok((row.get("quota")?, LeaderRow::from_row(row)?))).collect()
    }

    /// Makes `to` the leader if `from` is it now, or if there is none. The term rises, and the age restarts at zero.
    /// Returns the leader row afterwards.
    pub async fn take_leadership(
        &self,
        quota: &ProviderName,
        from: Option<&str>,
        to: &str,
    ) -> Result<LeaderRow, LedgerError> {
        if let Some(row) = self.query_one(&TAKE, args![quota, from, to]).await? {
            return LeaderRow::from_row(&row);
        }
        // Another worker was faster. The row exists, because only an operator deletes it.
        let mut held = self.stored_leaders(std::slice::from_ref(quota)).await?;
        held.remove(quota)
            .ok_or_else(|| LedgerError::Unavailable("the limiter's leader row was deleted: retrying".to_owned()))
    }

    /// Stores each clock attestation, unless the quota's row has another term, or one of a later clock step.
    pub async fn record_clock_attestations(&self, attestations: &[QuotaAttestation]) -> Result<(), LedgerError> {
        if attestations.is_empty() {
            return Ok(());
        }
        let row = |said: &QuotaAttestation| {
            let ClockAttestation { offset, since } = said.attestation;
            json!({ "quota": said.quota.as_str(), "term": said.term, "least_us": offset.least_us,
                    "most_us": offset.most_us, "since_us": i64::try_from(since.0).unwrap_or(i64::MAX) })
        };
        let rows: Vec<serde_json::Value> = attestations.iter().map(row).collect();
        self.query(&ATTEST, args![json!(rows).to_string()]).await.map(drop)
    }
}

from_row!(row => LeaderRow {
    holder, term, age;
    now: micros(row, "now_ms", 1_000)?,
    attestation: attestation(row)?,
});

fn attestation(row: &SqlRow) -> Result<Option<(ClockAttestation, Duration)>, LedgerError> {
    if row.get::<Option<i64>>("clock_since_us")?.is_none() {
        return Ok(None);
    }
    let offset = ClockOffset { least_us: row.get("clock_ahead_least_us")?, most_us: row.get("clock_ahead_most_us")? };
    // If the clock went back, the age is unknown: too old for any use.
    let age_ms = u64::try_from(row.get::<i64>("clock_age_ms")?).unwrap_or(u64::MAX);
    let since = micros(row, "clock_since_us", 1)?;
    Ok(Some((ClockAttestation { offset, since }, Duration::from_millis(age_ms))))
}

fn micros(row: &SqlRow, column: &str, unit: u64) -> Result<Micros, LedgerError> {
    Ok(Micros(row.get::<u64>(column)?.saturating_mul(unit)))
}

/// All providers that have a job: steps from one to the next instead of reading all entries of the index.
pub const LANES: &str = "WITH RECURSIVE lanes (provider) AS ( \
     SELECT min(provider) FROM jobs \
     UNION ALL \
     SELECT (SELECT min(provider) FROM jobs WHERE jobs.provider > lanes.provider) FROM lanes \
     WHERE lanes.provider IS NOT NULL)";

/// All providers that have a flow, as [`LANES`].
const LANES_OF_FLOWS: &str = "WITH RECURSIVE lanes (provider) AS ( \
     SELECT min(provider) FROM flows \
     UNION ALL \
     SELECT (SELECT min(provider) FROM flows WHERE flows.provider > lanes.provider) FROM lanes \
     WHERE lanes.provider IS NOT NULL)";

static OPEN_LANES: Template = Template::made(|_| {
    format!(
        "{LANES} SELECT provider FROM lanes WHERE provider IS NOT NULL AND EXISTS (SELECT 1 FROM jobs \
             WHERE jobs.provider = lanes.provider AND jobs.state IN ('waiting', 'sending', 'unknown'))"
    )
});

static FLOW_LANES: Template =
    Template::made(|_| format!("{LANES_OF_FLOWS} SELECT provider FROM lanes WHERE provider IS NOT NULL"));

static OPEN_COUNT: Template = Template::new(
    "SELECT count(*) AS jobs FROM (SELECT 1 FROM jobs \
         WHERE provider = $1 AND state IN ('waiting', 'sending', 'unknown') LIMIT $2) AS counted",
);

static COUNTS: Template = Template::new("SELECT provider, state, count(*) AS jobs FROM jobs GROUP BY provider, state");

/// One row for all: while the commit of one check hangs, the next one waits for the row, and leaves no session behind.
pub(super) static CHECK_COMMIT: Template = Template::new("UPDATE commit_checks SET checked_at = {now}");

static PING: Template = Template::new("SELECT {version} AS version");

static OUTCOME: Template = Template::new("SELECT outcome FROM attempts WHERE job_id = $1 AND number = $2");

impl Database {
    /// The lanes with a job that waits, is being sent, or has an unknown outcome. The others need no sweep of their own.
    pub async fn lanes_with_open_jobs(&self) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&self.query_by_index(&OPEN_LANES, []).await?)
    }

    /// Number of the lane's jobs that wait, are being sent, or have an unknown outcome, counted up to `most`.
    pub async fn count_open_jobs(&self, lane: &ProviderName, most: u32) -> Result<u32, LedgerError> {
        let rows = self.query_by_index(&OPEN_COUNT, args![lane, most]).await?;
        rows.first().map_or(Ok(0), |row| row.get("jobs"))
    }

    /// The lanes that have flows, with or without jobs. One statement for all lanes, since most have none.
    pub async fn lanes_with_flows(&self) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&self.query_by_index(&FLOW_LANES, []).await?)
    }

    pub async fn state_counts(&self) -> Result<Vec<StateCount>, LedgerError> {
        self.query_as(&COUNTS, []).await
    }

    /// The outcome of a request, as its row says: `None` while it is open, and when no request has this number.
    pub async fn request_outcome(&self, job: &JobId, number: u32) -> Result<Option<String>, LedgerError> {
        self.query_one(&OUTCOME, args![job, number]).await?.map_or(Ok(None), |row| row.get("outcome"))
    }

    /// Commits a row of its own within [`COMMIT_MAX`]. A rollback would flush nothing, and wait for no standby.
    ///
    /// # Errors
    /// [`LedgerError::CannotWrite`] when the database answers and commits nothing.
    pub async fn check_commit(&self) -> Result<(), LedgerError> {
        let (began, steps) = (Instant::now(), vec![self.must_affect(&CHECK_COMMIT, [])]);
        match timeout(COMMIT_MAX, self.engine.atomically_within(ROW_WAIT_MAX, steps)).await {
            Ok(Ok(Some(_))) => Ok(()),
            Ok(Ok(None)) => {
                Err(LedgerError::StatementFailed("table `commit_checks` has no row: insert one".to_owned()))
            }
            Ok(Err(LedgerError::Unavailable(_))) if began.elapsed() >= ROW_WAIT_MAX => {
                Err(self.hanging_commit().into())
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.hanging_commit().into()),
        }
    }

    /// The fault of a database that reads and does not end a commit.
    pub fn hanging_commit(&self) -> BackendFault {
        match self.dialect() {
            Dialect::Postgres => BackendFault::StandbyMissing,
            Dialect::Sqlite => BackendFault::CommitHangs,
        }
    }

    /// Asks the database for a sign of life; returns its version.
    pub async fn ping(&self) -> Result<String, LedgerError> {
        self.query_row(&PING, []).await?.get("version")
    }
}

from_row!(row => StateCount { provider, state, jobs });

/// A name that no row of a provider can have is left out.
pub fn providers(rows: &[SqlRow]) -> Result<BTreeSet<ProviderName>, LedgerError> {
    let names = rows.iter().map(|row| Ok(ProviderName::new(&row.get::<String>("provider")?).ok()));
    names.filter_map(Result::transpose).collect()
}
