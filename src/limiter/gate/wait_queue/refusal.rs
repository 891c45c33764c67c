//! Refusals of waiters: those that the limiter is never asked for, and what a refusal says.
//!
//! A waiter whose account is blocked by a rule, or whose cost no window can admit, is refused as soon as it arrives.

use std::time::Duration;

use super::waiter::EnforcedLimit;
use super::{CountedSubjects, PermitWaiter};
use crate::domain::permit_protocol::{CallKind, Subject};
use crate::domain::quota_spec::QuotaSpec;
use crate::limiter::gate::{BlockReason, GateRefusal, RefusalScope};

/// Wait of a job whose account is blocked.
const BLOCKED_WAIT: Duration = Duration::from_secs(60);

/// The subjects that count a waiter, or why the limiter is not called for it: its account is blocked, or no window can
/// ever admit its cost.
pub(super) fn admissible_subjects<T>(
    waiter: &PermitWaiter<T>,
    spec: &QuotaSpec,
) -> Result<CountedSubjects, BlockReason> {
    let kind = waiter.scope.kind();
    let Ok(subjects) = waiter.scope.subjects(spec) else {
        return Err(BlockReason::AccountBlocked { account: waiter.scope.account.clone().unwrap_or_default() });
    };
    // Every open limit admits a cost of 1. Jobs wait while a limit is closed (0).
    if waiter.cost > 1
        && let Some((limit, max_cost)) = spec.tightest_limit(kind, &subjects)
        && max_cost > 0
        && waiter.cost > max_cost
    {
        return Err(BlockReason::Oversized { limit, max_cost });
    }
    let counters = subjects.iter().flat_map(|subject| spec.subject_counters(subject));
    let held_counters = counters.filter(|counter| counter.is_held() && counter.applies(kind)).collect();
    let enforced = enforced_limits(&subjects, kind, spec);
    Ok(CountedSubjects { subjects, held_counters, enforced })
}

/// The limits of the subjects that may refuse a call of this kind.
fn enforced_limits(subjects: &[Subject], kind: CallKind, spec: &QuotaSpec) -> Vec<EnforcedLimit> {
    let of_subject = |(subject, own): (usize, &Subject)| {
        let counters = own.limits.iter().zip(spec.subject_counters(own));
        let enforced = counters.filter(|(_, counter)| !counter.shadow && counter.applies(kind));
        enforced.map(|(limit, _)| EnforcedLimit { subject, limit: limit.index }).collect::<Vec<_>>()
    };
    subjects.iter().enumerate().flat_map(of_subject).collect()
}

pub(super) fn inadmissible_refusal(reason: BlockReason) -> GateRefusal {
    if matches!(reason, BlockReason::Oversized { .. }) {
        return GateRefusal { retry_after: Duration::ZERO, exact: true, reason, scope: RefusalScope::Job };
    }
    GateRefusal { retry_after: BLOCKED_WAIT, exact: false, reason, scope: RefusalScope::Account }
}

pub(super) fn refusal_for(wait: Duration, exact: bool, reason: &BlockReason, scope: RefusalScope) -> GateRefusal {
    GateRefusal { retry_after: wait.max(Duration::from_millis(1)), exact, reason: reason.clone(), scope }
}
