//! The order of a state's calls, as one gate sees it: each reply is of a later call than the one before.
//!
//! A reply that is not shows a state that was put back, by a copy that lagged, a snapshot, or by hand. It has forgotten what was
//! granted since, so it is begun anew, and the ledger tells what was used. A caller that a state has heard later than its gate
//! ever called shows the same.

use crate::domain::permit_protocol::{LimiterReply, RefusalReason};
use crate::domain::time::Micros;

/// The reply that came last.
#[derive(Debug, Default)]
pub(super) struct CallSequence {
    last: Option<(Micros, u64)>,
}

impl CallSequence {
    /// Whether this reply goes on where the last one ended. After one that does not, the next is the first.
    pub fn is_in_sequence(&mut self, reply: &LimiterReply) -> bool {
        let this = (reply.state_epoch, reply.calls);
        let goes_on = match reply.refused.map(|refused| refused.reason) {
            Some(RefusalReason::StaleCall) => false,
            // Such a call is answered and not counted.
            Some(RefusalReason::StaleVersion) => self.last.is_none_or(|last| last <= this),
            _ => self.last.is_none_or(|last| last < this),
        };
        self.last = goes_on.then_some(this);
        goes_on
    }

    /// Another store, or a state that is begun anew: nothing that came before says anything of the next reply.
    pub fn reset(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::permit_protocol::LimiterRefusal;

    fn reply(born: u64, calls: u64, by: Option<RefusalReason>) -> LimiterReply {
        LimiterReply {
            now: Micros(0),
            version: 1,
            state_epoch: Micros(born),
            calls,
            grants: Vec::new(),
            skipped: Vec::new(),
            remaining: 0,
            deciding_limit: 0,
            reset_us: 0,
            refused: by.map(|by| LimiterRefusal { reason: by, wait_us: 0, exact: false }),
        }
    }

    #[test]
    fn earlier_call_reply_is_out_of_sequence() {
        let stale = Some(RefusalReason::StaleVersion);
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
            ((7, 5), (7, 6, Some(RefusalReason::StaleCall)), false),
        ];
        for ((born, calls), (next_born, next_calls, by), expected) in table {
            let mut order = CallSequence::default();
            assert!(order.is_in_sequence(&reply(born, calls, None)));
            assert_eq!(
                order.is_in_sequence(&reply(next_born, next_calls, by)),
                expected,
                "{next_born} {next_calls} {by:?}"
            );
            // After a break whatever comes next is the first.
            assert!(order.is_in_sequence(&reply(next_born, next_calls + 1, None)));
        }
        let mut order = CallSequence::default();
        assert!(order.is_in_sequence(&reply(7, 5, None)));
        order.reset();
        assert!(order.is_in_sequence(&reply(6, 1, None)));
    }
}
