//! The names of all Redis keys of the limiter.
//!
//! All keys of a quota have the same hash tag, so that a cluster keeps them on one node and one function can use them
//! (Redis cluster specification, "Hash tags"). Names of quotas, limits and subjects cannot contain braces. No key has a
//! name that a producer could choose freely.

use std::collections::HashSet;

use crate::domain::permit_protocol::{LimiterCall, Subject};
use crate::domain::quota_spec::QuotaSpec;

/// Key of a quota's state; it is the prefix of the quota's other keys.
pub fn state_key(prefix: &str, spec: &QuotaSpec) -> String {
    format!("{prefix}:{{{}}}", spec.quota)
}

/// The function's first keys: the state, and a log for each of the provider's limits.
pub fn provider_keys(prefix: &str, spec: &QuotaSpec) -> Vec<String> {
    let state = state_key(prefix, spec);
    let logs: Vec<String> =
        spec.provider_counter_names().into_iter().map(|name| format!("{state}:log:{name}")).collect();
    std::iter::once(state).chain(logs).collect()
}

pub fn subject_key(prefix: &str, spec: &QuotaSpec, subject: &Subject) -> String {
    format!("{}:{}", state_key(prefix, spec), subject.key)
}

/// The subjects of a call, each once, in the order of the call's keys.
pub fn call_subjects(call: &LimiterCall) -> Vec<&Subject> {
    let mut known = HashSet::new();
    let requested = call.requests.iter().flat_map(|request| &request.subjects);
    let released = call.releases.iter().flat_map(|release| &release.subjects);
    let seeded = call.seeds.iter().flat_map(|seeds| &seeds.subjects).map(|seed| &seed.subject);
    requested.chain(seeded).chain(released).filter(|subject| known.insert(subject.key.as_str())).collect()
}

/// The keys of one call, in the order of the function's KEYS.
pub fn call_keys(prefix: &str, spec: &QuotaSpec, call: &LimiterCall) -> Vec<String> {
    let own = call_subjects(call).into_iter().map(|subject| subject_key(prefix, spec, subject));
    provider_keys(prefix, spec).into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::permit_protocol::{PermitRequest, SubjectLimit};
    use crate::domain::provider::{BOOKING_HORIZON, Pacing, ProviderName, StoreDown};
    use crate::domain::quota_spec::LimitSpec;
    use std::time::Duration;

    #[test]
    fn redis_keys_are_byte_stable() {
        let limit = |name: &str| LimitSpec::sliding_log(name, 1, Duration::from_secs(1));
        let spec = QuotaSpec {
            quota: ProviderName::new("stripe").unwrap(),
            version: 1,
            limits: vec![limit("per-minute"), limit("per-second")],
            account_rules: Vec::new(),
            pacing: Some(Pacing::Even),
            grant_jitter: None,
            hold_max: Duration::ZERO,
            send_budget: Duration::ZERO,
            store_down: StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        let subject = Subject {
            key: "account:a_1".into(),
            limits: vec![SubjectLimit {
                index: 0,
                max_requests: 1,
                window: Duration::from_secs(1),
                burst: None,
                exempt: false,
            }],
        };
        let call = LimiterCall {
            incarnation: 1,
            number: 1,
            requests: vec![PermitRequest { subjects: vec![subject], ..PermitRequest::charges(1, 1) }],
            releases: Vec::new(),
            pause: None,
            rebuild: None,
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: String::new(),
        };
        let expected = [
            "sluicegate:{stripe}",
            "sluicegate:{stripe}:log:per-minute",
            "sluicegate:{stripe}:log:per-second",
            "sluicegate:{stripe}:log:start spacing",
            "sluicegate:{stripe}:account:a_1",
        ];
        assert_eq!(call_keys("sluicegate", &spec, &call), expected);
    }
}
