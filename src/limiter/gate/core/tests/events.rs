//! Random events of a gate, for the property tests of its core, and checks of the order in which they are granted.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::{PendingCall, Rig, Waiting, job};
use crate::domain::permit_protocol::CallKind;

pub const ACCOUNTS: [&str; 3] = ["a", "b", "c"];

/// A request as it was sent.
#[derive(Clone, Debug)]
pub struct Ask {
    pub account: Option<&'static str>,
    pub priority: u8,
    pub cost: u32,
    pub kind: CallKind,
    pub lane: usize,
    pub patience: Duration,
}

/// A random event.
#[derive(Clone, Debug)]
pub enum Step {
    Join(Ask),
    Cancel(usize),
    Finish {
        index: usize,
        is_used: bool,
    },
    Pass(Duration),
    Pause(Duration),
    /// New numbers of the limits, and the account that a rule blocks.
    Settings {
        max: u32,
        blocked: Option<usize>,
    },
    LoseReplies(bool),
    RoundTrip(Duration),
}

fn ask(patience: impl Strategy<Value = Duration>) -> impl Strategy<Value = Ask> {
    let account = prop_oneof![Just(None), (0..ACCOUNTS.len()).prop_map(|index| Some(ACCOUNTS[index]))];
    let kind = prop_oneof![4 => Just(CallKind::Charge), 1 => Just(CallKind::Lookup)];
    (account, 0..3_u8, prop_oneof![4 => Just(1_u32), 1 => 1..4_u32], kind, 0..2_usize, patience).prop_map(
        |(account, priority, cost, kind, lane, patience)| Ask { account, priority, cost, kind, lane, patience },
    )
}

pub fn millis(range: std::ops::Range<u64>) -> impl Strategy<Value = Duration> {
    range.prop_map(Duration::from_millis)
}

pub fn step(patience: impl Strategy<Value = Duration>) -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => ask(patience).prop_map(Step::Join),
        1 => any::<usize>().prop_map(Step::Cancel),
        5 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(index, is_used)| Step::Finish { index, is_used }),
        5 => prop_oneof![millis(0..20), millis(0..1_500)].prop_map(Step::Pass),
        1 => millis(0..800).prop_map(Step::Pause),
        1 => (3..12_u32, prop::option::of(0..ACCOUNTS.len()))
            .prop_map(|(max, blocked)| Step::Settings { max, blocked }),
        1 => any::<bool>().prop_map(Step::LoseReplies),
        1 => prop_oneof![Just(Duration::ZERO), millis(0..8)].prop_map(Step::RoundTrip),
    ]
}

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
