//! One limiter call on this worker's share of the limits.
//!
//! A request that costs more than the share is skipped while shares last, so that it does not block the wait queue.
//! See `docs/decisions/0015-fallback-shares-without-redis.md`.

use crate::domain::permit_protocol::{LimiterCall, LimiterReply, PermitRequest, Shortage, SkippedRequest};
use crate::domain::quota_spec::QuotaSpec;
use crate::limiter::embedded::EmbeddedLimiter;
use crate::limiter::{Limiter as _, LimiterError};

/// How long a request that costs more than a share is deferred before the next try, in microseconds. Shares last for a
/// minute at least, and each try of a delayed job costs a round through the queue.
const OVERSIZED_WAIT_US: u64 = 15_000_000;

pub(super) async fn call(
    shares: &EmbeddedLimiter,
    spec: &QuotaSpec,
    call: &LimiterCall,
    workers: u32,
) -> Result<LimiterReply, LimiterError> {
    let mut own = call.divided_by(spec, workers);
    let spec = spec.divided_by(workers);
    let mut oversized = Vec::new();
    let mut fitting = Vec::new();
    for (index, request) in own.requests.iter().enumerate() {
        match request.exceeded_limit(&spec) {
            Some(limit) => {
                oversized.push(SkippedRequest {
                    request_index: index,
                    limit,
                    wait_us: OVERSIZED_WAIT_US,
                    exact: false,
                    shortage: Shortage::NoSlot,
                });
            }
            None => fitting.push(index),
        }
    }
    own.requests = fitting.iter().filter_map(|index| request_at(&own, *index)).collect();
    let mut reply = shares.call(&spec, &own).await?;
    let original_index = |index: usize| fitting.get(index).copied().unwrap_or(usize::MAX);
    reply.grants.iter_mut().for_each(|grant| grant.request_index = original_index(grant.request_index));
    reply.skipped.iter_mut().for_each(|skipped| skipped.request_index = original_index(skipped.request_index));
    reply.skipped.extend(oversized);
    Ok(reply)
}

fn request_at(call: &LimiterCall, index: usize) -> Option<PermitRequest> {
    call.requests.get(index).cloned()
}
