//! The attribution of returned messages to their publishes, when many are in flight on a channel.
//!
//! lapin 4.12.3 keeps returned messages in a queue, and the next confirm, whichever it is, takes the oldest out of it
//! (`acknowledgement.rs`). The broker returns a message before it confirms it. So at its confirm, a message's return was
//! taken by an earlier confirm, is taken by its own, or still lies behind the one that its own takes. While the last may
//! be so, the message does not count as delivered.

use std::collections::BTreeMap;

/// What became of a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The broker has taken responsibility.
    Delivered,
    /// No queue has it.
    Returned,
    /// The broker could not take it.
    Nacked,
}

/// The publishes of one channel that are not judged yet.
#[derive(Debug)]
pub struct ReturnTracker<M> {
    open: BTreeMap<u64, PendingPublish<M>>,
    /// Publishes in `open` that are confirmed.
    confirmed: Vec<u64>,
    /// Publishes in `open` that are returned and not confirmed.
    returned_unconfirmed: usize,
}

#[derive(Debug)]
struct PendingPublish<M> {
    message: M,
    returned: bool,
    confirmed: Option<PublishConfirm>,
}

#[derive(Clone, Copy, Debug)]
struct PublishConfirm {
    accepted: bool,
    /// Took a return out of the queue, its own or another's.
    carried_return: bool,
}

impl<M> Default for ReturnTracker<M> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), confirmed: Vec::new(), returned_unconfirmed: 0 }
    }
}

impl<M> ReturnTracker<M> {
    /// Records a publish under a number that no earlier one had.
    pub fn record_publish(&mut self, id: u64, message: M) {
        self.open.insert(id, PendingPublish { message, returned: false, confirmed: None });
    }

    /// Records a confirm. `took`: it brought a returned message, which [`Self::record_return`] records.
    pub fn record_confirm(&mut self, id: u64, accepted: bool, took: bool) {
        if let Some(open) = self.open.get_mut(&id).filter(|open| open.confirmed.is_none()) {
            open.confirmed = Some(PublishConfirm { accepted, carried_return: took });
            self.returned_unconfirmed -= usize::from(open.returned);
            self.confirmed.push(id);
        }
    }

    /// A returned message, by how alike it is to one of ours: 0 for another, and the highest is meant. Of two that
    /// are alike in everything either will do. `false` when it is none of ours: then any of ours may have come back.
    pub fn record_return(&mut self, alike: impl Fn(&M) -> u8) -> bool {
        let candidates = self.open.iter_mut().filter(|(_, open)| !open.returned);
        let scored = candidates.map(|(id, open)| ((alike(&open.message), open.confirmed.is_none(), *id), open));
        let best = scored.filter(|((alike, ..), _)| *alike > 0).max_by_key(|(score, _)| *score);
        let Some((_, open)) = best else { return false };
        open.returned = true;
        self.returned_unconfirmed += usize::from(open.confirmed.is_none());
        true
    }

    /// The publishes that are certain, with their messages. Before it, every confirm that has come must be recorded.
    ///
    /// While a return lies in lapin's queue every confirm takes one out. So if one lies there whose own confirm has come,
    /// confirms have taken out fewer than have come since the queue was last empty; and unless one of those taken out is
    /// still to be confirmed, there are as many confirms of theirs alone. Hence: who took nothing is judged by
    /// what is known, and who took another's return once all that are known to be returned are confirmed.
    pub fn take_resolved(&mut self) -> Vec<(u64, M, PublishOutcome)> {
        let complete = self.returned_unconfirmed == 0;
        let mut confirmed = std::mem::take(&mut self.confirmed);
        confirmed.sort_unstable();
        let mut resolved = Vec::with_capacity(confirmed.len());
        for id in confirmed {
            let verdict = self.open.get(&id).and_then(|open| open.verdict(complete));
            match verdict.and_then(|verdict| Some((self.open.remove(&id)?.message, verdict))) {
                Some((message, verdict)) => resolved.push((id, message, verdict)),
                None => self.confirmed.push(id),
            }
        }
        resolved
    }

    /// The messages of the publishes that nothing is certain of.
    pub fn into_open(self) -> impl Iterator<Item = M> {
        self.open.into_values().map(|open| open.message)
    }
}

impl<M> PendingPublish<M> {
    /// `None`: nothing is certain yet. `complete`: all publishes that are known to be returned are confirmed.
    fn verdict(&self, complete: bool) -> Option<PublishOutcome> {
        let PublishConfirm { accepted, carried_return } = self.confirmed?;
        match (self.returned, accepted) {
            (true, _) => Some(PublishOutcome::Returned),
            (false, _) if carried_return && !complete => None,
            (false, true) => Some(PublishOutcome::Delivered),
            (false, false) => Some(PublishOutcome::Nacked),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// A publish: what it says, whether the broker has a queue for it, and when it confirms it.
    type Publish = (u8, bool, u16);

    fn alike(content: u8) -> impl Fn(&u8) -> u8 {
        move |message| u8::from(*message == content)
    }

    fn resolved(accounts: &mut ReturnTracker<u8>) -> Vec<(u64, PublishOutcome)> {
        accounts.take_resolved().into_iter().map(|(id, _, outcome)| (id, outcome)).collect()
    }

    #[test]
    fn confirm_waits_for_its_own_return() {
        let mut accounts = ReturnTracker::default();
        for (id, content) in [(1, b'a'), (2, b'b'), (3, b'c')] {
            accounts.record_publish(id, content);
        }
        // Both b and c were returned; a's confirm takes out b's return, c's confirm takes out its own.
        accounts.record_confirm(1, true, true);
        assert!(accounts.record_return(alike(b'b')));
        assert_eq!(resolved(&mut accounts), []);
        accounts.record_confirm(3, true, true);
        assert!(accounts.record_return(alike(b'c')));
        assert_eq!(resolved(&mut accounts), [(3, PublishOutcome::Returned)], "a's own may still come");
        accounts.record_confirm(2, true, false);
        assert_eq!(resolved(&mut accounts), [(1, PublishOutcome::Delivered), (2, PublishOutcome::Returned)]);
    }

    #[test]
    fn return_matches_the_most_similar_publish() {
        let mut accounts = ReturnTracker::default();
        for (id, content) in [(1, 1_u8), (2, 2), (3, 1)] {
            accounts.record_publish(id, content);
            accounts.record_confirm(id, id != 1, false);
        }
        assert!(!accounts.record_return(|_| 0));
        assert!(accounts.record_return(|message| *message));
        assert_eq!(
            resolved(&mut accounts),
            [(1, PublishOutcome::Nacked), (2, PublishOutcome::Returned), (3, PublishOutcome::Delivered)]
        );
    }

    proptest! {
        /// The broker returns in the order of publishes and confirms in any; lapin gives the oldest return to the next
        /// confirm; we see what has come so far in any order.
        #[test]
        fn return_reaches_its_own_publish(
            publishes in prop::collection::vec((any::<u8>(), any::<bool>(), any::<u16>()), 1..60),
            window in 1..30_usize,
            look_every in 1..6_usize,
        ) {
            let outcomes = run(&publishes, |id| id, window, look_every);
            for (id, (_, routed, _)) in publishes.iter().enumerate() {
                let expected = if *routed { PublishOutcome::Delivered } else { PublishOutcome::Returned };
                prop_assert_eq!(outcomes.get(&(id as u64)), Some(&expected), "publish {}", id);
            }
        }

        /// Nothing distinguishes twins; as many of each kind come back as were returned.
        #[test]
        fn identical_publishes_match_the_return_count(
            publishes in prop::collection::vec((0..3_u8, any::<bool>(), any::<u16>()), 1..60),
            window in 1..30_usize,
        ) {
            let outcomes = run(&publishes, |id| usize::from(publishes[id].0), window, 1);
            for content in 0..3 {
                let of = |publish: &Publish| publish.0 == content;
                let returned = publishes.iter().filter(|publish| of(publish) && !publish.1).count();
                let ids = (0..publishes.len()).filter(|id| of(&publishes[*id]));
                let reported = ids.filter(|id| outcomes[&(*id as u64)] == PublishOutcome::Returned).count();
                prop_assert_eq!(reported, returned, "{}", content);
            }
        }
    }

    fn run(
        publishes: &[Publish],
        content: impl Fn(usize) -> usize,
        window: usize,
        look_every: usize,
    ) -> BTreeMap<u64, PublishOutcome> {
        let (mut accounts, mut outcomes, mut queue) = (ReturnTracker::default(), BTreeMap::new(), VecDeque::new());
        let (mut in_flight, mut unseen, mut next) = (Vec::<usize>::new(), Vec::new(), 0);
        while next < publishes.len() || !in_flight.is_empty() {
            while next < publishes.len() && in_flight.len() < window {
                accounts.record_publish(next as u64, content(next));
                if !publishes[next].1 {
                    queue.push_back(next);
                }
                in_flight.push(next);
                next += 1;
            }
            let place = usize::from(publishes[in_flight[0]].2) % in_flight.len();
            let id = in_flight.remove(place);
            unseen.push((id, queue.pop_front()));
            if unseen.len() < look_every && !in_flight.is_empty() {
                continue;
            }
            for (id, returned) in unseen.drain(..).rev() {
                accounts.record_confirm(id as u64, true, returned.is_some());
                if let Some(returned) = returned {
                    assert!(accounts.record_return(|message| u8::from(*message == content(returned))));
                }
            }
            for (id, _, verdict) in accounts.take_resolved() {
                assert!(outcomes.insert(id, verdict).is_none(), "{id} is judged twice");
            }
        }
        assert!(accounts.open.is_empty() && accounts.confirmed.is_empty(), "{accounts:?}");
        assert_eq!(accounts.returned_unconfirmed, 0);
        outcomes
    }
}
