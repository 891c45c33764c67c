//! The facts about one payment, gathered from ledger, settings, queue, limiter, and a process's lanes and gates.
//!
//! A backend that does not respond in time is reported as unavailable, and the other facts are still returned. Only the
//! ledger is required.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{UnrecordedJob, find_unrecorded};
use crate::domain::explain::forecast::RecentUsage;
use crate::domain::explain::{
    BacklogPlace, ClaimState, EgressPosition, Facts, FlowBlock, GatePosition, JobFacts, JobsAhead, LaneFacts,
    LastDelay, LimitUtilisation, LimiterFacts, ManualChange, PermitRefusal, RowFacts, SentRequest, cost_of_part,
};
use crate::domain::job::{Identifier, JobId};
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::PastUse;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{QuotaSpec, SubjectQuery};
use crate::domain::time::EpochMs;
use crate::domain::wait_reason::{BlockReason, Wait, WaitReason};
use crate::fleet::report::{LaneState, LaneStatus, ReportedPause};
use crate::ledger::backlog::{BacklogPosition, LedgerQueuePosition};
use crate::ledger::database::Database;
use crate::ledger::operator::{DatabaseTime, JobDetails};
use crate::ledger::{LedgerError, RecentUses};
use crate::limiter::Limiter;
use crate::ops::OverviewCollector;
use crate::queue::{Queue, QueueError};
use crate::worker::quotas::quota_spec;
use crate::worker::settings_sync::LoadedSettings;
use crate::worker::supervisor::WorkerStatus;

/// Timeout of a query to the broker, a gate or the limiter's store.
pub const QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// The sources of the facts. Without a process, lanes and gates are unknown.
pub struct FactSources<'a> {
    pub ledger: &'a Database,
    pub settings: &'a LoadedSettings,
    /// `None`: there is no broker.
    pub queue: Option<&'a dyn Queue>,
    /// `None` if the limiter is in another process.
    pub limiter_facts: Option<&'a dyn Limiter>,
    pub process: Option<&'a WorkerStatus>,
    /// Reports of all workers, for the backlogs of the lanes.
    pub collector: Option<&'a OverviewCollector>,
}

/// Gathers the current facts about one id.
pub async fn gather_facts(sources: &FactSources<'_>, id: &JobId) -> Result<Facts, LedgerError> {
    let details = sources.ledger.job_details(id).await?;
    let details = details.map(|details| details.seen_with(sources.queue.is_some()));
    let search = match &details {
        Some(_) => UnrecordedJob::default(),
        None => find_unrecorded(sources, id).await,
    };
    let provider = details.as_ref().map(|details| details.line.provider.as_str());
    let name = provider.and_then(|name| ProviderName::new(name).ok()).or(search.lane);
    let row = name.as_ref().map(|name| row_facts(sources.settings, name)).unwrap_or_default();
    let quota = row.provider.as_ref().map(|provider| provider.quota.clone());
    let sharing: Vec<ProviderName> = match &quota {
        Some(quota) => {
            let rows = sources.settings.providers.values().filter(|row| row.quota == *quota);
            rows.map(|row| row.name.clone()).collect()
        }
        None => name.iter().cloned().collect(),
    };
    let position = sources.ledger.queue_position(id, &sharing).await?;
    let claim = match search.claim {
        Some(claim) => claim,
        None => claim_state(sources.process, name.as_ref(), details.as_ref(), id).await,
    };
    let (ready, queue_problem) = match (sources.queue, &name) {
        (Some(queue), Some(name)) => ready_messages(queue, name).await,
        (None, _) => (Some(0), None),
        (Some(_), None) => (None, None),
    };
    let account = match (&details, &search.job) {
        (Some(details), _) => details.line.account.as_deref(),
        (None, job) => job.as_ref().and_then(|job| job.account.as_deref()),
    };
    let mut limiter = match (&row.spec, &name) {
        (Some(spec), Some(_)) => limiter(sources, spec, account, position.mean_request_time).await,
        _ => LimiterFacts::default(),
    };
    let gate = sources.process.and_then(|process| process.gates.get(name.as_ref()?).cloned());
    limiter.block = gate.and_then(|gate| {
        let block = gate.view().borrow().block.clone();
        block.map(|(by, until)| permit_refusal(by, until, false))
    });
    let lane = match (sources.process, &name) {
        (Some(process), Some(name)) => lane_facts(process, name),
        _ => LaneFacts::NotAsked,
    };
    let backlog = match &position.backlog {
        Some(place) => Some(backlog_place(sources, place, &row, position.mean_request_time).await),
        None => None,
    };
    let now = EpochMs(position.now.0);
    Ok(Facts {
        now,
        id: id.as_str().to_owned(),
        rejected: position.rejected.clone(),
        ahead: jobs_ahead(&position, ready),
        backlog,
        queue_problem,
        unrecorded: search.job.map(|job| JobFacts { created_at: now, updated_at: now, wake_at: now, ..job }),
        message_search: search.message_search,
        job: details.map(|details| job_facts(details, &position)),
        row,
        lane,
        claim,
        limiter,
    })
}

fn row_facts(known: &LoadedSettings, name: &ProviderName) -> RowFacts {
    let provider = known.providers.get(name).cloned();
    let bad = known.invalid_rows.iter().find(|bad| bad.provider == name.as_str());
    let spec = provider.as_ref().and_then(|row| quota_spec(known, &row.quota)).map(Arc::new);
    RowFacts { provider, problems: bad.map(|bad| bad.problems.clone()).unwrap_or_default(), spec }
}

fn lane_facts(process: &WorkerStatus, name: &ProviderName) -> LaneFacts {
    let Some(control) = process.lanes.get(name) else { return LaneFacts::Absent };
    // A lane whose queue refuses its consumer still sends its active jobs.
    let still_sends = control.is_queue_refused() && control.sending_pause().is_none();
    let LaneStatus { does, pause } = control.status();
    let ReportedPause { words, ends_in_ms, wait, .. } = pause.unwrap_or_default();
    let ends_in = Duration::from_millis(ends_in_ms.unwrap_or_default());
    match (does, wait) {
        (LaneState::Held, Some(cause)) => LaneFacts::Held { cause },
        (LaneState::Probing, _) => LaneFacts::Probing { cause: words },
        (LaneState::Stopped, Some(cause)) if !still_sends => LaneFacts::Paused { cause, ends_in },
        (LaneState::Stopped | LaneState::Resting, Some(cause)) => LaneFacts::ClaimsPaused { cause, ends_in },
        (LaneState::Running | LaneState::Full, _) | (_, None) => LaneFacts::Running,
    }
}

async fn claim_state(
    process: Option<&WorkerStatus>,
    name: Option<&ProviderName>,
    details: Option<&JobDetails>,
    id: &JobId,
) -> ClaimState {
    let Some(worker) = details.and_then(|details| details.holder.clone()) else { return ClaimState::Unclaimed };
    if let Some(process) = process.filter(|process| process.active_jobs.contains(id)) {
        let here = match name {
            Some(name) => position_in_lane(process, name, &worker, id).await,
            None => None,
        };
        return here.unwrap_or(ClaimState::AskedWorker { worker, position: None });
    }
    ClaimState::OtherWorker { worker }
}

/// Position of the job in the wait queue of its lane's gate: it waits for the lane's egress, or for a permit.
pub async fn position_in_lane(
    process: &WorkerStatus,
    name: &ProviderName,
    worker: &str,
    id: &JobId,
) -> Option<ClaimState> {
    let gate = process.gates.get(name)?;
    let place = timeout(QUERY_TIMEOUT, gate.position_of(id.clone())).await.ok().flatten()?;
    if let (None, Some(egress)) = (&place.block, place.egress) {
        let position = EgressPosition {
            before: egress.jobs_ahead,
            cost_before: cost_of_part(egress.jobs_ahead, place.jobs_ahead, place.cost_ahead),
            leaves_in: egress.egress_wait,
        };
        return Some(ClaimState::AwaitingEgress { worker: worker.to_owned(), position });
    }
    let place = GatePosition {
        before: place.jobs_ahead,
        cost_before: place.cost_ahead,
        refused: place.block.map(|(by, until, exact)| permit_refusal(by, until, exact)),
        by_own_limit: place.is_own_limit,
    };
    Some(ClaimState::AskedWorker { worker: worker.to_owned(), position: Some(place) })
}

fn permit_refusal(reason: BlockReason, until: Instant, exact: bool) -> PermitRefusal {
    PermitRefusal { reason, wait: until.saturating_duration_since(Instant::now()), exact }
}

/// The limiter's usage, and the quota's recent usage by the ledger.
async fn limiter(
    sources: &FactSources<'_>,
    spec: &QuotaSpec,
    account: Option<&str>,
    hold: Option<Duration>,
) -> LimiterFacts {
    let mut facts = LimiterFacts::default();
    let subjects = spec.subjects(account, None).unwrap_or_default();
    if let Some(limiter) = sources.limiter_facts {
        match timeout(QUERY_TIMEOUT, limiter.peek(spec, subjects.first())).await {
            Ok(Ok(uses)) => {
                let enforced = uses.into_iter().filter(|limit| !limit.shadow);
                let used = enforced.map(|limit| LimitUtilisation {
                    name: limit.name,
                    used: limit.used,
                    capacity: u64::from(limit.capacity),
                });
                facts.uses = used.collect();
            }
            Ok(Err(error)) => facts.unavailable = Some(error.to_string()),
            Err(_) => facts.unavailable = Some("no answer in time".to_owned()),
        }
    }
    facts.recent_usage = recent_usage(sources.ledger.recent_uses(&spec.quota, spec.lookback()), hold).await;
    facts
}

/// Recent usage by the ledger; `None`: it did not return it.
async fn recent_usage(
    asked: impl Future<Output = Result<RecentUses, LedgerError>>,
    hold: Option<Duration>,
) -> Option<RecentUsage> {
    let answer = timeout(QUERY_TIMEOUT, asked).await.map_err(|_| "no answer in time".to_owned());
    let answer = answer.and_then(|answer| answer.map_err(|error| error.to_string()));
    let uses = answer.inspect_err(|problem| {
        tracing::debug!(problem, "no estimated start: the ledger could not return the recent usage");
    });
    let RecentUses { ended, open, .. } = uses.ok()?;
    let ended = ended.into_iter().map(|(age, cost)| PastUse { age, cost }).collect();
    Some(RecentUsage { ended, in_flight: open, hold: hold.unwrap_or_default() })
}

/// The place of a job in the backlog, with the usage of its account if a limit counts it.
async fn backlog_place(
    sources: &FactSources<'_>,
    place: &BacklogPosition,
    row: &RowFacts,
    hold: Option<Duration>,
) -> BacklogPlace {
    let (account, spec) = (place.flow.account.as_ref(), row.spec.as_deref());
    let keeps_order = row.provider.as_ref().is_some_and(|row| row.keeps_order_of(account));
    let account_usage = match (spec, account) {
        (Some(spec), Some(account)) => account_usage(sources, spec, account, hold).await,
        _ => None,
    };
    let block = place.flow.block().map(|blocked| FlowBlock { wait: blocked.wait(), left: blocked.left });
    BacklogPlace {
        priority: place.flow.class.priority(),
        before_in_flow: place.before_in_flow.saturating_add(place.active_of_flow),
        waiting_in_flow: place.flow.waiting.saturating_add(place.active_of_flow),
        account_ahead: place.others_of_account,
        account_cost_ahead: place.account_cost_ahead,
        account_holder: place.account_holder.clone().filter(|_| keeps_order),
        block,
        account_usage,
    }
}

/// Recent usage of an account by the ledger; `None`: no limit counts accounts, or the ledger did not return it.
async fn account_usage(
    sources: &FactSources<'_>,
    spec: &QuotaSpec,
    account: &Identifier,
    hold: Option<Duration>,
) -> Option<RecentUsage> {
    let name = account.as_str();
    let subject = spec.subjects(Some(name), None).ok()?.into_iter().next()?;
    let counters = spec.subject_counters(&subject);
    let within = counters.iter().filter(|counter| !counter.shadow).map(|counter| counter.window_us).max()?;
    let (scope, within) = (Scope::Account, Duration::from_micros(within));
    let asked = SubjectQuery { scope, names: vec![name.to_owned()], within };
    let of_account = async {
        let mut uses = sources.ledger.recent_subject_uses(&spec.quota, &asked).await?;
        Ok(uses.remove(name).unwrap_or_default())
    };
    recent_usage(of_account, hold).await
}

/// The ready messages in a lane's queue, or why the queue does not answer.
async fn ready_messages(queue: &dyn Queue, lane: &ProviderName) -> (Option<u64>, Option<String>) {
    match timeout(QUERY_TIMEOUT, queue.depth(lane)).await {
        Ok(Ok(ready)) => (ready, None),
        Ok(Err(error @ QueueError::Unavailable(_))) => (None, Some(error.to_string())),
        Ok(Err(_)) => (None, None),
        Err(_) => (None, Some(format!("no answer within {} s", QUERY_TIMEOUT.as_secs()))),
    }
}

/// Jobs ahead by the ledger, plus messages of the lane's queue, which are not recorded yet. No message is ahead of a job
/// of the backlog.
fn jobs_ahead(position: &LedgerQueuePosition, ready: Option<u64>) -> JobsAhead {
    let unrecorded = ready.filter(|_| position.backlog.is_none()).unwrap_or_default();
    JobsAhead {
        jobs: position.jobs_ahead + unrecorded,
        // Of messages the cost is not known: they count as the recorded jobs.
        cost: position.cost_ahead + mean_cost(position).saturating_mul(unrecorded),
        active: position.active,
        ready,
        workers: position.workers,
    }
}

/// Mean cost of the recorded jobs ahead, rounded down; 1 without any.
fn mean_cost(position: &LedgerQueuePosition) -> u64 {
    position.cost_ahead.checked_div(position.jobs_ahead).unwrap_or(1).max(1)
}

fn job_facts(details: JobDetails, position: &LedgerQueuePosition) -> JobFacts {
    let ms = |at: DatabaseTime| EpochMs(at.0);
    let request = |attempt: &crate::ledger::operator::AttemptSummary| SentRequest {
        number: attempt.number,
        began_at: ms(attempt.began_at),
        ended_at: attempt.ended_at.map(ms),
        outcome: attempt.outcome.clone(),
    };
    let event = details.events.iter().rev().find(|event| event.state == details.line.state);
    let manual_change = details.audit.last().map(|change| ManualChange {
        operator: change.os_user.clone().unwrap_or_else(|| change.who.clone()),
        reason: change.because.clone(),
        is_decisive: !change.erased && change.new_state.as_deref() == Some(details.line.state.as_str()),
    });
    JobFacts {
        created_at: ms(details.line.created_at),
        updated_at: ms(details.line.updated_at),
        wake_at: ms(details.line.wake_at),
        not_before: details.not_before.map(ms),
        expires_at: details.expires_at.map(ms),
        revived_at: details.revived_at.map(ms),
        first_sent_at: details.first_sent_at.map(ms),
        unknown_since: position.progress.unknown_since.map(ms),
        cost: details.cost,
        attempts: details.line.attempts,
        lookups: position.progress.lookups,
        resend: position.progress.resend,
        lost_holders: position.progress.lost_holders,
        requests: details.attempts.iter().map(request).collect(),
        last_delay: details.waited.and_then(|delay| {
            let reason = WaitReason::from_columns(&delay.wait_reason, delay.wait_limit)?;
            let reason = Wait { reason, detail: delay.wait_detail };
            Some(LastDelay { reason, since: ms(delay.since), request: delay.request })
        }),
        is_event_published: event.and_then(|event| event.published),
        manual_change,
        provider: details.line.provider,
        state: details.line.state,
        wait_reason: details.line.wait_reason.and_then(|code| WaitReason::from_columns(&code, details.line.wait_limit)),
        reason: details.line.reason,
        reference: details.line.provider_reference,
        amount: details.line.amount,
        currency: Some(details.line.currency),
        account: details.line.account,
    }
}
