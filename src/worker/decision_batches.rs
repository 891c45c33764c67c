//! The application of decision batches: a worker leases a batch and decides about its payments, one after the other.
//!
//! Each outcome is written in the transaction of the payment's own change, so a crash at any point neither skips a
//! payment nor decides twice. A payment that is sent again is `waiting` in the ledger before its message is published. If
//! the worker is lost in between, the sweeper publishes the message. Rate and lease are rows of the database, so a batch
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
use crate::queue::QueueError;

/// Time between two looks for batches.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Payments that are read at once.
const TURNS_AT_ONCE: u32 = 100;
/// Pause after a backend failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Code of a refusal by the rules of the database.
const LEDGER_REFUSED: &str = "ledger_refused";

/// Why a turn is tried again later. Nothing is lost, and nothing is done twice.
#[derive(Debug, thiserror::Error)]
enum TurnError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Queue(#[from] QueueError),
}

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
async fn apply_next(worker: &WorkerContext, batch: &LeasedBatch, pace: &mut Interval) -> Result<bool, TurnError> {
    let ledger = &worker.backends.ledger;
    let turns = ledger.next_turns(&batch.id, TURNS_AT_ONCE).await?;
    if turns.is_empty() {
        return Ok(true);
    }
    let providers = provider_names(ledger).await?;
    let mut broker_answers = false;
    for turn in &turns {
        tokio::select! {
            _ = pace.tick() => {}
            () = worker.stop.cancelled() => return Ok(true),
        }
        if batch.decision.resolution().needs_resend() && !broker_answers {
            worker.backends.queue.ping().await?;
            broker_answers = true;
        }
        let at = TurnAt { batch, turn, worker: &worker.options.owner };
        let (result, is_published) = decide(worker, &at, &providers).await?;
        broker_answers &= is_published;
        if result == TurnResult::Lost {
            tracing::info!(batch = batch.id, "a decision batch was stopped, or another worker has it");
            return Ok(true);
        }
    }
    Ok(false)
}

/// The turn's result, and whether the broker has all messages.
type Decided = (TurnResult, bool);

async fn decide(worker: &WorkerContext, at: &TurnAt<'_>, providers: &[ProviderName]) -> Result<Decided, LedgerError> {
    let ledger = &worker.backends.ledger;
    let decided = if at.batch.decision.resolution().needs_resend() {
        resend(worker, at, providers).await
    } else {
        ledger.apply_turn(at, at.turn.member.seen_fence).await.map(|result| (result, true))
    };
    match decided {
        // A rule of the database refuses this payment, or its row cannot be read: the others may be fine.
        Err(error @ (LedgerError::StatementFailed(_) | LedgerError::Corrupt(_))) => {
            Ok((ledger.refuse_turn_as(at, LEDGER_REFUSED, &error.to_string()).await?, true))
        }
        Ok((TurnResult::Applied, is_published)) => {
            worker.outbox.notify_unleased();
            Ok((TurnResult::Applied, is_published))
        }
        decided => decided,
    }
}

/// The ledger first, then the broker. A message that cannot be published is published by the sweeper.
async fn resend(worker: &WorkerContext, at: &TurnAt<'_>, providers: &[ProviderName]) -> Result<Decided, LedgerError> {
    let (ledger, queue) = (&worker.backends.ledger, worker.backends.queue.as_ref());
    let (resolution, actor) = (at.batch.decision.resolution(), at.batch.actor());
    let card_numbers = worker.options.card_numbers;
    let resender = Resender { ledger, queue, providers, card_numbers, resolution, actor };
    let (reloaded, message) = match resender.prepare(&at.turn.member.id).await {
        Ok(prepared) => prepared,
        Err(ResendError::Ledger(error)) => return Err(error),
        Err(refused) => return Ok((ledger.refuse_turn_as(at, refused.code(), &refused.to_string()).await?, true)),
    };
    if at.turn.member.seen_fence.is_some_and(|seen| seen != reloaded.fence) {
        // The check that follows names the reason.
        return Ok((ledger.apply_turn(at, at.turn.member.seen_fence).await?, true));
    }
    let result = ledger.apply_turn(at, Some(reloaded.fence)).await?;
    if result != TurnResult::Applied {
        return Ok((result, true));
    }
    let published = queue.publish(message).await;
    if let Err(error) = &published {
        let job = at.turn.member.id.as_str();
        tracing::warn!(batch = at.batch.id, job, %error, "its message was not published; the sweeper will publish it");
    }
    Ok((result, published.is_ok()))
}
