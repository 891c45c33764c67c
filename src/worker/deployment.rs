//! A running worker: lanes as the provider rows say, from the first settings to the last acknowledgement.
//!
//! Refuses to leave jobs behind silently: the drain stops intake, finishes or hands back within its time, and its report
//! says what was left.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::execute::Repeats;
use super::in_hand::InHand;
use super::lane::{self, LaneParts, LaneSettings};
use super::meter::{Decision, DecisionKind, Meter};
use super::patience::{GivenUp, until_back};
use super::pauses::Pauses;
use super::pool::Pool;
use super::quotas::Quotas;
use super::settings_watch::{self, Known};
use super::{Engines, Worker, WorkerOptions, outbox, sweeper, topology};
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::settings::BadRow;
use crate::limiter::gate::Gate;
use crate::provider::FreezeError;

/// Longest time after the drain for settling permits and publishing events, even when the drain took all of its own.
const LAST_WORDS_MAX: Duration = Duration::from_secs(3);

/// What a worker says of itself to health checks and status.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Settings are loaded and the topology is declared.
    pub ready: bool,
    pub draining: bool,
    pub known: Arc<Known>,
    /// The lanes that run, by their provider.
    pub lanes: Arc<BTreeMap<ProviderName, Arc<Pauses>>>,
    /// The gates where the jobs of these lanes wait.
    pub gates: Arc<BTreeMap<ProviderName, Gate>>,
    /// The leaky buckets that they wait in before.
    pub pools: Arc<BTreeMap<ProviderName, Pool>>,
    pub in_hand: Arc<InHand>,
    /// What this process has counted; the same from its beginning to its end.
    pub meter: Arc<Meter>,
}

/// What the drain left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Something was still under way when the time was over.
    pub timed_out: bool,
    /// Jobs still in hand when the time was over; the broker and the leases give them back.
    pub left_in_hand: usize,
    /// Requests whose outcome is not written down.
    pub abandoned_on_wire: usize,
}

struct RunningLane {
    settings: watch::Sender<Arc<LaneSettings>>,
    pool: Pool,
    parts: Arc<LaneParts>,
    stop: CancellationToken,
}

/// Runs until `stop` fires and the drain is over.
///
/// # Errors
/// When the database refuses in a way that waiting will not mend.
pub async fn run(
    engines: Engines,
    options: WorkerOptions,
    stop: CancellationToken,
    progress: watch::Sender<Progress>,
) -> Result<DrainReport, LedgerError> {
    let worker = Worker {
        engines,
        options: Arc::new(options),
        in_hand: Arc::new(InHand::default()),
        meter: Arc::clone(&progress.borrow().meter),
        outbox: Arc::default(),
        late: Arc::default(),
        local_faults: Arc::default(),
        log_throttle: Arc::default(),
        start_timer: Arc::default(),
        stop,
        abandon: CancellationToken::new(),
        jobs: TaskTracker::new(),
    };
    let settings = Arc::clone(&worker.engines.settings);
    let nothing = Known::default();
    let first = until_back("load settings", &worker.stop, || settings_watch::load(settings.as_ref(), &nothing));
    let known = match first.await {
        Ok(known) => Arc::new(known),
        Err(GivenUp::Stopped) => return Ok(DrainReport::default()),
        Err(GivenUp::Failed(error)) => return Err(error),
    };
    worker.meter.reloaded();
    let services = TaskTracker::new();
    let (known_tx, known_rx) = watch::channel(Arc::clone(&known));
    let drained = CancellationToken::new();
    let (store_version, store_versions) = settings_watch::StoreVersion::channel();
    let (poll, stop, meter) = (worker.options.settings_poll, worker.stop.clone(), Arc::clone(&worker.meter));
    let hinted = Arc::new(Notify::new());
    services.spawn(settings_watch::heed(settings.hints(), Arc::clone(&hinted), stop.clone()));
    services.spawn(settings_watch::follow(Arc::clone(&settings), poll, stop, known_tx, store_versions, hinted, meter));
    services.spawn(outbox::run(worker.clone(), drained.clone()));
    services.spawn(Arc::clone(&worker.in_hand).keep(Arc::clone(&worker.engines.ledger), drained.clone()));
    let (limiter, ledger) = (Arc::clone(&worker.engines.limiter), Arc::clone(&worker.engines.ledger));
    let quotas = Quotas::new(limiter, ledger, store_version);

    services.spawn(sweeper::run(worker.clone(), known_rx.clone(), progress.subscribe()));
    services.spawn(topology::keep_declared(worker.clone(), known_rx.clone(), progress.clone()));

    lanes(&worker, &quotas, known_rx, &progress).await;

    progress.send_modify(|progress| progress.draining = true);
    let over_at = Instant::now() + worker.options.drain_timeout;
    let report = drain(&worker, over_at).await;
    drained.cancel();
    services.close();
    let last_words = async {
        quotas.close().await;
        services.wait().await;
        outbox::publish_rest(&worker).await;
    };
    if timeout_at(over_at.max(Instant::now() + LAST_WORDS_MAX), last_words).await.is_err() {
        tracing::warn!("not every settlement and outcome event is out; leases run out, and other workers publish");
    }
    Ok(report)
}

/// Keeps one lane per enabled provider until the worker stops.
async fn lanes(
    worker: &Worker,
    quotas: &Quotas,
    mut known: watch::Receiver<Arc<Known>>,
    progress: &watch::Sender<Progress>,
) {
    let mut running: HashMap<ProviderName, RunningLane> = HashMap::new();
    while !worker.stop.is_cancelled() {
        let now = known.borrow_and_update().clone();
        progress.send_modify(|progress| progress.known = Arc::clone(&now));
        let changed = quotas.follow(&now);
        running.retain(|name, lane| {
            let row = now.providers.get(name).filter(|row| row.enabled);
            // Behind another gate a new lane begins, and behind none there is nothing to take jobs for.
            let gate = row.and_then(|row| quotas.gate(&row.quota));
            let goes_on = gate.is_some_and(|gate| gate.is(&lane.parts.gate));
            if !goes_on {
                tracing::info!(provider = %name, "lane ends: its row is disabled or gone, or its quota is another or unknown");
                lane.stop.cancel();
            }
            goes_on
        });
        for lane in running.values() {
            let quota = lane.settings.borrow().provider.quota.clone();
            if changed.allow_otherwise.contains(&quota) {
                lane.parts.pauses.limits_changed();
            }
            if changed.resumed.contains(&quota) {
                lane.parts.pauses.named_wait_lifted();
            }
        }
        let mut told = Known::clone(&now);
        for row in now.providers.values().filter(|row| row.enabled) {
            let used = match running.get(&row.name) {
                Some(lane) => follow_row(worker, lane, row),
                None => start_lane(worker, quotas, row)
                    .map(|lane| running.extend(lane.map(|lane| (row.name.clone(), lane)))),
            };
            told.bad.extend(used.err().map(|error| unusable(row, &error)));
        }
        if told.bad.len() > now.bad.len() {
            progress.send_modify(|progress| progress.known = Arc::new(told));
        }
        let lanes = running.iter().map(|(name, lane)| (name.clone(), Arc::clone(&lane.parts.pauses))).collect();
        let gates = running.iter().map(|(name, lane)| (name.clone(), lane.parts.gate.clone())).collect();
        let pools = running.iter().map(|(name, lane)| (name.clone(), lane.pool.clone())).collect();
        progress.send_modify(|progress| {
            progress.pools = Arc::new(pools);
            progress.lanes = Arc::new(lanes);
            progress.gates = Arc::new(gates);
            progress.in_hand = Arc::clone(&worker.in_hand);
        });
        tokio::select! {
            () = worker.stop.cancelled() => {}
            changed = known.changed() => if changed.is_err() { worker.stop.cancelled().await },
        }
    }
}

/// A row that can be meant, but not called from here: it is told like any other bad row.
fn unusable(row: &Provider, error: &FreezeError) -> BadRow {
    let (provider, quota) = (row.name.to_string(), row.quota.to_string());
    BadRow { provider, quota, enabled: row.enabled, paused: row.paused, problems: vec![error.to_string()] }
}

fn follow_row(worker: &Worker, lane: &RunningLane, row: &Arc<Provider>) -> Result<(), FreezeError> {
    if lane.settings.borrow().provider == *row {
        return Ok(());
    }
    let unusable = |error: &FreezeError| {
        tracing::error!(provider = %row.name, %error, "row cannot be used; the last good one stays");
        // That nothing shall be sent is obeyed, whatever else the row says.
        let good = lane.settings.borrow().clone();
        if row.paused && !good.provider.paused {
            let provider = Arc::new(Provider { paused: true, ..Provider::clone(&good.provider) });
            lane.settings.send_replace(Arc::new(LaneSettings { provider, client: Arc::clone(&good.client) }));
            tell_of_row(&lane.parts, false, true);
        }
    };
    let client = worker.engines.providers.build(row).inspect_err(unusable)?;
    lane.pool.set(row.workers, row.outflow_per_second());
    let before = lane.settings.send_replace(Arc::new(LaneSettings { provider: Arc::clone(row), client }));
    lane.parts.pauses.lift();
    tell_of_row(&lane.parts, before.provider.paused, row.paused);
    Ok(())
}

/// What a changed row means for those who look at the lane's decisions.
fn tell_of_row(lane: &LaneParts, paused_before: bool, paused: bool) {
    let decision = match (paused_before, paused) {
        (false, true) => Decision::new(DecisionKind::Paused, "its row says so"),
        (true, false) => Decision::new(DecisionKind::Resumed, "its row says so"),
        _ => return,
    };
    lane.meter.decision(decision);
}

/// No lane without a gate.
fn start_lane(worker: &Worker, quotas: &Quotas, row: &Arc<Provider>) -> Result<Option<RunningLane>, FreezeError> {
    let unusable =
        |error: &FreezeError| tracing::error!(provider = %row.name, %error, "no lane: the row cannot be used");
    let client = worker.engines.providers.build(row).inspect_err(unusable)?;
    let Some(gate) = quotas.gate(&row.quota) else { return Ok(None) };
    let stop = worker.stop.child_token();
    let pool_stop = CancellationToken::new();
    let (pool, pool_task) = Pool::new(row.workers, row.outflow_per_second(), pool_stop.clone());
    let (settings, settings_rx) = watch::channel(Arc::new(LaneSettings { provider: Arc::clone(row), client }));
    let parts = Arc::new(LaneParts {
        worker: worker.clone(),
        name: row.name.clone(),
        meter: worker.meter.lane(&row.name),
        settings: settings_rx,
        gate,
        pool: pool.clone(),
        pauses: Arc::new(Pauses::of(&row.name)),
        repeats: Repeats::default(),
        stop: stop.clone(),
    });
    worker.jobs.spawn(pool_task);
    let lane = lane::run(Arc::clone(&parts));
    worker.jobs.spawn(async move {
        lane.await;
        pool_stop.cancel();
    });
    Ok(Some(RunningLane { settings, pool, parts, stop }))
}

/// Intake has stopped; waits for what is in hand, at most until the drain's time is over, then says what was left.
async fn drain(worker: &Worker, over_at: Instant) -> DrainReport {
    worker.jobs.close();
    let timed_out = timeout_at(over_at, worker.jobs.wait()).await.is_err();
    let report = DrainReport {
        timed_out,
        left_in_hand: worker.in_hand.jobs(),
        abandoned_on_wire: worker.in_hand.requests_on_wire(),
    };
    worker.abandon.cancel();
    if timed_out {
        tracing::warn!(?report, "drain time is over; leases and the broker give the rest back");
    }
    report
}
