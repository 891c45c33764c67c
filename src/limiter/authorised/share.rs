//! One call to this worker's own share.
//!
//! Refuses to let a job block the line that costs more than a share: it is passed over while shares last.

use crate::domain::decision::{Call, PassedOver, Reply, Shortage, Want};
use crate::domain::quota_spec::QuotaSpec;
use crate::limiter::embedded::EmbeddedLimiter;
use crate::limiter::{Limiter as _, LimiterError};

/// How long a job that costs more than a share stands aside before it is looked at again, in microseconds: shares last for a
/// minute at least, and each look costs a job that is parked a round through the queue.
const TOO_COSTLY_US: u64 = 15_000_000;

pub(super) async fn call(
    shares: &EmbeddedLimiter,
    spec: &QuotaSpec,
    call: &Call,
    of: u32,
) -> Result<Reply, LimiterError> {
    let mut own = call.share(spec, of);
    let spec = spec.share(of);
    let mut costly = Vec::new();
    let mut fitting = Vec::new();
    for (index, want) in own.wants.iter().enumerate() {
        match want.outgrown(&spec) {
            Some(limit) => {
                let why = Shortage::NoSlot;
                costly.push(PassedOver { want: index, limit, wait_us: TOO_COSTLY_US, exact: false, why });
            }
            None => fitting.push(index),
        }
    }
    own.wants = fitting.iter().filter_map(|index| call_want(&own, *index)).collect();
    let mut reply = shares.call(&spec, &own).await?;
    let place = |index: usize| fitting.get(index).copied().unwrap_or(usize::MAX);
    reply.granted.iter_mut().for_each(|run| run.want = place(run.want));
    reply.passed_over.iter_mut().for_each(|passed| passed.want = place(passed.want));
    reply.passed_over.extend(costly);
    Ok(reply)
}

fn call_want(call: &Call, index: usize) -> Option<Want> {
    call.wants.get(index).cloned()
}
