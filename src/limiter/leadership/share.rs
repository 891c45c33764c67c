//! One call to this worker's own share.
//!
//! Refuses to let a job block the line that costs more than a share: it is passed over while shares last.

use crate::domain::permit_protocol::{LimiterCall, LimiterReply, PermitRequest, Shortage, SkippedRequest};
use crate::domain::quota_spec::QuotaSpec;
use crate::limiter::embedded::EmbeddedLimiter;
use crate::limiter::{Limiter as _, LimiterError};

/// How long a job that costs more than a share stands aside before it is looked at again, in microseconds: shares last for a
/// minute at least, and each look costs a job that is parked a round through the queue.
const OVERSIZED_WAIT_US: u64 = 15_000_000;

pub(super) async fn call(
    shares: &EmbeddedLimiter,
    spec: &QuotaSpec,
    call: &LimiterCall,
    of: u32,
) -> Result<LimiterReply, LimiterError> {
    let mut own = call.divided_by(spec, of);
    let spec = spec.divided_by(of);
    let mut costly = Vec::new();
    let mut fitting = Vec::new();
    for (index, want) in own.requests.iter().enumerate() {
        match want.exceeded_limit(&spec) {
            Some(limit) => {
                let why = Shortage::NoSlot;
                costly.push(SkippedRequest {
                    request_index: index,
                    limit,
                    wait_us: OVERSIZED_WAIT_US,
                    exact: false,
                    shortage: why,
                });
            }
            None => fitting.push(index),
        }
    }
    own.requests = fitting.iter().filter_map(|index| request_at(&own, *index)).collect();
    let mut reply = shares.call(&spec, &own).await?;
    let place = |index: usize| fitting.get(index).copied().unwrap_or(usize::MAX);
    reply.grants.iter_mut().for_each(|run| run.request_index = place(run.request_index));
    reply.skipped.iter_mut().for_each(|passed| passed.request_index = place(passed.request_index));
    reply.skipped.extend(costly);
    Ok(reply)
}

fn request_at(call: &LimiterCall, index: usize) -> Option<PermitRequest> {
    call.requests.get(index).cloned()
}
