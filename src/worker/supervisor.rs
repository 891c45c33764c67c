//! The supervisor of a worker process: runs one lane per enabled provider, from the first settings to the end of the
//! drain.
//!
//! The drain stops intake, then finishes the active jobs, or returns them to the backlog, until its timeout. [`DrainReport`] says what was
//! left.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::active_jobs::ActiveJobs;
use super::backlog::LaneBacklog;
use super::commit_guard::{self, CommitGuard};
use super::intake_bound::IntakeBound;
use super::intake_room::IntakeRoom;
use super::job::Duplicates;
use super::lane::{self, LaneContext, LaneSettings};
use super::lane_control::LaneControl;
use super::meter::{DecisionKind, LaneDecision, Meter};
use super::quotas::Quotas;
use super::retry::{RetryEnded, retry_while_unavailable};
use super::settings_sync::{self, LoadedSettings};
use super::sleepers::Sleepers;
use super::{
    Backends, WorkerContext, WorkerOptions, beats, change_hints, decision_batches, evictions, limit_returns, sweeper,
    topology, unpublished,
};
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::settings::InvalidRow;
use crate::limiter::gate::{Gate, LaneEgress};
use crate::outcomes::amqp::Publisher;
use crate::provider::FreezeError;

/// Longest time after the drain for releasing permits and publishing events, even if the drain used all of its timeout.
const FINAL_FLUSH_MAX: Duration = Duration::from_secs(3);

/// Longest time for logging the outcomes that the ledger did not accept.
const LOGGED_WITHIN: Duration = Duration::from_secs(1);

/// Status of a worker, for health checks and `status`.
#[derive(Clone, Debug, Default)]
pub struct WorkerStatus {
    /// Settings are loaded, and at a broker the topology is declared.
    pub ready: bool,
    pub draining: bool,
    pub settings: Arc<LoadedSettings>,
    /// The lanes that run, by their provider.
    pub lanes: Arc<BTreeMap<ProviderName, Arc<LaneControl>>>,
    /// The gates where the jobs of these lanes wait.
    pub gates: Arc<BTreeMap<ProviderName, Gate>>,
    pub active_jobs: Arc<ActiveJobs>,
    /// Counters of this process, from its start to its end.
    pub meter: Arc<Meter>,
}

/// What the drain left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Some work was unfinished when the timeout passed.
    pub timed_out: bool,
    /// Jobs that were still active when the timeout passed; they return to the backlog once this process has ended.
    pub left_active: usize,
    /// Requests whose outcome is not recorded.
    pub abandoned_in_flight: usize,
    /// Those of them with an outcome, which the ledger did not accept; the log has each.
    pub unwritten: usize,
}

struct RunningLane {
    settings: watch::Sender<Arc<LaneSettings>>,
    context: Arc<LaneContext>,
}

/// Runs until `stop` fires and the drain is over.
///
/// # Errors
/// When the database rejects the settings query for a reason that a retry does not fix.
pub async fn run(
    backends: Backends,
    options: WorkerOptions,
    stop: CancellationToken,
    progress: watch::Sender<WorkerStatus>,
) -> Result<DrainReport, LedgerError> {
    let guard = Arc::new(CommitGuard::new(&backends.ledger));
    let worker = WorkerContext {
        backends,
        options: Arc::new(options),
        active_jobs: Arc::new(ActiveJobs::default()),
        meter: Arc::clone(&progress.borrow().meter),
        new_events: Arc::default(),
        unwritten: Arc::default(),
        local_faults: Arc::default(),
        log_throttle: Arc::default(),
        start_timer: Arc::default(),
        intake_turns: Arc::default(),
        flow_lanes: Arc::default(),
        beats: Arc::default(),
        lanes_with_returns: Arc::default(),
        rejected_room: Arc::default(),
        held_room: Arc::default(),
        guard,
        stop,
        abandon: CancellationToken::new(),
        jobs: TaskTracker::new(),
    };
    let ledger = worker.backends.ledger.clone();
    let first = retry_while_unavailable("load settings", &worker.stop, || begin(&worker));
    let known = match first.await {
        Ok(known) => Arc::new(known),
        Err(RetryEnded::Stopped) => return Ok(DrainReport::default()),
        Err(RetryEnded::Failed(error)) => return Err(error),
    };
    worker.meter.record_reload();
    let services = TaskTracker::new();
    let (known_tx, known_rx) = watch::channel(Arc::clone(&known));
    let drained = CancellationToken::new();
    let (store_version, store_versions) = settings_sync::StoreVersion::channel();
    follow_settings(&worker, &services, known_tx, store_versions);
    services.spawn(publisher(&worker).run(drained.clone()));
    services.spawn(unpublished::keep_counted(worker.clone(), drained.clone()));
    services.spawn(beats::run(worker.clone(), drained.clone()));
    let quotas = Quotas::new(Arc::clone(&worker.backends.limiter), ledger, store_version);

    services.spawn(sweeper::run(worker.clone(), known_rx.clone(), progress.subscribe()));
    services.spawn(decision_batches::run(worker.clone()));
    services.spawn(evictions::run(worker.clone()));
    services.spawn(commit_guard::run(worker.clone(), known_rx.clone(), progress.subscribe()));
    become_ready(&worker, &services, known_rx.clone(), progress.clone());

    run_lanes(&worker, &quotas, known_rx, &progress).await;

    progress.send_modify(|progress| progress.draining = true);
    let over_at = Instant::now() + worker.options.drain_timeout;
    let report = drain(&worker, over_at).await;
    drained.cancel();
    services.close();
    let final_flush = async {
        quotas.close().await;
        services.wait().await;
    };
    if timeout_at(over_at.max(Instant::now() + FINAL_FLUSH_MAX), final_flush).await.is_err() {
        tracing::warn!(
            "not all permits were released and outcome events published before the timeout: permits end by themselves, and \
             another worker publishes the events"
        );
    }
    Ok(report)
}

/// What a worker reads and writes before any lane starts: its settings, the holds of lanes, and its first beat.
async fn begin(worker: &WorkerContext) -> Result<LoadedSettings, LedgerError> {
    let ledger = &worker.backends.ledger;
    let owner = worker.options.owner.as_str();
    // A limit whose time is over must not be used once more.
    if let Err(error) = limit_returns::apply_due(ledger, owner).await {
        tracing::warn!(%error, "planned returns of limits cannot be read");
    }
    // A lane that is held must start nothing in the first second, either.
    worker.guard.read_holds(ledger, owner).await?;
    beats::begin(worker).await?;
    settings_sync::load(ledger, &LoadedSettings::default()).await
}

/// Makes the worker ready: at a broker once the topology is declared, and otherwise now.
fn become_ready(
    worker: &WorkerContext,
    services: &TaskTracker,
    known: watch::Receiver<Arc<LoadedSettings>>,
    progress: watch::Sender<WorkerStatus>,
) {
    match worker.backends.queue.clone() {
        Some(queue) => {
            services.spawn(topology::keep_declared(worker.clone(), queue, known, progress));
        }
        None => progress.send_modify(|progress| progress.ready = true),
    }
}

/// What the publisher of outcome events needs of this worker.
fn publisher(worker: &WorkerContext) -> Publisher {
    Publisher {
        ledger: worker.backends.ledger.clone(),
        queue: worker.backends.queue.clone(),
        holder: worker.options.owner.clone(),
        new_events: Arc::clone(&worker.new_events),
    }
}

/// Starts the tasks that keep the settings current: hints, polls, and limits that go back by themselves.
fn follow_settings(
    worker: &WorkerContext,
    services: &TaskTracker,
    known: watch::Sender<Arc<LoadedSettings>>,
    store_versions: watch::Receiver<i64>,
) {
    let (ledger, stop, hinted) = (worker.backends.ledger.clone(), worker.stop.clone(), Arc::new(Notify::new()));
    if let Some(hints) = ledger.change_hints() {
        let records = ledger.record_news().clone();
        services.spawn(change_hints::follow(hints, Arc::clone(&hinted), records, stop.clone()));
    }
    let owner = worker.options.owner.clone();
    let (changes, returned) = (known.subscribe(), Arc::clone(&hinted));
    services.spawn(limit_returns::run(ledger.clone(), owner, changes, returned, stop.clone()));
    let (poll, meter) = (worker.options.settings_poll, Arc::clone(&worker.meter));
    services.spawn(settings_sync::poll(ledger, poll, stop, known, store_versions, hinted, meter));
}

/// Keeps one lane per enabled provider until the worker stops.
async fn run_lanes(
    worker: &WorkerContext,
    quotas: &Quotas,
    mut known: watch::Receiver<Arc<LoadedSettings>>,
    progress: &watch::Sender<WorkerStatus>,
) {
    let mut running: HashMap<ProviderName, RunningLane> = HashMap::new();
    while !worker.stop.is_cancelled() {
        let now = known.borrow_and_update().clone();
        progress.send_modify(|progress| progress.settings = Arc::clone(&now));
        let changed = quotas.apply_settings(&now);
        running.retain(|name, lane| {
            let row = now.providers.get(name).filter(|row| row.enabled);
            // A lane keeps one gate: another quota needs a new lane, and without a gate no job can be sent.
            let gate = row.and_then(|row| quotas.gate(&row.quota));
            let continues = gate.is_some_and(|gate| gate.same_queue(&lane.context.gate));
            if !continues {
                tracing::info!(
                    provider = %name,
                    "lane stops: its provider row is disabled or deleted, or its quota changed or is unknown"
                );
                lane.context.stop.cancel();
            }
            continues
        });
        for lane in running.values() {
            let quota = lane.settings.borrow().provider.quota.clone();
            if changed.limits_changed.contains(&quota) {
                lane.context.control.clear_limit_pause();
            }
            if changed.resumed.contains(&quota) {
                lane.context.control.clear_provider_pause();
            }
        }
        let mut reported = LoadedSettings::clone(&now);
        for row in now.providers.values().filter(|row| row.enabled) {
            let used = match running.get(&row.name) {
                Some(lane) => apply_row(worker, lane, row),
                None => start_lane(worker, quotas, row).map(|lane| {
                    if lane.is_none() {
                        let problems = now.unknown_limits(&row.quota);
                        tracing::error!(provider = %row.name, ?problems, "no lane started: limits of its quota are unknown");
                    }
                    running.extend(lane.map(|lane| (row.name.clone(), lane)));
                }),
            };
            reported.invalid_rows.extend(used.err().map(|error| unusable_row(row, &error)));
        }
        if reported.invalid_rows.len() > now.invalid_rows.len() {
            progress.send_modify(|progress| progress.settings = Arc::new(reported));
        }
        let lanes = running.iter().map(|(name, lane)| (name.clone(), Arc::clone(&lane.context.control))).collect();
        let gates = running.iter().map(|(name, lane)| (name.clone(), lane.context.gate.clone())).collect();
        progress.send_modify(|progress| {
            progress.lanes = Arc::new(lanes);
            progress.gates = Arc::new(gates);
            progress.active_jobs = Arc::clone(&worker.active_jobs);
        });
        tokio::select! {
            () = worker.stop.cancelled() => {}
            changed = known.changed() => if changed.is_err() { worker.stop.cancelled().await },
        }
    }
}

/// Reports a valid row that cannot be called from this process like any other invalid row.
fn unusable_row(row: &Provider, error: &FreezeError) -> InvalidRow {
    let (provider, quota) = (row.name.to_string(), row.quota.to_string());
    InvalidRow { provider, quota, enabled: row.enabled, paused: row.paused, problems: vec![error.to_string()] }
}

fn apply_row(worker: &WorkerContext, lane: &RunningLane, row: &Arc<Provider>) -> Result<(), FreezeError> {
    if lane.settings.borrow().provider == *row {
        return Ok(());
    }
    let unusable = |error: &FreezeError| {
        tracing::error!(provider = %row.name, %error, "provider row cannot be used; the last valid row stays in force");
        // A pause applies whatever else is wrong with the row.
        let good = lane.settings.borrow().clone();
        if row.paused && !good.provider.paused {
            let provider = Arc::new(Provider { paused: true, ..Provider::clone(&good.provider) });
            lane.settings.send_replace(Arc::new(LaneSettings { provider, client: Arc::clone(&good.client) }));
            record_pause_change(&lane.context, false, true);
        }
    };
    let client = worker.backends.providers.build(row).inspect_err(unusable)?;
    lane.context.egress.configure(row.workers, row.egress_per_second(), Instant::now());
    lane.context.gate.wake();
    let before = lane.settings.send_replace(Arc::new(LaneSettings { provider: Arc::clone(row), client }));
    lane.context.control.clear();
    lane.context.backlog.end_blocks();
    record_pause_change(&lane.context, before.provider.paused, row.paused);
    Ok(())
}

/// Records a pause or resume of the row among the lane's decisions.
fn record_pause_change(lane: &LaneContext, paused_before: bool, paused: bool) {
    let decision = match (paused_before, paused) {
        (false, true) => LaneDecision::new(DecisionKind::Paused, "paused in its provider row"),
        (true, false) => LaneDecision::new(DecisionKind::Resumed, "resumed in its provider row"),
        _ => return,
    };
    lane.meter.record_decision(decision);
}

/// Starts a lane; `None` if its quota has no gate.
fn start_lane(
    worker: &WorkerContext,
    quotas: &Quotas,
    row: &Arc<Provider>,
) -> Result<Option<RunningLane>, FreezeError> {
    let unusable = |error: &FreezeError| {
        tracing::error!(provider = %row.name, %error, "no lane started: the provider row cannot be used");
    };
    let client = worker.backends.providers.build(row).inspect_err(unusable)?;
    let Some(gate) = quotas.gate(&row.quota) else { return Ok(None) };
    let (settings, settings_rx) = watch::channel(Arc::new(LaneSettings { provider: Arc::clone(row), client }));
    let context = Arc::new(LaneContext {
        intake_bound: Mutex::new(IntakeBound::starting_at(Instant::now())),
        room: IntakeRoom::default(),
        worker: worker.clone(),
        name: row.name.clone(),
        meter: worker.meter.lane(&row.name),
        settings: settings_rx,
        gate,
        egress: LaneEgress::new(row.workers, row.egress_per_second()),
        control: Arc::new(LaneControl::for_provider(&row.name)),
        duplicates: Duplicates::default(),
        backlog: Arc::new(LaneBacklog::new()),
        sleepers: Sleepers::default(),
        stop: worker.stop.child_token(),
    });
    context.control.set_hold(worker.guard.hold_of(&row.name));
    worker.jobs.spawn(lane::run(Arc::clone(&context)));
    Ok(Some(RunningLane { settings, context }))
}

/// Waits for the active jobs after intake has stopped, at most until `over_at`. Reports what was left.
async fn drain(worker: &WorkerContext, over_at: Instant) -> DrainReport {
    worker.jobs.close();
    let timed_out = timeout_at(over_at, worker.jobs.wait()).await.is_err();
    let report = DrainReport {
        timed_out,
        left_active: worker.active_jobs.count(),
        abandoned_in_flight: worker.active_jobs.requests_in_flight(),
        unwritten: worker.unwritten.count(),
    };
    worker.abandon.cancel();
    // Each is logged before the process ends.
    timeout(LOGGED_WITHIN, worker.unwritten.none_left()).await.ok();
    if timed_out {
        tracing::warn!(
            ?report,
            "drain timed out; the remaining jobs return to the backlog once this process has ended"
        );
    }
    report
}
