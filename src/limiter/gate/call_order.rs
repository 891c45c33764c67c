//! The order of a state's calls, as one gate sees it: each reply is of a later call than the one before.
//!
//! A reply that is not shows a state that was put back, by a copy that lagged, a snapshot, or by hand. It has forgotten what was
//! granted since, so it is begun anew, and the ledger tells what was used. A caller that a state has heard later than its gate
//! ever called shows the same.

use crate::domain::decision::{Refusal, Reply};
use crate::domain::time::Micros;

/// The reply that came last.
#[derive(Debug, Default)]
pub(super) struct CallOrder {
    last: Option<(Micros, u64)>,
}

impl CallOrder {
    /// Whether this reply goes on where the last one ended. After one that does not, the next is the first.
    pub fn goes_on(&mut self, reply: &Reply) -> bool {
        let this = (reply.born, reply.calls);
        let goes_on = match reply.refused.map(|refused| refused.by) {
            Some(Refusal::StaleCall) => false,
            // Such a call is answered and not counted.
            Some(Refusal::StaleVersion) => self.last.is_none_or(|last| last <= this),
            _ => self.last.is_none_or(|last| last < this),
        };
        self.last = goes_on.then_some(this);
        goes_on
    }

    /// Another store, or a state that is begun anew: nothing that came before says anything of the next reply.
    pub fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::decision::Refused;

    fn reply(born: u64, calls: u64, by: Option<Refusal>) -> Reply {
        Reply {
            now: Micros(0),
            version: 1,
            born: Micros(born),
            calls,
            granted: Vec::new(),
            passed_over: Vec::new(),
            remaining: 0,
            decides: 0,
            reset_us: 0,
            refused: by.map(|by| Refused { by, wait_us: 0, exact: false }),
        }
    }

    #[test]
    fn a_reply_of_an_earlier_call_does_not_go_on() {
        let stale = Some(Refusal::StaleVersion);
        // What came before, what comes, and whether it goes on.
        let table = [
            ((7, 5), (7, 6, None), true),
            // Others called meanwhile, or began it anew.
            ((7, 5), (7, 60, None), true),
            ((7, 5), (8, 1, None), true),
            // The same number twice is one call that was undone.
            ((7, 5), (7, 5, None), false),
            ((7, 5), (7, 4, None), false),
            ((7, 5), (6, 60, None), false),
            ((7, 5), (7, 5, stale), true),
            ((7, 5), (7, 4, stale), false),
            ((7, 5), (7, 6, Some(Refusal::StaleCall)), false),
        ];
        for ((born, calls), (next_born, next_calls, by), expected) in table {
            let mut order = CallOrder::default();
            assert!(order.goes_on(&reply(born, calls, None)));
            assert_eq!(order.goes_on(&reply(next_born, next_calls, by)), expected, "{next_born} {next_calls} {by:?}");
            // After a break whatever comes next is the first.
            assert!(order.goes_on(&reply(next_born, next_calls + 1, None)));
        }
        let mut order = CallOrder::default();
        assert!(order.goes_on(&reply(7, 5, None)));
        order.forget();
        assert!(order.goes_on(&reply(6, 1, None)));
    }
}
