//! Which of a channel's publishes were returned, when many are in flight and lapin hands returns to anybody.
//!
//! lapin 4.12.3 keeps returned messages in a queue, and whichever confirm comes next takes the oldest out of it
//! (`acknowledgement.rs`). The broker returns a message before it confirms it, so at its confirm a message's return has
//! been taken by an earlier confirm, is taken by its own, or still lies behind the one that its own takes. Refuses to
//! call a message delivered while the last may be so.

use std::collections::BTreeMap;

/// What became of a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The broker has taken responsibility.
    Delivered,
    /// No queue has it.
    Returned,
    /// The broker could not take it.
    Refused,
}

/// The publishes of one channel that are not judged yet.
#[derive(Debug)]
pub(super) struct Accounts<M> {
    open: BTreeMap<u64, Open<M>>,
}

#[derive(Debug)]
struct Open<M> {
    message: M,
    returned: bool,
    confirmed: Option<Confirmed>,
}

#[derive(Clone, Copy, Debug)]
struct Confirmed {
    accepted: bool,
    /// Took a return out of the queue, its own or another's.
    took: bool,
}

impl<M> Default for Accounts<M> {
    fn default() -> Self {
        Self { open: BTreeMap::new() }
    }
}

impl<M> Accounts<M> {
    pub fn published(&mut self, id: u64, message: M) {
        self.open.insert(id, Open { message, returned: false, confirmed: None });
    }

    /// A confirm came; `took` if it brought a returned message, which [`Accounts::returned`] is told of too.
    pub fn confirmed(&mut self, id: u64, accepted: bool, took: bool) {
        if let Some(open) = self.open.get_mut(&id) {
            open.confirmed = Some(Confirmed { accepted, took });
        }
    }

    /// A returned message, by how alike it is to one of ours: 0 for another, and the highest is meant. Of two that
    /// are alike in everything either will do. `false` when it is none of ours: then any of ours may have come back.
    #[must_use]
    pub fn returned(&mut self, alike: impl Fn(&M) -> u8) -> bool {
        let candidates = self.open.iter_mut().filter(|(_, open)| !open.returned);
        let scored = candidates.map(|(id, open)| ((alike(&open.message), open.confirmed.is_none(), *id), open));
        let best = scored.filter(|((alike, ..), _)| *alike > 0).max_by_key(|(score, _)| *score);
        best.map(|(_, open)| open.returned = true).is_some()
    }

    /// What is certain, once every confirm that has come was told of.
    ///
    /// While a return lies in lapin's queue every confirm takes one out. So if one lies there whose own confirm has come,
    /// confirms have taken out fewer than have come since the queue was last empty; and unless one of those taken out is
    /// still to be confirmed, there are as many confirms of theirs alone. Hence: who took nothing is judged by
    /// what is known, and who took another's return once all that are known to be returned are confirmed.
    pub fn judge(&mut self) -> Vec<(u64, Verdict)> {
        let settled = self.open.values().all(|open| !open.returned || open.confirmed.is_some());
        let mut judged = Vec::new();
        self.open.retain(|id, open| {
            let Some(Confirmed { accepted, took }) = open.confirmed else { return true };
            let verdict = match (open.returned, accepted) {
                (true, _) => Verdict::Returned,
                (false, _) if took && !settled => return true,
                (false, true) => Verdict::Delivered,
                (false, false) => Verdict::Refused,
            };
            judged.push((*id, verdict));
            false
        });
        judged
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    /// A publish: what it says, whether the broker has a queue for it, and when it confirms it.
    type Publish = (u8, bool, u16);

    fn alike(content: u8) -> impl Fn(&u8) -> u8 {
        move |message| u8::from(*message == content)
    }

    #[test]
    fn a_confirm_that_takes_anothers_return_waits_for_its_own() {
        let mut accounts = Accounts::default();
        for (id, content) in [(1, b'a'), (2, b'b'), (3, b'c')] {
            accounts.published(id, content);
        }
        // Both b and c were returned; a's confirm takes out b's return, c's confirm takes out its own.
        accounts.confirmed(1, true, true);
        assert!(accounts.returned(alike(b'b')));
        assert_eq!(accounts.judge(), []);
        accounts.confirmed(3, true, true);
        assert!(accounts.returned(alike(b'c')));
        assert_eq!(accounts.judge(), [(3, Verdict::Returned)], "a's own may still come");
        accounts.confirmed(2, true, false);
        assert_eq!(accounts.judge(), [(1, Verdict::Delivered), (2, Verdict::Returned)]);
    }

    #[test]
    fn a_return_is_the_most_alike_and_none_of_ours_is_told() {
        let mut accounts = Accounts::default();
        for (id, content) in [(1, 1_u8), (2, 2), (3, 1)] {
            accounts.published(id, content);
            accounts.confirmed(id, id != 1, false);
        }
        assert!(!accounts.returned(|_| 0));
        assert!(accounts.returned(|message| *message));
        assert_eq!(accounts.judge(), [(1, Verdict::Refused), (2, Verdict::Returned), (3, Verdict::Delivered)]);
    }

    proptest! {
        /// The broker returns in the order of publishes and confirms in any; lapin gives the oldest return to the next
        /// confirm; we see what has come so far in any order.
        #[test]
        fn each_return_is_told_to_its_own(
            publishes in prop::collection::vec((any::<u8>(), any::<bool>(), any::<u16>()), 1..60),
            window in 1..30_usize,
            look_every in 1..6_usize,
        ) {
            let told = run(&publishes, |id| id, window, look_every);
            for (id, (_, routed, _)) in publishes.iter().enumerate() {
                let expected = if *routed { Verdict::Delivered } else { Verdict::Returned };
                prop_assert_eq!(told.get(&(id as u64)), Some(&expected), "publish {}", id);
            }
        }

        /// Nobody can tell twins apart; so many of each kind come back as were returned.
        #[test]
        fn of_twins_as_many_are_told_as_were_returned(
            publishes in prop::collection::vec((0..3_u8, any::<bool>(), any::<u16>()), 1..60),
            window in 1..30_usize,
        ) {
            let told = run(&publishes, |id| usize::from(publishes[id].0), window, 1);
            for content in 0..3 {
                let of = |publish: &Publish| publish.0 == content;
                let returned = publishes.iter().filter(|publish| of(publish) && !publish.1).count();
                let ids = (0..publishes.len()).filter(|id| of(&publishes[*id]));
                let told = ids.filter(|id| told[&(*id as u64)] == Verdict::Returned).count();
                prop_assert_eq!(told, returned, "{}", content);
            }
        }
    }

    fn run(
        publishes: &[Publish],
        content: impl Fn(usize) -> usize,
        window: usize,
        look_every: usize,
    ) -> BTreeMap<u64, Verdict> {
        let (mut accounts, mut told, mut queue) = (Accounts::default(), BTreeMap::new(), VecDeque::new());
        let (mut in_flight, mut unseen, mut next) = (Vec::<usize>::new(), Vec::new(), 0);
        while next < publishes.len() || !in_flight.is_empty() {
            while next < publishes.len() && in_flight.len() < window {
                accounts.published(next as u64, content(next));
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
                accounts.confirmed(id as u64, true, returned.is_some());
                if let Some(returned) = returned {
                    assert!(accounts.returned(|message| u8::from(*message == content(returned))));
                }
            }
            for (id, verdict) in accounts.judge() {
                assert!(told.insert(id, verdict).is_none(), "{id} is judged twice");
            }
        }
        assert!(accounts.open.is_empty(), "{accounts:?}");
        told
    }
}
