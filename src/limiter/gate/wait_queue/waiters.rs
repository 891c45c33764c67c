//! The waiters of a queue in order, with indexes by deadline, of the ready and the deferred ones, and of the lanes.
//!
//! A queue may have ten thousand waiters and is searched with every message, so no search reads all of them. Waiters
//! are not lent for change, because their deadlines and deferral are index keys.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::ops::RangeTo;
use std::sync::Arc;

use tokio::time::Instant;

use super::by_name::{ByName, named_scopes};
use super::call_bounds::LaneWaiters;
use super::{CountedSubjects, CountingScope, Deferral, PermitWaiter, QueueKey};
use crate::domain::limit::Scope;
use crate::limiter::gate::core::Ticket;
use crate::limiter::gate::egress::ReleaseWait;

#[derive(Debug)]
pub(super) struct Waiters<T> {
    by_key: BTreeMap<QueueKey, PermitWaiter<T>>,
    by_deadline: BTreeSet<(Instant, QueueKey)>,
    by_egress_deadline: BTreeSet<(Instant, QueueKey)>,
    /// Those that are not deferred.
    ready: BTreeSet<QueueKey>,
    /// Those that have an account or a reference, deferred or not.
    named: ByName,
    deferred: Deferred,
    lanes: LaneWaiters,
    /// Number of checks since cancelled waiters were last swept.
    checks_since_sweep: usize,
}

/// The deferred waiters, by the end of their deferral and by what defers others with them.
#[derive(Debug, Default)]
struct Deferred {
    by_end: BTreeSet<(Instant, QueueKey)>,
    by_name: ByName,
}

impl Deferred {
    fn insert(&mut self, key: QueueKey, scope: &CountingScope, deferral: &Deferral) {
        self.by_end.insert((deferral.until, key));
        if let Some((of, _)) = deferral.counted_with {
            self.by_name.insert(key, of, scope);
        }
    }

    fn remove(&mut self, key: QueueKey, scope: &CountingScope, deferral: &Deferral) {
        self.by_end.remove(&(deferral.until, key));
        if let Some((of, _)) = deferral.counted_with {
            self.by_name.remove(key, of, scope);
        }
    }
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self {
            by_key: BTreeMap::new(),
            by_deadline: BTreeSet::new(),
            by_egress_deadline: BTreeSet::new(),
            ready: BTreeSet::new(),
            named: ByName::default(),
            deferred: Deferred::default(),
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
        match &waiter.deferral {
            Some(deferral) => self.deferred.insert(key, &waiter.scope, deferral),
            None => drop(self.ready.insert(key)),
        }
        named_scopes(&waiter.scope).for_each(|of| self.named.insert(key, of, &waiter.scope));
        self.by_key.insert(key, waiter);
    }

    pub fn remove(&mut self, key: QueueKey, now: Instant) -> Option<PermitWaiter<T>> {
        let waiter = self.by_key.remove(&key)?;
        self.by_deadline.remove(&(waiter.wait_until, key));
        if let Some(egress) = &waiter.egress {
            self.by_egress_deadline.remove(&(egress.wait_until, key));
        }
        self.lanes.remove(waiter.egress.as_ref(), now);
        match &waiter.deferral {
            Some(deferral) => self.deferred.remove(key, &waiter.scope, deferral),
            None => drop(self.ready.remove(&key)),
        }
        named_scopes(&waiter.scope).for_each(|of| self.named.remove(key, of, &waiter.scope));
        Some(waiter)
    }

    /// Sets the subjects that count a waiter.
    pub fn count_with(&mut self, key: QueueKey, counted: CountedSubjects) {
        if let Some(waiter) = self.by_key.get_mut(&key) {
            waiter.counted = Arc::new(counted);
        }
    }

    pub fn defer(&mut self, key: QueueKey, deferral: Deferral) {
        let Some(waiter) = self.by_key.get_mut(&key) else { return };
        if let Some(before) = waiter.deferral.take() {
            self.deferred.remove(key, &waiter.scope, &before);
        }
        self.ready.remove(&key);
        waiter.waited_for_account |= deferral.is_by_account_limit();
        let lane = waiter.egress.as_ref().filter(|_| deferral.ends_by_release).map(|egress| &egress.lane);
        waiter.release_wait = lane.map(|lane| waiter.release_wait.take().unwrap_or_else(|| ReleaseWait::new(lane)));
        self.deferred.insert(key, &waiter.scope, &deferral);
        waiter.deferral = Some(deferral);
    }

    /// A waiter holds back cheaper ones since then.
    pub fn hold(&mut self, key: QueueKey, since: Instant) {
        if let Some(waiter) = self.by_key.get_mut(&key) {
            waiter.holds_since = Some(since);
        }
    }

    fn resume(&mut self, key: QueueKey) {
        let Some(waiter) = self.by_key.get_mut(&key) else { return };
        if let Some(deferral) = waiter.deferral.take() {
            self.deferred.remove(key, &waiter.scope, &deferral);
            self.ready.insert(key);
        }
    }

    /// Ends the deferrals that end by then.
    pub fn resume_due(&mut self, now: Instant) {
        while let Some((_, key)) = self.deferred.by_end.first().copied().filter(|(until, _)| *until <= now) {
            self.resume(key);
        }
    }

    /// Ends the deferrals that are over.
    pub fn resume_if(&mut self, is_over: impl Fn(&Deferral) -> bool) {
        let is_over = |key: &QueueKey| self.get(*key).and_then(|waiter| waiter.deferral.as_ref()).is_some_and(&is_over);
        let keys: Vec<QueueKey> = self.deferred.by_end.iter().map(|(_, key)| *key).filter(is_over).collect();
        keys.into_iter().for_each(|key| self.resume(key));
    }

    /// Ends the deferrals that are over, of those whose limit may count a permit of this scope.
    pub fn resume_related(&mut self, scope: &CountingScope, is_over: impl Fn(&PermitWaiter<T>, &Deferral) -> bool) {
        let is_over = |key: &QueueKey| {
            let waiter = self.by_key.get(key);
            waiter.is_some_and(|waiter| waiter.deferral.as_ref().is_some_and(|deferral| is_over(waiter, deferral)))
        };
        let keys: Vec<QueueKey> = self.deferred.by_name.related(scope).flatten().copied().filter(is_over).collect();
        keys.into_iter().for_each(|key| self.resume(key));
    }

    pub fn iter(&self) -> impl Iterator<Item = (&QueueKey, &PermitWaiter<T>)> {
        self.by_key.iter()
    }

    /// The waiters that are not deferred, in order.
    pub fn ready(&self) -> impl DoubleEndedIterator<Item = (&QueueKey, &PermitWaiter<T>)> {
        self.ready.iter().filter_map(|key| Some((key, self.by_key.get(key)?)))
    }

    /// The deferred waiters, by the end of their deferral.
    pub fn deferred(&self) -> impl Iterator<Item = (Instant, &PermitWaiter<T>)> {
        self.deferred.by_end.iter().filter_map(|(until, key)| Some((*until, self.by_key.get(key)?)))
    }

    pub fn ahead_of(&self, keys: RangeTo<QueueKey>) -> impl Iterator<Item = &PermitWaiter<T>> {
        self.by_key.range(keys).map(|(_, waiter)| waiter)
    }

    /// The deferred waiters before this key whose limit may count a waiter of this scope, too.
    pub fn related_ahead_of(&self, key: QueueKey, scope: &CountingScope) -> impl Iterator<Item = &PermitWaiter<T>> {
        let ahead = self.deferred.by_name.related(scope).flat_map(move |keys| keys.range(..key));
        ahead.filter_map(|key| self.by_key.get(key))
    }

    /// The waiters before this key that a limit of the same account defers.
    pub fn deferred_ahead(&self, key: QueueKey, scope: &CountingScope) -> impl Iterator<Item = &QueueKey> {
        let keys = self.deferred.by_name.of_subject(Scope::Account, scope);
        keys.into_iter().flat_map(move |keys| keys.range(..key))
    }

    /// The waiters behind this key, deferred or not, of the account or reference that the deferral's limit counts.
    pub fn named_behind(
        &self,
        key: QueueKey,
        scope: &CountingScope,
        deferral: &Deferral,
    ) -> impl Iterator<Item = (QueueKey, &PermitWaiter<T>)> {
        let keys = deferral.counted_with.and_then(|(of, _)| self.named.of_subject(of, scope));
        let behind = keys.into_iter().flat_map(move |keys| keys.range((Excluded(key), Unbounded)));
        behind.filter_map(|key| Some((*key, self.by_key.get(key)?)))
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
    use crate::domain::limit::AppliesTo;
    use crate::domain::permit_protocol::CallKind;
    use crate::limiter::gate::wait_queue::WaitQueue;
    use crate::limiter::gate::{AcquireResult, BlockReason};

    impl<T: Ticket> Waiters<T> {
        /// Whether each index has the waiters that it should have, and nothing else.
        pub fn has_exact_indexes(&self) -> bool {
            let deferred = self.by_key.values().filter(|waiter| waiter.deferral.is_some()).count();
            let names = self.by_key.values().flat_map(|waiter| named_scopes(&waiter.scope)).count();
            self.by_deadline.len() == self.len()
                && self.by_egress_deadline.len() <= self.len()
                && self.ready.len() + deferred == self.len()
                && self.deferred.by_end.len() == deferred
                && self.deferred.by_name.len() <= deferred
                && self.named.len() == names
        }
    }

    impl<T: Ticket> WaitQueue<T> {
        pub fn has_exact_indexes(&self) -> bool {
            self.waiters.has_exact_indexes()
        }

        /// The tickets of the waiters that are not deferred.
        pub fn ready_tickets(&self) -> impl Iterator<Item = &T> {
            self.waiters.ready().map(|(_, waiter)| &waiter.ticket)
        }

        pub fn ticket_of(&self, key: QueueKey) -> Option<&T> {
            self.waiters.get(key).map(|waiter| &waiter.ticket)
        }
    }

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
            let counted_with = match self.rng.random_range(0..3) {
                0 => None,
                1 => Some((Scope::Account, AppliesTo::All)),
                _ => Some((Scope::Reference, AppliesTo::All)),
            };
            Deferral {
                until: self.instant(),
                reason: BlockReason::Cold,
                exact: true,
                ends_by_release: false,
                counted_with,
                is_by_cost: false,
            }
        }

        fn scope(&mut self) -> CountingScope {
            let mut name = || [None, Some("a"), Some("b")][self.rng.random_range(0..3)].map(Into::into);
            CountingScope { kind: CallKind::Charge, account: name(), reference: name() }
        }

        /// The key of any waiter that has arrived, whether it still waits or not.
        fn any_key(&mut self) -> QueueKey {
            self.answers[self.rng.random_range(0..self.answers.len())].0
        }

        fn arrive(&mut self, arrival: u64) {
            let key = QueueKey { priority_reversed: self.rng.random_range(0..3), arrival };
            let (reply, answer) = oneshot::channel();
            let deferral = self.rng.random_bool(0.3).then(|| self.deferral());
            let (wait_until, scope) = (self.instant(), self.scope());
            let waiter = PermitWaiter {
                job: None,
                cost: 1,
                priority: 0,
                scope,
                reference: None,
                wait_until,
                accepted_wait: Duration::ZERO,
                account_wait_until: None,
                egress: None,
                ticket: reply,
                deferral,
                release_wait: None,
                holds_since: None,
                waited_for_account: false,
                counted: Arc::default(),
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
                    self.waiters.resume_due(now);
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
            let (until, key, scope, deferral) = (self.instant(), self.any_key(), self.scope(), self.deferral());
            let all: Vec<(QueueKey, &PermitWaiter<_>)> =
                self.waiters.iter().map(|(key, waiter)| (*key, waiter)).collect();
            assert_eq!(self.waiters.first_deadline(), all.iter().map(|(_, waiter)| waiter.wait_until).min());
            let mut late: Vec<QueueKey> =
                all.iter().filter(|(_, waiter)| waiter.wait_until < until).map(|(key, _)| *key).collect();
            let mut expiring = self.waiters.expiring_before(until);
            late.sort();
            expiring.sort();
            assert_eq!(expiring, late);
            let ready: Vec<QueueKey> =
                all.iter().filter(|(_, waiter)| waiter.deferral.is_none()).map(|(key, _)| *key).collect();
            assert_eq!(self.waiters.ready().map(|(key, _)| *key).collect::<Vec<_>>(), ready);
            let ends: Vec<Instant> = self.waiters.deferred().map(|(until, _)| until).collect();
            assert!(ends.len() + ready.len() == all.len() && ends.is_sorted());
            let together = |waiter: &PermitWaiter<_>| waiter.defers(&scope);
            let deferred = all.iter().filter(|(at, waiter)| *at < key && together(waiter)).count();
            assert_eq!(self.waiters.related_ahead_of(key, &scope).filter(|other| together(other)).count(), deferred);
            if scope.account.is_some() && scope.reference.is_some() {
                let counts = |waiter: &PermitWaiter<_>| deferral.counts_together(&scope, &waiter.scope);
                let later = |(at, waiter): &&(QueueKey, &PermitWaiter<_>)| *at > key && counts(waiter);
                let later: Vec<QueueKey> = all.iter().filter(later).map(|(at, _)| *at).collect();
                let found: Vec<QueueKey> =
                    self.waiters.named_behind(key, &scope, &deferral).map(|(key, _)| key).collect();
                assert_eq!(found, later);
            }
            assert!(self.waiters.has_exact_indexes());
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
