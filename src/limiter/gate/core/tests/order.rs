//! Checks of the order in which the rig's requests are made and granted.

use std::collections::BTreeMap;

use super::events::Ask;
use super::{PendingCall, Rig, Waiting, job};

impl Rig {
    /// No call requests a permit for an account behind a costlier request of it: the limiter may skip that one.
    pub fn check_account_order(&mut self, outgoing: &PendingCall) {
        let mut costs: BTreeMap<&str, u32> = BTreeMap::new();
        for batch in &outgoing.batches {
            let Some(account) = batch.scope.account.as_deref() else { continue };
            let before = costs.insert(account, batch.cost).unwrap_or_default();
            assert!(before <= batch.cost, "{} behind {before} of {account}", batch.cost);
        }
        let keys = outgoing.batches.iter().flat_map(|batch| &batch.keys);
        let requested = keys.filter_map(|key| self.core.queue.ticket_of(*key)).map(|ticket| ticket.id).collect();
        self.requested.insert(outgoing.call.number, requested);
    }

    /// Whether a waiter was left out of a call, because a costlier request of its account was in it before.
    fn was_held_back(&self, id: u32, ask: &Ask, call: u64) -> bool {
        let is_costlier = |other: &Ask| other.account == ask.account && other.cost > 1;
        !self.requested[&call].contains(&id)
            && ask.account.is_some()
            && self.requested[&call].iter().any(|other| is_costlier(&self.asks[other]))
    }

    /// A waiter that goes first and may leave the same lane waits on only for its own account.
    pub fn check_order(&self, id: u32, ask: &Ask, call: u64) {
        let goes_first = |(other, waiting): &(&u32, &Waiting)| {
            let other_ask = &waiting.ask;
            let key = |priority: u8, id: u32| (u8::MAX - priority, id);
            self.ready[&call].contains(other)
                && key(other_ask.priority, **other) < key(ask.priority, id)
                && (other_ask.kind, other_ask.lane) == (ask.kind, ask.lane)
        };
        for (other, waiting) in self.waiting.iter().filter(goes_first) {
            let position = self.core.position_of(&job(*other), self.now());
            // Decisions of the same reply are not taken yet.
            let is_decided = position.is_none();
            let is_deferred = position.is_some_and(|position| position.is_own_limit);
            let is_held_back = self.was_held_back(*other, &waiting.ask, call);
            assert!(
                is_decided || is_deferred || is_held_back,
                "{id} of {ask:?} went before {other} of {:?}",
                waiting.ask
            );
            assert!(!is_held_back || waiting.ask.account != ask.account, "{id} overtook {other} of its account");
            let is_same_flow = (waiting.ask.account, waiting.ask.cost) == (ask.account, ask.cost);
            assert!(is_decided || self.had_late_permits || !is_same_flow, "{id} overtook {other} of its flow");
        }
    }
}
