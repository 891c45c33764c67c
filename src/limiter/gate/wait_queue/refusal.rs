//! Refusals of waiters: those that the limiter is never asked for, and the answer itself.
//!
//! A waiter whose account is blocked by a rule, or whose cost no window can admit, is refused as soon as it arrives.

use std::time::Duration;

use super::PermitWaiter;
use crate::domain::quota_spec::QuotaSpec;
use crate::limiter::gate::{AcquireResult, BlockReason, GateRefusal, RefusalScope};

/// Wait of a job whose account is blocked.
const BLOCKED_WAIT: Duration = Duration::from_secs(60);

/// Why the limiter is not called for a waiter: its account is blocked, or no window can ever admit its cost.
pub(super) fn inadmissible_by(waiter: &PermitWaiter, spec: &QuotaSpec) -> Option<BlockReason> {
    let Ok(subjects) = waiter.scope.subjects(spec) else {
        return Some(BlockReason::AccountBlocked { account: waiter.scope.account.clone().unwrap_or_default() });
    };
    // Every open limit admits a cost of 1.
    if waiter.cost <= 1 {
        return None;
    }
    let (limit, max_cost) = spec.tightest_limit(waiter.scope.kind(), &subjects)?;
    // Jobs wait while a limit is closed (0).
    (max_cost > 0 && waiter.cost > max_cost).then_some(BlockReason::Oversized { limit, max_cost })
}

pub(super) fn refuse_inadmissible(waiter: PermitWaiter, reason: &BlockReason) {
    let (wait, exact, scope) = match reason {
        BlockReason::Oversized { .. } => (Duration::ZERO, true, RefusalScope::Job),
        _ => (BLOCKED_WAIT, false, RefusalScope::Account),
    };
    refuse(waiter, wait, exact, reason, scope);
}

pub(super) fn refuse(waiter: PermitWaiter, wait: Duration, exact: bool, reason: &BlockReason, scope: RefusalScope) {
    let never = matches!(reason, BlockReason::Oversized { .. });
    let retry_after = if never { Duration::ZERO } else { wait.max(Duration::from_millis(1)) };
    // A cancelled waiter needs no answer.
    let reason = reason.clone();
    let _ = waiter.reply.send(AcquireResult::Refused(GateRefusal { retry_after, exact, reason, scope }));
}
