//! The waiters of a queue in order, with indexes by deadline, of the deferred ones, and of the lanes.
//!
//! A queue may have ten thousand waiters and is searched with every message, so no search reads all of them. Waiters
//! are not lent for change, because their deadlines and deferral are index keys.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeTo;

use tokio::time::Instant;

use super::lane_capacity::LaneWaiters;
use super::{CountingScope, Deferral, PermitWaiter, QueueKey};
use crate::limiter::gate::core::Ticket;

#[derive(Debug)]
pub(super) struct Waiters<T> {
    by_key: BTreeMap<QueueKey, PermitWaiter<T>>,
    by_deadline: BTreeSet<(Instant, QueueKey)>,
    by_egress_deadline: BTreeSet<(Instant, QueueKey)>,
    deferred: BTreeSet<QueueKey>,
    lanes: LaneWaiters,
    /// Number of checks since cancelled waiters were last swept.
    checks_since_sweep: usize,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self {
            by_key: BTreeMap::new(),
            by_deadline: BTreeSet::new(),
            by_egress_deadline: BTreeSet::new(),
            deferred: BTreeSet::new(),
            lanes: LaneWaiters::default(),
            checks_since_sweep: 0,
        }
    }
}

impl<T: Ticket> Waiters<T> {
    pub fn insert(&mut self, key: QueueKey, waiter: PermitWaiter<T>, now: Instant) {
        self.by_deadline.insert((waiter.wait_until, key));
        self.by_egress_deadline.extend(waiter.egress.as_ref().map(|egress| (egress.wait_until, key)));
        self.lanes.add(waiter.egress.as_ref(), now);
        if waiter.deferral.is_some() {
            self.deferred.insert(key);
        }
        self.by_key.insert(key, waiter);
    }

    pub fn remove(&mut self, key: QueueKey, now: Instant) -> Option<PermitWaiter<T>> {
        let waiter = self.by_key.remove(&key)?;
        self.by_deadline.remove(&(waiter.wait_until, key));
        if let Some(egress) = &waiter.egress {
            self.by_egress_deadline.remove(&(egress.wait_until, key));
        }
        self.lanes.remove(waiter.egress.as_ref(), now);
        self.deferred.remove(&key);
        Some(waiter)
    }

    pub fn defer(&mut self, key: QueueKey, deferral: Deferral) {
        if let Some(waiter) = self.by_key.get_mut(&key) {
            waiter.deferral = Some(deferral);
            self.deferred.insert(key);
        }
    }

    /// Ends the deferrals that are over.
    pub fn resume_if(&mut self, is_over: impl Fn(&Deferral) -> bool) {
        self.resume_if_waiter(|_, deferral| is_over(deferral));
    }

    /// Ends the deferrals of the waiters for which they are over.
    pub fn resume_if_waiter(&mut self, is_over: impl Fn(&CountingScope, &Deferral) -> bool) {
        let Self { by_key, deferred, .. } = self;
        deferred.retain(|key| {
            let waiter = by_key.get_mut(key);
            waiter.is_some_and(|waiter| {
                let PermitWaiter { scope, deferral, .. } = waiter;
                deferral.take_if(|deferral| is_over(scope, deferral));
                waiter.deferral.is_some()
            })
        });
    }

    pub fn iter(&self) -> impl Iterator<Item = (&QueueKey, &PermitWaiter<T>)> {
        self.by_key.iter()
    }

    pub fn ahead_of(&self, keys: RangeTo<QueueKey>) -> impl Iterator<Item = &PermitWaiter<T>> {
        self.by_key.range(keys).map(|(_, waiter)| waiter)
    }

    pub fn deferred_ahead_of(&self, keys: RangeTo<QueueKey>) -> impl Iterator<Item = &PermitWaiter<T>> {
        self.deferred.range(keys).filter_map(|key| self.by_key.get(key))
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// The earliest deadline.
    pub fn first_deadline(&self) -> Option<Instant> {
        self.by_deadline.first().map(|(at, _)| *at)
    }

    /// Keys of the waiters whose deadline is earlier.
    pub fn expiring_before(&self, until: Instant) -> Vec<QueueKey> {
        self.by_deadline.iter().take_while(|(at, _)| *at < until).map(|(_, key)| *key).collect()
    }

    /// The earliest instant after `now` at which a waiter gives up its wait for a worker slot.
    pub fn next_egress_deadline(&self, now: Instant) -> Option<Instant> {
        let after_now = (now, QueueKey::LAST)..;
        self.by_egress_deadline.range(after_now).next().map(|(at, _)| *at)
    }

    /// Keys of the waiters that wait for a worker slot no longer.
    pub fn past_egress_deadline(&self, now: Instant) -> Vec<QueueKey> {
        self.by_egress_deadline.iter().take_while(|(at, _)| *at <= now).map(|(_, key)| *key).collect()
    }

    /// The lanes of the waiters.
    pub fn lanes(&self) -> &LaneWaiters {
        &self.lanes
    }

    pub fn get(&self, key: QueueKey) -> Option<&PermitWaiter<T>> {
        self.by_key.get(&key)
    }

    /// Removes cancelled waiters, once in as many checks as there are waiters, so that a check stays cheap on average.
    pub fn sweep_if_due(&mut self, now: Instant) {
        self.checks_since_sweep += 1;
        if self.checks_since_sweep >= self.len() {
            self.sweep_all(now);
        }
    }

    pub fn sweep_all(&mut self, now: Instant) {
        self.checks_since_sweep = 0;
        let cancelled: Vec<QueueKey> =
            self.iter().filter(|(_, waiter)| waiter.ticket.is_cancelled()).map(|(key, _)| *key).collect();
        for key in cancelled {
            self.remove(key, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};
    use tokio::sync::oneshot;

    use super::*;
    use crate::limiter::gate::{AcquireResult, BlockReason};

    struct Rig {
        waiters: Waiters<oneshot::Sender<AcquireResult>>,
        answers: Vec<(QueueKey, oneshot::Receiver<AcquireResult>)>,
        zero: Instant,
        rng: StdRng,
    }

    impl Rig {
        fn instant(&mut self) -> Instant {
            self.zero + Duration::from_millis(self.rng.random_range(0..50))
        }

        fn deferral(&mut self) -> Deferral {
            Deferral { until: self.instant(), reason: BlockReason::Cold, exact: true, counted_with: None }
        }

        /// The key of any waiter that has arrived, whether it still waits or not.
        fn any_key(&mut self) -> QueueKey {
            self.answers[self.rng.random_range(0..self.answers.len())].0
        }

        fn arrive(&mut self, arrival: u64) {
            let key = QueueKey { priority_reversed: self.rng.random_range(0..3), arrival };
            let (reply, answer) = oneshot::channel();
            let deferral = self.rng.random_bool(0.3).then(|| self.deferral());
            let wait_until = self.instant();
            let waiter = PermitWaiter {
                job: None,
                cost: 1,
                priority: 0,
                scope: CountingScope::default(),
                reference: None,
                wait_until,
                accepted_wait: Duration::ZERO,
                account_wait_until: None,
                egress: None,
                ticket: reply,
                deferral,
            };
            self.waiters.insert(key, waiter, self.zero);
            self.answers.push((key, answer));
        }

        fn step(&mut self, arrival: u64) {
            match self.rng.random_range(0..8) {
                0..4 => self.arrive(arrival),
                4 => drop(self.waiters.remove(self.answers[0].0, self.zero)),
                5 => {
                    let (key, deferral) = (self.any_key(), self.deferral());
                    self.waiters.defer(key, deferral);
                }
                6 => {
                    let now = self.instant();
                    self.waiters.resume_if(|deferral| deferral.until <= now);
                }
                _ => {
                    let index = self.rng.random_range(0..self.answers.len());
                    self.answers[index].1.close();
                    self.waiters.sweep_if_due(self.zero);
                }
            }
        }

        /// Each index finds what a full scan finds.
        fn check(&mut self) {
            let (until, key) = (self.instant(), self.any_key());
            let all: Vec<(QueueKey, &PermitWaiter<_>)> =
                self.waiters.iter().map(|(key, waiter)| (*key, waiter)).collect();
            assert_eq!(self.waiters.first_deadline(), all.iter().map(|(_, waiter)| waiter.wait_until).min());
            let mut late: Vec<QueueKey> =
                all.iter().filter(|(_, waiter)| waiter.wait_until < until).map(|(key, _)| *key).collect();
            let mut expiring = self.waiters.expiring_before(until);
            late.sort();
            expiring.sort();
            assert_eq!(expiring, late);
            let deferred = all.iter().filter(|(at, waiter)| *at < key && waiter.deferral.is_some()).count();
            assert_eq!(self.waiters.deferred_ahead_of(..key).count(), deferred);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn indexes_agree_with_a_full_scan() {
        let (zero, rng) = (Instant::now(), StdRng::seed_from_u64(1));
        let mut rig = Rig { waiters: Waiters::default(), answers: Vec::new(), zero, rng };
        rig.arrive(0);
        for arrival in 1..3_000 {
            rig.step(arrival);
            rig.check();
        }
        assert!(rig.waiters.len() > 100, "{}", rig.waiters.len());
        rig.answers.clear();
        rig.waiters.sweep_all(rig.zero);
        assert_eq!((rig.waiters.len(), rig.waiters.first_deadline()), (0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_waiters_are_swept_in_time() {
        let (zero, rng) = (Instant::now(), StdRng::seed_from_u64(2));
        let mut rig = Rig { waiters: Waiters::default(), answers: Vec::new(), zero, rng };
        (0..100).for_each(|arrival| rig.arrive(arrival));
        rig.answers.drain(..40);
        for _ in 0..100 {
            rig.waiters.sweep_if_due(rig.zero);
        }
        assert_eq!(rig.waiters.len(), 60);
    }
}
