//! The states of this process's lanes and of their circuit breakers, by provider.
//!
//! Each process has its own lanes; a query over all workers counts them.

use std::fmt;

use super::write::MetricsWriter;
use crate::domain::provider::Provider;
use crate::worker::supervisor::WorkerStatus;

/// The states of a lane; exactly one of them has the value 1.
const STATES: [&str; 7] = ["running", "resting", "stopped", "probing", "paused", "draining", "absent"];

pub fn write(writer: &mut MetricsWriter<'_>, status: &WorkerStatus) -> Result<(), fmt::Error> {
    let enabled = || status.settings.providers.values().filter(|row| row.enabled);
    let state = |row: &Provider| match status.lanes.get(&row.name) {
        _ if status.draining => "draining",
        None => "absent",
        Some(_) if row.paused => "paused",
        Some(lane) => lane.state().code(),
    };
    let states = enabled().flat_map(|row| {
        let now = state(row);
        STATES.map(|state| {
            let labels = vec![("provider", row.name.to_string()), ("state", state.to_owned())];
            (labels, f64::from(u8::from(state == now)))
        })
    });
    writer.gauge(
        "lane_state",
        "Lane state in this process: the one with value 1. Resting and draining take no jobs; stopped sends none.",
        states,
    )?;
    let breakers = enabled().map(|row| {
        let is_probing = status.lanes.get(&row.name).is_some_and(|lane| lane.is_probing());
        let breaker = match state(row) {
            _ if !is_probing => 0.0,
            "stopped" => 2.0,
            _ => 1.0,
        };
        (vec![("provider", row.name.to_string())], breaker)
    });
    writer.gauge(
        "breaker_state",
        "Circuit breaker of the lane: 0 closed, 1 half-open (one job at a time), 2 open (nothing is sent).",
        breakers,
    )
}
