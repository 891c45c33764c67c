//! A limiter call in flight: its requests, its releases, and what a repeat or a later call needs of it.
//!
//! The releases are grouped from the permits that were used or returned unused. Accounts and references that the settings
//! no longer count are left out, and so are slots of limits that no longer exist.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::wait_queue::{CountingScope, RequestBatch};
use crate::domain::permit_protocol::{
    EndedPermit, LimiterCall, LimiterReply, PermitRelease, ReleaseKind, group_releases,
};
use crate::domain::quota_spec::QuotaSpec;

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

impl PendingCall {
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

/// The slots of one granted permit, with what is needed to release them.
#[derive(Debug)]
pub(crate) struct GrantedSlots {
    /// The call that granted them.
    pub call: u64,
    pub cost: u32,
    pub scope: CountingScope,
    /// Per limit name, the instant to restore if they are not used; the same for all permits of a run.
    pub origins: Arc<[(String, u64)]>,
}

/// Slots that are to be released.
#[derive(Debug)]
pub(crate) struct PendingRelease {
    slots: GrantedSlots,
    /// When the response was read; `None`: nothing was sent.
    used_at: Option<Instant>,
}

impl GrantedSlots {
    /// The release of slots that are free a window after this response.
    pub fn used(self, at: Instant) -> PendingRelease {
        PendingRelease { slots: self, used_at: Some(at) }
    }

    /// The release of slots that are restored as they were.
    pub fn unused(self) -> PendingRelease {
        PendingRelease { slots: self, used_at: None }
    }
}

impl PendingRelease {
    pub fn scope(&self) -> &CountingScope {
        &self.slots.scope
    }
}

/// The releases of a call that is sent at this instant.
pub(super) fn permit_releases(pending: &[PendingRelease], spec: &QuotaSpec, sent_at: Instant) -> Vec<PermitRelease> {
    let names = spec.provider_counter_names();
    let ended = pending.iter().map(|PendingRelease { slots, used_at }| {
        let GrantedSlots { call, cost, scope, origins } = slots;
        let origin_of = |name: &&str| origins.iter().find(|(known, _)| known == name).map_or(0, |(_, origin)| *origin);
        let release_kind = match used_at {
            Some(at) => ReleaseKind::Used { age: sent_at.saturating_duration_since(*at) },
            None => ReleaseKind::Unused { origins: names.iter().map(origin_of).collect() },
        };
        EndedPermit { call: *call, holder: scope, cost: *cost, release_kind }
    });
    group_releases(ended, |scope| (scope.kind, scope.subjects_to_release(spec)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::permit_protocol::{CallKind, LimiterRefusal, PermitGrant, RefusalReason};
    use crate::domain::provider::{ProviderName, StoreDown};
    use crate::domain::quota_spec::LimitSpec;

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
                now: crate::domain::time::Micros(0),
                version: 1,
                state_epoch: crate::domain::time::Micros(0),
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

    #[test]
    fn answers_of_one_millisecond_are_one_release() {
        let spec = QuotaSpec {
            quota: ProviderName::new("q").unwrap(),
            version: 1,
            limits: vec![LimitSpec::sliding_log("a", 10, Duration::from_secs(1))],
            account_rules: Vec::new(),
            pacing: None,
            grant_jitter: None,
            hold_max: Duration::from_secs(1),
            send_budget: Duration::from_secs(1),
            store_down: StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        let sent_at = Instant::now() + Duration::from_secs(10);
        let slots = |call, cost| GrantedSlots {
            call,
            cost,
            scope: CountingScope { kind: CallKind::Charge, account: None, reference: None },
            origins: [("b".into(), 7), ("a".into(), 5)].into(),
        };
        let answered = |call, age_us| slots(call, 1).used(sent_at.checked_sub(Duration::from_micros(age_us)).unwrap());
        let unused = slots(2, 3).unused();
        let all = [answered(1, 2_100), unused, answered(1, 2_900), answered(2, 2_500), answered(1, 3_000)];
        let found: Vec<(u64, u32, ReleaseKind)> = permit_releases(&all, &spec, sent_at)
            .into_iter()
            .map(|end| (end.call, end.cost, end.release_kind))
            .collect();
        let used = |us| ReleaseKind::Used { age: Duration::from_micros(us) };
        let expected = [
            (1, 1, used(3_000)),
            (2, 1, used(2_500)),
            (1, 2, used(2_100)),
            (2, 3, ReleaseKind::Unused { origins: vec![5] }),
        ];
        assert_eq!(found, expected);
    }
}
