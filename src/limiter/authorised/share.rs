//! One call to this worker's own share.
//!
//! Refuses to let a job block the line that costs more than a share: it is passed over while shares last.

use crate::domain::decision::{Call, PassedOver, Reply, Want};
use crate::domain::quota_spec::QuotaSpec;
use crate::limiter::embedded::EmbeddedLimiter;
use crate::limiter::{Limiter as _, LimiterError};

/// How long a job that costs more than a share stands aside before it is looked at again, in microseconds.
const TOO_COSTLY_US: u64 = 1_000_000;

pub(super) async fn call(
    shares: &EmbeddedLimiter,
    spec: &QuotaSpec,
    call: &Call,
    of: u32,
) -> Result<Reply, LimiterError> {
    let mut own = call.share(spec, of);
    let spec = spec.share(of);
    let too_costly = |want: &Want| {
        let cost_max = spec.cost_max(want.kind, &want.subjects);
        // What is closed is waited for by all.
        cost_max > 0 && want.cost > cost_max
    };
    let (costly, fitting): (Vec<usize>, Vec<usize>) =
        (0..own.wants.len()).partition(|index| own.wants.get(*index).is_some_and(too_costly));
    own.wants = fitting.iter().filter_map(|index| call_want(&own, *index)).collect();
    let mut reply = shares.call(&spec, &own).await?;
    let place = |index: usize| fitting.get(index).copied().unwrap_or(usize::MAX);
    reply.granted.iter_mut().for_each(|run| run.want = place(run.want));
    reply.passed_over.iter_mut().for_each(|passed| passed.want = place(passed.want));
    let tightest = (0..spec.limits.len()).min_by_key(|index| spec.limits.get(*index).map(|limit| limit.cost_max()));
    let limit = tightest.unwrap_or(0);
    let aside = |want| PassedOver { want, limit, wait_us: TOO_COSTLY_US, exact: false };
    reply.passed_over.extend(costly.into_iter().map(aside));
    Ok(reply)
}

fn call_want(call: &Call, index: usize) -> Option<Want> {
    call.wants.get(index).cloned()
}
