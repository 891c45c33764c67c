//! What the lanes of this process do: running, resting, stopped, or trying whether their provider is up again.
//!
//! Refuses to speak for other processes: each has lanes of its own, with breakers and pauses of their own.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tokio::time::Instant;

use crate::domain::provider::ProviderName;
use crate::worker::pauses::{LaneState, Pause, Pauses};

/// One lane, as it is told.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Lane {
    provider: String,
    /// `running`; `resting`: takes no more; `stopped`: sends nothing either; `probing`: one job at a time.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
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
