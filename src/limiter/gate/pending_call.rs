//! One call on its way: what it asks for, what it settles, and what must be kept of it if it is not heard.
//!
//! Refuses to ask for permits before the store's clock can be compared: a first call takes nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::permit::PendingRelease;
use super::release::permit_releases;
use super::wait_queue::RequestBatch;
use crate::domain::permit_protocol::{CounterSeeds, LimiterCall, LimiterReply, RebuildData};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// So many permits and settlements at once are a crowd.
const BATCH_MIN: usize = 4;
/// How long the next of a crowd gather: a call costs the store as much as that of many, and no limit holds anybody back.
const BATCH_DELAY: Duration = Duration::from_millis(2);

/// A call whose reply has not arrived.
pub(super) struct PendingCall {
    pub call: LimiterCall,
    pub spec: Arc<QuotaSpec>,
    pub sent_at: Instant,
    pub batches: Vec<RequestBatch>,
    /// As it was before it was packed: other settings may want it packed otherwise.
    pub releases: Vec<PendingRelease>,
    pub pause_until: Option<Instant>,
}

/// What a new call is made of.
pub(super) struct CallInput {
    pub spec: Arc<QuotaSpec>,
    pub batches: Vec<RequestBatch>,
    pub releases: Vec<PendingRelease>,
    pub pause_until: Option<Instant>,
    pub rebuild: Option<RebuildData>,
    pub seeds: Option<CounterSeeds>,
    pub invalidate_epoch: Option<Micros>,
}

impl PendingCall {
    pub fn new(load: CallInput, incarnation: u64, number: u64, run_id: String) -> Self {
        let sent_at = Instant::now();
        let CallInput { spec, batches, releases, pause_until, rebuild, seeds, invalidate_epoch } = load;
        let call = LimiterCall {
            incarnation,
            number,
            requests: batches.iter().map(|group| group.request.clone()).collect(),
            releases: permit_releases(&releases, &spec, sent_at),
            pause: pause_until.map(|until| until.saturating_duration_since(sent_at)),
            rebuild,
            seeds,
            invalidate_epoch,
            run_id,
        };
        Self { call, spec, sent_at, batches, releases, pause_until }
    }

    /// When the next call is worth making, as far as this one says: at once, unless a crowd passes without a limit.
    pub fn next_call_at(&self, reply: &LimiterReply) -> Instant {
        self.sent_at + batch_delay(self.releases.len(), reply)
    }
}

/// How long after a call its next is worth making, by what it settled and was granted.
fn batch_delay(settled: usize, reply: &LimiterReply) -> Duration {
    let granted = usize::try_from(reply.permits()).unwrap_or(usize::MAX);
    let is_crowd = granted.saturating_add(settled) >= BATCH_MIN;
    if is_crowd && granted > 0 && reply.refused.is_none() { BATCH_DELAY } else { Duration::ZERO }
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
            // Nobody asked: whoever does next is not one of a crowd.
            (0, 10 * BATCH_MIN, false, Duration::ZERO),
            // The wait is the limit's to name.
            (10 * BATCH_MIN, 0, true, Duration::ZERO),
        ];
        for (granted, settled, is_refused, expected) in table {
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
            assert_eq!(batch_delay(settled, &reply), expected, "{granted} granted, {settled} settled, {is_refused}");
        }
    }
}
