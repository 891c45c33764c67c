//! Where the overview is gathered: every source asked once for all who look, each with its own patience.
//!
//! A source that does not answer is missing, and a warning says why: its last answer does not pass for now's. While nobody
//! looks, the reports of the workers and, now and then, the jobs are asked for: enough for the history. The reports come
//! first: while they cannot be read, nothing else is asked of the database.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt as _;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::HISTORY_MAX_S;
use super::asked::{a_few_at_a_time, those_that_answered};
use super::cached::{Answer, Asked, Cached, Versioned};
use super::counts::{Asks, Counted, Counts, Depths};
use super::history::{History, Point};
use super::pausers::pausers;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::fleet::backlog::Seen;
use crate::fleet::report::problem_of;
use crate::fleet::workers::present;
use crate::fleet::{Conserved, Evidence, Overview, by_provider, overview};
use crate::ledger::fleet::{Fleet, Reported};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::Settings;
use crate::ledger::upkeep::Upkeep;
use crate::limiter::{LimitUse, Limiter};
use crate::queue::Queue;
use crate::worker::deployment::Progress;
use crate::worker::quotas::quota_specs;
use crate::worker::settings_watch::Known;
use crate::worker::sweeper::{ASTRAY_AFTER, CHECKED};

/// Distance of the points of the history.
pub(super) const SAMPLE_EVERY: Duration = Duration::from_secs(2);
/// One picture for everybody who asks within this time.
const PICTURE_KEPT: Duration = Duration::from_secs(1);
/// Longest time that a source is waited for.
const SOURCE_PATIENCE: Duration = Duration::from_secs(2);
/// Clocks further apart than this make times on pages misleading; limits do not depend on it.
const CLOCK_SKEW_MAX_MS: u64 = 5_000;

/// What is asked.
#[derive(Clone)]
pub struct Sources {
    pub progress: watch::Receiver<Progress>,
    pub settings: Arc<dyn Settings>,
    pub fleet: Arc<dyn Fleet>,
    pub upkeep: Arc<dyn Upkeep>,
    pub queue: Arc<dyn Queue>,
    pub limiter: Arc<dyn Limiter>,
    /// The process that answers.
    pub worker: String,
    pub version: String,
}

/// Whether someone looks, or the history alone is continued.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Looks {
    Watched,
    Unwatched,
}

const DEPTHS_AGE_MAX: Duration = Duration::from_secs(2);
const OLDEST_AGE_MAX: Duration = Duration::from_secs(5);
const USED_AGE_MAX: Duration = Duration::from_secs(1);
const REPORTS_AGE_MAX: Duration = Duration::from_secs(1);
/// Of a count, for the history alone.
const UNWATCHED_COUNT_AGE_MAX: Duration = Duration::from_secs(10);
/// Rows are read again when their version moves; and now and then, to be sure.
const ROWS_AGE_MAX: Duration = Duration::from_secs(60);

/// The reports, and by how many milliseconds the database's clock is ahead of ours.
type Heard = (Vec<Reported>, i64);
/// As written, and who paused those that are paused.
type Rows = (Vec<ProviderRow>, BTreeMap<String, String>);
type Used = BTreeMap<ProviderName, Vec<LimitUse>>;

/// One look: what was gathered, and what is shown of it.
#[derive(Clone, Debug)]
pub struct Picture {
    pub evidence: Arc<Evidence>,
    pub overview: Arc<Overview>,
}

/// Gathers, and remembers fifteen minutes.
pub struct Lookout {
    sources: Sources,
    rows: Versioned<Rows>,
    reports: Cached<Heard>,
    /// While the database is away, and there is no snapshot of both.
    depths: Cached<Depths>,
    oldest: Cached<BTreeMap<String, i64>>,
    used: Cached<Used>,
    counts: Counts,
    database_was_away: AtomicBool,
    /// What the snapshots have come to, and when the last one was had.
    seen: Mutex<(BTreeMap<String, Seen>, Option<Instant>)>,
    picture: AsyncMutex<Option<(Instant, Picture)>>,
    history: Mutex<History>,
}

impl Lookout {
    #[must_use]
    pub fn new(sources: Sources) -> Self {
        Self {
            sources,
            rows: Versioned::new(SOURCE_PATIENCE),
            reports: Cached::new(SOURCE_PATIENCE),
            depths: Cached::new(SOURCE_PATIENCE),
            oldest: Cached::new(SOURCE_PATIENCE),
            used: Cached::new(SOURCE_PATIENCE),
            counts: Counts::new(),
            database_was_away: AtomicBool::default(),
            seen: Mutex::default(),
            picture: AsyncMutex::default(),
            history: Mutex::default(),
        }
    }

    /// Counts and keeps the history until it is stopped.
    pub async fn run(&self, stop: CancellationToken) {
        let depths = || async { self.ask_depths(&self.names().await).await }.boxed();
        let jobs = || self.ask_jobs().boxed();
        tokio::join!(self.counts.keep(Asks { jobs: &jobs, depths: &depths }, &stop), self.sample(&stop));
    }

    /// What is known now, at most about two seconds old.
    pub async fn overview(&self) -> Arc<Overview> {
        self.look().await.overview
    }

    /// What [`Lookout::overview`] is made of.
    pub async fn evidence(&self) -> Arc<Evidence> {
        self.look().await.evidence
    }

    /// The last points of one provider, oldest first.
    #[must_use]
    pub fn history(&self, provider: &str, seconds: u64) -> Vec<Point> {
        let points = seconds.min(HISTORY_MAX_S) / SAMPLE_EVERY.as_secs();
        let history = locked(&self.history);
        history.last(provider, usize::try_from(points).unwrap_or(usize::MAX))
    }

    /// Both.
    pub async fn look(&self) -> Picture {
        let mut picture = self.picture.lock().await;
        if let Some((_, picture)) = picture.as_ref().filter(|(at, _)| at.elapsed() < PICTURE_KEPT) {
            return picture.clone();
        }
        let new = self.picture_of(Looks::Watched).await;
        *picture = Some((Instant::now(), new.clone()));
        new
    }

    async fn picture_of(&self, looks: Looks) -> Picture {
        let evidence = self.gather(looks).await;
        Picture { overview: Arc::new(overview(&evidence)), evidence: Arc::new(evidence) }
    }

    /// Payments that no worker has recorded, by provider; each snapshot is followed once.
    fn unrecorded(&self, counted: &Counted) -> BTreeMap<String, u64> {
        let Counted { accounts: Some(accounts), had_at: Some(had_at), .. } = counted else { return BTreeMap::new() };
        let mut seen = locked(&self.seen);
        let (before, last_at) = &mut *seen;
        if last_at.is_none_or(|last_at| last_at < *had_at) {
            let since = last_at.map_or(Duration::ZERO, |last_at| *had_at - last_at);
            *last_at = Some(*had_at);
            let none = Conserved::default();
            for (name, ready) in &counted.depths {
                let account = accounts.iter().find(|account| account.provider == *name).unwrap_or(&none);
                let now = Seen::after(before.get(name).copied(), account, *ready, since);
                before.insert(name.clone(), now);
            }
        }
        before.iter().map(|(name, seen)| (name.clone(), seen.unrecorded)).collect()
    }

    /// The picture that someone looks at, or one for the history: a page shows the same figure in both.
    async fn point(&self) -> Arc<Overview> {
        let seen = self.picture.lock().await.clone();
        match seen.filter(|(at, _)| at.elapsed() < SAMPLE_EVERY) {
            Some((_, picture)) => picture.overview,
            None => self.picture_of(Looks::Unwatched).await.overview,
        }
    }

    async fn sample(&self, stop: &CancellationToken) {
        let mut tick = interval(SAMPLE_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let point = async {
                tick.tick().await;
                self.point().await
            };
            tokio::select! {
                point = point => locked(&self.history).enter(&point),
                () = stop.cancelled() => return,
            }
        }
    }

    /// Providers that have a row, good or bad, or jobs: each may have messages in its queue.
    async fn names(&self) -> Vec<ProviderName> {
        let known = Arc::clone(&self.sources.progress.borrow().known);
        let rows = self.rows.last().await.value.map(|(rows, _)| rows).unwrap_or_default();
        let accounts = self.counts.last().accounts;
        let recorded = accounts.iter().flat_map(|accounts| accounts.iter()).map(|account| account.provider.as_str());
        let bad = known.bad.iter().map(|bad| bad.provider.as_str());
        named(&known, rows.iter().map(|row| row.name.as_str()).chain(bad).chain(recorded))
    }

    async fn gather(&self, looks: Looks) -> Evidence {
        let known = Arc::clone(&self.sources.progress.borrow().known);
        let reports = self.reports.get(REPORTS_AGE_MAX, self.ask_reports()).await;
        let used = async {
            if looks == Looks::Unwatched {
                return Answer::none();
            }
            self.used.get(USED_AGE_MAX, self.ask_used(&known)).await
        };
        let stored = self.stored(looks, reports.problem.is_some(), known.version);
        let (used, (rows, oldest, counted)) = tokio::join!(used, stored);
        let problem_of = |what: &str, problem: &Option<String>| problem.as_ref().map(|it| problem_of(what, it));
        let mut away: Vec<String> = Vec::new();
        away.extend(problem_of("queue", &counted.queue_problem));
        away.extend(problem_of("limiter", &used.problem));
        away.extend(counted.problem.as_ref().map(|problem| format!("jobs could not be counted: {problem}")));
        let database_away = reports.problem.or(rows.problem);
        let sources = [("database", &database_away), ("queue", &counted.queue_problem), ("limiter", &used.problem)];
        let missing = sources.into_iter().filter_map(|(name, problem)| problem.as_ref().map(|_| name)).collect();
        let (heard, skew_ms) = reports.value.unwrap_or_default();
        away.extend(skewed(skew_ms));
        let (written, paused_by) = rows.value.unwrap_or_default();
        let at_ms = unix_ms();
        let unrecorded = self.unrecorded(&counted);
        let counted_for = counted.had_at.filter(|_| counted.accounts.is_some()).map(|at| at.elapsed());
        let counted_at_ms = counted_for.map(|age| at_ms - i64::try_from(age.as_millis()).unwrap_or(0));
        Evidence {
            at_ms,
            version: self.sources.version.clone(),
            worker: self.sources.worker.clone(),
            rows: written,
            paused_by,
            providers: known.providers.clone(),
            bad: known.bad.clone(),
            workers: present(&heard, reports.age, reports.outage),
            accounts: counted.accounts.map(|accounts| by_provider(accounts.iter().cloned())),
            counted_at_ms,
            lately_per_s: locked(&self.history).lately_per_s(),
            unrecorded,
            depths: counted.depths,
            oldest_ms: oldest.current(),
            queue_tells_ages: self.sources.queue.tells_ages(),
            used: used.value.unwrap_or_default(),
            database_away,
            away,
            missing,
        }
    }

    /// What stands in the database, and in the queues at the same moment.
    async fn stored(
        &self,
        looks: Looks,
        database_away: bool,
        version: i64,
    ) -> (Answer<Rows>, Answer<BTreeMap<String, i64>>, Counted) {
        let was_away = self.database_was_away.swap(database_away, Ordering::Relaxed);
        let names = self.names().await;
        if database_away {
            let depths = self.depths.get(DEPTHS_AGE_MAX, self.ask_depths(&names)).await;
            let queue_problem = depths.problem;
            let counted = Counted { depths: depths.value.unwrap_or_default(), queue_problem, ..Counted::default() };
            return (self.rows.last().await, Answer::none(), counted);
        }
        if was_away {
            self.counts.recovered();
        }
        let counted = async {
            match looks {
                Looks::Watched => self.counts.wanted().await,
                Looks::Unwatched => self.counts.wanted_within(UNWATCHED_COUNT_AGE_MAX),
            }
        };
        let oldest = async {
            if looks == Looks::Unwatched {
                return Answer::none();
            }
            self.oldest.get(OLDEST_AGE_MAX, self.ask_oldest(&names)).await
        };
        tokio::join!(self.rows.get(version, ROWS_AGE_MAX, self.ask_rows()), oldest, counted)
    }

    async fn ask_rows(&self) -> Result<Rows, String> {
        let written = self.sources.settings.written(None).await.map_err(|error| error.to_string())?;
        // Those that cannot be read are among the bad ones that the worker knows.
        let rows: Vec<ProviderRow> = written.into_iter().flatten().collect();
        let paused_by = pausers(self.sources.settings.as_ref(), &rows).await;
        Ok((rows, paused_by))
    }

    async fn ask_reports(&self) -> Result<Heard, String> {
        let reports = self.sources.fleet.reports().await.map_err(|error| error.to_string())?;
        let now_ms = |row: &Reported| row.reported_at_ms + i64::try_from(row.age.as_millis()).unwrap_or(0);
        let skew_ms = reports.iter().map(now_ms).max().map_or(0, |now_ms| now_ms - unix_ms());
        Ok((reports, skew_ms))
    }

    /// In the ledger, or in a queue that says so.
    async fn ask_oldest(&self, names: &[ProviderName]) -> Result<BTreeMap<String, i64>, String> {
        let oldest = self.sources.fleet.oldest_open(names).await.map_err(|error| error.to_string())?;
        let mut oldest: BTreeMap<String, i64> = oldest.into_iter().collect();
        let each =
            names.iter().map(|name| async move { Some((name, self.sources.queue.oldest_ready(name).await.ok()??)) });
        for (name, age) in a_few_at_a_time(each).await.into_iter().flatten().flatten() {
            let since_ms = unix_ms() - i64::try_from(age.as_millis()).unwrap_or(0);
            let known_ms = oldest.entry(name.to_string()).or_insert(since_ms);
            *known_ms = since_ms.min(*known_ms);
        }
        Ok(oldest)
    }

    async fn ask_jobs(&self) -> Result<Vec<Conserved>, String> {
        let accounts = self.sources.upkeep.conservation(ASTRAY_AFTER, CHECKED).await;
        accounts.map(|all| all.into_iter().map(Conserved::from).collect()).map_err(|error| error.to_string())
    }

    async fn ask_depths(&self, names: &[ProviderName]) -> Asked<Depths> {
        let each = names.iter().map(|name| async move {
            let depth = self.sources.queue.depth(name).await.map_err(|error| error.to_string())?;
            // Without a queue nothing is in it.
            Ok((name.to_string(), depth.unwrap_or(0)))
        });
        let (depths, problem) = those_that_answered(a_few_at_a_time(each).await);
        Asked { value: Some(depths.into_iter().collect()), problem }
    }

    async fn ask_used(&self, known: &Known) -> Asked<Used> {
        let specs: Vec<QuotaSpec> = quota_specs(known).into_iter().filter_map(|quota| quota.spec).collect();
        let each = specs.into_iter().map(|spec| async move {
            let used = self.sources.limiter.peek(&spec, None).await.map_err(|error| error.to_string())?;
            Ok((spec.quota, used))
        });
        let (used, problem) = those_that_answered(a_few_at_a_time(each).await);
        Asked { value: Some(used.into_iter().collect()), problem }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The known providers, and those of these names that can be one's.
#[must_use]
pub fn named<'a>(known: &Known, others: impl Iterator<Item = &'a str>) -> Vec<ProviderName> {
    let others = others.filter_map(|name| ProviderName::new(name).ok());
    let all: BTreeSet<ProviderName> = known.providers.keys().cloned().chain(others).collect();
    all.into_iter().collect()
}

fn skewed(skew_ms: i64) -> Option<String> {
    let seconds = skew_ms.unsigned_abs() / 1_000;
    (skew_ms.unsigned_abs() > CLOCK_SKEW_MAX_MS).then(|| {
        format!(
            "the database's clock and this machine's are {seconds} s apart: times shown here mislead, limits do not"
        )
    })
}

/// Milliseconds since the Unix epoch by this machine's clock, for people.
#[must_use]
pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
