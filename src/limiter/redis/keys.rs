//! The names of every Redis key, made here and nowhere else.
//!
//! All keys of a quota carry the same hash tag, so that a cluster keeps them on one node and one script can take them
//! together (Redis cluster specification, "Hash tags"). Quota and limit names hold no braces by their own rules.

use crate::domain::decision::QuotaSpec;

/// Keys of one call, in the order of the script's KEYS.
#[must_use]
pub fn call_keys(prefix: &str, spec: &QuotaSpec) -> Vec<String> {
    let quota = format!("{prefix}:{{{}}}", spec.quota);
    let logs = spec.limits.iter().map(|limit| format!("{quota}:log:{}", limit.name));
    [format!("{quota}:meta"), format!("{quota}:leases")].into_iter().chain(logs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::decision::LimitSpec;
    use crate::domain::provider::ProviderName;
    use std::time::Duration;

    #[test]
    fn names_are_pinned_to_the_byte() {
        let limit = |name: &str| LimitSpec { name: name.into(), max_requests: 1, window: Duration::from_secs(1) };
        let spec = QuotaSpec {
            quota: ProviderName::new("stripe").unwrap(),
            version: 1,
            limits: vec![limit("per-minute"), limit("per-second")],
            grant_jitter: None,
            hold_max: Duration::ZERO,
            send_budget: Duration::ZERO,
        };
        let expected = [
            "sluicegate:{stripe}:meta",
            "sluicegate:{stripe}:leases",
            "sluicegate:{stripe}:log:per-minute",
            "sluicegate:{stripe}:log:per-second",
        ];
        assert_eq!(call_keys("sluicegate", &spec), expected);
    }
}
