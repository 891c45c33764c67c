//! One call on its way: what it asks for, what it settles, and what must be kept of it if it is not heard.
//!
//! Refuses to ask for permits before the store's clock can be compared: a first call takes nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::line::Group;
use super::permit::Settled;
use super::settle::settlements;
use crate::domain::decision::{Call, Rebuild, Reply, Seeds};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// So many permits and settlements at once are a crowd.
const CROWD: usize = 4;
/// How long the next of a crowd gather: a call costs the store as much as that of many, and no limit holds anybody back.
const GATHER: Duration = Duration::from_millis(2);

/// A call whose reply has not arrived.
pub(super) struct Outgoing {
    pub call: Call,
    pub spec: Arc<QuotaSpec>,
    pub departed: Instant,
    pub groups: Vec<Group>,
    /// As it was before it was packed: other settings may want it packed otherwise.
    pub settled: Vec<Settled>,
    pub pause_until: Option<Instant>,
}

/// What a new call is made of.
pub(super) struct Load {
    pub spec: Arc<QuotaSpec>,
    pub groups: Vec<Group>,
    pub settled: Vec<Settled>,
    pub pause_until: Option<Instant>,
    pub rebuild: Option<Rebuild>,
    pub seeds: Option<Seeds>,
    pub distrust: Option<Micros>,
}

impl Outgoing {
    pub fn new(load: Load, incarnation: u64, number: u64, run_id: String) -> Self {
        let departed = Instant::now();
        let Load { spec, groups, settled, pause_until, rebuild, seeds, distrust } = load;
        let call = Call {
            incarnation,
            number,
            wants: groups.iter().map(|group| group.want.clone()).collect(),
            settlements: settlements(&settled, &spec, departed),
            pause: pause_until.map(|until| until.saturating_duration_since(departed)),
            rebuild,
            seeds,
            distrust,
            run_id,
        };
        Self { call, spec, departed, groups, settled, pause_until }
    }

    /// When the next call is worth making, as far as this one says: at once, unless a crowd passes without a limit.
    pub fn next_worth_at(&self, reply: &Reply) -> Instant {
        self.departed + gathering(self.settled.len(), reply)
    }
}

/// How long after a call its next is worth making, by what it settled and was granted.
fn gathering(settled: usize, reply: &Reply) -> Duration {
    let granted = usize::try_from(reply.permits()).unwrap_or(usize::MAX);
    let is_crowd = granted.saturating_add(settled) >= CROWD;
    if is_crowd && granted > 0 && reply.refused.is_none() { GATHER } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::decision::{Refusal, Refused, Run};

    #[test]
    fn only_a_crowd_that_no_limit_holds_up_gathers() {
        let table = [
            (0, 0, false, Duration::ZERO),
            (CROWD - 1, 0, false, Duration::ZERO),
            (CROWD, 0, false, GATHER),
            (1, CROWD - 1, false, GATHER),
            // Nobody asked: whoever does next is not one of a crowd.
            (0, 10 * CROWD, false, Duration::ZERO),
            // The wait is the limit's to name.
            (10 * CROWD, 0, true, Duration::ZERO),
        ];
        for (granted, settled, is_refused, expected) in table {
            let permits = u32::try_from(granted).unwrap();
            let reply = Reply {
                now: Micros(0),
                version: 1,
                born: Micros(0),
                calls: 1,
                granted: vec![Run { want: 0, permits, wait_us: 0, origins: Vec::new() }],
                passed_over: Vec::new(),
                remaining: 0,
                decides: 0,
                reset_us: 0,
                refused: is_refused.then_some(Refused { by: Refusal::Paused, wait_us: 1, exact: true }),
            };
            assert_eq!(gathering(settled, &reply), expected, "{granted} granted, {settled} settled, {is_refused}");
        }
    }
}
