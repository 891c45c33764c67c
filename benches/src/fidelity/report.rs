//! The report of a fidelity run, as a table and as JSON.
//!
//! It shows the utilisation over whole turns beside that over the whole span, and beside that of a perfect limiter.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::limit_cycles;
use crate::conditions::Conditions;
use crate::print::number;
use crate::quantile::{self, Distribution};
use sluicegate::cli::Console;
use sluicegate::domain::limit::Rate;
use sluicegate::provider::simulated;
use sluicegate::worker::meter::ReturnReason;

/// Targets for the lateness of starts.
const P50_MAX_US: u64 = 600;
const P99_MAX_US: u64 = 3_000;

/// The counts of provider and workers.
pub struct Measurements {
    /// Arrivals until the workers were stopped.
    pub arrivals_us: Vec<u64>,
    pub provider: simulated::FakeProviderReport,
    pub lateness: Distribution,
    /// Lateness of the starts that were granted ahead of time.
    pub ahead: Distribution,
    /// Unused permits by reason.
    pub returned: BTreeMap<&'static str, u64>,
}

/// The terms of the run.
pub struct RunTerms {
    pub limit: Rate,
    /// The allowance for transit, if slots are released by the grant.
    pub jitter: Option<Duration>,
    /// Difference between the longest and the shortest time from request to response.
    pub latency_spread: Duration,
}

#[derive(Clone, Debug, Serialize)]
pub struct FidelityReport {
    conditions: Conditions,
    limit: String,
    slot_release: &'static str,
    workers: u16,
    in_flight: i64,
    requests: usize,
    seconds: f64,
    /// Mean time from request to response, by the provider's clock.
    hold_ms: f64,
    /// L / (W + hold), or L / (W + allowance) if slots are released by the grant.
    possible_per_second: f64,
    /// Over whole turns of the slots, from middle to middle; `None` with fewer than two turns.
    rate_per_second: Option<f64>,
    utilisation: Option<f64>,
    /// n − L calls over the span from the first to the last, with the loss at the cut end of the run.
    utilisation_over_span: Option<f64>,
    /// The same for a perfect limiter with this first turn and these holds.
    perfect_over_span: Option<f64>,
    /// `utilisation_over_span` divided by `perfect_over_span`.
    of_perfect_over_span: Option<f64>,
    /// Most requests in any window.
    largest_in_any_window: u64,
    breaches: u64,
    refused_429: u64,
    charged_twice: u64,
    /// Lateness of all starts.
    lateness: Lateness,
    /// Lateness of starts that were granted ahead of time: the timer's share.
    lateness_booked: Lateness,
    /// Lateness of starts that could begin at once: the time to record the request.
    lateness_at_once: Lateness,
    /// Permits released unused.
    permits_returned: u64,
    /// Unused permits that missed their deadline.
    permits_late: u64,
}

/// The lateness of starts against the times of their permits. Percentiles are interpolated between the meter's bounds;
/// the shares are exact.
#[derive(Clone, Debug, Serialize)]
struct Lateness {
    starts: u64,
    p50_ms: f64,
    p99_ms: f64,
    share_within_600_us: f64,
    share_within_3_ms: f64,
}

impl Lateness {
    fn from_distribution(counted: &Distribution) -> Self {
        Self {
            starts: counted.counts.iter().sum(),
            p50_ms: quantile::quantile_us(counted, 0.5) / 1_000.0,
            p99_ms: quantile::quantile_us(counted, 0.99) / 1_000.0,
            share_within_600_us: quantile::share_within(counted, P50_MAX_US),
            share_within_3_ms: quantile::share_within(counted, P99_MAX_US),
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    fn to_text(&self) -> String {
        let starts = number(self.starts as f64);
        if self.starts == 0 {
            return starts;
        }
        format!("p50 {:.2} ms, p99 {:.2} ms, {starts} starts", self.p50_ms, self.p99_ms)
    }
}

impl FidelityReport {
    #[allow(clippy::cast_precision_loss, reason = "microseconds of minutes")]
    pub fn new(
        conditions: Conditions,
        &RunTerms { limit, jitter, latency_spread }: &RunTerms,
        workers: u16,
        in_flight: i64,
        seen: Measurements,
    ) -> Self {
        let Measurements { arrivals_us, provider, lateness, ahead, returned } = seen;
        let hold_ms = provider.answer_ms.as_ref().map_or(0.0, |times| times.mean);
        let beyond_s = jitter.map_or(hold_ms / 1_000.0, |jitter| jitter.as_secs_f64());
        let possible = f64::from(limit.max_requests()) / (limit.window().as_secs_f64() + beyond_s);
        let slots = usize::try_from(limit.max_requests()).unwrap_or(usize::MAX);
        let rate = limit_cycles::rate(&arrivals_us, slots);
        let over_span = limit_cycles::rate_over_span(&arrivals_us, slots).map(|rate| rate / possible);
        // A slot that is released by the grant is used again as if every call held it for the allowance.
        let spread_s = if jitter.is_some() { 0.0 } else { latency_spread.as_secs_f64() };
        let turn = limit_cycles::LimitCycle { slots, seconds: limit.window().as_secs_f64() + beyond_s, spread_s };
        let perfect = limit_cycles::perfect_over_span(&arrivals_us, turn).map(|rate| rate / possible);
        let span_us = arrivals_us.last().zip(arrivals_us.first()).map_or(0, |(last, first)| last - first);
        Self {
            conditions,
            limit: limit.to_string(),
            slot_release: if jitter.is_some() { "grant" } else { "response" },
            workers,
            in_flight,
            requests: arrivals_us.len(),
            seconds: span_us as f64 / 1e6,
            hold_ms,
            possible_per_second: possible,
            rate_per_second: rate,
            utilisation: rate.map(|rate| rate / possible),
            utilisation_over_span: over_span,
            perfect_over_span: perfect,
            of_perfect_over_span: over_span.zip(perfect).map(|(ours, perfect)| ours / perfect),
            largest_in_any_window: provider.limits.iter().map(|limit| limit.largest).max().unwrap_or(0),
            breaches: provider.limits.iter().map(|limit| limit.breaches).sum(),
            refused_429: provider.refused_429,
            charged_twice: provider.doubles,
            lateness_at_once: Lateness::from_distribution(&quantile::subtract(&lateness, &ahead)),
            lateness: Lateness::from_distribution(&lateness),
            lateness_booked: Lateness::from_distribution(&ahead),
            permits_returned: returned.values().sum(),
            permits_late: returned.get(ReturnReason::DeadlineMissed.code()).copied().unwrap_or(0),
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    pub fn print(&self, console: &mut Console) -> std::io::Result<()> {
        for line in self.conditions.lines() {
            console.line(&line)?;
        }
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        let lateness = &self.lateness;
        let known = |share: Option<f64>| share.map_or_else(|| "too few calls".to_owned(), percent);
        let rows = [
            row("utilisation, whole turns", known(self.utilisation)),
            row(
                "utilisation, n − L over the span",
                format!(
                    "{}; a perfect limiter: {}; of that {}",
                    known(self.utilisation_over_span),
                    known(self.perfect_over_span),
                    known(self.of_perfect_over_span)
                ),
            ),
            row(
                "rate, of the highest possible",
                format!(
                    "{}/s of {:.2}/s ({}, {})",
                    self.rate_per_second.map_or_else(|| "?".to_owned(), |rate| format!("{rate:.2}")),
                    self.possible_per_second,
                    self.limit,
                    self.slot_release
                ),
            ),
            row("hold at the provider", format!("{:.1} ms", self.hold_ms)),
            row("breaches", format!("{}, at most {} in any window", self.breaches, self.largest_in_any_window)),
            row("429, charged twice", format!("{}, {}", self.refused_429, self.charged_twice)),
            row("lateness of starts", lateness.to_text()),
            row("  granted ahead of time (timer)", self.lateness_booked.to_text()),
            row("  granted at once (ledger)", self.lateness_at_once.to_text()),
            row(
                "starts within 0.6 ms, within 3 ms",
                format!("{}, {}", percent(lateness.share_within_600_us), percent(lateness.share_within_3_ms)),
            ),
            row(
                "permits released unused, of them too late",
                format!("{}, {}", number(self.permits_returned as f64), number(self.permits_late as f64)),
            ),
            row("workers × concurrent requests", format!("{} × {}", self.workers, self.in_flight)),
            row("requests", format!("{} in {:.1} s", number(self.requests as f64), self.seconds)),
        ];
        console.table(&["figure", "value"], &rows)
    }
}
