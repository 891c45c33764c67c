//! The queries of the collector, one for each source. Each returns its value, or the words in which the source failed.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::timeout;

use super::super::backlog_counts::{CountedJobs, QueueDepths};
use super::super::pause_authors;
use super::super::sources::{QueryResult, query_concurrently, split_results};
use super::{OverviewCollector, ReportsWithSkew, RowsWithPauses, USAGE_AT_COUNT_TIMEOUT, unix_ms};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::fleet::UsageByQuota;
use crate::ledger::fleet::StoredReport;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::rejected::RejectedCount;
use crate::ledger::throttled::ThrottlingByProvider;
use crate::worker::quotas::quota_specs;
use crate::worker::settings_sync::LoadedSettings;
use crate::worker::sweeper::OVERDUE_ALARM_AFTER;

impl OverviewCollector {
    pub(super) async fn query_rows(&self) -> Result<RowsWithPauses, String> {
        let written = self.sources.reads.raw_rows(None).await.map_err(|error| error.to_string())?;
        // Unreadable rows are among the invalid rows that the worker knows.
        let rows: Vec<ProviderRow> = written.into_iter().flatten().collect();
        let paused_by = pause_authors(&self.sources.reads, &rows).await;
        let pause_of_all = self.sources.reads.pause_of_all().await.map_err(|error| error.to_string())?;
        Ok(RowsWithPauses { rows, paused_by, pause_of_all })
    }

    pub(super) async fn query_reports(&self) -> Result<ReportsWithSkew, String> {
        let reports = self.sources.reads.worker_reports().await.map_err(|error| error.to_string())?;
        let now_ms = |row: &StoredReport| row.reported_at_ms + i64::try_from(row.age.as_millis()).unwrap_or(0);
        let skew_ms = reports.iter().map(now_ms).max().map_or(0, |now_ms| now_ms - unix_ms());
        Ok((reports, skew_ms))
    }

    /// The oldest job by provider in the ledger.
    pub(super) async fn query_oldest(&self, names: &[ProviderName]) -> Result<BTreeMap<String, i64>, String> {
        let oldest = self.sources.reads.oldest_open(names).await.map_err(|error| error.to_string())?;
        Ok(oldest.into_iter().collect())
    }

    pub(super) async fn query_rejected(&self) -> Result<Vec<RejectedCount>, String> {
        self.sources.reads.count_rejected().await.map_err(|error| error.to_string())
    }

    pub(super) async fn query_held(&self) -> Result<BTreeMap<String, u64>, String> {
        self.sources.reads.count_held().await.map_err(|error| error.to_string())
    }

    pub(super) async fn query_throttling(&self) -> Result<ThrottlingByProvider, String> {
        let names = self.provider_names().await;
        let names: Vec<&str> = names.iter().map(ProviderName::as_str).collect();
        self.sources.reads.throttling(&names).await.map_err(|error| error.to_string())
    }

    pub(in crate::ops::overview) async fn query_jobs(&self) -> Result<CountedJobs, String> {
        let known = Arc::clone(&self.sources.worker_status.borrow().settings);
        // First the limiter: a job that gets its permit between the two then counts in neither, and never in both.
        let usage = timeout(USAGE_AT_COUNT_TIMEOUT, self.query_limit_usage(&known)).await;
        let count = self.finished_checks.count(|scope| self.sources.reads.reconcile(OVERDUE_ALARM_AFTER, scope));
        let reconciliations = count.await.map_err(|error| error.to_string())?;
        Ok(CountedJobs { reconciliations, limit_usage: usage.ok().and_then(|usage| usage.value).unwrap_or_default() })
    }

    pub(super) async fn query_depths(&self, names: &[ProviderName]) -> QueryResult<QueueDepths> {
        let each = names.iter().map(|name| async move {
            let Some(queue) = &self.sources.queue else { return Ok((name.to_string(), 0)) };
            let depth = queue.depth(name).await.map_err(|error| error.to_string())?;
            // A queue that does not exist has no messages.
            Ok((name.to_string(), depth.unwrap_or(0)))
        });
        let (depths, problem) = split_results(query_concurrently(each).await);
        QueryResult { value: Some(depths.into_iter().collect()), problem }
    }

    pub(super) async fn query_limit_usage(&self, known: &LoadedSettings) -> QueryResult<UsageByQuota> {
        let specs: Vec<QuotaSpec> = quota_specs(known).into_iter().filter_map(|quota| quota.spec).collect();
        let each = specs.into_iter().map(|spec| async move {
            let used = self.sources.limiter.peek(&spec, None).await.map_err(|error| error.to_string())?;
            Ok((spec.quota, used))
        });
        let (used, problem) = split_results(query_concurrently(each).await);
        QueryResult { value: Some(used.into_iter().collect()), problem }
    }
}
