//! What this process says of itself to all others: one row of the database, written anew every two seconds.
//!
//! One statement at a time, given up after a while, and a failure is said once, so that payments are not disturbed. While an
//! engine does not answer, the process reports more often: readers see within three seconds that it answers again. A process
//! that ends as it should takes its row with it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::Engines;
use super::deployment::Progress;
use super::execute::held_by;
use super::pauses::{LaneState, Pause, Pauses};
use crate::domain::explain::parked;
use crate::domain::explain::words::count;
use crate::domain::job::JobField;
use crate::domain::provider::{Provider, ProviderName};
use crate::fleet::report::{By, Decision, Does, Engine, FORMAT, Held, Lane, Report, Waits};
use crate::fleet::workers::KEPT;
use crate::ledger::fleet::{Fleet, WorkerReport};
use crate::limiter::gate::{GateView, RefusedBy};
use crate::worker::meter::LaneFigures;

/// How often a process reports.
pub const EVERY: Duration = Duration::from_secs(2);
/// The time over which `sent_10s` looks back.
const WINDOW: Duration = Duration::from_secs(10);
/// The same while an engine doesn't answer.
const AGAIN: Duration = Duration::from_millis(500);
/// How long a report may take to write.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long an engine may take to say that it is there.
const ANSWER_MAX: Duration = Duration::from_secs(2);
const DATABASE: &str = "database";
/// Reports between two looks for such rows.
const FORGET_EVERY: u64 = 300;
/// Most decisions in one report, of all lanes together: it is written every two seconds.
const DECISIONS_MAX: usize = 200;
/// Fewest and most decisions of one lane.
const DECISIONS_OF_LANE: (usize, usize) = (3, 50);

/// Who reports.
#[derive(Clone, Debug)]
pub struct Identity {
    /// That of its leases.
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub kinds: Kinds,
}

/// What stands behind each face.
#[derive(Clone, Copy, Debug)]
pub struct Kinds {
    pub database: &'static str,
    pub queue: &'static str,
    pub limiter: &'static str,
}

/// What is reported from.
#[derive(Clone)]
pub struct Reporter {
    pub fleet: Arc<dyn Fleet>,
    pub engines: Engines,
    pub progress: watch::Receiver<Progress>,
    pub identity: Identity,
}

impl Reporter {
    /// Reports until `stop` fires, then deletes the row.
    pub async fn run(self, stop: CancellationToken) {
        let started = Instant::now();
        let (mut sent, mut away, mut count, mut wait) = (Sent::default(), false, 0_u64, Duration::ZERO);
        loop {
            tokio::select! {
                () = sleep(wait) => {}
                () = stop.cancelled() => break,
            }
            let engines = tokio::select! {
                engines = self.engines() => engines,
                () = stop.cancelled() => break,
            };
            let all_answer = engines.values().all(|engine| engine.ok);
            // A database that does not answer is not asked to take a report.
            let unreachable = engines.get(DATABASE).filter(|engine| !engine.ok).map(|engine| engine.problem.clone());
            let report = self.report(engines, &mut sent);
            // Not given up when it stops: a row that is written after it was deleted would be a lost worker's.
            let written = match unreachable {
                Some(problem) => Err(problem.unwrap_or_default()),
                None => {
                    let written = timeout(PATIENCE, self.write(&report, started.elapsed())).await;
                    written.unwrap_or_else(|_| Err("no answer in time".to_owned()))
                }
            };
            wait = if all_answer && written.is_ok() { EVERY } else { AGAIN };
            match written {
                Ok(()) => {
                    away = false;
                    if count.is_multiple_of(FORGET_EVERY) {
                        self.forget().await;
                    }
                    count = count.saturating_add(1);
                }
                Err(error) if !away => {
                    away = true;
                    tracing::warn!(error, "this worker cannot report; payments go on, and pages may call it lost");
                }
                Err(_) => {}
            }
        }
        if timeout(PATIENCE, self.leave(started.elapsed())).await.is_err() {
            tracing::debug!("the last report was not written in time; this worker will be called lost");
        }
    }

    /// Rows that nobody may delete are not shown after a day either.
    async fn forget(&self) {
        match timeout(PATIENCE, self.fleet.forget(KEPT)).await {
            Ok(Ok(rows)) => tracing::debug!(rows, "reports of workers that vanished are deleted"),
            Ok(Err(error)) => tracing::debug!(%error, "old reports not deleted"),
            Err(_) => tracing::debug!("old reports not deleted in time"),
        }
    }

    /// Takes the row along. Where the database's rights let nobody delete, the row says that it is nobody's.
    async fn leave(&self, uptime: Duration) {
        let Err(error) = self.fleet.leave(&self.identity.id).await else { return };
        tracing::debug!(%error, "report not deleted");
        let last = Report { stopped: true, ..Report::default() };
        if let Err(error) = self.write(&last, uptime).await {
            tracing::debug!(error, "the last report was not written; this worker will be called lost");
        }
    }

    async fn write(&self, report: &Report, uptime: Duration) -> Result<(), String> {
        let Identity { id, host, pid, version, .. } = self.identity.clone();
        let body = serde_json::to_string(report).map_err(|error| error.to_string())?;
        let row = WorkerReport { id, host, pid, version, uptime, format: FORMAT, body };
        self.fleet.report(&row).await.map_err(|error| error.to_string())
    }

    /// Engines that do not answer delay the report that says so, but not for long enough to look lost.
    async fn engines(&self) -> BTreeMap<String, Engine> {
        let Engines { ledger, queue, limiter, .. } = &self.engines;
        let kinds = self.identity.kinds;
        let (database, queue, limiter) = tokio::join!(
            asked(kinds.database, async { ledger.ping().await.map(Some).map_err(|error| error.to_string()) }),
            asked(kinds.queue, async { queue.ping().await.map_err(|error| error.to_string()) }),
            asked(kinds.limiter, async { limiter.ping().await.map_err(|error| error.to_string()) }),
        );
        [(DATABASE, database), ("queue", queue), ("limiter", limiter)].map(|(name, it)| (name.to_owned(), it)).into()
    }

    fn report(&self, engines: BTreeMap<String, Engine>, sent: &mut Sent) -> Report {
        let progress = self.progress.borrow().clone();
        let each = (DECISIONS_MAX / progress.lanes.len().max(1)).clamp(DECISIONS_OF_LANE.0, DECISIONS_OF_LANE.1);
        let mut lanes: BTreeMap<String, Lane> = BTreeMap::new();
        for (name, pauses) in progress.lanes.iter() {
            let figures = progress.meter.lane(name).figures();
            let gate = progress.gates.get(name).map(|gate| gate.view().borrow().clone()).unwrap_or_default();
            lanes.insert(name.to_string(), lane(&figures, pauses, &gate, each));
        }
        sent.enter(&mut lanes);
        Report {
            ready: progress.ready,
            draining: progress.draining,
            stopped: false,
            settings_version: progress.known.version,
            lanes,
            engines,
            warnings: warnings(&progress),
        }
    }
}

fn warnings(progress: &Progress) -> Vec<String> {
    let mut warnings = unusable(progress);
    warnings.extend(uncounted(progress));
    warnings.extend(progress.meter.unpublished().and_then(|it| it.warning()));
    warnings
}

/// Rows in force that have no lane here.
fn unusable(progress: &Progress) -> Vec<String> {
    if !progress.ready || progress.draining {
        return Vec::new();
    }
    let missing = |name: &&ProviderName| !progress.lanes.contains_key(*name);
    let enabled = progress.known.providers.iter().filter(|(_, row)| row.enabled).map(|(name, _)| name);
    enabled.filter(missing).map(|name| format!("no lane for {name}: its log says why")).collect()
}

/// Lanes whose limits and rules did not apply to jobs for want of a field that their rows still do not require.
fn uncounted(progress: &Progress) -> Vec<String> {
    let rows = progress.known.providers.values().filter(|row| row.enabled);
    let lanes = rows.filter_map(|row| Some((row, progress.meter.find(&row.name)?.uncounted())));
    let warnings = |(row, counts): (&Arc<Provider>, Vec<(JobField, u64)>)| {
        let told = counts.into_iter().filter(|(lacks, jobs)| *jobs > 0 && !row.require.contains(lacks));
        let told = told.filter(|(lacks, _)| row.counts_by(*lacks));
        told.map(|(lacks, jobs)| without_field(&row.name, lacks, jobs)).collect::<Vec<_>>()
    };
    lanes.flat_map(warnings).collect()
}

fn without_field(provider: &ProviderName, lacks: JobField, jobs: u64) -> String {
    let (field, jobs) = (lacks.name(), count(jobs, "job"));
    let passed = match lacks {
        JobField::Account => "account limits and rules",
        JobField::Reference => "reference limits",
    };
    format!(
        "{provider}: its {passed} did not apply to {jobs} without `{field}`; set require = [\"{field}\"] in its row, or publish \
         every payment with its `{field}`"
    )
}

async fn asked(kind: &str, question: impl Future<Output = Result<Option<String>, String>>) -> Engine {
    let began = Instant::now();
    let answer = timeout(ANSWER_MAX, question).await.unwrap_or_else(|_| Err("no answer in time".to_owned()));
    let ok = answer.is_ok();
    let rtt_ms = ok.then(|| (began.elapsed().as_secs_f64() * 100_000.0).round() / 100.0);
    let (version, problem) = answer.map_or_else(|problem| (None, Some(problem)), |version| (version, None));
    Engine { ok, kind: kind.to_owned(), version, rtt_ms, problem }
}

/// When the last reports were made, and how many requests had begun until then.
#[derive(Debug, Default)]
struct Sent(VecDeque<(Instant, BTreeMap<String, u64>)>);

impl Sent {
    fn enter(&mut self, lanes: &mut BTreeMap<String, Lane>) {
        let oldest = self.0.front();
        for (name, lane) in lanes.iter_mut() {
            // A lane that was not there had sent nothing; before the first report, nobody had.
            let before = oldest.map_or(0, |(_, sent)| sent.get(name).copied().unwrap_or(0));
            let since = oldest.map_or(Duration::ZERO, |(at, _)| at.elapsed());
            lane.sent_10s = in_10s(lane.sent_total.saturating_sub(before), since);
        }
        let sent = lanes.iter().map(|(name, lane)| (name.clone(), lane.sent_total)).collect();
        self.0.push_back((Instant::now(), sent));
        // The oldest is the last one that is as old as the window.
        while self.0.get(1).is_some_and(|(at, _)| at.elapsed() >= WINDOW - EVERY) {
            self.0.pop_front();
        }
    }
}

/// Reports may come late; then what was counted since is spread over the time that it took.
fn in_10s(sent: u64, since: Duration) -> u64 {
    let full = u128::from(sent) * WINDOW.as_millis();
    u64::try_from(full / since.max(WINDOW).as_millis()).unwrap_or(u64::MAX)
}

fn lane(figures: &LaneFigures, pauses: &Pauses, gate: &GateView, decisions: usize) -> Lane {
    let (does, pause) = match pauses.state() {
        LaneState::Running => (Does::Running, None),
        LaneState::Resting(pause) => (Does::Resting, Some(held(pause))),
        LaneState::Stopped(pause) => (Does::Stopped, Some(held(pause))),
        LaneState::Probing { cause } => (Does::Probing, Some(Held { by: By::Breaker, words: cause, ends_in_ms: None })),
    };
    let line = |decision: &crate::worker::meter::DecisionLine| Decision {
        at_ms: i64::try_from(decision.at_ms).unwrap_or(i64::MAX),
        kind: decision.kind.to_owned(),
        reason: decision.reason.clone(),
        permits: decision.permits,
    };
    Lane {
        does,
        pause,
        gate: gate.standing.as_ref().and_then(|(by, until)| stands(by, *until)),
        gate_waiting: u64::try_from(gate.waiting).unwrap_or(u64::MAX),
        in_hand: figures.in_hand,
        in_flight: figures.in_flight,
        sent_total: figures.sent_total,
        sent_10s: 0,
        throttled_total: figures.throttled_total,
        waits: Waits {
            bounds_ms: figures.permit_waits.bounds_ms.to_vec(),
            counts: figures.permit_waits.counts.clone(),
        },
        decisions: figures.decisions.iter().take(decisions).map(line).collect(),
    }
}

/// Milliseconds until then; `None` when it has passed.
fn left_ms(until: Instant) -> Option<u64> {
    let left = until.saturating_duration_since(Instant::now());
    (!left.is_zero()).then(|| u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
}

fn held(pause: Pause) -> Held {
    let Pause { until, by, cause } = pause;
    let limit = parked::limit_of(&cause).filter(|_| by == By::Limit).map(str::to_owned);
    Held { by, words: limit.unwrap_or(cause), ends_in_ms: left_ms(until) }
}

/// Why the line of a gate stands; `None` when its time has passed, or an account's rule is no matter of the lane.
fn stands(by: &RefusedBy, until: Instant) -> Option<Held> {
    let ends_in_ms = Some(left_ms(until)?);
    let words = match by {
        RefusedBy::Limit(name) => name.clone(),
        RefusedBy::Cold => "the limiter has lost its state and waits until nothing from before can count".to_owned(),
        RefusedBy::NeedsHistory => "usage of a limit is being read from the ledger".to_owned(),
        RefusedBy::Paused => "the provider asked for a pause".to_owned(),
        RefusedBy::StoreAway(problem) => format!("limiter: {problem}"),
        RefusedBy::StaleSettings => "newer settings are being loaded".to_owned(),
        RefusedBy::TooCostly { .. } | RefusedBy::Blocked { .. } | RefusedBy::Stopping => return None,
    };
    Some(Held { by: held_by(by), words, ends_in_ms })
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_was_sent_lately_is_counted_over_the_last_reports() {
        // However often it reports: the window is the same.
        for (each, times) in [(EVERY, 1), (EVERY / 4, 4)] {
            let (mut sent, mut told) = (Sent::default(), Vec::new());
            for total in [10, 30, 60, 60, 60, 60, 60, 70] {
                for nth in 0..times {
                    let lane = Lane { sent_total: total, ..Lane::default() };
                    let mut lanes = BTreeMap::from([("acme".to_owned(), lane)]);
                    sent.enter(&mut lanes);
                    told.extend((nth == 0).then_some(lanes["acme"].sent_10s));
                    advance(each).await;
                }
            }
            // From the sixth report on, the first no longer counts.
            assert_eq!(told, [10, 20, 50, 50, 50, 50, 30, 10], "every {each:?}");
        }
        assert_eq!((in_10s(120, Duration::from_secs(12)), in_10s(7, Duration::ZERO)), (100, 7));
    }

    #[test]
    fn jobs_that_limits_did_not_apply_to_are_warned_of_with_the_fix() {
        let acme = ProviderName::new("acme").unwrap();
        assert_eq!(
            without_field(&acme, JobField::Account, 1),
            "acme: its account limits and rules did not apply to 1 job without `account`; set require = [\"account\"] in its \
             row, or publish every payment with its `account`"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_lane_tells_its_pause_and_its_gate() {
        let pauses = Pauses::default();
        pauses.stop_taking(Duration::from_secs(9), By::Limit, "waits for limit per-minute");
        let until = Instant::now() + Duration::from_secs(12);
        let gate = GateView { waiting: 3, standing: Some((RefusedBy::StoreAway("gone".to_owned()), until)) };
        let told = lane(&LaneFigures { sent_total: 7, in_hand: 2, ..LaneFigures::default() }, &pauses, &gate, 5);
        assert_eq!((told.does, told.sent_total, told.in_hand, told.gate_waiting), (Does::Resting, 7, 2, 3));
        let pause = told.pause.unwrap();
        assert_eq!((pause.by, pause.words.as_str(), pause.ends_in_ms), (By::Limit, "per-minute", Some(9_000)));
        let gate = told.gate.unwrap();
        assert_eq!((gate.by, gate.words.as_str(), gate.ends_in_ms), (By::Engine, "limiter: gone", Some(12_000)));
        assert_eq!(stands(&RefusedBy::Cold, Instant::now()), None);
    }
}
