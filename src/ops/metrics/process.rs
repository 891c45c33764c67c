//! The metrics of the process: version, readiness, settings in force, outcome events, and the states of its lanes.
//!
//! Host and process id are no labels: Prometheus adds the scrape target itself. Each process has its own lanes, with
//! their own circuit breakers; a query over all workers counts them.

use std::fmt;

use super::{Labels, MetricsWriter, float, seconds};
use crate::domain::provider::Provider;
use crate::ops::guard::AuthenticationFailures;
use crate::telemetry;
use crate::worker::supervisor::WorkerStatus;

/// The states of a lane; exactly one of them has the value 1.
const STATES: [&str; 7] = ["running", "resting", "stopped", "probing", "paused", "draining", "absent"];

pub fn write(
    writer: &mut MetricsWriter<'_>,
    progress: &WorkerStatus,
    failures: AuthenticationFailures,
) -> Result<(), fmt::Error> {
    let (meter, known) = (&progress.meter, &progress.settings);
    let none = Labels::new;
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    writer.gauge("build_info", "The version that runs; always 1.", [(version, 1.0)])?;
    writer.gauge(
        "process_start_time_seconds",
        "Start time of this process, in Unix time.",
        [(none(), seconds(meter.started_at_ms()))],
    )?;
    let ready = progress.ready && !progress.draining;
    writer.gauge(
        "ready",
        "1 while this process takes jobs; 0 while it starts or drains.",
        [(none(), f64::from(u8::from(ready)))],
    )?;
    writer.counter(
        "log_lines_dropped",
        "Log lines that were dropped because they were not read in time.",
        [(none(), telemetry::log_lines_dropped())],
    )?;
    let AuthenticationFailures { wrong_token, too_soon } = failures;
    writer.counter(
        "ops_authentication_failures",
        "Tokens that the ops server rejected: wrong ones, and tokens too soon after a wrong one, not compared.",
        [("wrong_token", wrong_token), ("too_soon", too_soon)]
            .map(|(reason, count)| (vec![("reason", reason.to_owned())], count)),
    )?;
    writer.gauge(
        "config_last_reload_success_timestamp_seconds",
        "Time at which the settings in force were loaded, in Unix time.",
        meter.reloaded_at_ms().map(|ms| (none(), seconds(ms))),
    )?;
    let unpublished = meter.unpublished();
    writer.gauge(
        "unpublished_outcome_events",
        "Outcome events that are not published, of all workers; rejected: a queue that is bound to them is full.",
        unpublished.into_iter().flat_map(|counts| {
            [("waiting", counts.events.saturating_sub(counts.rejected)), ("rejected", counts.rejected)]
                .map(|(state, events)| (vec![("state", state.to_owned())], float(events)))
        }),
    )?;
    writer.gauge(
        "oldest_unpublished_outcome_event_age_seconds",
        "How long the oldest unpublished outcome event has waited; 0 if there is none.",
        unpublished.map(|counts| (none(), counts.oldest.unwrap_or_default().as_secs_f64())),
    )?;
    let version = u64::try_from(known.version).unwrap_or(0);
    writer.gauge("settings_version", "Version of the settings in force.", [(none(), float(version))])?;
    let good = known.providers.keys().filter(|name| known.invalid_rows.iter().all(|bad| bad.provider != name.as_str()));
    let good = good.map(|name| (name.to_string(), 0.0));
    let rows = good.chain(known.invalid_rows.iter().map(|bad| (bad.provider.clone(), 1.0)));
    writer.gauge(
        "invalid_rows",
        "1 while the provider's row is invalid: its last valid one applies, or it has no lane.",
        rows.map(|(provider, bad)| (vec![("provider", provider)], bad)),
    )
}

/// Writes the states of the lanes and of their circuit breakers.
pub fn write_lanes(writer: &mut MetricsWriter<'_>, status: &WorkerStatus) -> Result<(), fmt::Error> {
    let enabled = || status.settings.providers.values().filter(|row| row.enabled);
    let state = |row: &Provider| match status.lanes.get(&row.name) {
        _ if status.draining => "draining".to_owned(),
        None => "absent".to_owned(),
        Some(_) if row.paused => "paused".to_owned(),
        Some(lane) => lane.status().does.to_string(),
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
        let breaker = match state(row).as_str() {
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
