//! Reasons for which the limiter's gate delays a job: the texts that the ledger stores and `explain` parses.
//!
//! They have this one place: a text that is reworded in only one of two would send `explain` to the wrong check. A
//! ledger keeps the texts of earlier versions while a job is delayed.

pub const PAUSED: &str = "the provider asked for a pause";
/// Reason of the payment whose own response named the wait. Index `jobs_parked_for_named_waits` contains this and
/// [`PAUSED`] too.
pub const THROTTLED: &str = "throttled by the provider";
pub const COLD: &str = "the limiter has lost its state and waits";
pub const NEEDS_HISTORY: &str = "usage of a limit is being read from the ledger";
pub const STORE_UNAVAILABLE: &str = "the limiter store is unavailable";
pub const STALE_SETTINGS: &str = "newer settings are being loaded";
/// Reason of a job that came before its time and was never delayed for another reason.
pub const NOT_DUE: &str = "waits for its time";
/// Prefix of the reason of a job whose request cannot be built from its row.
pub const UNBUILDABLE_PREFIX: &str = "the request cannot be built yet";
/// Prefix of the reason of a job that a limit refused. Index `jobs_parked_for_limits` contains it too.
pub const LIMIT_PREFIX: &str = "waits for limit ";
const BLOCKED_SUFFIX: &str = "is blocked by a rule of this provider";

#[must_use]
pub fn limit_reason(name: &str) -> String {
    format!("{LIMIT_PREFIX}{name}")
}

/// Reason of a job whose cost is above the limit's capacity; it waits until the limit is raised.
#[must_use]
pub fn oversized_reason(limit: &str, cost: u16, at_once: u32) -> String {
    format!("{LIMIT_PREFIX}{limit}: cost {cost} exceeds the {at_once} that it admits at once")
}

/// The limit that the reason names, if a limit is the reason. No limit has a colon in its name.
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

/// Whether the reason blocks every job of the gate.
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
