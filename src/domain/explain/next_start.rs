//! The earliest start of an account's next payment in a lane's backlog, for `limits peek --account`.
//!
//! It is a lower bound, not an estimate: other payments of the lane may come first.

use std::time::Duration;

use super::facts::FlowBlock;
use crate::domain::limit::Rule;
use crate::domain::wait_reason::WaitReason;

/// What the account's next payment depends on.
#[derive(Clone, Debug, Default)]
pub struct NextStartInput {
    /// Payments of the account in the lane's backlog.
    pub waiting: u64,
    /// An operator paused the provider.
    pub paused: bool,
    /// The rule of the quota that blocks or refuses the account, if one does.
    pub rule: Option<Rule>,
    /// The block of each of its flows that have payments; `None`: the flow is not blocked.
    pub blocks: Vec<Option<FlowBlock>>,
    /// The enforced limits that count its charges.
    pub limits: Vec<LimitWait>,
}

/// The next permit of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitWait {
    pub name: String,
    /// Time until a permit of cost 1 may start; `None`: not known, or never.
    pub retry_after: Option<Duration>,
    pub is_closed: bool,
}

/// When the account's next payment starts at the earliest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextStart {
    NothingWaits,
    /// Not before this time has passed; zero: now. With what it waits for, if it waits.
    In {
        wait: Duration,
        reason: Option<WaitReason>,
    },
    NotWhilePaused,
    /// A rule of the provider blocks the account.
    NotWhileBlocked,
    /// A rule of the quota refuses the account: its payments end as declined.
    Refused,
    /// The limit is 0.
    Never {
        limit: String,
    },
    /// The limit counts requests in flight, and nothing names the instant at which one ends.
    WhenRequestEnds {
        limit: String,
    },
}

impl NextStartInput {
    pub fn next_start(&self) -> NextStart {
        if self.waiting == 0 {
            return NextStart::NothingWaits;
        }
        match self.rule {
            Some(Rule::Refuse) => return NextStart::Refused,
            Some(Rule::Blocked) => return NextStart::NotWhileBlocked,
            _ => {}
        }
        if let Some(closed) = self.limits.iter().find(|limit| limit.is_closed) {
            return NextStart::Never { limit: closed.name.clone() };
        }
        if self.paused {
            return NextStart::NotWhilePaused;
        }
        let unknown = self.limits.iter().find(|limit| limit.retry_after.is_none());
        if let Some(in_flight) = unknown {
            return NextStart::WhenRequestEnds { limit: in_flight.name.clone() };
        }
        let by_block = self.blocks.iter().map(|block| {
            let reason = block.as_ref().map(|block| block.wait.reason.clone());
            (block.as_ref().map_or(Duration::ZERO, |block| block.left), reason)
        });
        let by_limits = self
            .limits
            .iter()
            .map(|limit| (limit.retry_after.unwrap_or_default(), Some(WaitReason::Limit(limit.name.clone()))));
        // The first of its flows may go, and each limit has to let it pass.
        let first = by_block.min_by_key(|(wait, _)| *wait);
        let latest = first.into_iter().chain(by_limits).max_by_key(|(wait, _)| *wait);
        let (wait, reason) = latest.unwrap_or_default();
        NextStart::In { wait, reason: reason.filter(|_| !wait.is_zero()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::wait_reason::Wait;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn next_start_is_the_latest_of_block_and_limits() {
        let block = |left, reason: WaitReason| Some(FlowBlock { wait: Wait::from(reason), left: ms(left) });
        let own = |left| block(left, WaitReason::Limit("own".to_owned()));
        let limit = |name: &str, retry_after: Option<u64>| LimitWait {
            name: name.to_owned(),
            retry_after: retry_after.map(ms),
            is_closed: false,
        };
        let closed = LimitWait { is_closed: true, ..limit("all", None) };
        let waits = |blocks, limits| NextStartInput { waiting: 3, blocks, limits, ..NextStartInput::default() };
        let after =
            |wait, name: &str| NextStart::In { wait: ms(wait), reason: Some(WaitReason::Limit(name.to_owned())) };
        let now = NextStart::In { wait: Duration::ZERO, reason: None };
        let free = || waits(vec![None], vec![limit("all", Some(0))]);
        for (case, input, wanted) in [
            ("nothing", NextStartInput { waiting: 0, paused: true, ..free() }, NextStart::NothingWaits),
            ("free", free(), now.clone()),
            ("no limit is known", waits(vec![None], Vec::new()), now),
            ("blocked by its limit", waits(vec![own(5_000)], vec![limit("all", Some(0))]), after(5_000, "own")),
            (
                "the first of its flows",
                waits(vec![own(5_000), own(2_000)], vec![limit("all", Some(0))]),
                after(2_000, "own"),
            ),
            (
                "one of its flows is free",
                waits(vec![own(5_000), None], vec![limit("all", Some(900))]),
                after(900, "all"),
            ),
            (
                "the lane is full for longer",
                waits(vec![own(5_000)], vec![limit("all", Some(9_000))]),
                after(9_000, "all"),
            ),
            (
                "refused by the provider",
                waits(vec![block(30_000, WaitReason::Misconfigured)], vec![limit("all", Some(0))]),
                NextStart::In { wait: ms(30_000), reason: Some(WaitReason::Misconfigured) },
            ),
            ("paused", NextStartInput { paused: true, ..free() }, NextStart::NotWhilePaused),
            ("blocked", NextStartInput { rule: Some(Rule::Blocked), ..free() }, NextStart::NotWhileBlocked),
            ("refused", NextStartInput { rule: Some(Rule::Refuse), paused: true, ..free() }, NextStart::Refused),
            (
                "another rule",
                NextStartInput { rule: Some(Rule::Exempt), ..free() },
                NextStart::In { wait: ms(0), reason: None },
            ),
            (
                "closed",
                waits(vec![None], vec![limit("own", Some(3)), closed]),
                NextStart::Never { limit: "all".to_owned() },
            ),
            (
                "requests in flight",
                waits(vec![own(5_000)], vec![limit("slots", None)]),
                NextStart::WhenRequestEnds { limit: "slots".to_owned() },
            ),
        ] {
            assert_eq!(input.next_start(), wanted, "{case}");
        }
    }
}
