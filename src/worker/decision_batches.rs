//! The application of decision batches: a worker leases a batch and decides about its payments, one after the other.
//!
//! Each outcome is written in the transaction of the payment's own change, so a crash at any point neither skips a
//! payment nor decides twice. Rate and lease are rows of the database, so a batch
//! goes on at its rate after any restart.

use std::collections::HashSet;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep};

use super::WorkerContext;
use super::resend::{ResendError, Resender, provider_names};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::decision_batches::{LeasedBatch, TurnAt, TurnResult};

/// Time between two looks for batches.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Payments that are read at once.
const TURNS_AT_ONCE: u32 = 100;
/// Pause after a backend failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Code of a refusal by the rules of the database.
const LEDGER_REFUSED: &str = "ledger_refused";

/// Applies batches until the worker stops. Then their leases end, and another worker goes on.
pub async fn run(worker: WorkerContext) {
    let (mut running, mut applied, mut failing) = (HashSet::new(), JoinSet::new(), false);
    let ledger = &worker.backends.ledger;
    loop {
        tokio::select! {
            () = worker.stop.cancelled() => break,
            Some(ended) = applied.join_next(), if !applied.is_empty() => {
                match ended {
                    Ok(id) => {
                        running.remove(&id);
                    }
                    Err(error) => tracing::error!(%error, "the task of a decision batch ended early"),
                }
                // Also those of tasks that ended early.
                if applied.is_empty() {
                    running.clear();
                }
            }
            () = sleep(POLL_INTERVAL) => {
                let leased = ledger.lease_batches(&worker.options.owner).await;
                match &leased {
                    Ok(_) if failing => tracing::info!("decision batches are read again"),
                    Err(error) if !failing => tracing::warn!(%error, "failed to read decision batches, retrying"),
                    _ => {}
                }
                failing = leased.is_err();
                for batch in leased.unwrap_or_default() {
                    if running.insert(batch.id.clone()) {
                        applied.spawn(apply_in_task(worker.clone(), batch));
                    }
                }
            }
        }
    }
    while applied.join_next().await.is_some() {}
    if let Err(error) = ledger.release_batches(&worker.options.owner).await {
        tracing::warn!(%error, "failed to release decision batches; another worker goes on when their leases expire");
    }
}

async fn apply_in_task(worker: WorkerContext, batch: LeasedBatch) -> String {
    tracing::info!(batch = batch.id, decision = batch.decision.name(), "applying a decision batch");
    apply(&worker, &batch).await;
    batch.id
}

/// Applies a batch until no payment is left, it is stopped, another worker has it, or this worker stops. It ends between
/// two payments.
async fn apply(worker: &WorkerContext, batch: &LeasedBatch) {
    let mut pace = interval_at(Instant::now() + batch.wait, batch.rate.interval());
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failing = false;
    while !worker.stop.is_cancelled() {
        let result = apply_next(worker, batch, &mut pace).await;
        match &result {
            Ok(true) => return,
            Ok(false) if failing => tracing::info!(batch = batch.id, "a decision batch goes on"),
            Ok(false) => {}
            Err(error) if !failing => tracing::warn!(batch = batch.id, %error, "a decision batch waits for a backend"),
            Err(_) => {}
        }
        failing = result.is_err();
        if failing {
            tokio::select! {
                () = sleep(RETRY_AFTER) => {}
                () = worker.stop.cancelled() => return,
            }
        }
    }
}

/// Decides about the next payments; true: the batch is over for this worker.
async fn apply_next(worker: &WorkerContext, batch: &LeasedBatch, pace: &mut Interval) -> Result<bool, LedgerError> {
    let ledger = &worker.backends.ledger;
    let turns = ledger.next_turns(&batch.id, TURNS_AT_ONCE).await?;
    if turns.is_empty() {
        return Ok(true);
    }
    let providers = provider_names(ledger).await?;
    for turn in &turns {
        tokio::select! {
            _ = pace.tick() => {}
            () = worker.stop.cancelled() => return Ok(true),
        }
        let at = TurnAt { batch, turn, worker: &worker.options.owner };
        if decide(worker, &at, &providers).await? == TurnResult::Lost {
            tracing::info!(batch = batch.id, "a decision batch was stopped, or another worker has it");
            return Ok(true);
        }
    }
    Ok(false)
}

async fn decide(
    worker: &WorkerContext,
    at: &TurnAt<'_>,
    providers: &[ProviderName],
) -> Result<TurnResult, LedgerError> {
    let ledger = &worker.backends.ledger;
    let decided = if at.batch.decision.resolution().needs_resend() {
        resend(worker, at, providers).await
    } else {
        ledger.apply_turn(at, at.turn.member.seen_fence).await
    };
    match decided {
        // A rule of the database refuses this payment, or its row cannot be read: the others may be fine.
        Err(error @ (LedgerError::StatementFailed(_) | LedgerError::Corrupt(_))) => {
            ledger.refuse_turn_as(at, LEDGER_REFUSED, &error.to_string()).await
        }
        Ok(TurnResult::Applied) => {
            worker.new_events.notify_one();
            Ok(TurnResult::Applied)
        }
        decided => decided,
    }
}

async fn resend(
    worker: &WorkerContext,
    at: &TurnAt<'_>,
    providers: &[ProviderName],
) -> Result<TurnResult, LedgerError> {
    let ledger = &worker.backends.ledger;
    let (resolution, actor) = (at.batch.decision.resolution(), at.batch.actor());
    let resender = Resender { ledger, providers, resolution, actor };
    let reloaded = match resender.prepare(&at.turn.member.id).await {
        Ok(reloaded) => reloaded,
        Err(ResendError::Ledger(error)) => return Err(error),
        Err(refused) => return ledger.refuse_turn_as(at, refused.code(), &refused.to_string()).await,
    };
    // If the payment has changed since it was selected, the turn names the reason.
    let seen = at.turn.member.seen_fence.unwrap_or(reloaded.fence);
    ledger.apply_turn(at, Some(seen)).await
}
