//! The dispatcher of a lane: it does the steps of its core with the ledger, and runs the jobs that it claims.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep_until};

use super::AheadGuard;
use super::claimed_ahead::AheadBounds;
use super::core::{DispatchStep, KNOWN_FLOWS_MAX, LaneFacts, PAUSED_INTERVAL, SeenFlow};
use crate::domain::fair_order::FairClaim;
use crate::domain::job::{FlowKey, Identifier};
use crate::domain::provider::ProviderName;
use crate::faults::{self, CrashPoint};
use crate::ledger::LedgerError;
use crate::ledger::backlog::{BacklogClaim, BacklogClaimRequest, BacklogJob, FlowStatus};
use crate::ledger::database::Database;
use crate::ledger::record_notices::RecordNews;
use crate::queue::message::is_unchanged;
use crate::telemetry::spans;
use crate::worker::intake::{DeliveryAction, run_without_message};
use crate::worker::job::{review_changed_row, run_claimed};
use crate::worker::lane::{LaneContext, RESUME_AHEAD, claims_ahead_max};

/// Age at which the lanes with flows are read again.
const FLOW_LANES_AGE_MAX: Duration = Duration::from_secs(1);

/// The lanes that have flows, as this process has read them last. Most lanes are idle most of the time, and each of
/// their dispatchers looks for flows that other processes have recorded: one statement answers them all.
#[derive(Debug, Default)]
pub struct FlowLanes(Mutex<Option<ReadLanes>>);

#[derive(Debug)]
struct ReadLanes {
    read_at: Instant,
    lanes: BTreeSet<ProviderName>,
}

impl FlowLanes {
    /// When the ledger was read last, if it had no flow of this lane. One query runs at a time, and one from before
    /// `since` is repeated.
    async fn read_without(
        &self,
        lane: &ProviderName,
        ledger: &Database,
        since: Option<Instant>,
    ) -> Result<Option<Instant>, LedgerError> {
        let mut last = self.0.lock().await;
        let now = Instant::now();
        let is_fresh = |read: &ReadLanes| now < read.read_at + FLOW_LANES_AGE_MAX && since <= Some(read.read_at);
        let read = match last.take().filter(is_fresh) {
            Some(fresh) => fresh,
            None => ReadLanes { read_at: now, lanes: ledger.lanes_with_flows().await? },
        };
        let read = last.insert(read);
        Ok((!read.lanes.contains(lane)).then_some(read.read_at))
    }
}

/// Claims jobs from the backlog until the lane is stopped.
pub async fn run(lane: Arc<LaneContext>) {
    let mut news = lane.worker.backends.ledger.record_news().subscribe();
    let mut heard_at = None;
    loop {
        let step = lane.backlog.core.lock().next_step(Instant::now(), || lane_facts(&lane));
        if let DispatchStep::Wait(until) = step {
            tokio::select! {
                () = lane.stop.cancelled() => return,
                () = sleep_until(until) => {}
                () = lane.backlog.changed.notified() => {}
                heard = news.recv() => heard_at = heard_of_records(&lane, heard).or(heard_at),
            }
        } else if let Err(error) = perform(&lane, &step, heard_at).await {
            tracing::debug!(provider = %lane.name, %error, "failed to claim from the backlog, retrying");
            lane.backlog.core.lock().failed(&step, Instant::now());
        }
        if lane.stop.is_cancelled() {
            return;
        }
    }
}

/// When other processes have recorded jobs that this lane now looks for; `None`: it does not.
fn heard_of_records(lane: &LaneContext, heard: Result<RecordNews, RecvError>) -> Option<Instant> {
    let now = Instant::now();
    let heard_at = match heard {
        Ok(RecordNews { lane: Some(other), .. }) if other != lane.name => return None,
        Ok(news) => news.heard_at,
        Err(_) => now,
    };
    lane.backlog.core.lock().record_news(now).then_some(heard_at)
}

async fn perform(
    lane: &Arc<LaneContext>,
    step: &DispatchStep<Identifier>,
    heard_at: Option<Instant>,
) -> Result<(), LedgerError> {
    match step {
        DispatchStep::EndBlocks => drop(lane.worker.backends.ledger.unblock_flows(&lane.name).await?),
        DispatchStep::Look => tokio::select! {
            looked = look(lane, heard_at) => looked?,
            () = lane.stop.cancelled() => {}
        },
        DispatchStep::Claim(claim) => claim_jobs(lane, claim).await?,
        DispatchStep::Wait(_) => {}
    }
    Ok(())
}

async fn look(lane: &LaneContext, heard_at: Option<Instant>) -> Result<(), LedgerError> {
    let ledger = &lane.worker.backends.ledger;
    if lane.backlog.core.lock().is_idle()
        && let Some(read_at) = lane.worker.flow_lanes.read_without(&lane.name, ledger, heard_at).await?
    {
        lane.backlog.core.lock().looked(read_at, Vec::new(), read_at);
        return Ok(());
    }
    let began = Instant::now();
    let flows = ledger.waiting_flows(&lane.name, KNOWN_FLOWS_MAX).await?;
    lane.backlog.core.lock().looked(began, flows.into_iter().map(seen_flow).collect(), Instant::now());
    Ok(())
}

fn seen_flow(status: FlowStatus) -> SeenFlow<Identifier> {
    let blocked_for = status.blocked.map(|blocked| blocked.left);
    SeenFlow { flow: FlowKey { class: status.class, account: status.account }, blocked_for }
}

async fn claim_jobs(lane: &Arc<LaneContext>, claim: &FairClaim<Identifier>) -> Result<(), LedgerError> {
    let request = BacklogClaimRequest { lane: &lane.name, holder: &lane.worker.options.owner, bounds: claim };
    let claimed = lane.worker.backends.ledger.claim_backlog(&request).await;
    faults::crash(CrashPoint::AfterBacklogClaim);
    let now = Instant::now();
    match claimed? {
        BacklogClaim::Claimed { jobs, next_wake } => {
            let wake_at = next_wake.and_then(|wait| now.checked_add(wait));
            lane.backlog.core.lock().claimed(claim, jobs.iter().map(flow_of), wake_at, now);
            jobs.into_iter().for_each(|job| start(lane, job));
        }
        BacklogClaim::Busy => lane.backlog.core.lock().lane_was_busy(rand::random(), now),
    }
    Ok(())
}

fn flow_of(job: &BacklogJob) -> FlowKey {
    FlowKey { class: job.class, account: job.job.account.clone() }
}

fn start(lane: &Arc<LaneContext>, job: BacklogJob) {
    let ahead = AheadGuard::new(&lane.backlog, flow_of(&job));
    let (context, id) = (Arc::clone(lane), job.job.id.clone());
    let work = async move {
        // Boxed because a future of thousands of bytes would be moved several times, and kept twice.
        let steps = Box::pin(process(&context, job, ahead));
        run_without_message(&context, &id, steps).await;
    };
    lane.worker.jobs.spawn(work);
}

fn lane_facts(lane: &LaneContext) -> LaneFacts {
    let prefetch = claims_ahead_max(lane);
    let paused_until = claims_paused_until(lane);
    let provider = &lane.settings.borrow().provider;
    let bounds = AheadBounds::of(provider, prefetch, lane.egress.release_waiters());
    let (can_start, cost_bound) = (lane.egress.can_start(Instant::now()), lane.control.cost_bound());
    let is_known = lane.worker.beats.are_confirmed();
    let sends_lookups = is_known && provider.lookup.is_some() && !provider.paused && lane.control.accepts_lookups();
    LaneFacts { bounds, paused_until, sends_lookups, can_start, order: provider.order, cost_bound }
}

/// Until when the lane claims no charge; `None`: it may.
pub(super) fn claims_paused_until(lane: &LaneContext) -> Option<Instant> {
    let now = Instant::now();
    let is_known = lane.worker.beats.are_confirmed();
    if !is_known || lane.settings.borrow().provider.paused || lane.control.hold().is_some() {
        // Ends with the next beat, the row's next change or a release, not by time.
        return Some(now + PAUSED_INTERVAL);
    }
    let until = lane.control.charges_paused_until()?;
    let until = until.checked_sub(RESUME_AHEAD).unwrap_or(until);
    (until > now).then_some(until)
}

/// Runs a claimed job, unless its row no longer says what was recorded.
async fn process(lane: &LaneContext, claimed: BacklogJob, ahead: AheadGuard) -> DeliveryAction {
    let BacklogJob { job, hash, claimed, .. } = claimed;
    spans::record_job(&job.id);
    match is_unchanged(&job, hash) {
        true => run_claimed(lane, job, claimed, ahead).await,
        false => review_changed_row(lane, job, claimed, ahead).await,
    }
}
