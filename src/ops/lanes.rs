//! What the lanes of this process do: running, resting, stopped, or trying whether their provider is up again.
//!
//! Refuses to speak for other processes: each has lanes of its own, with breakers and pauses of their own.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::domain::provider::ProviderName;
use crate::worker::pauses::{LaneState, Pause, Pauses};

/// One lane, as it is told.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct Lane {
    provider: String,
    /// `running`; `resting`: takes no more; `stopped`: sends nothing either; `probing`: one job at a time.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    ends_in_ms: Option<u128>,
}

pub(super) fn told(lanes: &BTreeMap<ProviderName, Arc<Pauses>>) -> Vec<Lane> {
    lanes.iter().map(|(name, pauses)| lane(name, pauses.state())).collect()
}

fn lane(provider: &ProviderName, state: LaneState) -> Lane {
    let until = |pause: Pause| {
        let left = pause.until.saturating_duration_since(Instant::now());
        (Some(pause.cause), Some(left.as_millis()))
    };
    let (state, (cause, ends_in_ms)) = match state {
        LaneState::Running => ("running", (None, None)),
        LaneState::Resting(pause) => ("resting", until(pause)),
        LaneState::Stopped(pause) => ("stopped", until(pause)),
        LaneState::Probing { cause } => ("probing", (Some(cause), None)),
    };
    Lane { provider: provider.to_string(), state, cause, ends_in_ms }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::fleet::report::By;

    #[tokio::test]
    async fn a_lane_that_rests_says_why_and_for_how_long() {
        let lanes: BTreeMap<_, Arc<Pauses>> = ["acme", "bolt", "crate"]
            .into_iter()
            .map(|name| (ProviderName::new(name).unwrap(), Arc::default()))
            .collect();
        let pauses = |name: &str| &lanes[&ProviderName::new(name).unwrap()];
        pauses("bolt").stop_taking(Duration::from_secs(600), By::Limit, "waits for limit all");
        pauses("crate").stop_taking(Duration::from_secs(900), By::Limit, "waits for limit all");
        pauses("crate").stop_sending(Duration::from_secs(600), By::Breaker, "the provider is down: no answer in time");
        let mut told = serde_json::to_value(told(&lanes)).unwrap();
        for resting in [1, 2] {
            let ends_in_ms = told[resting]["ends_in_ms"].take().as_u64().unwrap();
            assert!((500_000..=600_000).contains(&ends_in_ms), "{ends_in_ms}");
        }
        let wanted = json!([
            {"provider": "acme", "state": "running"},
            {"provider": "bolt", "state": "resting", "cause": "waits for limit all", "ends_in_ms": null},
            {"provider": "crate", "state": "stopped", "cause": "the provider is down: no answer in time",
             "ends_in_ms": null},
        ]);
        assert_eq!(told, wanted);
    }
}
