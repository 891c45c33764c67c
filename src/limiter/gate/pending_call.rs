//! A limiter call in flight: its requests, its releases, and what a repeat or a later call needs of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::release::{PendingRelease, permit_releases};
use super::wait_queue::RequestBatch;
use crate::domain::permit_protocol::{CounterSeeds, LimiterCall, LimiterReply, RebuildData};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// Smallest number of permits and releases in one call after which the next call is delayed.
const BATCH_MIN: usize = 4;
/// Delay of the next call, so that it gathers more requests. A call costs the store as much for one request as for
/// many, and at this point no limit delays any of them.
const BATCH_DELAY: Duration = Duration::from_millis(2);

/// A call whose reply has not arrived.
#[derive(Debug)]
pub(crate) struct PendingCall {
    pub call: LimiterCall,
    pub spec: Arc<QuotaSpec>,
    pub sent_at: Instant,
    pub batches: Vec<RequestBatch>,
    /// The releases before they were grouped, because other settings may group them in another way.
    pub releases: Vec<PendingRelease>,
    pub pause_until: Option<Instant>,
}

/// The parts of a new call.
pub(super) struct CallInput {
    pub spec: Arc<QuotaSpec>,
    pub batches: Vec<RequestBatch>,
    pub releases: Vec<PendingRelease>,
    pub pause_until: Option<Instant>,
    pub rebuild: Option<RebuildData>,
    pub seeds: Option<CounterSeeds>,
    pub invalidate_epoch: Option<Micros>,
    pub look_ahead: Duration,
}

/// The identity of a new call: its gate, its number, and the run of the store that it is for.
pub(super) struct CallIdentity {
    pub incarnation: u64,
    pub number: u64,
    pub run_id: String,
}

impl PendingCall {
    pub(super) fn new(input: CallInput, identity: CallIdentity, sent_at: Instant) -> Self {
        let CallIdentity { incarnation, number, run_id } = identity;
        let CallInput { spec, batches, releases, pause_until, rebuild, seeds, invalidate_epoch, look_ahead } = input;
        let call = LimiterCall {
            incarnation,
            number,
            requests: batches.iter().map(RequestBatch::request).collect(),
            releases: permit_releases(&releases, &spec, sent_at),
            pause: pause_until.map(|until| until.saturating_duration_since(sent_at)),
            rebuild,
            seeds,
            invalidate_epoch,
            look_ahead,
            run_id,
        };
        Self { call, spec, sent_at, batches, releases, pause_until }
    }

    /// When the next call may be made: at once, unless many permits were granted without a limit's refusal.
    pub fn next_call_at(&self, reply: &LimiterReply) -> Instant {
        self.sent_at + batch_delay(self.releases.len(), reply)
    }
}

/// Delay between a call and the next one, by the number of its releases and grants.
fn batch_delay(released: usize, reply: &LimiterReply) -> Duration {
    let granted = usize::try_from(reply.permits()).unwrap_or(usize::MAX);
    let is_batch = granted.saturating_add(released) >= BATCH_MIN;
    if is_batch && granted > 0 && reply.refused.is_none() { BATCH_DELAY } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::permit_protocol::{LimiterRefusal, PermitGrant, RefusalReason};

    #[test]
    fn only_large_unlimited_calls_delay_the_next() {
        let table = [
            (0, 0, false, Duration::ZERO),
            (BATCH_MIN - 1, 0, false, Duration::ZERO),
            (BATCH_MIN, 0, false, BATCH_DELAY),
            (1, BATCH_MIN - 1, false, BATCH_DELAY),
            // Nothing was requested, so the next request comes alone.
            (0, 10 * BATCH_MIN, false, Duration::ZERO),
            // The limit's refusal names the wait.
            (10 * BATCH_MIN, 0, true, Duration::ZERO),
        ];
        for (granted, released, is_refused, expected) in table {
            let permits = u32::try_from(granted).unwrap();
            let reply = LimiterReply {
                now: Micros(0),
                version: 1,
                state_epoch: Micros(0),
                calls: 1,
                previous_call: 0,
                grants: vec![PermitGrant { request_index: 0, permits, wait_us: 0, origins: Vec::new() }],
                skipped: Vec::new(),
                remaining: 0,
                deciding_limit: 0,
                reset_us: 0,
                refused: is_refused.then_some(LimiterRefusal {
                    reason: RefusalReason::Paused,
                    wait_us: 1,
                    exact: true,
                }),
            };
            assert_eq!(batch_delay(released, &reply), expected, "{granted} granted, {released} released, {is_refused}");
        }
    }
}
