//! The `/metrics` endpoint: the counters of this process, its version, settings and lanes, and the figures of the
//! overview.
//!
//! A scrape does not fail when a backend is unavailable: it reads the worker's last check of each. Label values come
//! from provider rows and closed lists, never from jobs or accounts. A family without values is written too, so that
//! every scrape lists these metrics.
//!
//! Host and process id are no labels: Prometheus adds the scrape target itself. Each process has its own lanes, with
//! their own circuit breakers; a query over all workers counts them.

use std::fmt;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode, encode_registry};
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::OpsState;
use super::guard::AuthenticationFailures;
use super::overview::OverviewSnapshot;
use crate::domain::provider::Provider;
use crate::telemetry;
use crate::worker::meter::{Labels, PREFIX};
use crate::worker::supervisor::WorkerStatus;

mod overview;

/// <https://prometheus.io/docs/instrumenting/exposition_formats/>
const PLAIN_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// <https://prometheus.io/docs/specs/om/open_metrics_spec/>
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The data of one scrape that the meter does not count.
#[derive(Debug)]
struct MetricsSnapshot {
    worker_status: WorkerStatus,
    failures: AuthenticationFailures,
    overview: OverviewSnapshot,
}

/// All metrics in the text format of OpenMetrics.
async fn scrape(state: &OpsState) -> Result<String, fmt::Error> {
    let worker_status = state.worker_status.borrow().clone();
    let failures = state.wrong_tokens.failures();
    let overview = state.collector.snapshot().await;
    let mut text = String::new();
    encode_registry(&mut text, worker_status.meter.registry())?;
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(MetricsSnapshot { worker_status, failures, overview }));
    encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for MetricsSnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut writer = MetricsWriter(encoder);
        write_process(&mut writer, &self.worker_status, self.failures)?;
        write_lanes(&mut writer, &self.worker_status)?;
        overview::write_limits(&mut writer, &self.worker_status.settings, &self.overview.input.limit_usage)?;
        overview::write(&mut writer, &self.overview)
    }
}

/// Responds in the older text format unless the client accepts OpenMetrics.
pub async fn show(State(state): State<OpsState>, headers: HeaderMap) -> Response {
    let wants = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match scrape(&state).await {
        Ok(text) if wants.contains("application/openmetrics-text") => {
            ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
        }
        Ok(text) => ([(header::CONTENT_TYPE, PLAIN_TEXT)], from_open_metrics(&text)).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics could not be encoded; the scrape fails");
            axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Turns OpenMetrics text into the text format 0.0.4. They differ in how counters are announced and in the last line.
fn from_open_metrics(open_metrics: &str) -> String {
    let counters = open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"));
    counters.fold(open_metrics.replace("# EOF\n", ""), |text, name| {
        ["# HELP", "# TYPE"].iter().fold(text, |text, announcement| {
            text.replace(&format!("{announcement} {name} "), &format!("{announcement} {name}_total "))
        })
    })
}

const MS_PER_S: f64 = 1_000.0;

/// The writer of metrics that are read at scrape time: a name, a help text, and a value for each set of labels.
struct MetricsWriter<'a>(DescriptorEncoder<'a>);

impl MetricsWriter<'_> {
    /// Writes a counter; `name` is without `_total`.
    fn counter(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, u64)>,
    ) -> Result<(), fmt::Error> {
        let write = |metric: &mut MetricEncoder<'_>, value| metric.encode_counter::<Labels, u64, u64>(&value, None);
        write_family(self.0.encode_descriptor(name, help, None, MetricType::Counter)?, values, write)
    }

    fn gauge(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, f64)>,
    ) -> Result<(), fmt::Error> {
        let write = |metric: &mut MetricEncoder<'_>, value| metric.encode_gauge(&value);
        write_family(self.0.encode_descriptor(name, help, None, MetricType::Gauge)?, values, write)
    }
}

fn write_family<V>(
    mut family: MetricEncoder<'_>,
    values: impl IntoIterator<Item = (Labels, V)>,
    write: impl Fn(&mut MetricEncoder<'_>, V) -> Result<(), fmt::Error>,
) -> Result<(), fmt::Error> {
    for (labels, value) in values {
        if labels.is_empty() {
            write(&mut family, value)?;
        } else {
            write(&mut family.encode_family(&labels)?, value)?;
        }
    }
    Ok(())
}

/// A count as a float; beyond 2^53 it loses its last digits.
#[allow(clippy::cast_precision_loss, reason = "metrics are floats")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Converts milliseconds to seconds.
fn seconds(ms: u64) -> f64 {
    float(ms) / MS_PER_S
}

/// The states of a lane; exactly one of them has the value 1.
const LANE_STATES: [&str; 9] =
    ["running", "full", "resting", "stopped", "probing", "held", "paused", "draining", "absent"];

fn write_process(
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
    let AuthenticationFailures { wrong_token, too_many } = failures;
    writer.counter(
        "ops_authentication_failures",
        "Wrong tokens at the ops server: those that got 401, and those beyond the bound of their address and minute.",
        [("wrong_token", wrong_token), ("too_many", too_many)]
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
fn write_lanes(writer: &mut MetricsWriter<'_>, status: &WorkerStatus) -> Result<(), fmt::Error> {
    let enabled = || status.settings.providers.values().filter(|row| row.enabled);
    let state = |row: &Provider| match status.lanes.get(&row.name) {
        _ if status.draining => "draining".to_owned(),
        None => "absent".to_owned(),
        Some(_) if row.paused => "paused".to_owned(),
        Some(lane) => lane.status().does.to_string(),
    };
    let states = enabled().flat_map(|row| {
        let now = state(row);
        LANE_STATES.map(|state| {
            let labels = vec![("provider", row.name.to_string()), ("state", state.to_owned())];
            (labels, f64::from(u8::from(state == now)))
        })
    });
    writer.gauge(
        "lane_state",
        "Lane state in this process: the one with value 1. Full takes no messages, draining no jobs; stopped sends none.",
        states,
    )?;
    writer.gauge(
        "lane_held",
        "1 while the lane starts no charge until an operator releases it; otherwise 0.",
        enabled().map(|row| {
            let is_held = status.lanes.get(&row.name).is_some_and(|lane| lane.hold().is_some());
            (vec![("provider", row.name.to_string())], f64::from(u8::from(is_held)))
        }),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_types_have_the_full_name() {
        let new = "# HELP a_jobs Jobs.\n# TYPE a_jobs counter\na_jobs_total{p=\"x\"} 1\n# HELP b Bees.\n# TYPE b gauge\n\
                   b 2.0\n# EOF\n";
        let old = "# HELP a_jobs_total Jobs.\n# TYPE a_jobs_total counter\na_jobs_total{p=\"x\"} 1\n# HELP b Bees.\n\
                   # TYPE b gauge\nb 2.0\n";
        assert_eq!(from_open_metrics(new), old);
    }
}
