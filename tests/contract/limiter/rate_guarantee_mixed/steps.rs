//! Random steps of a world of workers, a store and a provider: calls, crashes, lost state, clock steps.

use proptest::prelude::*;

use super::WORKERS;

#[derive(Clone, Copy, Debug)]
pub struct Use {
    pub begin_us: u64,
    pub transit_us: u64,
    pub answer_us: u64,
    pub is_sent: bool,
    pub is_answered: bool,
}

#[derive(Clone, Debug)]
pub enum Step {
    Call {
        worker: usize,
        /// Accounts and costs.
        wants: Vec<(Option<u8>, u32)>,
        out_us: u64,
        back_us: u64,
        is_reply_lost: bool,
        uses: Vec<Use>,
    },
    Crash {
        worker: usize,
    },
    Restart,
    /// The store's clock steps.
    MoveClock {
        us: i64,
    },
}

/// Faults besides lost calls and crashes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trouble {
    LostState,
    ClockSteps,
}

pub fn step(trouble: Trouble) -> impl Strategy<Value = (u64, Step)> {
    let gap = prop_oneof![4 => 0_u64..2_000, 3 => 0_u64..60_000, 1 => Just(130_000_u64), 1 => Just(420_000)];
    let delay = || prop_oneof![3 => 0_u64..500, 2 => 0_u64..30_000, 2 => 100_000_u64..160_000];
    // Sometimes the process is frozen between the reply and the start, for longer than its hold.
    let begin = prop_oneof![6 => Just(0_u64), 3 => 0_u64..50_000, 1 => Just(900_000)];
    let one = (begin, delay(), delay(), prop::bool::weighted(0.85), prop::bool::weighted(0.85));
    let one = one.prop_map(|(begin_us, transit_us, answer_us, is_sent, is_answered)| Use {
        begin_us,
        transit_us,
        answer_us,
        is_sent,
        is_answered,
    });
    let want =
        (prop_oneof![1 => Just(None), 2 => (0_u8..3).prop_map(Some)], prop_oneof![6 => Just(1_u32), 1 => Just(2)]);
    let call = (0..WORKERS, prop::collection::vec(want, 1..6), 0_u64..8_000, 0_u64..8_000);
    let call = (call, prop::bool::weighted(0.1), prop::collection::vec(one, 6));
    let call = call.prop_map(|((worker, wants, out_us, back_us), is_reply_lost, uses)| Step::Call {
        worker,
        wants,
        out_us,
        back_us,
        is_reply_lost,
        uses,
    });
    let clock = (100_000_i64..30_000_000, any::<bool>()).prop_map(|(us, back)| if back { -us } else { us });
    let trouble = match trouble {
        Trouble::LostState => prop_oneof![
            2 => (0..WORKERS).prop_map(|worker| Step::Crash { worker }),
            1 => Just(Step::Restart),
        ]
        .boxed(),
        Trouble::ClockSteps => clock.prop_map(|us| Step::MoveClock { us }).boxed(),
    };
    (gap, prop_oneof![30 => call, 1 => trouble])
}
