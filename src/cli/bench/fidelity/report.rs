//! What a fidelity run came to, for people and for programs.
//!
//! Refuses to choose the kindest figure: the utilisation over whole turns stands beside the one over the whole span, and
//! beside that what a perfect limiter would have come to.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::limit_cycles;
use crate::cli::Console;
use crate::cli::bench::conditions::Conditions;
use crate::cli::bench::print::number;
use crate::cli::bench::quantile;
use crate::domain::limit::Rate;
use crate::provider::simulated;
use crate::worker::meter::{Distribution, ReturnReason};

/// What the table of targets asks of the starts.
const P50_MAX_US: u64 = 600;
const P99_MAX_US: u64 = 3_000;

/// What provider and workers counted.
pub struct Measurements {
    /// Until the workers were told to stop.
    pub arrivals_us: Vec<u64>,
    pub provider: simulated::FakeProviderReport,
    pub lateness: Distribution,
    /// Of the starts that lay ahead when their permits were granted.
    pub ahead: Distribution,
    /// By reason.
    pub returned: BTreeMap<&'static str, u64>,
}

/// What was asked of the provider and of us.
pub struct RunTerms {
    pub limit: Rate,
    /// Where slots are released by the grant.
    pub jitter: Option<Duration>,
    /// Between the shortest and the longest time from receipt to answer.
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
    /// Mean time from receipt to answer, by the provider's own clock.
    hold_ms: f64,
    /// L / (W + hold), or L / (W + allowance) where slots are released by the grant.
    possible_per_second: f64,
    /// Over whole turns of the slots, from middle to middle; `None` with too few calls for two of them.
    rate_per_second: Option<f64>,
    utilisation: Option<f64>,
    /// n − L calls over the span from the first to the last: what the cut end of the run costs is in it.
    utilisation_over_span: Option<f64>,
    /// What a perfect limiter with this first turn and these holds comes to, counted in the same way.
    perfect_over_span: Option<f64>,
    /// The one over the other.
    of_perfect_over_span: Option<f64>,
    /// Most requests in any window.
    largest_in_any_window: u64,
    breaches: u64,
    refused_429: u64,
    charged_twice: u64,
    /// Of all starts.
    lateness: Lateness,
    /// Of starts that lay ahead when their permits were granted: what the timer adds.
    lateness_booked: Lateness,
    /// Of starts that could begin at once: what writing the request down takes.
    lateness_at_once: Lateness,
    /// Permits given back unused.
    permits_returned: u64,
    /// Those of them that came too late.
    permits_late: u64,
}

/// Of starts, against the instants that their permits named. Percentiles lie between the meter's bounds; the shares are
/// exact.
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
        // A slot that the grant releases comes round as if every call held it for the allowance.
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

    /// # Errors
    /// When stdout is closed.
    #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    pub fn print(&self, console: &mut Console) -> std::io::Result<()> {
        for line in self.conditions.lines() {
            console.line(&line)?;
        }
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        let lateness = &self.lateness;
        let known = |share: Option<f64>| share.map_or_else(|| "too few calls to say".to_owned(), percent);
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
                "rate, of what the limit lets out",
                format!(
                    "{}/s of {:.2}/s ({}, {})",
                    self.rate_per_second.map_or_else(|| "?".to_owned(), |rate| format!("{rate:.2}")),
                    self.possible_per_second,
                    self.limit,
                    self.slot_release
                ),
            ),
            row("hold, the provider's own", format!("{:.1} ms", self.hold_ms)),
            row("breaches", format!("{}, at most {} in any window", self.breaches, self.largest_in_any_window)),
            row("429, charged twice", format!("{}, {}", self.refused_429, self.charged_twice)),
            row("lateness of starts", lateness.to_text()),
            row("  that were booked ahead (timer)", self.lateness_booked.to_text()),
            row("  that could begin at once (ledger)", self.lateness_at_once.to_text()),
            row(
                "starts within 0.6 ms, within 3 ms",
                format!("{}, {}", percent(lateness.share_within_600_us), percent(lateness.share_within_3_ms)),
            ),
            row(
                "permits given back, of them too late",
                format!("{}, {}", number(self.permits_returned as f64), number(self.permits_late as f64)),
            ),
            row("workers × requests at once", format!("{} × {}", self.workers, self.in_flight)),
            row("requests", format!("{} in {:.1} s", number(self.requests as f64), self.seconds)),
        ];
        console.table(&["figure", "value"], &rows)
    }
}
