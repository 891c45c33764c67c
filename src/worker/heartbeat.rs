//! The heartbeat of this process: writes its report to one row of the database every two seconds.
//!
//! At most one statement runs at a time, and a failure is logged once, so that payments are not disturbed. A report that
//! is not committed within three seconds shows that the database commits nothing. While a backend does not answer, or a
//! start or a pause is about to end, the process reports more often: readers see that within three seconds. A process that shuts down deletes its row.
//! See `docs/decisions/0006-one-overview-of-all-workers.md`.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::Backends;
use super::job::refusal_codes;
use super::lane_control::LaneControl;
use super::outage_starts::OutageStarts;
use super::report_warnings::warnings;
use super::report_write::ReportWrite;
use super::supervisor::WorkerStatus;
use crate::domain::time::millis_down;
use crate::fleet::report::{
    BackendStatus, HeldRequests, LaneReport, PauseCause, ProcessReport, REPORT_FORMAT, ReportedPause, problem_with_name,
};
use crate::fleet::workers::ROW_RETENTION;
use crate::ledger::fleet::WorkerReport;
use crate::limiter::gate::{BlockReason, GateView};
use crate::queue::Queue;
use crate::worker::meter::unix_ms;

/// Time between two reports.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// Time that `sent_10s` covers.
const WINDOW: Duration = Duration::from_secs(10);
/// Time between two reports while a backend does not answer, or [`changes_soon`].
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time that deleting a row may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time that a backend may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(2);
const DATABASE: &str = "database";
/// Number of reports between two deletions of old rows.
const CLEANUP_EVERY: u64 = 300;
/// Most decisions in one report, over all lanes: it is written every two seconds.
const DECISIONS_MAX: usize = 200;
/// Fewest and most decisions of one lane.
const DECISIONS_OF_LANE: (usize, usize) = (3, 50);

/// Identity of the reporting process.
#[derive(Clone, Debug)]
pub struct WorkerIdentity {
    /// The id under which it holds jobs.
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub kinds: BackendKinds,
}

/// Kind of each backend, as reports name it.
#[derive(Clone, Copy, Debug)]
pub struct BackendKinds {
    pub database: &'static str,
    pub queue: &'static str,
    pub limiter: &'static str,
}

/// Sources of the reports.
#[derive(Clone)]
pub struct HeartbeatReporter {
    pub backends: Backends,
    pub status: watch::Receiver<WorkerStatus>,
    pub identity: WorkerIdentity,
}

impl HeartbeatReporter {
    /// Reports until `stop` fires, then deletes the row.
    pub async fn run(self, stop: CancellationToken) {
        let started = Instant::now();
        let (mut sent, mut failing, mut count, mut wait) = (RecentRequests::default(), false, 0_u64, Duration::ZERO);
        let (mut outages, mut write) = (OutageStarts::default(), ReportWrite::default());
        loop {
            tokio::select! {
                () = sleep(wait) => {}
                () = stop.cancelled() => break,
            }
            let mut backends = tokio::select! {
                backends = self.ping_backends() => backends,
                () = stop.cancelled() => break,
            };
            let now_ms = i64::try_from(unix_ms()).unwrap_or(i64::MAX);
            for (backend, since_ms) in outages.record(&mut backends, now_ms) {
                tracing::info!(backend, after_ms = now_ms.saturating_sub(since_ms), "backend available again");
            }
            let report = self.report(backends.clone(), &mut sent);
            // Not cancelled by `stop`: a row that is written after its deletion would look like a lost worker.
            let written = self.commit(&report, &mut backends, &mut write, started.elapsed()).await;
            self.status.borrow().meter.record_backends(&backends);
            let is_current = backends.values().all(|backend| backend.ok) && written.is_ok() && !changes_soon(&report);
            wait = if is_current { HEARTBEAT_INTERVAL } else { RETRY_INTERVAL };
            match written {
                Ok(()) => {
                    failing = false;
                    if count.is_multiple_of(CLEANUP_EVERY) {
                        self.delete_old_rows().await;
                    }
                    count = count.saturating_add(1);
                }
                Err(error) if !failing => {
                    failing = true;
                    tracing::warn!(
                        error,
                        "this worker's report is not stored: `status` shows the cause, or the worker as lost"
                    );
                }
                Err(_) => {}
            }
        }
        if timeout(WRITE_TIMEOUT, self.deregister(started.elapsed())).await.is_err() {
            tracing::debug!("the last report was not written in time; the worker will be shown as lost");
        }
    }

    /// Commits the report, which is the one write of an idle worker. A database that does not commit it is unavailable.
    async fn commit(
        &self,
        report: &ProcessReport,
        backends: &mut BTreeMap<String, BackendStatus>,
        write: &mut ReportWrite,
        uptime: Duration,
    ) -> Result<(), String> {
        let (ledger, database) = (&self.backends.ledger, backends.entry(DATABASE.to_owned()).or_default());
        if !database.ok {
            let problem = database.problem.clone().unwrap_or_default();
            ledger.committed_writes().record_unreachable(problem.clone());
            write.database_is_unreachable();
            return Err(problem);
        }
        let written = write.commit(ledger, self.row(report, uptime)?).await;
        ledger.committed_writes().record_report(&written);
        written.map_err(|error| {
            let problem = error.to_string();
            if error.is_outage() {
                (database.ok, database.problem) = (false, Some(problem.clone()));
            }
            problem
        })
    }

    /// Deletes the rows of processes that vanished. Readers ignore rows of that age, even where no right to delete
    /// exists.
    async fn delete_old_rows(&self) {
        match timeout(WRITE_TIMEOUT, self.backends.ledger.remove_silent_reports(ROW_RETENTION)).await {
            Ok(Ok(rows)) => tracing::debug!(rows, "deleted the reports of vanished workers"),
            Ok(Err(error)) => tracing::debug!(%error, "old reports not deleted"),
            Err(_) => tracing::debug!("old reports not deleted in time"),
        }
    }

    /// Deletes the row. Without the right to delete, the row is marked as stopped instead.
    async fn deregister(&self, uptime: Duration) {
        let Err(error) = self.backends.ledger.remove_report(&self.identity.id).await else { return };
        tracing::debug!(%error, "report not deleted");
        let last = ProcessReport { stopped: true, ..ProcessReport::default() };
        let Ok(row) = self.row(&last, uptime) else { return };
        if let Err(error) = self.backends.ledger.write_report(&row).await {
            tracing::debug!(%error, "the last report was not written; the worker will be shown as lost");
        }
    }

    fn row(&self, report: &ProcessReport, uptime: Duration) -> Result<WorkerReport, String> {
        let WorkerIdentity { id, host, pid, version, .. } = self.identity.clone();
        let body = serde_json::to_string(report).map_err(|error| error.to_string())?;
        Ok(WorkerReport { id, host, pid, version, uptime, format: REPORT_FORMAT, body })
    }

    /// Pings all backends. One that does not answer delays the report that says so, but not long enough to look lost.
    async fn ping_backends(&self) -> BTreeMap<String, BackendStatus> {
        let Backends { ledger, queue, limiter, .. } = &self.backends;
        let kinds = self.identity.kinds;
        let (database, queue, limiter) = tokio::join!(
            ping(kinds.database, async { ledger.ping().await.map(Some).map_err(|error| error.to_string()) }),
            OptionFuture::from(queue.as_deref().map(|queue| ping_queue(kinds.queue, queue))),
            ping(kinds.limiter, async { limiter.ping().await.map_err(|error| error.to_string()) }),
        );
        let statuses = [(DATABASE, Some(database)), ("queue", queue), ("limiter", Some(limiter))];
        statuses.into_iter().filter_map(|(name, status)| Some((name.to_owned(), status?))).collect()
    }

    fn report(&self, backends: BTreeMap<String, BackendStatus>, sent: &mut RecentRequests) -> ProcessReport {
        let progress = self.status.borrow().clone();
        let each = (DECISIONS_MAX / progress.lanes.len().max(1)).clamp(DECISIONS_OF_LANE.0, DECISIONS_OF_LANE.1);
        let mut lanes: BTreeMap<String, LaneReport> = BTreeMap::new();
        for (name, pauses) in progress.lanes.iter() {
            let figures = progress.meter.lane(name).figures();
            let gate = progress.gates.get(name).map(|gate| gate.view().borrow().clone()).unwrap_or_default();
            lanes.insert(name.to_string(), lane_report(figures, pauses, &gate, each));
        }
        sent.record(&mut lanes);
        ProcessReport {
            ready: progress.ready,
            draining: progress.draining,
            stopped: false,
            settings_version: progress.settings.version,
            lanes,
            backends,
            warnings: warnings(&progress),
        }
    }
}

/// Whether the report is out of date before the next one is due: the process starts, or a pause ends. Limits are waited
/// for in every window, and such a short wait is not shown.
fn changes_soon(report: &ProcessReport) -> bool {
    let pauses = report.lanes.values().flat_map(LaneReport::pauses);
    let mut other = pauses.filter(|pause| pause.by != PauseCause::Limit);
    !report.ready
        || other.any(|pause| pause.ends_in_ms.is_some_and(|ms| u128::from(ms) < HEARTBEAT_INTERVAL.as_millis()))
}

async fn ping_queue(kind: &str, queue: &dyn Queue) -> BackendStatus {
    let (mut status, publishes) = tokio::join!(
        ping(kind, async { queue.ping().await.map_err(|error| error.to_string()) }),
        timeout(PING_TIMEOUT, queue.publish_fault()),
    );
    // Deliveries go on, so the queue is not unavailable.
    let blocked = publishes.ok().flatten().filter(|_| status.ok);
    status.problem = status.problem.or_else(|| blocked.map(|fault| fault.to_string()));
    status
}

async fn ping(kind: &str, question: impl Future<Output = Result<Option<String>, String>>) -> BackendStatus {
    let began = Instant::now();
    let answer = timeout(PING_TIMEOUT, question).await.unwrap_or_else(|_| Err("no answer in time".to_owned()));
    let ok = answer.is_ok();
    let rtt_ms = ok.then(|| (began.elapsed().as_secs_f64() * 100_000.0).round() / 100.0);
    let (version, problem) = answer.map_or_else(|problem| (None, Some(problem)), |version| (version, None));
    BackendStatus { ok, kind: kind.to_owned(), version, rtt_ms, problem, since_ms: None }
}

/// Requests of one lane until a report.
#[derive(Clone, Copy, Debug, Default)]
struct RequestsUntil {
    sent: u64,
    held: HeldRequests,
    /// The mean hold that was reported.
    mean_hold_us: Option<u64>,
}

/// Times of the last reports, and the requests until then.
#[derive(Debug, Default)]
struct RecentRequests(VecDeque<(Instant, BTreeMap<String, RequestsUntil>)>);

impl RecentRequests {
    fn record(&mut self, lanes: &mut BTreeMap<String, LaneReport>) {
        let (oldest, newest) = (self.0.front(), self.0.back());
        for (name, lane) in lanes.iter_mut() {
            // A lane that did not exist had sent nothing; before the first report, no lane had.
            let before = oldest.and_then(|(_, until)| until.get(name).copied()).unwrap_or_default();
            let last = newest.and_then(|(_, until)| until.get(name)).and_then(|until| until.mean_hold_us);
            let since = oldest.map_or(Duration::ZERO, |(at, _)| at.elapsed());
            lane.sent_10s = per_10s(lane.sent_total.saturating_sub(before.sent), since);
            lane.mean_hold_us = lane.held.mean_us_since(before.held).or(last);
        }
        let until = |lane: &LaneReport| RequestsUntil {
            sent: lane.sent_total,
            held: lane.held,
            mean_hold_us: lane.mean_hold_us,
        };
        let until = lanes.iter().map(|(name, lane)| (name.clone(), until(lane))).collect();
        self.0.push_back((Instant::now(), until));
        // The oldest is the last one that is as old as the window.
        while self.0.get(1).is_some_and(|(at, _)| at.elapsed() >= WINDOW - HEARTBEAT_INTERVAL) {
            self.0.pop_front();
        }
    }
}

/// Requests per ten seconds. If reports come late, the requests are spread over the time since the last one.
fn per_10s(sent: u64, since: Duration) -> u64 {
    let full = u128::from(sent) * WINDOW.as_millis();
    u64::try_from(full / since.max(WINDOW).as_millis()).unwrap_or(u64::MAX)
}

fn lane_report(mut figures: LaneReport, pauses: &LaneControl, gate: &GateView, decisions: usize) -> LaneReport {
    figures.decisions.truncate(decisions);
    LaneReport {
        status: pauses.status(),
        gate: gate.block.as_ref().and_then(|(by, until)| reported_block(by, *until)),
        costly: pauses.reported_cost_wait(),
        refused: pauses.reported_refusal(),
        gate_waiting: u64::try_from(gate.waiting).unwrap_or(u64::MAX),
        ..figures
    }
}

/// Why the gate's wait queue is blocked; `None` when the block has ended, or concerns only single jobs.
fn reported_block(by: &BlockReason, until: Instant) -> Option<ReportedPause> {
    let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
    let words = match by {
        BlockReason::Limit(name) => name.clone(),
        BlockReason::Cold => {
            "the limiter starts cold: no permit until earlier requests are read from the ledger or aged out".to_owned()
        }
        BlockReason::NeedsHistory => "usage of a limit is being read from the ledger".to_owned(),
        BlockReason::Paused => "the provider asked for a pause".to_owned(),
        BlockReason::StoreUnavailable(problem) => problem_with_name("limiter", problem),
        BlockReason::StaleSettings => "newer settings are being loaded".to_owned(),
        BlockReason::Oversized { .. } | BlockReason::AccountBlocked { .. } | BlockReason::Stopping => return None,
    };
    let limit = matches!(by, BlockReason::Limit(_)).then(|| words.clone());
    Some(ReportedPause { by: refusal_codes(by).1, limit, words, ends_in_ms: Some(millis_down(left)), wait: None })
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::domain::wait_reason::Wait;
    use crate::fleet::report::LaneState;
    use crate::worker::meter::Meter;

    #[tokio::test(start_paused = true)]
    async fn recent_requests_cover_ten_seconds() {
        // The window is the same, however often the process reports.
        for (each, times) in [(HEARTBEAT_INTERVAL, 1), (HEARTBEAT_INTERVAL / 4, 4)] {
            let (mut sent, mut counted) = (RecentRequests::default(), Vec::new());
            for total in [10, 30, 60, 60, 60, 60, 60, 70] {
                for nth in 0..times {
                    let lane = LaneReport { sent_total: total, ..LaneReport::default() };
                    let mut lanes = BTreeMap::from([("acme".to_owned(), lane)]);
                    sent.record(&mut lanes);
                    counted.extend((nth == 0).then_some(lanes["acme"].sent_10s));
                    advance(each).await;
                }
            }
            // From the sixth report on, the first no longer counts.
            assert_eq!(counted, [10, 20, 50, 50, 50, 50, 30, 10], "every {each:?}");
        }
        assert_eq!((per_10s(120, Duration::from_secs(12)), per_10s(7, Duration::ZERO)), (100, 7));
    }

    #[tokio::test(start_paused = true)]
    async fn silent_backend_is_unavailable_until_it_responds() {
        let meter = Meter::default();
        let dependencies = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, meter.registry()).unwrap();
            let samples = text.lines().filter_map(|line| line.strip_prefix("sluicegate_dependency_"));
            samples.map(str::to_owned).collect::<Vec<_>>()
        };
        let record = |status| meter.record_backends(&[("limiter".to_owned(), status)].into());
        let up = ["up{dependency=\"limiter\"} 1", "rtt_seconds{dependency=\"limiter\"} 0.0"];
        record(ping("redis", async { Ok(None) }).await);
        assert_eq!(dependencies(), up);
        let silent = ping("redis", std::future::pending()).await;
        assert_eq!((silent.ok, silent.problem.as_deref()), (false, Some("no answer in time")));
        record(silent);
        assert_eq!(dependencies(), ["up{dependency=\"limiter\"} 0"]);
        record(ping("redis", async { Ok(None) }).await);
        assert_eq!(dependencies(), up);
    }

    #[test]
    fn short_lived_states_are_reported_again_soon() {
        let report = |ready, by, ends_in_ms| {
            let gate = Some(ReportedPause { by, ends_in_ms, ..ReportedPause::default() });
            let lanes = [("acme".to_owned(), LaneReport { gate, ..LaneReport::default() })].into();
            ProcessReport { ready, lanes, ..ProcessReport::default() }
        };
        for (ready, by, ends_in_ms, soon) in [
            (false, PauseCause::Cold, None, true),
            (true, PauseCause::Cold, Some(700), true),
            (true, PauseCause::Backend, Some(999), true),
            (true, PauseCause::Cold, Some(60_000), false),
            (true, PauseCause::Breaker, None, false),
            (true, PauseCause::Limit, Some(700), false),
        ] {
            assert_eq!(changes_soon(&report(ready, by, ends_in_ms)), soon, "{ready} {by:?} {ends_in_ms:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lane_report_has_pause_and_queue_block() {
        let pauses = LaneControl::default();
        pauses.pause_claims(Duration::from_secs(9), PauseCause::Limit, Wait::for_limit("per-minute"));
        let until = Instant::now() + Duration::from_secs(12);
        let block = Some((BlockReason::StoreUnavailable("gone".to_owned()), until));
        let gate = GateView { waiting: 3, block, ..GateView::default() };
        let report = lane_report(LaneReport { sent_total: 7, active: 2, ..LaneReport::default() }, &pauses, &gate, 5);
        assert_eq!((report.sent_total, report.active, report.gate_waiting), (7, 2, 3));
        assert_eq!(report.status.does, LaneState::Resting);
        let pause = report.status.pause.unwrap();
        assert_eq!(
            (pause.by, pause.limit.as_deref(), pause.ends_in_ms),
            (PauseCause::Limit, Some("per-minute"), Some(9_000))
        );
        let gate = report.gate.unwrap();
        assert_eq!(
            (gate.by, gate.words.as_str(), gate.ends_in_ms),
            (PauseCause::Backend, "limiter: gone", Some(12_000))
        );
        assert_eq!(reported_block(&BlockReason::Cold, Instant::now()), None);
    }
}
