//! Held messages: jobs of a format that this worker can read are recorded, and messages that waited too long are rejected.
//!
//! Each worker asks for this duty by the version that it reads. So an older worker of a rolling deployment never takes
//! the turn of a newer one. Recording comes first and the deletion second: a repeated record changes nothing.

use std::time::Duration;

use tokio::time::Instant;

use super::{BATCH, RoundRobin, SweepError};
use crate::domain::job::{InvalidMessage, InvalidReason, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::BacklogRecord;
use crate::ledger::held::HeldMessage;
use crate::queue::message::VERSION;
use crate::worker::WorkerContext;
use crate::worker::decode::{DecodedMessage, decode_delivery};
use crate::worker::lane::LaneSettings;
use crate::worker::publish::MessageCopy;
use crate::worker::rejections::rejected_message;
use crate::worker::settings_sync::LoadedSettings;

/// Sweeps between two turns of this duty: a minute.
const SWEEPS: u32 = 12;
const INVALID_MESSAGE: &str = "held message rejected";

/// When this process asks for the duty again.
#[derive(Debug, Default)]
pub(super) struct HeldMessages {
    asks_at: Option<Instant>,
}

impl HeldMessages {
    /// Reads the held messages, if this worker gets the duty.
    pub(super) async fn process(&mut self, worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
        let interval = worker.options.sweep_every * SWEEPS;
        if self.asks_at.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        self.asks_at = Some(Instant::now() + interval);
        let ledger = &worker.backends.ledger;
        if !ledger.lease_duty(&format!("held_messages_{VERSION}"), interval * 3 / 4).await? {
            return Ok(());
        }
        let with_held = ledger.lanes_with_held().await?;
        // Without a row there is no maximum age, and no rule to judge a job by. A row that cannot be used is reported by
        // its lane.
        let rows = with_held.into_iter().filter_map(|lane| Some((known.providers.get(&lane)?.clone(), lane)));
        let usable = rows.filter_map(|(provider, lane)| {
            let client = worker.backends.providers.build(&provider).ok()?;
            Some((lane, LaneSettings { provider, client }))
        });
        let mut lanes = RoundRobin::new(worker, usable);
        let mut processed = Ok(());
        while let Some(((lane, settings), batches)) = lanes.next().await {
            match process_batch(worker, &lane, &settings).await {
                Ok(messages) => lanes.requeue((lane, settings), batches, messages),
                Err(error) => processed = processed.and(Err(error.into())),
            }
        }
        processed
    }
}

/// Processes the messages of one batch; an error of one holds up no other.
async fn process_batch(
    worker: &WorkerContext,
    lane: &ProviderName,
    settings: &LaneSettings,
) -> Result<u32, LedgerError> {
    let due = worker.backends.ledger.due_held(lane, VERSION, settings.provider.max_age, BATCH).await?;
    let mut processed = Ok(());
    let mut recorded = 0;
    for message in &due {
        match process(worker, message, settings).await {
            Ok(is_recorded) => recorded += u32::from(is_recorded),
            Err(error) => processed = processed.and(Err(error)),
        }
    }
    if recorded > 0 {
        tracing::info!(provider = %lane, recorded, "recorded the jobs of held messages");
    }
    processed.map(|()| u32::try_from(due.len()).unwrap_or(u32::MAX))
}

/// Whether the message's job is recorded now.
async fn process(worker: &WorkerContext, message: &HeldMessage, settings: &LaneSettings) -> Result<bool, LedgerError> {
    let ledger = &worker.backends.ledger;
    let (invalid, id) = match decode_delivery(worker, &message.body, &message.lane, Some(settings)).await? {
        DecodedMessage::Job(decoded) => {
            match ledger.record_backlog(&decoded.job, decoded.hash, Duration::ZERO).await? {
                BacklogRecord::Recorded { .. } | BacklogRecord::Known => {
                    ledger.delete_held(message).await?;
                    return Ok(true);
                }
                BacklogRecord::Conflict(invalid) => (invalid, Some(decoded.job.id)),
            }
        }
        DecodedMessage::Invalid { invalid, claimed_id } => (invalid, claimed_id),
        DecodedMessage::NewerVersion(version) => match too_old(version, message.age, settings.provider.max_age) {
            Some(invalid) => (invalid, None),
            None => return Ok(false),
        },
    };
    reject(worker, message, &invalid, id).await?;
    Ok(false)
}

/// Why a message of a newer format is held no longer.
fn too_old(version: u64, age: Duration, max_age: Duration) -> Option<InvalidMessage> {
    let seconds = max_age.as_secs();
    let detail = format!("v: {version} is a newer format, and no newer worker came within max_age_s = {seconds}");
    (age > max_age).then(|| InvalidMessage::new(InvalidReason::NewerVersion, detail))
}

/// Moves the message to the rejected ones. While those have no room, it stays held.
async fn reject(
    worker: &WorkerContext,
    message: &HeldMessage,
    invalid: &InvalidMessage,
    id: Option<JobId>,
) -> Result<(), LedgerError> {
    if worker.has_no_room_for_rejected().await? {
        return Ok(());
    }
    let reason = invalid.reason.code();
    if worker.log_throttle.admits(message.lane.as_str(), INVALID_MESSAGE, reason) {
        tracing::error!(provider = %message.lane, reason, detail = invalid.detail, "{INVALID_MESSAGE}");
    }
    let properties = serde_json::from_str(&message.properties).unwrap_or_default();
    let copy = MessageCopy { provider: message.lane.clone(), body: message.body.clone().into(), properties };
    worker.backends.ledger.reject_held(message, &rejected_message(&copy, invalid, id)).await?;
    if let Some(lane) = worker.meter.find_lane(&message.lane) {
        lane.record_rejected(reason);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_version_waits_until_max_age() {
        let judge = |age: u64| too_old(2, Duration::from_secs(age), Duration::from_secs(60));
        assert_eq!(judge(60), None);
        let invalid = judge(61).unwrap();
        assert_eq!(invalid.reason, InvalidReason::NewerVersion);
        assert_eq!(invalid.detail, "v: 2 is a newer format, and no newer worker came within max_age_s = 60");
    }
}
