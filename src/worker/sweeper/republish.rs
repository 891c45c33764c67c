//! Republishing of jobs: their messages are built from the ledger and published to their lanes.
//!
//! A job whose built message differs from the recorded one goes to manual review. Lanes that are paused, disabled or
//! deleted get no messages, because no worker would consume them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};

use super::overdue::{GRACE_BUSY, LaneView, overdue_query};
use super::{BATCH, RoundRobin, SweepError};
use crate::domain::provider::{Provider, ProviderName};
use crate::faults::{self, CrashPoint};
use crate::ledger::upkeep::JobToRepublish;
use crate::ledger::{FencedWrite, LedgerError};
use crate::queue::message::{decode_recorded, encode};
use crate::queue::{Destination, OutgoingMessage, Properties, headers};
use crate::worker::WorkerContext;
use crate::worker::settings_sync::LoadedSettings;
use crate::worker::supervisor::WorkerStatus;
use crate::worker::unconfirmed::publish_with_timeout;

/// Jobs without a message are published this long before they are due; a worker then waits for the exact instant.
const PUBLISH_AHEAD: Duration = Duration::from_secs(30);
/// Publishes in progress at once: a broker confirms many together.
const CONCURRENT_PUBLISHES: usize = 64;

pub(super) async fn republish_all(
    worker: &WorkerContext,
    progress: &WorkerStatus,
    known: &LoadedSettings,
) -> Result<(), SweepError> {
    let refused = |row: &Provider| progress.lanes.get(&row.name).is_some_and(|pauses| pauses.is_queue_refused());
    let open = worker.backends.ledger.lanes_with_open_jobs().await?;
    let takes = |row: &&Arc<Provider>| {
        let is_open = open.contains(&row.name) && row.enabled && !row.paused;
        is_open && !refused(row) && !worker.unconfirmed.blocks(&row.name)
    };
    let flowing = known.providers.values().filter(takes);
    let (mut result, mut visited) = (Ok(()), BTreeSet::new());
    let mut lanes = RoundRobin::new(worker, flowing);
    while let Some((provider, batches)) = lanes.next().await {
        // Without a lane of its own, this worker has no reason against the usual rule.
        let pauses = progress.lanes.get(&provider.name);
        let healthy_for = pauses.map_or(Some(Duration::MAX), |pauses| pauses.healthy_for());
        let published = match visited.insert(&provider.name) {
            true => republish_overdue(worker, provider, healthy_for).await,
            false => publish_unqueued(worker, &provider.name).await,
        };
        match published {
            Ok(jobs) => lanes.requeue(provider, batches, jobs),
            // Where one message cannot be published, the next batch would fail too.
            Err(error) => result = result.and(Err(error)),
        }
    }
    result
}

/// Republishes the overdue jobs of a lane, once per sweep, and the first batch of jobs without a message.
async fn republish_overdue(
    worker: &WorkerContext,
    provider: &Provider,
    healthy_for: Option<Duration>,
) -> Result<u32, SweepError> {
    let (lane, ledger) = (&provider.name, &worker.backends.ledger);
    // Without a queue, the message would be unroutable; the lane declares the queue when it opens.
    let Some(ready) = worker.backends.queue.depth(lane).await? else { return Ok(0) };
    let view = LaneView { ready, jobs_per_second: provider.least_per_second(), healthy_for };
    let back = match overdue_query(view, worker.options.sweep_every) {
        Some(which) => ledger.take_overdue(lane, &which).await?,
        None => Vec::new(),
    };
    if !back.is_empty() {
        let most = back.iter().map(|job| job.sweeps).max().unwrap_or_default();
        tracing::warn!(provider = %lane, jobs = back.len(), ready, most_copies = most, "republishing overdue jobs");
    }
    publish_all(worker, lane, back).await?;
    publish_unqueued(worker, lane).await
}

/// Publishes a batch of jobs without a message: all payments of a day may be due at midnight.
async fn publish_unqueued(worker: &WorkerContext, lane: &ProviderName) -> Result<u32, SweepError> {
    let due = worker.backends.ledger.take_unqueued(lane, PUBLISH_AHEAD, GRACE_BUSY, BATCH).await?;
    let taken = u32::try_from(due.len()).unwrap_or(u32::MAX);
    publish_all(worker, lane, due).await?;
    Ok(taken)
}

async fn publish_all(worker: &WorkerContext, lane: &ProviderName, jobs: Vec<JobToRepublish>) -> Result<(), SweepError> {
    let mut published = stream::iter(jobs).map(|job| publish(worker, lane, job)).buffer_unordered(CONCURRENT_PUBLISHES);
    let mut first = Ok(());
    while let Some(done) = published.next().await {
        if first.is_ok() {
            first = done;
        }
    }
    first
}

/// Publishes one copy. If that fails, the next is published after the job's interval: this one was used up.
async fn publish(worker: &WorkerContext, lane: &ProviderName, recorded: JobToRepublish) -> Result<(), SweepError> {
    let Some(body) = rebuild_or_review(worker, &recorded).await? else { return Ok(()) };
    let properties = Properties {
        message_id: Some(recorded.job.id.as_str().to_owned()),
        content_type: Some("application/json".to_owned()),
        ..Properties::default()
    };
    let properties = headers::with_copy_number(properties, recorded.copy);
    let message = OutgoingMessage { destination: Destination::Lane(lane.clone()), body, properties };
    publish_with_timeout(worker, lane, message).await?;
    faults::crash(CrashPoint::SweeperAfterPublish);
    Ok(())
}

/// The job's message; if it differs from the recorded one, the job goes to manual review instead.
pub(in crate::worker) async fn rebuild_or_review(
    worker: &WorkerContext,
    recorded: &JobToRepublish,
) -> Result<Option<Bytes>, LedgerError> {
    let message = rebuild_message(recorded);
    if message.is_none() {
        let reason = "its message cannot be made from the ledger: content and hash differ";
        tracing::error!(job = %recorded.job.id, reason);
        if worker.backends.ledger.move_to_review(&recorded.job.id, reason).await? == FencedWrite::Applied {
            worker.outbox.notify_unleased();
        }
    }
    Ok(message)
}

/// The job's message, if it equals the recorded one. An emptied payload, or a row that was changed by hand, gives
/// another hash.
pub(in crate::worker) fn rebuild_message(recorded: &JobToRepublish) -> Option<Bytes> {
    let body = encode(&recorded.job);
    // The job was validated when it was recorded; rules for new jobs must not stop it now.
    let decoded = decode_recorded(&body, &recorded.job.provider).ok()?;
    (decoded.hash == recorded.hash && decoded.job == recorded.job).then(|| body.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::job::{BODY_BYTES_MAX, Job};

    fn recorded(body: &str) -> JobToRepublish {
        let decoded = decode_recorded(body.as_bytes(), &ProviderName::new("acme").unwrap()).unwrap();
        JobToRepublish { job: decoded.job, hash: decoded.hash, sweeps: 1, copy: 0 }
    }

    #[test]
    fn rebuilt_message_equals_the_original() {
        for body in [
            r#"{"id":"p-1","amount":1299,"currency":"EUR"}"#,
            r#"{"id":"p-1","amount":1,"currency":"EUR","payload":{"card":"4242424242424242","auth":"Bearer 0123456789abcdefghij"}}"#,
            r#"{ "v": 1, "id": "p-1", "provider": "acme", "amount": 1, "currency": "EUR", "account": "a", "cost": 7,
                 "reference": "Rechnung \u00e9 \" \n", "idempotency_key": "k", "priority": 9,
                 "not_before": "2027-01-31T23:00:00.0005+01:00", "expires_at": "2027-02-01T00:00:00.9Z",
                 "payload": { "b" : 1.0e2, "a": "\u0041", "a b": [ ] } }"#,
        ] {
            let recorded = recorded(body);
            assert!(rebuild_message(&recorded).is_some(), "{body}");
        }
    }

    #[test]
    fn changed_row_gives_no_message() {
        let good = recorded(r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":1}}"#);
        let altered: [fn(&mut Job); 4] = [
            |job| job.payload = None,
            |job| job.payload = Some("{}".to_owned()),
            |job| job.amount += 1,
            |job| job.payload = Some("no JSON".to_owned()),
        ];
        for alter in altered {
            let mut recorded = good.clone();
            alter(&mut recorded.job);
            assert_eq!(rebuild_message(&recorded), None, "{:?}", recorded.job);
        }
    }

    /// What the lane name says need not be in the message, so a message of the largest size still fits.
    #[test]
    fn largest_message_can_be_rebuilt() {
        let head = r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":""#;
        let body = format!("{head}{}\"}}}}", "x".repeat(BODY_BYTES_MAX - head.len() - 3));
        assert_eq!(body.len(), BODY_BYTES_MAX);
        assert!(rebuild_message(&recorded(&body)).is_some());
    }
}
