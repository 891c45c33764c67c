//! The repair of lost payments: remembered outcomes are written again, and what may have been charged becomes `unknown`.
//!
//! Each repair claims its payment once more, and uses the same writes as any request. Nothing is sent.

use std::time::Duration;

use futures_util::future::try_join_all;

use super::{CommitGuard, KeptResponse};
use crate::domain::commit_memory::{Commit, Mark, Progress, REMEMBERED_FOR, Repair, repair};
use crate::domain::job::{Job, JobId};
use crate::domain::outcome::FinalState;
use crate::domain::provider::Provider;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::ledger::lane_holds::ClaimedForRepair;
use crate::ledger::{AttemptEnd, BeginResult, Claimed, FencedWrite, JobState, LeaseToken, LedgerError, RequestTiming};
use crate::provider::FrozenRequest;
use crate::worker::WorkerContext;
use crate::worker::settings_sync::LoadedSettings;

/// Repairs at the same time. Each claim waits for a connection of the pool, which other writes need, too.
const REPAIRED_AT_ONCE: usize = 8;
/// Wait of a payment that becomes `unknown`: its own response may still come.
const UNKNOWN_WAIT: Duration = Duration::from_secs(5);
const UNKNOWN: &str = "the database went back, and lost that this payment was sent";
const WRITTEN_AGAIN: &str = "written again: the database went back";

/// A lost payment under repair.
struct RepairRun<'a> {
    worker: &'a WorkerContext,
    id: &'a JobId,
    commit: &'a Commit<KeptResponse>,
    row: Option<&'a Provider>,
}

/// How one try of a repair ended.
enum Repaired {
    Done,
    /// The payment is `unknown`, and the response to its own request may still come.
    AwaitsResponse,
    /// Another worker has the payment now.
    TakenElsewhere,
}

/// Repairs each lost payment that can be repaired now, several at a time: one after another, each would wait for four commits. Those that another
/// worker has are tried again.
pub(super) async fn repair_all(worker: &WorkerContext, settings: &LoadedSettings) -> Result<(), LedgerError> {
    for some in worker.guard.lost_ids().chunks(super::COMPARED_AT_ONCE) {
        let rows = worker.backends.ledger.committed_marks(some).await?;
        for few in some.chunks(REPAIRED_AT_ONCE) {
            let repairs = few.iter().map(|id| repair_one(worker, settings, id, rows.get(id).copied()));
            try_join_all(repairs).await?;
        }
    }
    Ok(())
}

/// Repairs a lost payment of which the ledger has this mark.
///
/// # Errors
/// The ledger is unavailable. A payment that cannot be repaired is named in the log.
async fn repair_one(
    worker: &WorkerContext,
    settings: &LoadedSettings,
    id: &JobId,
    present: Option<Mark>,
) -> Result<(), LedgerError> {
    let guard = &worker.guard;
    let Some(commit) = guard.lost_commit(id) else { return Ok(()) };
    let row = settings.providers.get(&commit.provider).map(|row| &**row);
    let run = RepairRun { worker, id, commit: &commit, row };
    let written = match repair(&commit.progress, present) {
        Repair::Nothing => Ok(Repaired::Done),
        Repair::ReportMissing => {
            run.report_missing();
            Ok(Repaired::Done)
        }
        Repair::WriteAgain(response) => run.write(Some(response)).await,
        Repair::MakeUnknown => run.write(None).await,
    };
    match written {
        Ok(Repaired::Done) => guard.end_repair(id),
        Ok(Repaired::AwaitsResponse) => guard.await_response(id),
        Ok(Repaired::TakenElsewhere) => {}
        Err(error) if error.is_unavailable() => return Err(error),
        Err(error) => {
            tracing::error!(job = %id, %error, "a lost payment cannot be repaired: compare it with the provider");
            guard.end_repair(id);
        }
    }
    Ok(())
}

impl CommitGuard {
    /// The lost payments that are not repaired yet. Old ones are given up, and named unless they are repaired but for a
    /// response that never came.
    fn lost_ids(&self) -> Vec<JobId> {
        let now = self.now();
        let mut lost = self.lost.lock();
        lost.retain(|id, payment| {
            let is_kept = now.saturating_sub(payment.commit.at) <= REMEMBERED_FOR;
            if !is_kept && !payment.is_unknown {
                tracing::error!(job = %id, "a lost payment was not repaired in time: compare it with the provider");
            }
            is_kept
        });
        let is_due = |payment: &super::LostPayment| !(payment.is_unknown && payment.commit.progress == Progress::Sent);
        lost.iter().filter(|(_, payment)| is_due(payment)).map(|(id, _)| id.clone()).collect()
    }

    fn lost_commit(&self, id: &JobId) -> Option<Commit<KeptResponse>> {
        self.lost.lock().get(id).map(|payment| payment.commit.clone())
    }

    fn end_repair(&self, id: &JobId) {
        self.lost.lock().remove(id);
    }

    /// The payment is `unknown` now. Its request may be in flight, and its response is written then.
    fn await_response(&self, id: &JobId) {
        if let Some(payment) = self.lost.lock().get_mut(id) {
            payment.is_unknown = true;
        }
    }
}

impl RepairRun<'_> {
    fn report_missing(&self) {
        let provider = &self.commit.provider;
        let (outcome, reference) = match &self.commit.progress {
            Progress::Recorded => ("not sent", None),
            Progress::Sent => ("unknown", None),
            Progress::Ended(response) => (response.outcome, reference_of(&response.state)),
        };
        tracing::error!(
            %provider, job = %self.id, outcome, reference,
            "the database went back and has no row of this payment: publish it again only if it was not charged"
        );
    }

    /// Writes the response, or without one that the outcome is unknown.
    async fn write(&self, response: Option<&KeptResponse>) -> Result<Repaired, LedgerError> {
        let ledger = &self.worker.backends.ledger;
        let lost = LeaseToken { id: self.id.clone(), fence: self.commit.mark.fence };
        let holder = self.worker.options.owner.as_str();
        let own = (!self.worker.active_jobs.contains(self.id)).then_some(holder);
        let Some(claim) = ledger.claim_for_repair(&lost, holder, own).await? else {
            return Ok(Repaired::TakenElsewhere);
        };
        let ClaimedForRepair { job, claimed } = claim;
        let unknown =
            || JobState::Unknown { wait: UNKNOWN_WAIT, reason: Wait::with_detail(WaitReason::OutcomeUnknown, UNKNOWN) };
        if response.is_none() && claimed.maybe_charged {
            return Ok(repaired(ledger.transition(&claimed.lease, &unknown()).await?, response));
        }
        let Some(request) = self.request(&job, &claimed).await else {
            let reason = format!("{UNKNOWN}, and its request cannot be built again");
            let review = JobState::Final { state: FinalState::Review, reason, reference: None };
            return Ok(repaired(ledger.transition(&claimed.lease, &review).await?, response));
        };
        // It is written down again, and not sent.
        let timing = RequestTiming::immediate(Duration::ZERO);
        let BeginResult::Attempt(number) = ledger.begin_attempt(&claimed.lease, &request, timing).await? else {
            return Ok(Repaired::TakenElsewhere);
        };
        let state = response.map_or_else(unknown, |response| response.state.clone());
        let end = AttemptEnd {
            number,
            outcome: response.map_or("unknown", |response| response.outcome),
            status: response.and_then(|response| response.status),
            detail: WRITTEN_AGAIN.to_owned(),
            counts: true,
        };
        let written = ledger.finish_attempt(&claimed.lease, &end, &state).await?;
        self.worker.new_events.notify_one();
        let progress = response.map_or(Progress::Sent, |response| Progress::Ended(response.clone()));
        self.worker.guard.remember(&self.commit.provider, &claimed.lease, number, progress);
        Ok(repaired(written, response))
    }

    /// The frozen request, or the one that the present row makes.
    async fn request(&self, job: &Job, claimed: &Claimed) -> Option<FrozenRequest> {
        if let Some((frozen, _)) = &claimed.frozen_request {
            return Some(frozen.clone());
        }
        let row = self.row?;
        let sum = row.amounts.sum_of(job).ok()?;
        self.worker.backends.providers.build(row).ok()?.freeze(job, sum).await.ok()
    }
}

fn repaired(written: FencedWrite, response: Option<&KeptResponse>) -> Repaired {
    match (written, response) {
        (FencedWrite::Stale, _) => Repaired::TakenElsewhere,
        (FencedWrite::Applied, Some(_)) => Repaired::Done,
        (FencedWrite::Applied, None) => Repaired::AwaitsResponse,
    }
}

fn reference_of(state: &JobState) -> Option<&str> {
    match state {
        JobState::Final { reference, .. } => reference.as_deref(),
        JobState::SucceededInPart(charge) => charge.reference.as_deref(),
        JobState::Waiting { .. } | JobState::Unknown { .. } => None,
    }
}
