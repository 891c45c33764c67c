//! Republishing of jobs: their messages are built from the ledger and published to their lanes, once they are overdue.
//!
//! A job whose built message differs from the recorded one goes to manual review. Lanes that are paused, disabled or
//! deleted get no messages, because no worker would consume them.
//!
//! No broker can tell whether the first message of a due job still exists, and an overdue job is no sign of loss. On
//! billing day a lane holds 300,000 messages for an hour, and delayed jobs queue behind them. An extra copy is harmless,
//! because the ledger absorbs it, but each costs a delivery. So the copies per job are bounded.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, future, stream};

use super::{BATCH, RoundRobin, SweepError};
use crate::domain::provider::{Provider, ProviderName};
use crate::faults::{self, CrashPoint};
use crate::ledger::upkeep::{JobToRepublish, OverduePolicy};
use crate::ledger::{FencedWrite, LedgerError};
use crate::queue::message::{decode_recorded, encode};
use crate::queue::{Destination, OutgoingMessage, headers};
use crate::worker::WorkerContext;
use crate::worker::active_jobs::LEASE;
use crate::worker::publish::{job_properties, publish_with_timeout};
use crate::worker::settings_sync::LoadedSettings;
use crate::worker::supervisor::WorkerStatus;

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
    let published = stream::iter(jobs).map(|job| publish(worker, lane, job)).buffer_unordered(CONCURRENT_PUBLISHES);
    published.fold(Ok(()), |first: Result<(), SweepError>, done| future::ready(first.and(done))).await
}

/// Publishes one copy. If that fails, the next is published after the job's interval: this one was used up.
async fn publish(worker: &WorkerContext, lane: &ProviderName, recorded: JobToRepublish) -> Result<(), SweepError> {
    let Some(body) = rebuild_or_review(worker, &recorded).await? else { return Ok(()) };
    let properties = headers::with_copy_number(job_properties(&recorded.job.id), recorded.copy);
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

/// Grace of a lane with nothing ready. A delayed copy returns no later than its time, and a claim follows its delivery
/// at once. Beyond 15 s (also the longest step in which a copy waits for another worker's lease) there is no message.
pub const GRACE_EMPTY: Duration = Duration::from_secs(15);
const _: () = assert!(GRACE_EMPTY.as_secs() * 2 >= LEASE.as_secs(), "a copy waits half a lease for another worker's");
/// Least grace of a lane with messages ready.
pub const GRACE_BUSY: Duration = Duration::from_secs(5 * 60);
/// Longest grace of a lane with messages ready: a lost job of a lane that is never empty waits this long.
pub const GRACE_MAX: Duration = Duration::from_secs(60 * 60);
/// Factor on the estimated time through the lane's queue. The real rate may be a fraction of the limit: responses are
/// slow, accounts are limited, and others use the quota too.
const TRANSIT_FACTOR: f64 = 4.0;
/// Longest interval between two copies of one job. The intervals double, so that a job which queues for a day gets
/// five copies, and three more for each further day.
pub const REPUBLISH_INTERVAL_MAX: Duration = Duration::from_secs(6 * 60 * 60);
/// Least copies per lane and sweep, so that a slow lane's jobs return soon.
const BATCH_MIN: f64 = 100.0;
/// Most copies per lane and sweep; the next sweep continues.
const BATCH_MAX: f64 = 2_000.0;

/// State of a lane, as the sweeper sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaneView {
    /// Messages ready in its queue.
    pub ready: u64,
    /// Mean rate of a long backlog at least, by its row; 0 when a limit is closed.
    pub jobs_per_second: f64,
    /// Time for which jobs have been sent since its provider was last down or misconfigured; `None`: they are not sent.
    pub healthy_for: Option<Duration>,
}

/// Which of a lane's jobs to republish, with sweeps this far apart; `None`: none. While a provider is down, its overdue
/// jobs have their messages in the queue. After that, they need their time through the queue first.
pub fn overdue_query(lane: LaneView, every: Duration) -> Option<OverduePolicy> {
    let grace = grace(lane);
    if lane.ready > 0 && lane.healthy_for.is_none_or(|healthy_for| healthy_for < grace) {
        return None;
    }
    // Twice what the lane sends until the next sweep: a lane whose messages are all lost is refilled without a gap.
    let batch = (lane.jobs_per_second * every.as_secs_f64() * 2.0).clamp(BATCH_MIN, BATCH_MAX);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between the two bounds above")]
    let at_most = batch as u32;
    Some(OverduePolicy { grace, republish_after: grace, republish_interval_max: REPUBLISH_INTERVAL_MAX, at_most })
}

fn grace(lane: LaneView) -> Duration {
    if lane.ready == 0 {
        return GRACE_EMPTY;
    }
    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    let transit_s = lane.ready as f64 / lane.jobs_per_second * TRANSIT_FACTOR;
    // The transit time of a closed lane is infinite.
    Duration::try_from_secs_f64(transit_s)
        .map_or(GRACE_MAX, |transit| GRACE_BUSY.saturating_add(transit).min(GRACE_MAX))
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

    fn view(ready: u64, jobs_per_second: f64) -> LaneView {
        LaneView { ready, jobs_per_second, healthy_for: Some(Duration::MAX) }
    }

    #[test]
    fn grace_grows_with_the_queue() {
        // ready, jobs per second → seconds
        for (ready, jobs_per_second, grace_s) in [
            (0, 100.0, 15),
            (0, 0.0, 15),
            (1, 100.0, 300),
            (2_500, 100.0, 400),
            (300_000, 100.0, 3_600),
            (300_000, 5_000.0, 540),
            (1, 0.001, 3_600),
            (1, 0.0, 3_600),
            (u64::MAX, f64::MIN_POSITIVE, 3_600),
        ] {
            let got = overdue_query(view(ready, jobs_per_second), EVERY).unwrap();
            assert_eq!(got.grace.as_secs(), grace_s, "{ready} ready at {jobs_per_second}/s");
            assert_eq!((got.republish_after, got.republish_interval_max), (got.grace, REPUBLISH_INTERVAL_MAX));
        }
    }

    #[test]
    fn sweep_batch_matches_the_lane_rate() {
        for (jobs_per_second, at_most) in [(0.0, 100), (5.0, 100), (50.0, 500), (100.0, 1_000), (9_999.0, 2_000)] {
            assert_eq!(overdue_query(view(0, jobs_per_second), EVERY).unwrap().at_most, at_most);
        }
        assert_eq!(overdue_query(view(0, f64::NAN), EVERY).unwrap().at_most, 0);
    }

    #[test]
    fn unhealthy_lane_with_messages_gets_no_copies() {
        let s = Duration::from_secs;
        for (ready, healthy_for, copies) in [
            (13, None, false),
            (13, Some(s(0)), false),
            (13, Some(s(299)), false),
            (13, Some(s(301)), true),
            // Lost jobs of an empty queue return whatever the provider does.
            (0, None, true),
            (0, Some(s(0)), true),
        ] {
            let lane = LaneView { healthy_for, ..view(ready, 100.0) };
            assert_eq!(overdue_query(lane, EVERY).is_some(), copies, "{ready} ready, healthy for {healthy_for:?}");
        }
    }

    /// The bound that the documentation names: intervals double, from the grace to the longest.
    #[test]
    fn copies_per_job_grow_logarithmically() {
        let policy = overdue_query(view(300_000, 100.0), EVERY).unwrap();
        let copies = |within: Duration| {
            let (mut overdue, mut copies) = (policy.grace, 0);
            while overdue <= within {
                copies += 1;
                // As the ledger moves `sweep_after`, plus the grace.
                overdue += overdue.clamp(policy.republish_after, policy.republish_interval_max) + policy.grace;
            }
            copies
        };
        let hours = |hours: u64| Duration::from_secs(hours * 3_600);
        assert_eq!((copies(hours(1)), copies(hours(2)), copies(hours(24)), copies(hours(168))), (1, 1, 5, 26));
    }

    const EVERY: Duration = Duration::from_secs(5);
}
