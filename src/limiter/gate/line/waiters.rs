//! Those in line, in their order: who must be told of a standing and who stands aside are found without looking at all.
//!
//! A line holds ten thousand, and is looked at with every message. Refuses to lend a waiter for change: its time and its
//! standing aside are what it is found by.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeTo;

use tokio::time::Instant;

use super::{Aside, Place, Waiter};

#[derive(Debug, Default)]
pub(super) struct Waiters {
    by_place: BTreeMap<Place, Waiter>,
    by_time: BTreeSet<(Instant, Place)>,
    aside: BTreeSet<Place>,
    /// Looks at the line since those who have gone away were looked for.
    looks: usize,
}

impl Waiters {
    pub fn insert(&mut self, place: Place, waiter: Waiter) {
        self.by_time.insert((waiter.wait_until, place));
        if waiter.aside.is_some() {
            self.aside.insert(place);
        }
        self.by_place.insert(place, waiter);
    }

    pub fn remove(&mut self, place: Place) -> Option<Waiter> {
        let waiter = self.by_place.remove(&place)?;
        self.by_time.remove(&(waiter.wait_until, place));
        self.aside.remove(&place);
        Some(waiter)
    }

    pub fn set_aside(&mut self, place: Place, aside: Aside) {
        if let Some(waiter) = self.by_place.get_mut(&place) {
            waiter.aside = Some(aside);
            self.aside.insert(place);
        }
    }

    /// Those of whom this is true stand in line again.
    pub fn return_from_aside(&mut self, is_over: impl Fn(&Aside) -> bool) {
        let Self { by_place, aside, .. } = self;
        aside.retain(|place| {
            let waiter = by_place.get_mut(place);
            waiter.is_some_and(|waiter| {
                waiter.aside.take_if(|aside| is_over(aside));
                waiter.aside.is_some()
            })
        });
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Place, &Waiter)> {
        self.by_place.iter()
    }

    pub fn before(&self, places: RangeTo<Place>) -> impl Iterator<Item = &Waiter> {
        self.by_place.range(places).map(|(_, waiter)| waiter)
    }

    pub fn aside_before(&self, places: RangeTo<Place>) -> impl Iterator<Item = &Waiter> {
        self.aside.range(places).filter_map(|place| self.by_place.get(place))
    }

    pub fn len(&self) -> usize {
        self.by_place.len()
    }

    /// When the first of them has waited long enough.
    pub fn first_time(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Those who will not wait until then.
    pub fn impatient(&self, until: Instant) -> Vec<Place> {
        self.by_time.iter().take_while(|(at, _)| *at < until).map(|(_, place)| *place).collect()
    }

    pub fn of(&self, place: Place) -> Option<&Waiter> {
        self.by_place.get(&place)
    }

    /// Forgets those who have gone away, once in as many looks as there are in line: nobody else is held up by them.
    pub fn sweep(&mut self) {
        self.looks += 1;
        if self.looks >= self.len() {
            self.sweep_all();
        }
    }

    pub fn sweep_all(&mut self) {
        self.looks = 0;
        let gone: Vec<Place> =
            self.iter().filter(|(_, waiter)| waiter.reply.is_closed()).map(|(place, _)| *place).collect();
        for place in gone {
            self.remove(place);
        }
    }
}

impl IntoIterator for Waiters {
    type Item = (Place, Waiter);
    type IntoIter = std::collections::btree_map::IntoIter<Place, Waiter>;

    fn into_iter(self) -> Self::IntoIter {
        self.by_place.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};
    use tokio::sync::oneshot;

    use super::*;
    use crate::limiter::gate::line::Of;
    use crate::limiter::gate::{Grant, RefusedBy};

    struct Rig {
        waiters: Waiters,
        answers: Vec<(Place, oneshot::Receiver<Grant>)>,
        zero: Instant,
        rng: StdRng,
    }

    impl Rig {
        fn instant(&mut self) -> Instant {
            self.zero + Duration::from_millis(self.rng.random_range(0..50))
        }

        fn aside(&mut self) -> Aside {
            Aside { until: self.instant(), by: RefusedBy::Cold, exact: true, counts: None }
        }

        /// One of those who have come, whether they are still there or not.
        fn any(&mut self) -> Place {
            self.answers[self.rng.random_range(0..self.answers.len())].0
        }

        fn come(&mut self, arrival: u64) {
            let place = Place { priority_reversed: self.rng.random_range(0..3), arrival };
            let (reply, answer) = oneshot::channel();
            let aside = self.rng.random_bool(0.3).then(|| self.aside());
            let wait_until = self.instant();
            let waiter = Waiter {
                job: None,
                cost: 1,
                priority: 0,
                of: Of::default(),
                reference: None,
                wait_until,
                reply,
                aside,
            };
            self.waiters.insert(place, waiter);
            self.answers.push((place, answer));
        }

        fn step(&mut self, arrival: u64) {
            match self.rng.random_range(0..8) {
                0..4 => self.come(arrival),
                4 => drop(self.waiters.remove(self.answers[0].0)),
                5 => {
                    let (place, aside) = (self.any(), self.aside());
                    self.waiters.set_aside(place, aside);
                }
                6 => {
                    let now = self.instant();
                    self.waiters.return_from_aside(|aside| aside.until <= now);
                }
                _ => {
                    let index = self.rng.random_range(0..self.answers.len());
                    self.answers[index].1.close();
                    self.waiters.sweep();
                }
            }
        }

        /// What is found by an index is what looking at all of them finds.
        fn check(&mut self) {
            let (until, place) = (self.instant(), self.any());
            let all: Vec<(Place, &Waiter)> = self.waiters.iter().map(|(place, waiter)| (*place, waiter)).collect();
            assert_eq!(self.waiters.first_time(), all.iter().map(|(_, waiter)| waiter.wait_until).min());
            let mut late: Vec<Place> =
                all.iter().filter(|(_, waiter)| waiter.wait_until < until).map(|(place, _)| *place).collect();
            let mut impatient = self.waiters.impatient(until);
            late.sort();
            impatient.sort();
            assert_eq!(impatient, late);
            let aside = all.iter().filter(|(at, waiter)| *at < place && waiter.aside.is_some()).count();
            assert_eq!(self.waiters.aside_before(..place).count(), aside);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_found_by_time_and_by_standing_aside_is_what_all_of_them_say() {
        let (zero, rng) = (Instant::now(), StdRng::seed_from_u64(1));
        let mut rig = Rig { waiters: Waiters::default(), answers: Vec::new(), zero, rng };
        rig.come(0);
        for arrival in 1..3_000 {
            rig.step(arrival);
            rig.check();
        }
        assert!(rig.waiters.len() > 100, "{}", rig.waiters.len());
        rig.answers.clear();
        rig.waiters.sweep_all();
        assert_eq!((rig.waiters.len(), rig.waiters.first_time()), (0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_have_gone_are_forgotten_within_as_many_looks_as_are_in_line() {
        let (zero, rng) = (Instant::now(), StdRng::seed_from_u64(2));
        let mut rig = Rig { waiters: Waiters::default(), answers: Vec::new(), zero, rng };
        (0..100).for_each(|arrival| rig.come(arrival));
        rig.answers.drain(..40);
        for _ in 0..100 {
            rig.waiters.sweep();
        }
        assert_eq!(rig.waiters.len(), 60);
    }
}
