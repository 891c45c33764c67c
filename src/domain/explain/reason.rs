//! Why the limiter's gate has parked a job, in the words that the ledger keeps and `explain` reads back.
//!
//! Refuses a second copy of them: reworded in one place alone, a job would be told of the wrong gate. A ledger keeps those of
//! earlier versions for as long as a job is parked.

pub const PAUSED: &str = "the provider asked for a pause";
/// Of the payment whose own answer named the wait; index `jobs_parked_for_named_waits` has this and [`PAUSED`] too.
pub const THROTTLED: &str = "throttled by the provider";
pub const COLD: &str = "the limiter has lost its state and waits";
pub const NEEDS_HISTORY: &str = "usage of a limit is being read from the ledger";
pub const STORE_UNAVAILABLE: &str = "the limiter store is away";
pub const STALE_SETTINGS: &str = "newer settings are being loaded";
/// Of one that has come before its time and was never put down for anything else.
pub const NOT_DUE: &str = "waits for its time";
/// How the reason of a job begins whose request cannot be built from its row.
pub const UNBUILDABLE_PREFIX: &str = "the request cannot be built yet";
/// How the reason of a job begins that a limit refused; index `jobs_parked_for_limits` has it too.
pub const LIMIT_PREFIX: &str = "waits for limit ";
const BLOCKED_SUFFIX: &str = "is blocked by a rule of this provider";

#[must_use]
pub fn limit_reason(name: &str) -> String {
    format!("{LIMIT_PREFIX}{name}")
}

/// Of a job whose cost the limit never admits as it is now; it waits until the limit is raised.
#[must_use]
pub fn oversized_reason(limit: &str, cost: u16, at_once: u32) -> String {
    format!("{LIMIT_PREFIX}{limit}: cost {cost} exceeds the {at_once} that it admits at once")
}

/// The limit that the reason names, if it is a limit's. No limit has a colon in its name.
#[must_use]
pub fn parse_limit(reason: &str) -> Option<&str> {
    let limit = reason.strip_prefix(LIMIT_PREFIX)?;
    Some(limit.split_once(':').map_or(limit, |(limit, _)| limit))
}

#[must_use]
pub fn blocked_reason(account: &str) -> String {
    format!("account {account} {BLOCKED_SUFFIX}")
}

pub(super) fn is_blocked(reason: &str) -> bool {
    reason.ends_with(BLOCKED_SUFFIX)
}

/// Whether the gate can grant nothing to anybody.
pub(super) fn is_limiter_wide(reason: &str) -> bool {
    [PAUSED, COLD, NEEDS_HISTORY, STORE_UNAVAILABLE, STALE_SETTINGS].contains(&reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_reasons_round_trip() {
        for (reason, limit, rule, limiter) in [
            (limit_reason("per-minute"), Some("per-minute"), false, false),
            (oversized_reason("per-minute", 5, 3), Some("per-minute"), false, false),
            (blocked_reason("shop"), None, true, false),
            (PAUSED.to_owned(), None, false, true),
            (COLD.to_owned(), None, false, true),
            (NEEDS_HISTORY.to_owned(), None, false, true),
            (STORE_UNAVAILABLE.to_owned(), None, false, true),
            (STALE_SETTINGS.to_owned(), None, false, true),
            (UNBUILDABLE_PREFIX.to_owned(), None, false, false),
        ] {
            assert_eq!(
                (parse_limit(&reason), is_blocked(&reason), is_limiter_wide(&reason)),
                (limit, rule, limiter),
                "{reason}"
            );
        }
    }
}
