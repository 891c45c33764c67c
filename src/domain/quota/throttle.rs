//! Limiter reply in the form of redis-cell's `CL.THROTTLE`, for readers who know GCRA by that name.
//! <https://github.com/brandur/redis-cell#response>
//!
//! It only converts the reply and decides nothing.

use std::time::Duration;

use crate::domain::permit_protocol::{LimiterReply, RefusalReason};
use crate::domain::quota_spec::QuotaSpec;

/// The response for one permit at its start: a permit that was booked ahead is treated as a call at that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleResponse {
    pub limited: bool,
    /// Requests that may come at once: for GCRA, its burst and one more.
    pub limit: u32,
    /// Requests that may still come at once.
    pub remaining: u64,
    /// `None` if it was allowed, or if it costs more than the limit.
    pub retry_after: Option<Duration>,
    /// Time until nothing is used any more.
    pub reset_after: Duration,
}

impl ThrottleResponse {
    /// The response of the deciding limit to a call for one permit of this cost.
    pub fn from_reply(spec: &QuotaSpec, cost: u32, reply: &LimiterReply) -> Self {
        let limit = spec.limits.get(reply.deciding_limit).map_or(0, |limit| limit.cost_max());
        let ahead_us = reply.grants.last().map_or(0, |grant| grant.wait_us);
        let retry_after = reply.refused.filter(|refused| match refused.reason {
            RefusalReason::Limit { .. } => cost <= limit,
            _ => true,
        });
        Self {
            limited: reply.refused.is_some(),
            limit,
            remaining: reply.remaining,
            retry_after: retry_after.map(|refused| Duration::from_micros(refused.wait_us)),
            reset_after: Duration::from_micros(reply.reset_us.saturating_sub(ahead_us)),
        }
    }

    /// The values as `CL.THROTTLE` prints them: whole seconds, rounded up, and -1 for no retry.
    pub fn seconds(&self) -> [i64; 5] {
        let whole = |duration: Duration| {
            i64::try_from(duration.as_secs()).unwrap_or(i64::MAX) + i64::from(duration.subsec_nanos() > 0)
        };
        [
            i64::from(self.limited),
            i64::from(self.limit),
            i64::try_from(self.remaining).unwrap_or(i64::MAX),
            self.retry_after.map_or(-1, whole),
            whole(self.reset_after),
        ]
    }
}
