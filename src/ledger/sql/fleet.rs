//! The worker reports in SQL: each statement touches one small table, or a hundred entries of an index.

use std::sync::Arc;
use std::time::Duration;

use super::dialect::Dialect;
use super::engine::{Args, Sql};
use super::row::{SqlRow, corrupt, read_or_log};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::deployment::DeploymentId;
use crate::ledger::fleet::{StoredReport, WORKERS_MAX, WorkerReport};

pub struct FleetStatements {
    deployment: Sql,
    report: Sql,
    reports: Sql,
    leave: Sql,
    forget: Sql,
    oldest: Sql,
}

impl FleetStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            deployment: dialect.render("SELECT {text:id} AS id FROM deployment"),
            report: dialect.render(
                "INSERT INTO worker_reports (id, host, pid, version, started_at, reported_at, format, report) \
                 VALUES ($1, $2, $3, $4, {after:(0 - $5)}, {now}, $6, {json:$7}) \
                 ON CONFLICT (id) DO UPDATE SET reported_at = excluded.reported_at, format = excluded.format, \
                     report = excluded.report",
            ),
            reports: dialect.render(&format!(
                "SELECT id, host, pid, version, {{ms:started_at}} AS started_at_ms, {{ms:reported_at}} AS reported_at_ms, \
                     {{aged:reported_at}} AS age_ms, format, {{text:report}} AS report \
                 FROM worker_reports ORDER BY id LIMIT {WORKERS_MAX}"
            )),
            leave: dialect.render("DELETE FROM worker_reports WHERE id = $1"),
            forget: dialect.render("DELETE FROM worker_reports WHERE reported_at <= {after:(0 - $1)} RETURNING id"),
            // Condition and order are exactly those of index `jobs_open_by_sweep`.
            oldest: dialect.render(
                "SELECT names.value AS provider, (\
                     SELECT {ms:min(since)} FROM (\
                         SELECT CASE WHEN not_before > created_at AND {readable:not_before} THEN not_before \
                             WHEN {readable:created_at} THEN created_at END AS since FROM jobs \
                         WHERE provider = names.value AND state IN ('waiting', 'sending', 'unknown') \
                         ORDER BY CASE WHEN sweep_after > wake_at THEN sweep_after ELSE wake_at END LIMIT 100) AS longest\
                 ) AS since_ms FROM ({texts:$1}) AS names",
            ),
        }
    }
}

impl Database {
    /// The id of the deployment whose database this is.
    pub async fn deployment(&self) -> Result<DeploymentId, LedgerError> {
        let rows = self.engine.query(&self.sql.fleet.deployment, Arc::from([])).await?;
        let row = rows.first().ok_or_else(|| {
            LedgerError::StatementFailed(
                "table `deployment` has no row: insert one with a new UUID as its `id`".to_owned(),
            )
        })?;
        DeploymentId::parse(&row.text("id")?).map_err(|problem| corrupt("id", &problem))
    }

    /// Inserts or replaces the row of a process.
    pub async fn write_report(&self, report: &WorkerReport) -> Result<(), LedgerError> {
        let WorkerReport { id, host, pid, version, uptime, format, body } = report;
        let args: Args = Arc::from([
            id.as_str().into(),
            host.as_str().into(),
            (*pid).into(),
            version.as_str().into(),
            (*uptime).into(),
            (*format).into(),
            body.as_str().into(),
        ]);
        self.engine.query(&self.sql.fleet.report, args).await?;
        Ok(())
    }

    /// The rows of all processes, by id; at most [`WORKERS_MAX`].
    pub async fn worker_reports(&self) -> Result<Vec<StoredReport>, LedgerError> {
        let rows = self.engine.query(&self.sql.fleet.reports, Arc::from([])).await?;
        Ok(read_or_log(&rows, "worker_reports", "id", reported))
    }

    /// Deletes the row of a process that ends regularly.
    pub async fn remove_report(&self, id: &str) -> Result<(), LedgerError> {
        self.engine.query(&self.sql.fleet.leave, Arc::from([id.into()])).await?;
        Ok(())
    }

    /// Deletes the rows of processes that have not reported for this long; returns how many.
    pub async fn remove_silent_reports(&self, silent_for: Duration) -> Result<u64, LedgerError> {
        let removed = self.engine.query(&self.sql.fleet.forget, Arc::from([silent_for.into()])).await?;
        Ok(u64::try_from(removed.len()).unwrap_or(u64::MAX))
    }

    /// Start of the longest wait of each provider, in milliseconds since the Unix epoch: since when its oldest due job
    /// could be processed. Providers without an open job are left out. Reads only the first hundred open jobs of each
    /// provider by an index, so a job that is delayed again and again may be older.
    pub async fn oldest_open(&self, providers: &[ProviderName]) -> Result<Vec<(String, i64)>, LedgerError> {
        if providers.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<&str> = providers.iter().map(ProviderName::as_str).collect();
        let args: Args = Arc::from([serde_json::Value::from(names).to_string().into()]);
        let mut oldest = Vec::new();
        for row in self.engine.query(&self.sql.fleet.oldest, args).await? {
            if let Some(since_ms) = row.opt_int("since_ms")? {
                oldest.push((row.text("provider")?, since_ms));
            }
        }
        Ok(oldest)
    }
}

fn reported(row: &SqlRow) -> Result<StoredReport, LedgerError> {
    Ok(StoredReport {
        id: row.text("id")?,
        host: row.text("host")?,
        pid: row.count("pid")?,
        version: row.text("version")?,
        started_at_ms: row.instant("started_at_ms")?.0,
        reported_at_ms: row.instant("reported_at_ms")?.0,
        age: row.ms("age_ms")?,
        format: row.count("format")?,
        body: row.text("report")?,
    })
}
