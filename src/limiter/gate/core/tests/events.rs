//! Random events of a gate, for the property tests of its core.

use std::time::Duration;

use proptest::prelude::*;

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
