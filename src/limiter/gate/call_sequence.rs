//! The check that a gate's replies come from one state in the order of its calls.
//!
//! Each reply must be of a later call than the one before, and the state must know the gate's own last call. Otherwise
//! the state was restored from a lagging replica, a snapshot or by hand. It has forgotten what was granted since, so it
//! is reset and rebuilt from the ledger. A state that knows a later call of this gate than the gate has made shows the
//! same.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::permit_protocol::{LimiterReply, RefusalReason};
use crate::domain::quota::REPLY_RETENTION_US;
use crate::domain::time::Micros;

/// How long a state certainly remembers a gate's last call: a minute less than it keeps it.
const OWN_CALL_KEPT: Duration = Duration::from_micros(REPLY_RETENTION_US - 60_000_000);

/// The last reply, if any.
#[derive(Debug, Default)]
pub(super) struct CallSequence {
    last: Option<LastReply>,
}

#[derive(Clone, Copy, Debug)]
struct LastReply {
    state_epoch: Micros,
    calls: u64,
    /// Number of this gate's last call that the state counted.
    own_call: u64,
    own_call_at: Instant,
}

impl CallSequence {
    /// Whether the reply to this gate's call of this number continues the sequence. After one that does not, the next
    /// reply is the first.
    pub fn is_in_sequence(&mut self, number: u64, reply: &LimiterReply, now: Instant) -> bool {
        let reason = reply.refused.map(|refused| refused.reason);
        // Such a call is answered and not counted.
        let is_uncounted = reason == Some(RefusalReason::StaleVersion);
        let is_later = |last: LastReply| {
            let (before, this) = ((last.state_epoch, last.calls), (reply.state_epoch, reply.calls));
            before < this || (is_uncounted && before == this)
        };
        let knows_own_call = |last: LastReply| {
            let is_dropped = reply.previous_call == 0 && now >= last.own_call_at + OWN_CALL_KEPT;
            last.state_epoch != reply.state_epoch || last.own_call == reply.previous_call || is_dropped
        };
        let goes_on = reason != Some(RefusalReason::StaleCall)
            && self.last.is_none_or(|last| is_later(last) && knows_own_call(last));
        let heard_at = self.last.map_or(now, |last| last.own_call_at);
        let (own_call, own_call_at) = if is_uncounted { (reply.previous_call, heard_at) } else { (number, now) };
        let (state_epoch, calls) = (reply.state_epoch, reply.calls);
        self.last = goes_on.then_some(LastReply { state_epoch, calls, own_call, own_call_at });
        goes_on
    }

    /// Starts a new sequence, for another store or a state that was reset.
    pub fn reset(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::permit_protocol::LimiterRefusal;

    fn reply(born: u64, calls: u64, previous_call: u64, by: Option<RefusalReason>) -> LimiterReply {
        LimiterReply {
            now: Micros(0),
            version: 1,
            state_epoch: Micros(born),
            calls,
            previous_call,
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
            // Other gates called meanwhile, or reset the state.
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
        let now = Instant::now();
        for ((born, calls), (next_born, next_calls, by), expected) in table {
            let mut order = CallSequence::default();
            assert!(order.is_in_sequence(1, &reply(born, calls, 0, None), now));
            let next = reply(next_born, next_calls, u64::from(next_born == born), by);
            assert_eq!(order.is_in_sequence(2, &next, now), expected, "{next_born} {next_calls} {by:?}");
            // After a break whatever comes next is the first.
            assert!(expected || order.is_in_sequence(3, &reply(next_born, 1, 9, None), now));
        }
        let mut order = CallSequence::default();
        assert!(order.is_in_sequence(1, &reply(7, 5, 0, None), now));
        order.reset();
        assert!(order.is_in_sequence(2, &reply(6, 1, 0, None), now));
    }

    #[test]
    fn forgotten_own_call_breaks_the_sequence() {
        let (begin, stale) = (Instant::now(), Some(RefusalReason::StaleVersion));
        let after = |s: u64| begin + Duration::from_secs(s);
        // Of the second call: seconds since the first, which the state counted last, why it is refused; and whether it
        // goes on.
        let table = [
            (1, (7, 60, 1, None), true),
            (1, (7, 60, 0, None), false),
            (1, (7, 60, 0, stale), false),
            // A state that another gate has reset knows none of ours.
            (1, (8, 3, 0, None), true),
            // It dropped our last reply, as old as it was.
            (600, (7, 60, 0, None), true),
            (500, (7, 60, 0, None), false),
        ];
        for (s, (born, calls, previous, by), expected) in table {
            let mut order = CallSequence::default();
            assert!(order.is_in_sequence(1, &reply(7, 5, 0, None), begin));
            let goes_on = order.is_in_sequence(2, &reply(born, calls, previous, by), after(s));
            assert_eq!(goes_on, expected, "{s} {born} {previous} {by:?}");
        }
        // A call that older settings made was not counted.
        let mut order = CallSequence::default();
        assert!(order.is_in_sequence(1, &reply(7, 5, 0, None), begin));
        assert!(order.is_in_sequence(2, &reply(7, 5, 1, stale), begin));
        assert!(order.is_in_sequence(3, &reply(7, 6, 1, None), begin));
    }
}
