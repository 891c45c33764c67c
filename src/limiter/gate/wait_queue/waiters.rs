//! Those in line, in their order: who must be told of a standing and who stands aside are found without looking at all.
//!
//! A line holds ten thousand, and is looked at with every message. Refuses to lend a waiter for change: its time and its
//! standing aside are what it is found by.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeTo;

use tokio::time::Instant;

use super::{Deferral, PermitWaiter, QueueKey};

#[derive(Debug, Default)]
pub(super) struct Waiters {
    by_key: BTreeMap<QueueKey, PermitWaiter>,
    by_deadline: BTreeSet<(Instant, QueueKey)>,
    deferred: BTreeSet<QueueKey>,
    /// Looks at the line since those who have gone away were looked for.
    checks_since_sweep: usize,
}

impl Waiters {
    pub fn insert(&mut self, place: QueueKey, waiter: PermitWaiter) {
        self.by_deadline.insert((waiter.wait_until, place));
        if waiter.deferral.is_some() {
            self.deferred.insert(place);
        }
        self.by_key.insert(place, waiter);
    }

    pub fn remove(&mut self, place: QueueKey) -> Option<PermitWaiter> {
        let waiter = self.by_key.remove(&place)?;
        self.by_deadline.remove(&(waiter.wait_until, place));
        self.deferred.remove(&place);
        Some(waiter)
    }

    pub fn defer(&mut self, place: QueueKey, aside: Deferral) {
        if let Some(waiter) = self.by_key.get_mut(&place) {
            waiter.deferral = Some(aside);
            self.deferred.insert(place);
        }
    }

    /// Those of whom this is true stand in line again.
    pub fn resume_if(&mut self, is_over: impl Fn(&Deferral) -> bool) {
        let Self { by_key: by_place, deferred: aside, .. } = self;
        aside.retain(|place| {
            let waiter = by_place.get_mut(place);
            waiter.is_some_and(|waiter| {
                waiter.deferral.take_if(|aside| is_over(aside));
                waiter.deferral.is_some()
            })
        });
    }

    pub fn iter(&self) -> impl Iterator<Item = (&QueueKey, &PermitWaiter)> {
        self.by_key.iter()
    }

    pub fn ahead_of(&self, places: RangeTo<QueueKey>) -> impl Iterator<Item = &PermitWaiter> {
        self.by_key.range(places).map(|(_, waiter)| waiter)
    }

    pub fn deferred_ahead_of(&self, places: RangeTo<QueueKey>) -> impl Iterator<Item = &PermitWaiter> {
        self.deferred.range(places).filter_map(|place| self.by_key.get(place))
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// When the first of them has waited long enough.
    pub fn first_deadline(&self) -> Option<Instant> {
        self.by_deadline.first().map(|(at, _)| *at)
    }

    /// Those who will not wait until then.
    pub fn expiring_before(&self, until: Instant) -> Vec<QueueKey> {
        self.by_deadline.iter().take_while(|(at, _)| *at < until).map(|(_, place)| *place).collect()
    }

    pub fn get(&self, place: QueueKey) -> Option<&PermitWaiter> {
        self.by_key.get(&place)
    }

    /// Forgets those who have gone away, once in as many looks as there are in line: nobody else is held up by them.
    pub fn sweep_if_due(&mut self) {
        self.checks_since_sweep += 1;
        if self.checks_since_sweep >= self.len() {
            self.sweep_all();
        }
    }

    pub fn sweep_all(&mut self) {
        self.checks_since_sweep = 0;
        let gone: Vec<QueueKey> =
            self.iter().filter(|(_, waiter)| waiter.reply.is_closed()).map(|(place, _)| *place).collect();
        for place in gone {
            self.remove(place);
        }
    }
}

impl IntoIterator for Waiters {
    type Item = (QueueKey, PermitWaiter);
    type IntoIter = std::collections::btree_map::IntoIter<QueueKey, PermitWaiter>;

    fn into_iter(self) -> Self::IntoIter {
        self.by_key.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};
    use tokio::sync::oneshot;

    use super::*;
    use crate::limiter::gate::wait_queue::CountingScope;
    use crate::limiter::gate::{AcquireResult, BlockReason};

    struct Rig {
        waiters: Waiters,
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

        /// One of those who have come, whether they are still there or not.
        fn any_key(&mut self) -> QueueKey {
            self.answers[self.rng.random_range(0..self.answers.len())].0
        }

        fn arrive(&mut self, arrival: u64) {
            let place = QueueKey { priority_reversed: self.rng.random_range(0..3), arrival };
            let (reply, answer) = oneshot::channel();
            let aside = self.rng.random_bool(0.3).then(|| self.deferral());
            let wait_until = self.instant();
            let waiter = PermitWaiter {
                job: None,
                cost: 1,
                priority: 0,
                scope: CountingScope::default(),
                reference: None,
                wait_until,
                reply,
                deferral: aside,
            };
            self.waiters.insert(place, waiter);
            self.answers.push((place, answer));
        }

        fn step(&mut self, arrival: u64) {
            match self.rng.random_range(0..8) {
                0..4 => self.arrive(arrival),
                4 => drop(self.waiters.remove(self.answers[0].0)),
                5 => {
                    let (place, aside) = (self.any_key(), self.deferral());
                    self.waiters.defer(place, aside);
                }
                6 => {
                    let now = self.instant();
                    self.waiters.resume_if(|aside| aside.until <= now);
                }
                _ => {
                    let index = self.rng.random_range(0..self.answers.len());
                    self.answers[index].1.close();
                    self.waiters.sweep_if_due();
                }
            }
        }

        /// What is found by an index is what looking at all of them finds.
        fn check(&mut self) {
            let (until, place) = (self.instant(), self.any_key());
            let all: Vec<(QueueKey, &PermitWaiter)> =
                self.waiters.iter().map(|(place, waiter)| (*place, waiter)).collect();
            assert_eq!(self.waiters.first_deadline(), all.iter().map(|(_, waiter)| waiter.wait_until).min());
            let mut late: Vec<QueueKey> =
                all.iter().filter(|(_, waiter)| waiter.wait_until < until).map(|(place, _)| *place).collect();
            let mut impatient = self.waiters.expiring_before(until);
            late.sort();
            impatient.sort();
            assert_eq!(impatient, late);
            let aside = all.iter().filter(|(at, waiter)| *at < place && waiter.deferral.is_some()).count();
            assert_eq!(self.waiters.deferred_ahead_of(..place).count(), aside);
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
        rig.waiters.sweep_all();
        assert_eq!((rig.waiters.len(), rig.waiters.first_deadline()), (0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_waiters_are_swept_in_time() {
        let (zero, rng) = (Instant::now(), StdRng::seed_from_u64(2));
        let mut rig = Rig { waiters: Waiters::default(), answers: Vec::new(), zero, rng };
        (0..100).for_each(|arrival| rig.arrive(arrival));
        rig.answers.drain(..40);
        for _ in 0..100 {
            rig.waiters.sweep_if_due();
        }
        assert_eq!(rig.waiters.len(), 60);
    }
}
