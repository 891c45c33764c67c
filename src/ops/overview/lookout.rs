//! Where the overview is gathered: every source asked once for all who look, each with its own patience.
//!
//! Refuses to fail: a source that does not answer leaves its last answer, or nothing, and a warning. While nobody looks it
//! asks only for the reports of the workers and, now and then, for the depth of queues: enough for the history.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::HISTORY_MAX_S;
use super::asked::{a_few_at_a_time, those_that_answered};
use super::cached::{Answer, Cached, Versioned};
use super::counts::Counts;
use super::history::{History, Point};
use super::pausers::pausers;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::fleet::report::problem_of;
use crate::fleet::workers::present;
use crate::fleet::{Evidence, Overview, by_provider, overview};
use crate::ledger::fleet::{Fleet, Reported};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::Settings;
use crate::ledger::upkeep::Upkeep;
use crate::limiter::{LimitUse, Limiter};
use crate::queue::Queue;
use crate::worker::deployment::Progress;
use crate::worker::quotas::quota_specs;
use crate::worker::settings_watch::Known;

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

/// How old answers may be; `None`: not asked at all.
#[derive(Clone, Copy)]
struct Ages {
    depths: Duration,
    oldest: Option<Duration>,
    used: Option<Duration>,
}

/// Somebody looks.
const WATCHED: Ages =
    Ages { depths: Duration::from_secs(2), oldest: Some(Duration::from_secs(5)), used: Some(Duration::from_secs(1)) };
/// For the history alone.
const UNWATCHED: Ages = Ages { depths: Duration::from_secs(10), oldest: None, used: None };
const REPORTS_AGE_MAX: Duration = Duration::from_secs(1);
/// Rows are read again when their version moves; and now and then, to be sure.
const ROWS_AGE_MAX: Duration = Duration::from_secs(60);

/// The reports, and by how many milliseconds the database's clock is ahead of ours.
type Heard = (Vec<Reported>, i64);
/// As written, and who paused those that are paused.
type Rows = (Vec<ProviderRow>, BTreeMap<String, String>);
/// Numbers by provider or quota, and what was wrong with others.
type Partly<K, V> = (BTreeMap<K, V>, Option<String>);

#[derive(Clone)]
struct Picture {
    evidence: Arc<Evidence>,
    overview: Arc<Overview>,
}

/// Gathers, and remembers fifteen minutes.
pub struct Lookout {
    sources: Sources,
    rows: Versioned<Rows>,
    reports: Cached<Heard>,
    depths: Cached<Partly<String, u64>>,
    oldest: Cached<BTreeMap<String, i64>>,
    used: Cached<Partly<ProviderName, Vec<LimitUse>>>,
    counts: Counts,
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
            picture: AsyncMutex::default(),
            history: Mutex::default(),
        }
    }

    /// Counts and keeps the history until it is stopped.
    pub async fn run(&self, stop: CancellationToken) {
        tokio::join!(self.counts.keep(self.sources.upkeep.as_ref(), &stop), self.sample(&stop));
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
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.last(provider, usize::try_from(points).unwrap_or(usize::MAX))
    }

    async fn look(&self) -> Picture {
        let mut picture = self.picture.lock().await;
        if let Some((_, picture)) = picture.as_ref().filter(|(at, _)| at.elapsed() < PICTURE_KEPT) {
            return picture.clone();
        }
        let evidence = self.gather(WATCHED).await;
        let new = Picture { overview: Arc::new(overview(&evidence)), evidence: Arc::new(evidence) };
        *picture = Some((Instant::now(), new.clone()));
        new
    }

    async fn sample(&self, stop: &CancellationToken) {
        let mut tick = interval(SAMPLE_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let point = async {
                tick.tick().await;
                overview(&self.gather(UNWATCHED).await)
            };
            tokio::select! {
                point = point => self.history.lock().unwrap_or_else(PoisonError::into_inner).enter(&point),
                () = stop.cancelled() => return,
            }
        }
    }

    async fn gather(&self, ages: Ages) -> Evidence {
        let known = Arc::clone(&self.sources.progress.borrow().known);
        let names: Vec<ProviderName> = known.providers.keys().cloned().collect();
        let counted = async { if ages.used.is_some() { self.counts.wanted().await } else { self.counts.last() } };
        let asked_oldest = async {
            let Some(age) = ages.oldest else { return nothing() };
            self.oldest.get(age, self.ask_oldest(&names)).await
        };
        let asked_used = async {
            let Some(age) = ages.used else { return nothing() };
            self.used.get(age, self.ask_used(&known)).await
        };
        let (rows, reports, depths, oldest, used, counted) = tokio::join!(
            self.rows.get(known.version, ROWS_AGE_MAX, self.ask_rows()),
            self.reports.get(REPORTS_AGE_MAX, self.ask_reports()),
            self.depths.get(ages.depths, self.ask_depths(&names)),
            asked_oldest,
            asked_used,
            counted,
        );
        let (depths, used) = (partly("queue", depths), partly("limiter", used));
        let mut away: Vec<String> = [depths.1, used.1].into_iter().flatten().collect();
        away.extend(counted.problem.map(|problem| format!("jobs could not be counted: {problem}")));
        let (heard, skew_ms) = reports.value.unwrap_or_default();
        away.extend(skewed(skew_ms));
        let (written, paused_by) = rows.value.unwrap_or_default();
        let at_ms = unix_ms();
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
            workers: present(&heard, reports.age),
            accounts: counted.accounts.map(|accounts| by_provider(accounts.iter().cloned())),
            counted_at_ms,
            lately_per_s: self.history.lock().unwrap_or_else(PoisonError::into_inner).lately_per_s(),
            depths: depths.0,
            oldest_ms: oldest.value.unwrap_or_default(),
            used: used.0,
            database_away: reports.problem.or(rows.problem),
            away,
        }
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

    async fn ask_depths(&self, names: &[ProviderName]) -> Result<Partly<String, u64>, String> {
        let each = names.iter().map(|name| async move {
            let depth = self.sources.queue.depth(name).await.map_err(|error| error.to_string())?;
            Ok(depth.map(|depth| (name.to_string(), depth)))
        });
        let (depths, problem) = those_that_answered(a_few_at_a_time(each).await);
        Ok((depths.into_iter().flatten().collect(), problem))
    }

    async fn ask_used(&self, known: &Known) -> Result<Partly<ProviderName, Vec<LimitUse>>, String> {
        let specs: Vec<QuotaSpec> = quota_specs(known).into_iter().filter_map(|quota| quota.spec).collect();
        let each = specs.into_iter().map(|spec| async move {
            let used = self.sources.limiter.peek(&spec, None).await.map_err(|error| error.to_string())?;
            Ok((spec.quota, used))
        });
        let (used, problem) = those_that_answered(a_few_at_a_time(each).await);
        Ok((used.into_iter().collect(), problem))
    }
}

fn nothing<T>() -> Answer<T> {
    Answer { value: None, age: Duration::ZERO, problem: None }
}

/// The numbers, and the first thing that was wrong.
fn partly<K, V>(what: &str, answer: Answer<Partly<K, V>>) -> Partly<K, V> {
    let (numbers, of_some) = answer.value.unwrap_or_else(|| (BTreeMap::new(), None));
    (numbers, answer.problem.or(of_some).map(|problem| problem_of(what, &problem)))
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
