//! The jobs that this process has claimed from a lane's backlog and that wait for their permits.
//!
//! A job that waits at the gate has left the fair order. So no more are claimed ahead than the lane starts soon. A
//! flow's own limit may grant only a few of its jobs: where accounts have limits, no more than a few of each flow are
//! claimed, and the others leave the lane to other flows.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use crate::domain::job::{Flow, FlowClass, JobField};
use crate::domain::provider::Provider;

/// Jobs of one flow that one claim takes at most, and with which a flow is full, where accounts have limits.
const LIMITED_FLOW_MAX: u32 = 8;
/// The lane's jobs of this time are claimed ahead: a claim takes a small part of it, also on a busy database.
const AHEAD: Duration = Duration::from_millis(500);
/// Of a longer window, a quarter of the requests is claimed ahead at most: what waits when they are used up returns.
const WHOLE_WINDOW_MAX: Duration = Duration::from_secs(1);
/// Least jobs that are claimed ahead, if the lane has half as many worker slots.
pub const AHEAD_MIN: u32 = 16;
/// The same for a lane with one worker slot: the next job is ready when it is released.
const AHEAD_OF_SLOTS_MIN: u32 = 4;

/// Most jobs that wait for their permits at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AheadBounds {
    /// Jobs that start soon.
    pub all: u32,
    pub of_one_flow: u32,
    /// Jobs in addition: they wait for a slot in flight of their own account, and hold up no other account.
    pub release_waiters: u32,
}

impl AheadBounds {
    /// The bounds of a provider's lane that holds at most `prefetch` jobs, of which some await a release.
    pub fn of(provider: &Provider, prefetch: u16, release_waiters: u32) -> Self {
        let by_slots = provider.workers.saturating_mul(2).max(AHEAD_OF_SLOTS_MIN);
        let all = startable_soon(provider).min(by_slots).min(u32::from(prefetch)).max(1);
        let of_one_flow = if provider.counts_by(JobField::Account) { all.min(LIMITED_FLOW_MAX) } else { all };
        Self { all, of_one_flow, release_waiters: release_waiters.min(u32::from(prefetch).saturating_sub(all)) }
    }

    /// Most jobs that are claimed and have no permit.
    fn claimed(self) -> u32 {
        self.all.saturating_add(self.release_waiters)
    }

    /// Whether jobs of the lane can come to wait for their own account alone, so that there is room without a grant.
    pub fn grow(self) -> bool {
        self.of_one_flow < self.all
    }

    /// Room that is worth a claim at once.
    pub fn worth_a_claim(self) -> u32 {
        (self.all / 4).max(1)
    }
}

/// Jobs that the limits and the egress rate of a lane let it start soon, at least [`AHEAD_MIN`].
pub fn startable_soon(provider: &Provider) -> u32 {
    // A float beyond the range of u32 saturates.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and bounded")]
    let startable = provider.startable_by_limits_within(AHEAD, WHOLE_WINDOW_MAX).ceil() as u32;
    startable.max(AHEAD_MIN)
}

/// The claimed jobs without a permit, by flow.
#[derive(Debug)]
pub struct ClaimedAhead<A> {
    waiting: HashMap<Flow<A>, u32>,
    all: u32,
    /// Of the last claim, or of the last look at the room.
    bounds: Option<AheadBounds>,
}

/// The room for more jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room<A> {
    /// Jobs that may be claimed.
    pub jobs: u32,
    /// Whether a claim is due at once; otherwise room for a few more is waited for.
    pub is_worth_a_claim: bool,
    /// Whether a job of the backlog is more urgent than one that is claimed.
    pub is_urgent: bool,
    /// The flows of which no more jobs are claimed now.
    pub full_flows: Vec<Flow<A>>,
    /// Jobs of less urgent classes have no room.
    pub class_max: FlowClass,
}

impl<A> Default for ClaimedAhead<A> {
    fn default() -> Self {
        Self { waiting: HashMap::new(), all: 0, bounds: None }
    }
}

impl<A: Clone + Eq + Hash> ClaimedAhead<A> {
    pub fn add(&mut self, flow: Flow<A>) {
        *self.waiting.entry(flow).or_default() += 1;
        self.all += 1;
    }

    /// The room within these bounds, which hold from now on. If there is none, a more urgent job may go beyond them:
    /// `first_class` is the most urgent class that waits in the backlog.
    pub fn room_within(&mut self, bounds: AheadBounds, first_class: Option<FlowClass>) -> Room<A> {
        self.bounds = Some(bounds);
        let full = self.waiting.iter().filter(|(_, jobs)| **jobs >= bounds.of_one_flow);
        let full_flows = full.map(|(flow, _)| flow.clone()).collect();
        let free = bounds.claimed().saturating_sub(self.all);
        let (jobs, class_max) = match first_class {
            Some(class) if free == 0 => (bounds.claimed().saturating_sub(self.of_classes_until(class)), class),
            _ => (free, FlowClass::LAST),
        };
        let is_urgent = first_class.is_some_and(|class| self.of_classes_until(class) < self.all);
        Room { jobs, is_worth_a_claim: jobs >= bounds.worth_a_claim(), is_urgent, full_flows, class_max }
    }

    fn of_classes_until(&self, last: FlowClass) -> u32 {
        self.waiting.iter().filter(|(flow, _)| flow.class <= last).map(|(_, jobs)| jobs).sum()
    }

    /// Removes a job of the flow. Returns whether there is room for which a dispatcher may wait.
    pub fn remove(&mut self, flow: &Flow<A>) -> bool {
        let Some(jobs) = self.waiting.get_mut(flow) else { return false };
        let (of_flow, of_all) = (*jobs, self.all);
        *jobs -= 1;
        if *jobs == 0 {
            self.waiting.remove(flow);
        }
        self.all -= 1;
        self.bounds.is_some_and(|bounds| {
            let becomes_worth_a_claim = bounds.claimed().saturating_sub(self.all) == bounds.worth_a_claim();
            of_flow >= bounds.of_one_flow || of_all >= bounds.claimed() || becomes_worth_a_claim
        })
    }

    #[cfg(test)]
    pub fn len(&self) -> u32 {
        self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    const FLOW: Flow<u8> = Flow { class: FlowClass::LAST, account: None };

    fn room(jobs: u32) -> Room<u8> {
        Room { jobs, is_worth_a_claim: true, is_urgent: false, full_flows: Vec::new(), class_max: FlowClass::LAST }
    }

    fn claimed(jobs: u32) -> ClaimedAhead<u8> {
        let mut ahead = ClaimedAhead::default();
        (0..jobs).for_each(|_| ahead.add(FLOW));
        ahead
    }

    #[test]
    fn full_flow_has_room_after_a_grant() {
        let bounds = AheadBounds { all: 32, of_one_flow: 8, release_waiters: 0 };
        let mut ahead = claimed(8);
        assert_eq!(ahead.room_within(bounds, None).full_flows, [FLOW]);
        assert!(ahead.remove(&FLOW));
        assert_eq!(ahead.room_within(bounds, Some(FlowClass::LAST)), room(25));
        assert!(!ahead.remove(&FLOW), "there was room before");
        (0..6).for_each(|_| assert!(!ahead.remove(&FLOW)));
        assert!(!ahead.remove(&FLOW) && ahead.waiting.is_empty() && ahead.len() == 0);
    }

    #[test]
    fn dispatcher_is_woken_for_the_first_room_and_for_a_quarter() {
        let bounds = AheadBounds { all: 16, of_one_flow: 16, release_waiters: 0 };
        let mut ahead = claimed(16);
        assert_eq!(ahead.room_within(bounds, Some(FlowClass::LAST)).jobs, 0);
        assert!(ahead.remove(&FLOW), "a single job can be claimed a little later");
        assert!(!ahead.remove(&FLOW) && !ahead.remove(&FLOW));
        assert!(ahead.remove(&FLOW));
        assert_eq!(ahead.room_within(bounds, None), room(4));
    }

    /// As many urgent jobs as the bounds say go beyond them, and no others.
    #[test]
    fn urgent_job_has_room_in_a_full_lane() {
        let bounds = AheadBounds { all: 4, of_one_flow: 4, release_waiters: 0 };
        let mut ahead = claimed(4);
        let urgent = Flow { class: FlowClass::of_priority(9), account: None };
        for left in [4, 3, 2, 1, 0] {
            let Room { jobs: free, class_max, .. } = ahead.room_within(bounds, Some(urgent.class));
            assert_eq!((free, class_max), (left, urgent.class));
            ahead.add(urgent);
        }
        assert_eq!(ahead.room_within(bounds, Some(FlowClass::LAST)).jobs, 0);
    }

    /// Jobs that wait for their own account take no room of the others, up to the lane's prefetch.
    #[test]
    fn jobs_that_await_a_release_leave_their_room_to_others() {
        let slots =
            LimitRow { algorithm: "concurrency".to_owned(), scope: "account".to_owned(), ..LimitRow::default() };
        let all = LimitRow { name: "all".to_owned(), max_requests: 1_000, window_ms: 1_000, ..LimitRow::default() };
        let limits = vec![all, LimitRow { name: "own".to_owned(), max_requests: 1, ..slots }];
        let url = "https://acme.example/".to_owned();
        let row = ProviderRow { name: "acme".to_owned(), url, limits, workers: 8, ..ProviderRow::default() };
        let provider = row.validate(1).unwrap();
        let mut ahead = claimed(16);
        for (prefetch, release_waiters, expected) in [(100, 0, 0), (100, 10, 10), (100, 16, 16), (20, 16, 4)] {
            let bounds = AheadBounds::of(&provider, prefetch, release_waiters);
            assert_eq!(ahead.room_within(bounds, None).jobs, expected, "prefetch {prefetch}, {release_waiters} await");
            assert!(bounds.grow());
        }
    }

    /// While some of the room is free, too: it is claimed for at once, and not with the next few jobs.
    #[test]
    fn urgent_job_does_not_wait_for_more_room() {
        let bounds = AheadBounds { all: 16, of_one_flow: 16, release_waiters: 0 };
        let mut ahead = claimed(14);
        let urgent = Flow { class: FlowClass::of_priority(9), account: None::<u8> };
        for (first_class, expected) in [(None, false), (Some(FlowClass::LAST), false), (Some(urgent.class), true)] {
            let room = ahead.room_within(bounds, first_class);
            assert_eq!((room.jobs, room.is_worth_a_claim, room.is_urgent), (2, false, expected), "{first_class:?}");
        }
        let mut equal = ClaimedAhead::default();
        equal.add(urgent);
        assert!(!equal.room_within(bounds, Some(urgent.class)).is_urgent, "it is no more urgent than that one");
    }

    #[test]
    fn bounds_follow_pace_and_slots() {
        let limit = |max_requests, window_ms| LimitRow {
            name: "all".to_owned(),
            max_requests,
            window_ms,
            ..LimitRow::default()
        };
        let per_account = LimitRow { name: "own".to_owned(), scope: "account".to_owned(), ..limit(5, 1_000) };
        for (limits, workers, prefetch, all, of_one_flow) in [
            (vec![limit(100, 1_000)], 100, 500, 50, 50),
            (vec![limit(100, 1_000), per_account], 100, 500, 50, 8),
            (vec![limit(5, 1_000)], 100, 500, 16, 16),
            (vec![limit(5, 1_000)], 100, 3, 3, 3),
            (vec![limit(5_000, 1_000)], 32, 500, 64, 64),
            (vec![limit(5_000, 1_000)], 1, 500, 4, 4),
        ] {
            let url = "https://acme.example/".to_owned();
            let row = ProviderRow { name: "acme".to_owned(), url, limits, workers, ..ProviderRow::default() };
            // A faster egress rate of its own does not matter: the limits make the jobs wait.
            for leak_per_second in [None, Some(10_000.0)] {
                let row = ProviderRow { leak_per_second, ..row.clone() };
                assert_eq!(
                    AheadBounds::of(&row.validate(1).unwrap(), prefetch, 0),
                    AheadBounds { all, of_one_flow, release_waiters: 0 },
                    "{workers} workers, prefetch {prefetch}, egress rate {leak_per_second:?}"
                );
            }
        }
    }
}
