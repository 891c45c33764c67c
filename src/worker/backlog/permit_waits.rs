//! The waits of a lane's charges for their permits: they show whether a limit or the worker slots hold the lane back.
//!
//! A job at a limit of its account or reference waits as well, but then other jobs are granted at once. So the lane is
//! limited only if the last granted job waited, too, or if the gate is blocked; and if more jobs wait than it may start
//! soon. A lane that takes few jobs at a time has none that waits when the next one comes. So a grant that a limit has
//! made wait counts for as long as it waited.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

use super::claimed_ahead::AHEAD_MIN;
use crate::domain::provider::BOOKING_HORIZON;
use crate::limiter::gate::GateView;

/// A job that a limit makes wait longer shows a limited lane: a permit that could be booked ahead would have been.
pub const LIMITED_AFTER: Duration = BOOKING_HORIZON;
/// The same for a job that waits for a worker slot or for the egress rate. A lane holds what it finishes in a tenth of a
/// second, so a lane that is not slow does not let a job wait that long. If its slots are busy with the writes of this
/// process, such a wait does not count.
const SLOTS_SHORT_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub struct PermitWaits<J> {
    /// New jobs on their way to the gate.
    admitted: HashSet<J>,
    /// When each waiting job began to wait, in this order.
    waiting: BTreeMap<u64, Instant>,
    next_number: u64,
    last_grant: Option<Grant>,
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    at: Instant,
    waited: Duration,
    /// A limit blocked the gate meanwhile. Other waits, as for a cold limiter, say nothing of the next job's.
    is_by_limit: bool,
}

/// The wait that shows a limited lane.
fn long_wait(is_by_limit: bool) -> Duration {
    if is_by_limit { LIMITED_AFTER } else { SLOTS_SHORT_AFTER }
}

impl Grant {
    fn was_long(self) -> bool {
        self.waited > long_wait(self.is_by_limit)
    }

    /// Whether its wait counts: by a limit, or while the worker slots hold the lane back.
    fn counts(self, by_slots: impl FnOnce() -> bool) -> bool {
        self.was_long() && (self.is_by_limit || by_slots())
    }

    fn shows_a_limited_lane(self, now: Instant) -> bool {
        self.is_by_limit && self.was_long() && now.saturating_duration_since(self.at) < self.waited
    }
}

/// One job's wait.
#[derive(Clone, Copy, Debug)]
pub struct OngoingWait {
    number: u64,
    began: Instant,
}

impl<J> Default for PermitWaits<J> {
    fn default() -> Self {
        Self { admitted: HashSet::new(), waiting: BTreeMap::new(), next_number: 0, last_grant: None }
    }
}

impl<J: Eq + Hash> PermitWaits<J> {
    /// A new job is on its way to the gate. It counts until it waits there, or until it leaves.
    pub fn admit(&mut self, job: J) {
        self.admitted.insert(job);
    }

    pub fn leave(&mut self, job: &J) {
        self.admitted.remove(job);
    }

    pub fn begin(&mut self, job: &J, now: Instant) -> OngoingWait {
        self.admitted.remove(job);
        let number = self.next_number;
        self.next_number += 1;
        self.waiting.insert(number, now);
        OngoingWait { number, began: now }
    }

    /// The job has its permit.
    pub fn record_grant(&mut self, wait: OngoingWait, gate: &GateView, now: Instant) {
        let waited = gate.waited_for_limits(wait.began, now);
        let is_by_limit = gate.was_at_limit_since(wait.began);
        self.last_grant = Some(Grant { at: now, waited, is_by_limit });
    }

    pub fn end(&mut self, wait: OngoingWait) {
        self.waiting.remove(&wait.number);
    }

    /// Whether a job waits for longer than a free lane would let it, or surely will: more wait than the lane starts soon,
    /// or the last grant shows it. `by_slots`: whether its slots or its egress rate hold the lane back, and not the
    /// writes of this process.
    pub fn are_long(
        &self,
        now: Instant,
        startable_soon: impl FnOnce() -> u32,
        gate: &GateView,
        by_slots: impl Fn() -> bool,
    ) -> bool {
        let pending = self.admitted.len() + self.waiting.len();
        if pending >= AHEAD_MIN as usize && pending >= startable_soon() as usize
            || self.last_grant.is_some_and(|grant| grant.shows_a_limited_lane(now))
        {
            return true;
        }
        let is_long = |began: &Instant| {
            let is_by_limit = gate.is_blocked_by_limit() || gate.was_at_limit_since(*began);
            gate.waited_for_limits(*began, now) > long_wait(is_by_limit) && (is_by_limit || by_slots())
        };
        let last_was_long = || self.last_grant.is_some_and(|grant| grant.counts(&by_slots));
        self.waiting.first_key_value().is_some_and(|(_, began)| is_long(began))
            && (last_was_long() || gate.is_blocked_by_limit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::gate::BlockReason;

    /// The waits, and their clock.
    struct Waits {
        waits: PermitWaits<u32>,
        now: Instant,
        unavailable_at: Option<Instant>,
        by_slots: bool,
    }

    impl Waits {
        fn new() -> Self {
            Self { waits: PermitWaits::default(), now: Instant::now(), unavailable_at: None, by_slots: true }
        }

        fn begin(&mut self, job: u32) -> OngoingWait {
            self.waits.begin(&job, self.now)
        }

        fn grant(&mut self, wait: OngoingWait, is_by_limit: bool) {
            let limited_at = is_by_limit.then_some(self.now);
            let gate = GateView { limited_at, unavailable_at: self.unavailable_at, ..GateView::default() };
            self.waits.record_grant(wait, &gate, self.now);
            self.waits.end(wait);
        }

        fn are_long(&self, startable_soon: u32, is_at_limit: bool) -> bool {
            let block = is_at_limit.then(|| (BlockReason::Limit("all".to_owned()), self.now));
            let gate = GateView { block, unavailable_at: self.unavailable_at, ..GateView::default() };
            self.waits.are_long(self.now, || startable_soon, &gate, || self.by_slots)
        }
    }

    #[test]
    fn own_limit_of_one_job_is_no_limited_lane() {
        let mut rig = Waits::new();
        let own_limit = rig.begin(0);
        rig.now += LIMITED_AFTER * 2;
        assert!(!rig.are_long(100, false), "another job was never granted late");
        assert!(rig.are_long(100, true));
        let soon = rig.begin(0);
        rig.grant(soon, false);
        assert!(!rig.are_long(100, false));
        rig.waits.end(own_limit);
        assert!(!rig.are_long(100, true), "no job waits");
    }

    /// A queue that was full when the lane started is not taken into memory first.
    #[test]
    fn more_waits_than_start_soon_are_long_at_once() {
        let mut rig = Waits::new();
        (0..50).for_each(|job| rig.waits.admit(job));
        let is_long = |rig: &Waits, startable: [u32; 2]| startable.map(|startable| rig.are_long(startable, false));
        assert_eq!(is_long(&rig, [50, 51]), [true, false]);
        // One that waits is counted once, and one that has gone no more.
        let waiting = rig.begin(49);
        assert_eq!(is_long(&rig, [50, 51]), [true, false]);
        rig.waits.leave(&49);
        assert_eq!(is_long(&rig, [50, 51]), [true, false]);
        rig.waits.end(waiting);
        assert_eq!(is_long(&rig, [49, 50]), [true, false]);
    }

    #[test]
    fn late_grants_show_a_limited_lane() {
        let mut rig = Waits::new();
        let (first, second) = (rig.begin(0), rig.begin(0));
        rig.now += SLOTS_SHORT_AFTER * 2;
        rig.grant(first, false);
        assert!(rig.are_long(100, false));
        rig.waits.end(second);
        rig.begin(0);
        assert!(!rig.are_long(100, true), "it has just begun");
    }

    /// A lane that is not slow lets its jobs wait for a worker slot now and then, as long as it takes to write to a busy
    /// ledger.
    #[test]
    fn wait_for_a_slot_may_be_longer_than_one_for_a_limit() {
        for (waited, is_by_limit, is_limited) in [
            (LIMITED_AFTER, true, false),
            (LIMITED_AFTER * 2, true, true),
            (LIMITED_AFTER * 2, false, false),
            (SLOTS_SHORT_AFTER + LIMITED_AFTER, false, true),
        ] {
            let mut rig = Waits::new();
            let granted = rig.begin(0);
            rig.begin(1);
            rig.now += waited;
            rig.grant(granted, is_by_limit);
            assert_eq!(rig.are_long(100, is_by_limit), is_limited, "{waited:?}, by a limit: {is_by_limit}");
        }
    }

    /// Slots that are busy with this process's own writes are no reason to record payments first, which writes more.
    #[test]
    fn wait_for_a_slot_counts_while_the_slots_hold_the_lane_back() {
        for (by_slots, is_by_limit, is_limited) in
            [(true, false, true), (false, false, false), (false, true, true), (true, true, true)]
        {
            let mut rig = Waits { by_slots, ..Waits::new() };
            let granted = rig.begin(0);
            rig.begin(1);
            rig.now += SLOTS_SHORT_AFTER * 2;
            rig.grant(granted, is_by_limit);
            assert_eq!(rig.are_long(100, is_by_limit), is_limited, "by slots: {by_slots}, by a limit: {is_by_limit}");
        }
    }

    /// Of a lane with one place, no job waits when the next one comes.
    #[test]
    fn grant_that_a_limit_delayed_counts_for_as_long_as_it_waited() {
        let mut rig = Waits::new();
        for (waited, is_by_limit, is_limited) in
            [(LIMITED_AFTER * 4, false, false), (LIMITED_AFTER, true, false), (LIMITED_AFTER * 4, true, true)]
        {
            let job = rig.begin(0);
            rig.now += waited;
            rig.grant(job, is_by_limit);
            assert_eq!(rig.are_long(100, false), is_limited, "{waited:?}, by a limit: {is_by_limit}");
        }
        rig.now += LIMITED_AFTER * 3;
        assert!(rig.are_long(100, false));
        rig.now += LIMITED_AFTER;
        assert!(!rig.are_long(100, false));
    }

    /// A worker that starts with a full queue holds as many jobs as it takes at once, until its limiter is warm.
    #[test]
    fn wait_for_a_cold_limiter_is_no_limited_lane() {
        for is_cold in [true, false] {
            let mut rig = Waits::new();
            let (first, _second) = (rig.begin(0), rig.begin(1));
            rig.now += SLOTS_SHORT_AFTER * 2;
            rig.unavailable_at = is_cold.then_some(rig.now);
            rig.grant(first, false);
            assert_eq!(rig.are_long(100, false), !is_cold);
            // From then on, the wait for a worker slot counts.
            rig.now += SLOTS_SHORT_AFTER * 2;
            let third = rig.begin(2);
            rig.now += SLOTS_SHORT_AFTER * 2;
            rig.grant(third, false);
            assert!(rig.are_long(100, false));
        }
    }
}
