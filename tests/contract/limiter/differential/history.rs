//! Random histories of a quota's limiter: limits, callers, accounts, clock steps and lost state.

use proptest::prelude::*;
use sluicegate::domain::limit::{Algorithm, AppliesTo, Scope};
use sluicegate::domain::provider::Pacing;

/// One history, with the limits at its start.
#[derive(Clone, Debug)]
pub struct Plan {
    pub limits: Vec<PlannedLimit>,
    pub pacing: Option<Pacing>,
    pub jitter: bool,
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug)]
pub struct PlannedLimit {
    pub name: u8,
    pub algorithm: Algorithm,
    pub scope: Scope,
    pub applies_to: AppliesTo,
    pub shadow: bool,
    pub max_requests: u32,
    pub window_ms: u64,
    pub burst: u32,
}

#[derive(Clone, Debug)]
pub struct PlannedWant {
    pub permits: u32,
    pub cost: u32,
    pub lookup: bool,
    pub account: Option<u8>,
    pub reference: Option<u8>,
}

/// Past use from a ledger, of limits, accounts and references.
#[derive(Clone, Debug)]
pub struct PlannedSeeds {
    pub provider: Option<PlannedPast>,
    /// Accounts, or else references.
    pub subjects: Vec<(bool, u8, PlannedPast)>,
}

#[derive(Clone, Debug)]
pub struct PlannedPast {
    /// How long before the call the ledger was read.
    pub as_of_us: u64,
    pub within_ms: u64,
    pub ages_ms: Vec<u64>,
    pub open: (u32, u32),
}

/// One step of a history; permits to release are picked by position among the open ones.
#[derive(Clone, Debug)]
pub enum Step {
    Advance {
        us: u64,
    },
    /// The store's clock steps back.
    Back {
        us: u64,
    },
    Call {
        caller: usize,
        wants: Vec<PlannedWant>,
        settle: Vec<(usize, Option<u64>)>,
        pause_ms: u64,
        /// Ages of past uses, and the charges and look-ups that may be in flight.
        rebuild: Option<(Vec<u64>, (u32, u32))>,
        seeds: Option<PlannedSeeds>,
        distrust: bool,
    },
    Repeat {
        caller: usize,
    },
    Overtaken {
        caller: usize,
    },
    Change {
        limits: Vec<PlannedLimit>,
    },
    OldSettings {
        caller: usize,
    },
    Restart,
}

pub fn plan(algorithms: &'static [Algorithm], jitter: bool) -> impl Strategy<Value = Plan> {
    let limits = prop::collection::vec(limit(algorithms), 1..4);
    let pacing = prop_oneof![2 => Just(None), 2 => Just(Some(Pacing::Burst)), 1 => Just(Some(Pacing::Even))];
    (limits, pacing, prop::collection::vec(step(algorithms), 1..60)).prop_map(move |(limits, pacing, steps)| Plan {
        limits,
        pacing,
        jitter,
        steps,
    })
}

fn limit(algorithms: &'static [Algorithm]) -> impl Strategy<Value = PlannedLimit> {
    let scope = prop_oneof![3 => Just(Scope::Provider), 1 => Just(Scope::Account), 1 => Just(Scope::Reference)];
    let applies = prop_oneof![4 => Just(AppliesTo::All), 1 => Just(AppliesTo::Charge), 1 => Just(AppliesTo::Lookup)];
    let shadow = prop_oneof![5 => Just(false), 1 => Just(true)];
    // With few slots, a mistake of one slot shows; with many, the log spills into chunks.
    let max = prop_oneof![12 => 0_u32..8, 1 => Just(400_u32)];
    // With a month, a bucket whose rate is lowered drains later than the number range allows.
    let window =
        prop_oneof![4 => Just(50_u64), 4 => Just(400), 4 => Just(1_000), 4 => Just(30_000), 1 => Just(2_678_400_000)];
    (0_u8..3, prop::sample::select(algorithms), scope, applies, shadow, max, window, 1_u32..6).prop_map(
        |(name, algorithm, scope, applies_to, shadow, max_requests, window_ms, burst)| PlannedLimit {
            name,
            algorithm,
            scope,
            applies_to,
            shadow,
            max_requests,
            window_ms,
            burst,
        },
    )
}

fn want() -> impl Strategy<Value = PlannedWant> {
    let permits = prop_oneof![8 => 1_u32..4, 1 => Just(120_u32)];
    let cost = prop_oneof![6 => Just(1_u32), 1 => 2_u32..6];
    let lookup = prop_oneof![5 => Just(false), 1 => Just(true)];
    let own = || prop_oneof![1 => Just(None), 1 => (0_u8..3).prop_map(Some)];
    (permits, cost, lookup, own(), own()).prop_map(|(permits, cost, lookup, account, reference)| PlannedWant {
        permits,
        cost,
        lookup,
        account,
        reference,
    })
}

fn past() -> impl Strategy<Value = PlannedPast> {
    let as_of = prop_oneof![3 => 0_u64..5_000, 1 => 0_u64..3_000_000];
    let within = prop_oneof![1 => Just(100_u64), 1 => Just(1_500), 3 => Just(3_000_000_000)];
    let ages = prop::collection::vec(prop_oneof![0_u64..3_000, 0_u64..40_000], 0..6);
    (as_of, within, ages, (0_u32..3, 0_u32..2)).prop_map(|(as_of_us, within_ms, ages_ms, open)| PlannedPast {
        as_of_us,
        within_ms,
        ages_ms,
        open,
    })
}

fn seeds() -> impl Strategy<Value = Option<PlannedSeeds>> {
    let provider = prop_oneof![1 => Just(None), 1 => past().prop_map(Some)];
    let subjects = prop::collection::vec((any::<bool>(), 0_u8..3, past()), 0..4);
    let present = (provider, subjects).prop_map(|(provider, subjects)| Some(PlannedSeeds { provider, subjects }));
    prop_oneof![1 => Just(None), 1 => present]
}

fn step(algorithms: &'static [Algorithm]) -> impl Strategy<Value = Step> {
    let age = prop_oneof![1 => Just(None), 4 => (0_u64..400_000).prop_map(Some)];
    let settle = prop::collection::vec((any::<usize>(), age), 0..24);
    let pause = prop_oneof![20 => Just(0_u64), 1 => 1_u64..500];
    let past =
        (prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(0_u64..3_000, 1..9)], (0_u32..2, 0_u32..2));
    let rebuild = prop_oneof![1 => Just(None), 2 => past.prop_map(Some)];
    let distrust = prop_oneof![40 => Just(false), 1 => Just(true)];
    let wants = prop::collection::vec(want(), 0..5);
    let call = (0_usize..3, wants, settle, pause, rebuild, seeds(), distrust).prop_map(
        |(caller, wants, settle, pause_ms, rebuild, seeds, distrust)| Step::Call {
            caller,
            wants,
            settle,
            pause_ms,
            rebuild,
            seeds,
            distrust,
        },
    );
    prop_oneof![
        10 => prop_oneof![
            4 => 0_u64..3_000, 4 => 0_u64..400_000, 1 => Just(2_000_000), 1 => Just(40_000_000)
        ].prop_map(|us| Step::Advance { us }),
        1 => (0_u64..900_000).prop_map(|us| Step::Back { us }),
        24 => call,
        2 => (0_usize..3).prop_map(|caller| Step::Repeat { caller }),
        1 => (0_usize..3).prop_map(|caller| Step::Overtaken { caller }),
        1 => prop::collection::vec(limit(algorithms), 1..4).prop_map(|limits| Step::Change { limits }),
        1 => (0_usize..3).prop_map(|caller| Step::OldSettings { caller }),
        1 => Just(Step::Restart),
    ]
}
