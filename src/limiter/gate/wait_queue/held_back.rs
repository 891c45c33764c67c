//! The waiters that a call leaves out, because a costlier one of their account or reference is requested before them.
//!
//! The limiter skips a request that has too few slots, and would grant these to the cheaper requests behind it. So the
//! slots of an account would never gather for a costly job. A waiter that is left out holds back the later ones, so
//! that their order stays.

use std::collections::HashMap;

use super::PermitWaiter;

/// A limit of one account or reference: the key of the subject, and the index of the limit in the spec.
type CounterKey<'a> = (&'a str, usize);

/// The requests of one call, as far as they hold others back.
#[derive(Debug, Default)]
pub(super) struct HeldBack<'a> {
    counters: HashMap<CounterKey<'a>, Requested>,
    waiters: usize,
}

/// The requests of one call that a limit counts.
#[derive(Clone, Copy, Debug, Default)]
struct Requested {
    largest_cost: u32,
    /// A waiter that it counts is left out.
    is_closed: bool,
}

impl<'a> HeldBack<'a> {
    /// Whether the next waiter may be in the call; `false`: it is left out.
    pub fn admits<T>(&mut self, waiter: &'a PermitWaiter<T>) -> bool {
        // Nothing is cheaper than a cost of 1.
        if waiter.cost <= 1 && self.counters.is_empty() {
            return true;
        }
        let counted = &waiter.counted;
        let keys = || {
            let enforced = counted.enforced.iter();
            enforced.filter_map(|counter| Some((counted.subjects.get(counter.subject)?.key.as_str(), counter.limit)))
        };
        let holds_back = |requested: &Requested| requested.is_closed || waiter.cost < requested.largest_cost;
        let is_left_out = keys().any(|key| self.counters.get(&key).is_some_and(holds_back));
        for key in keys() {
            let requested = self.counters.entry(key).or_default();
            requested.largest_cost = requested.largest_cost.max(waiter.cost);
            requested.is_closed |= is_left_out;
        }
        self.waiters += usize::from(is_left_out);
        !is_left_out
    }

    /// The number of waiters that were left out.
    pub fn len(&self) -> usize {
        self.waiters
    }
}
