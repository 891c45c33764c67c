//! The states of this process's lanes: running, resting, stopped, or probing their provider.
//!
//! Every process has its own lanes, with their own circuit breakers and pauses. The overview has the lanes of all
//! workers.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::domain::provider::ProviderName;
use crate::worker::lane_control::{LaneControl, LanePause, LaneStatus};

/// The state of one lane.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct LaneOverview {
    provider: String,
    /// `running`; `resting`: starts no more jobs; `stopped`: takes and sends none; `probing`: sends one job at a time.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    ends_in_ms: Option<u128>,
}

pub(super) fn lane_overviews(lanes: &BTreeMap<ProviderName, Arc<LaneControl>>) -> Vec<LaneOverview> {
    lanes.iter().map(|(name, pauses)| lane_overview(name, pauses.state())).collect()
}

fn lane_overview(provider: &ProviderName, state: LaneStatus) -> LaneOverview {
    let until = |pause: LanePause| {
        let left = pause.until.saturating_duration_since(Instant::now());
        (Some(pause.reason.to_string()), Some(left.as_millis()))
    };
    let code = state.code();
    let (cause, ends_in_ms) = match state {
        LaneStatus::Running => (None, None),
        LaneStatus::IntakePaused(pause) | LaneStatus::Stopped(pause) => until(pause),
        LaneStatus::Probing { reason: cause } => (Some(cause), None),
    };
    LaneOverview { provider: provider.to_string(), state: code, cause, ends_in_ms }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::domain::wait_reason::{Wait, WaitReason};
    use crate::fleet::report::PauseCause;

    #[tokio::test]
    async fn paused_lane_shows_cause_and_end() {
        let lanes: BTreeMap<_, Arc<LaneControl>> = ["acme", "bolt", "crate"]
            .into_iter()
            .map(|name| (ProviderName::new(name).unwrap(), Arc::default()))
            .collect();
        let pauses = |name: &str| &lanes[&ProviderName::new(name).unwrap()];
        pauses("bolt").pause_intake(Duration::from_secs(600), PauseCause::Limit, Wait::for_limit("all"));
        pauses("crate").pause_intake(Duration::from_secs(900), PauseCause::Limit, Wait::for_limit("all"));
        pauses("crate").pause_sending(
            Duration::from_secs(600),
            PauseCause::Breaker,
            Wait::with_detail(WaitReason::CircuitOpen, "no answer in time"),
        );
        let mut overviews = serde_json::to_value(lane_overviews(&lanes)).unwrap();
        for resting in [1, 2] {
            let ends_in_ms = overviews[resting]["ends_in_ms"].take().as_u64().unwrap();
            assert!((500_000..=600_000).contains(&ends_in_ms), "{ends_in_ms}");
        }
        let wanted = json!([
            {"provider": "acme", "state": "running"},
            {"provider": "bolt", "state": "resting", "cause": "waits for limit all", "ends_in_ms": null},
            {"provider": "crate", "state": "stopped", "cause": "the provider is down: no answer in time",
             "ends_in_ms": null},
        ]);
        assert_eq!(overviews, wanted);
    }
}
