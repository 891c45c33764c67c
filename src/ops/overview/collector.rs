//! The collector of the overview: it queries every source once for all readers, each with a timeout.
//!
//! A source that does not respond is missing, with a warning; its last value is not shown as current. Without readers
//! only the workers' reports and, less often, the jobs are queried, which is enough for the history. The reports come
//! first: while they cannot be read, no other query goes to the database.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::backlog_counts::{BacklogCounter, BacklogCounts, CountQueries, FinishedChecks, QueueDepths};
use super::sources::{CachedSource, CachedValue, VersionedSource, clock_skew_warning};
use super::{HISTORY_MAX_S, HistoryPoint, OverviewHistory, SentLately};
use crate::domain::provider::ProviderName;
use crate::fleet::backlog::PaymentCount;
use crate::fleet::report::problem_with_name;
use crate::fleet::workers::visible_workers;
use crate::fleet::{Overview, OverviewInput, UsageByQuota, by_provider, overview};
use crate::ledger::database::Database;
use crate::ledger::fleet::StoredReport;
use crate::ledger::history::HistoryMark;
use crate::ledger::pause_of_all::PauseOfAll;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::rejected::RejectedCount;
use crate::ledger::throttled::ThrottlingByProvider;
use crate::ledger::upkeep::ProviderReconciliation;
use crate::limiter::Limiter;
use crate::queue::Queue;
use crate::worker::settings_sync::LoadedSettings;
use crate::worker::supervisor::WorkerStatus;

mod commits;
mod queries;
mod recorder;

/// Interval of the points of the history.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(2);
/// All readers within this time get the same snapshot.
const SNAPSHOT_TTL: Duration = Duration::from_secs(1);
/// Timeout of a source.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(2);

/// The sources of the overview.
#[derive(Clone)]
pub struct OverviewSources {
    pub worker_status: watch::Receiver<WorkerStatus>,
    /// For the history, which this process writes.
    pub ledger: Database,
    pub reads: Database,
    /// `None`: there is no broker, and nothing waits before its record.
    pub queue: Option<Arc<dyn Queue>>,
    pub limiter: Arc<dyn Limiter>,
    /// Id of this worker process.
    pub worker: String,
    pub version: String,
}

/// Whether a reader waits for the snapshot, or only the history needs it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CollectFor {
    Reader,
    HistoryOnly,
}

const DEPTHS_AGE_MAX: Duration = Duration::from_secs(2);
const OLDEST_AGE_MAX: Duration = Duration::from_secs(5);
const USAGE_AGE_MAX: Duration = Duration::from_secs(1);
const REPORTS_AGE_MAX: Duration = Duration::from_secs(1);
/// A count does not wait longer for the limiter.
const USAGE_AT_COUNT_TIMEOUT: Duration = Duration::from_millis(500);
/// Largest age of a count that only the history needs.
const UNWATCHED_COUNT_AGE_MAX: Duration = Duration::from_secs(10);
/// Rows are read again when their version changes, and at the latest after this time.
const ROWS_AGE_MAX: Duration = Duration::from_secs(60);
const REJECTED_AGE_MAX: Duration = Duration::from_secs(2);
const THROTTLING_AGE_MAX: Duration = Duration::from_secs(2);

/// The reports, and the milliseconds by which the database's clock is ahead of ours.
type ReportsWithSkew = (Vec<StoredReport>, i64);
/// Messages that became no job, and 429s; `None` for a source that did not answer.
#[derive(Default)]
struct Refusals {
    rejected: Option<Vec<RejectedCount>>,
    held: Option<BTreeMap<String, u64>>,
    throttling: Option<ThrottlingByProvider>,
}
/// The raw rows with their pauses.
#[derive(Clone, Default)]
struct RowsWithPauses {
    rows: Vec<ProviderRow>,
    /// The author of each pause, by provider.
    paused_by: BTreeMap<String, String>,
    pause_of_all: Option<PauseOfAll>,
}

/// The collected input, and the overview made from it.
#[derive(Clone, Debug)]
pub struct OverviewSnapshot {
    pub input: Arc<OverviewInput>,
    pub overview: Arc<Overview>,
}

/// Collects the overview, and keeps a history of fifteen minutes.
pub struct OverviewCollector {
    sources: OverviewSources,
    rows: VersionedSource<RowsWithPauses>,
    reports: CachedSource<ReportsWithSkew>,
    /// Queue depths while the database is unavailable and there are no backlog counts.
    depths: CachedSource<QueueDepths>,
    oldest: CachedSource<BTreeMap<String, i64>>,
    rejected: CachedSource<Vec<RejectedCount>>,
    held: CachedSource<BTreeMap<String, u64>>,
    throttling: CachedSource<ThrottlingByProvider>,
    limit_usage: CachedSource<UsageByQuota>,
    counts: BacklogCounter,
    finished_checks: FinishedChecks,
    database_was_unavailable: AtomicBool,
    /// Since when a source has not responded.
    missing_since_ms: Mutex<BTreeMap<&'static str, i64>>,
    /// Counts of unrecorded payments by provider, and the time of the last snapshot in them.
    payment_counts: Mutex<(BTreeMap<String, PaymentCount>, Option<Instant>)>,
    last_snapshot: AsyncMutex<Option<(Instant, OverviewSnapshot)>>,
    history: Mutex<OverviewHistory>,
    /// The last marks that this process has recorded.
    recorded_marks: Mutex<HashSet<HistoryMark>>,
}

impl OverviewCollector {
    pub fn new(sources: OverviewSources) -> Self {
        Self {
            sources,
            rows: VersionedSource::new(SOURCE_TIMEOUT),
            reports: CachedSource::new(SOURCE_TIMEOUT),
            depths: CachedSource::new(SOURCE_TIMEOUT),
            oldest: CachedSource::new(SOURCE_TIMEOUT),
            rejected: CachedSource::new(SOURCE_TIMEOUT),
            held: CachedSource::new(SOURCE_TIMEOUT),
            throttling: CachedSource::new(SOURCE_TIMEOUT),
            limit_usage: CachedSource::new(SOURCE_TIMEOUT),
            counts: BacklogCounter::new(),
            finished_checks: FinishedChecks::default(),
            database_was_unavailable: AtomicBool::default(),
            missing_since_ms: Mutex::default(),
            payment_counts: Mutex::default(),
            last_snapshot: AsyncMutex::default(),
            history: Mutex::default(),
            recorded_marks: Mutex::default(),
        }
    }

    /// Counts the backlog and records the history, in memory and in the ledger, until `stop` fires.
    pub async fn run(&self, stop: CancellationToken) {
        let depths = || async { self.query_depths(&self.provider_names().await).await }.boxed();
        let jobs = || self.query_jobs().boxed();
        let counting = self.counts.run(CountQueries { jobs: &jobs, depths: &depths }, &stop);
        tokio::join!(counting, self.record_history(&stop), self.record_to_ledger(&stop));
    }

    /// The current overview, at most about two seconds old.
    pub async fn overview(&self) -> Arc<Overview> {
        self.snapshot().await.overview
    }

    /// The input of [`OverviewCollector::overview`].
    pub async fn input(&self) -> Arc<OverviewInput> {
        self.snapshot().await.input
    }

    /// The last points of one provider, oldest first.
    pub fn history(&self, provider: &str, seconds: u64) -> Vec<HistoryPoint> {
        let points = seconds.min(HISTORY_MAX_S) / SAMPLE_EVERY.as_secs();
        let history = self.history.lock();
        history.last_points(provider, usize::try_from(points).unwrap_or(usize::MAX))
    }

    /// Input and overview of the same moment.
    pub async fn snapshot(&self) -> OverviewSnapshot {
        let mut last = self.last_snapshot.lock().await;
        if let Some((_, snapshot)) = last.as_ref().filter(|(at, _)| at.elapsed() < SNAPSHOT_TTL) {
            return snapshot.clone();
        }
        let new = self.build_snapshot(CollectFor::Reader).await;
        *last = Some((Instant::now(), new.clone()));
        new
    }

    async fn build_snapshot(&self, purpose: CollectFor) -> OverviewSnapshot {
        let input = self.collect(purpose).await;
        OverviewSnapshot { overview: Arc::new(overview(&input)), input: Arc::new(input) }
    }

    /// Payments that no worker has recorded, by provider. Each backlog count is used once.
    fn unrecorded(&self, counted: &BacklogCounts) -> BTreeMap<String, u64> {
        let BacklogCounts { jobs: Some(jobs), started_at: Some(had_at), .. } = counted else {
            return BTreeMap::new();
        };
        let mut seen = self.payment_counts.lock();
        let (before, last_at) = &mut *seen;
        if last_at.is_none_or(|last_at| last_at < *had_at) {
            let since = last_at.map_or(Duration::ZERO, |last_at| *had_at - last_at);
            *last_at = Some(*had_at);
            let none = ProviderReconciliation::default();
            for (name, ready) in &counted.depths {
                let account = jobs.reconciliations.iter().find(|account| account.provider == *name).unwrap_or(&none);
                let now = PaymentCount::updated(before.get(name).copied(), account, *ready, since);
                before.insert(name.clone(), now);
            }
        }
        before.iter().map(|(name, seen)| (name.clone(), seen.unrecorded)).collect()
    }

    /// Adds a point of each provider to the history. It is of the last snapshot of a reader, so that a page shows the same
    /// figure in both; a snapshot that is no later than the last point would repeat it.
    pub async fn record_point(&self) {
        let seen = self.last_snapshot.lock().await.clone();
        let is_new = |overview: &Overview| self.history.lock().is_later(overview);
        let seen = seen.filter(|(at, snapshot)| at.elapsed() < SAMPLE_EVERY && is_new(&snapshot.overview));
        let overview = match seen {
            Some((_, snapshot)) => snapshot.overview,
            None => self.build_snapshot(CollectFor::HistoryOnly).await.overview,
        };
        self.history.lock().record(&overview);
    }

    async fn record_history(&self, stop: &CancellationToken) {
        let mut tick = interval(SAMPLE_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let point = async {
                tick.tick().await;
                self.record_point().await;
            };
            tokio::select! {
                () = point => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Providers with a row, valid or not, or with jobs: each may have messages in its queue.
    async fn provider_names(&self) -> Vec<ProviderName> {
        let known = Arc::clone(&self.sources.worker_status.borrow().settings);
        let rows = self.rows.cached_value().await.value.unwrap_or_default().rows;
        let jobs = self.counts.last().jobs;
        let recorded = jobs.iter().flat_map(|jobs| &jobs.reconciliations).map(|account| account.provider.as_str());
        let bad = known.invalid_rows.iter().map(|bad| bad.provider.as_str());
        all_provider_names(&known, rows.iter().map(|row| row.name.as_str()).chain(bad).chain(recorded))
    }

    async fn collect(&self, purpose: CollectFor) -> OverviewInput {
        let known = Arc::clone(&self.sources.worker_status.borrow().settings);
        let reports = self.reports.get(REPORTS_AGE_MAX, self.query_reports()).await;
        // At once: it compares the age of the reports.
        let commits = self.commit_status(&reports);
        let used = async {
            if purpose == CollectFor::HistoryOnly {
                return CachedValue::not_queried();
            }
            self.limit_usage.get(USAGE_AGE_MAX, self.query_limit_usage(&known)).await
        };
        let refusals = async {
            if reports.problem.is_some() { Refusals::default() } else { self.collect_refusals(purpose).await }
        };
        let stored = self.collect_stored(purpose, reports.problem.is_some(), known.version);
        let (used, refusals, (rows, oldest, counted)) = tokio::join!(used, refusals, stored);
        let problem_of =
            |what: &str, problem: &Option<String>| problem.as_ref().map(|problem| problem_with_name(what, problem));
        let mut problems: Vec<String> = Vec::new();
        problems.extend(problem_of("queue", &counted.queue_problem));
        problems.extend(problem_of("limiter", &used.problem));
        problems.extend(counted.problem.as_ref().map(|problem| format!("jobs could not be counted: {problem}")));
        let database_problem = reports.problem.or(rows.problem).or(commits.problem);
        let sources = [("database", &database_problem), ("queue", &counted.queue_problem), ("limiter", &used.problem)];
        let missing: Vec<_> =
            sources.into_iter().filter_map(|(name, problem)| problem.as_ref().map(|_| name)).collect();
        let (stored_reports, skew_ms) = reports.value.unwrap_or_default();
        problems.extend(clock_skew_warning(skew_ms));
        let RowsWithPauses { rows: raw_rows, paused_by, pause_of_all } = rows.value.unwrap_or_default();
        let at_ms = unix_ms();
        let missing_since_ms = self.missing_since(&missing, purpose, at_ms);
        let unrecorded = self.unrecorded(&counted);
        let workers = visible_workers(stored_reports, reports.age, commits.outage);
        let live = workers.iter().filter(|worker| worker.is_live()).map(|worker| worker.id.clone()).collect();
        let SentLately { recent_per_s, sent_before, judged_before } = self.history.lock().sent_lately(live, at_ms);
        let counted_for = counted.started_at.filter(|_| counted.jobs.is_some()).map(|at| at.elapsed());
        let counted_at_ms = counted_for.map(|age| at_ms - i64::try_from(age.as_millis()).unwrap_or(0));
        OverviewInput {
            at_ms,
            version: self.sources.version.clone(),
            worker: self.sources.worker.clone(),
            rows: raw_rows,
            paused_by,
            pause_of_all,
            providers: known.providers.clone(),
            invalid_rows: known.invalid_rows.clone(),
            workers,
            reconciliation: counted.jobs.as_ref().map(|jobs| by_provider(jobs.reconciliations.iter().cloned())),
            counted_at_ms,
            usage_at_count: counted.jobs.map_or_else(UsageByQuota::new, |jobs| jobs.limit_usage.clone()),
            recent_per_s,
            sent_before,
            judged_before,
            unrecorded,
            depths: counted.depths,
            oldest_ms: oldest.current(),
            rejected: refusals.rejected,
            held: refusals.held,
            throttling: refusals.throttling,
            limit_usage: used.value.unwrap_or_default(),
            database_problem,
            backend_problems: problems,
            missing,
            missing_since_ms,
        }
    }

    /// Since when each missing source has not responded. Without a reader, the limiter is not queried: its outage goes on.
    fn missing_since(&self, missing: &[&'static str], purpose: CollectFor, at_ms: i64) -> BTreeMap<&'static str, i64> {
        let mut since = self.missing_since_ms.lock();
        let unknown = |name: &str| name == "limiter" && purpose == CollectFor::HistoryOnly;
        since.retain(|name, _| missing.contains(name) || unknown(name));
        for name in missing {
            since.entry(name).or_insert(at_ms);
        }
        since.clone()
    }

    async fn collect_refusals(&self, purpose: CollectFor) -> Refusals {
        let throttling = self.throttling.get(THROTTLING_AGE_MAX, self.query_throttling());
        if purpose == CollectFor::HistoryOnly {
            return Refusals { throttling: throttling.await.current(), ..Refusals::default() };
        }
        let rejected = self.rejected.get(REJECTED_AGE_MAX, self.query_rejected());
        let held = self.held.get(REJECTED_AGE_MAX, self.query_held());
        let (rejected, held, throttling) = tokio::join!(rejected, held, throttling);
        Refusals { rejected: rejected.current(), held: held.current(), throttling: throttling.current() }
    }

    /// The data of the database, and of the queues at the same moment.
    async fn collect_stored(
        &self,
        purpose: CollectFor,
        database_unavailable: bool,
        version: i64,
    ) -> (CachedValue<RowsWithPauses>, CachedValue<BTreeMap<String, i64>>, BacklogCounts) {
        let was_unavailable = self.database_was_unavailable.swap(database_unavailable, Ordering::Relaxed);
        let names = self.provider_names().await;
        if database_unavailable {
            let depths = self.depths.get(DEPTHS_AGE_MAX, self.query_depths(&names)).await;
            let queue_problem = depths.problem;
            let counted =
                BacklogCounts { depths: depths.value.unwrap_or_default(), queue_problem, ..BacklogCounts::default() };
            return (self.rows.cached_value().await, CachedValue::not_queried(), counted);
        }
        if was_unavailable {
            self.counts.notify_database_recovered();
        }
        let counted = async {
            match purpose {
                CollectFor::Reader => self.counts.current().await,
                CollectFor::HistoryOnly => self.counts.last_and_request(UNWATCHED_COUNT_AGE_MAX),
            }
        };
        let oldest = async {
            if purpose == CollectFor::HistoryOnly {
                return CachedValue::not_queried();
            }
            self.oldest.get(OLDEST_AGE_MAX, self.query_oldest(&names)).await
        };
        tokio::join!(self.rows.get(version, ROWS_AGE_MAX, self.query_rows()), oldest, counted)
    }
}

/// The known providers, and the valid ones of these names.
pub fn all_provider_names<'a>(known: &LoadedSettings, others: impl Iterator<Item = &'a str>) -> Vec<ProviderName> {
    let others = others.filter_map(|name| ProviderName::new(name).ok());
    let all: BTreeSet<ProviderName> = known.providers.keys().cloned().chain(others).collect();
    all.into_iter().collect()
}

/// Milliseconds since the Unix epoch by this machine's clock, for display.
pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
