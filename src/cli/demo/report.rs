//! The progress and the proof of the demo: finished payments and the rate against the limit, and at the end the
//! provider's counts of requests and charges, compared with the ledger.
//!
//! The progress is a bar at a terminal and one line every two seconds elsewhere. Breaches and double charges are counted
//! by the provider, on its own clock.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::time::Instant;

use crate::cli::{CommandError, Console};
use crate::domain::format::count;
use crate::domain::limit::Rate;
use crate::domain::outcome::FinalState;
use crate::ledger::StateCount;
use crate::provider::simulated::{Effect, FakeProviderReport};
use crate::simulation::steady_rate;

const LINE_INTERVAL: Duration = Duration::from_secs(2);
const CHART_SECONDS: usize = 30;
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

pub struct DemoProgress {
    bar: Option<ProgressBar>,
    limit: Rate,
    jobs: u64,
    last_line_at: Instant,
}

impl DemoProgress {
    pub fn new(jobs: u64, limit: Rate, draws: bool) -> Self {
        let bar = draws.then(|| {
            let bar = ProgressBar::new(jobs);
            // An invalid template would only lose the colours.
            if let Ok(style) = ProgressStyle::with_template(
                "{elapsed_precise} [{bar:40.green/blue}] {pos}/{len} payments finished, {eta} left\n         {msg}",
            ) {
                bar.set_style(style.progress_chars("━╸─"));
            }
            bar
        });
        Self { bar, limit, jobs, last_line_at: Instant::now() }
    }

    pub fn show(
        &mut self,
        finished: u64,
        counts: &[StateCount],
        arrivals_us: &[u64],
        console: &mut Console,
    ) -> io::Result<()> {
        let jobs_in = |state: &str| -> i64 { counts.iter().filter(|c| c.state == state).map(|c| c.jobs).sum() };
        let recorded: i64 = counts.iter().map(|count| count.jobs).sum();
        let waiting =
            self.jobs.saturating_sub(u64::try_from(recorded).unwrap_or(0)) + jobs_in("waiting").unsigned_abs();
        let newest_us = arrivals_us.last().copied().unwrap_or(0);
        let last_second = arrivals_us.iter().rev().take_while(|at_us| **at_us + 1_000_000 > newest_us).count();
        let text = format!(
            "{last_second}/s, provider allows {} · waiting {waiting} · in flight {} · unknown {} · {}",
            self.limit,
            jobs_in("sending"),
            jobs_in("unknown"),
            chart(arrivals_us, self.limit),
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(finished);
                bar.set_message(text);
            }
            None if self.last_line_at.elapsed() >= LINE_INTERVAL => {
                self.last_line_at = Instant::now();
                console.message(&format!("{finished} of {} finished · {text}", self.jobs))?;
            }
            None => {}
        }
        Ok(())
    }

    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A chart of the arrivals per second; a full block is the limit's rate.
pub fn chart(arrivals_us: &[u64], limit: Rate) -> String {
    let Some(first_us) = arrivals_us.first() else { return String::new() };
    let mut per_second: Vec<f64> = Vec::new();
    for at_us in arrivals_us {
        let second = usize::try_from((at_us - first_us) / 1_000_000).unwrap_or(0);
        per_second.resize(per_second.len().max(second + 1), 0.0);
        per_second[second] += 1.0;
    }
    let from = per_second.len().saturating_sub(CHART_SECONDS);
    per_second[from..].iter().map(|count| block(count / limit.per_second())).collect()
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the index range")]
fn block(share: f64) -> char {
    BLOCKS[(share * 7.0).round().clamp(0.0, 7.0) as usize]
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Proof {
    jobs: u64,
    /// Jobs in a final state.
    finished: u64,
    /// Jobs without a final state.
    lost: u64,
    /// Payments that the provider charged more than once.
    double: u64,
    /// Payments that only one of ledger and provider has as charged.
    disagreed: u64,
    limit: String,
    /// Most requests in any window, on the provider's clock.
    largest_in_any_window: u64,
    breaches: u64,
    refused_429: u64,
    requests: u64,
    /// Responses that were lost after the provider charged.
    answers_lost_by_provider: u64,
    /// Over whole windows of the limit; `None`: too few payments for two windows.
    rate_per_second: Option<f64>,
    /// Mean time for which a request holds its slot: until its response, or [`ProviderRecord::lost_hold`].
    hold_ms: f64,
    /// Mean time from request to response at the provider.
    #[serde(skip)]
    response_ms: f64,
    /// Rate divided by the highest rate that the proven limiter allows: L / (W + hold).
    utilisation: Option<f64>,
    /// That highest rate.
    #[serde(skip)]
    possible_per_second: f64,
    states: BTreeMap<String, i64>,
    #[serde(skip)]
    chart: String,
}

/// What the provider recorded of the run.
pub struct ProviderRecord {
    pub report: FakeProviderReport,
    pub effects: Vec<Effect>,
    /// On the provider's clock, ascending.
    pub arrivals_us: Vec<u64>,
    /// Time for which a request without a response holds its slot.
    pub lost_hold: Duration,
}

impl ProviderRecord {
    fn response_ms(&self) -> f64 {
        self.report.answer_ms.as_ref().map_or(0.0, |times| times.mean)
    }

    #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    fn hold_ms(&self) -> f64 {
        let lost = self.report.lost_answers as f64 / self.report.requests.max(1) as f64;
        self.response_ms() * (1.0 - lost) + self.lost_hold.as_secs_f64() * 1_000.0 * lost
    }
}

/// The number of jobs in a final state, `review` included.
pub fn count_finished(counts: &[StateCount]) -> u64 {
    let ended = counts.iter().filter(|count| FinalState::from_name(&count.state).is_some());
    ended.map(|count| count.jobs.unsigned_abs()).sum()
}

impl Proof {
    pub fn from_counts(jobs: u64, limit: Rate, counts: &[StateCount], provider: &ProviderRecord) -> Self {
        let ProviderRecord { report, effects, arrivals_us, .. } = provider;
        let states: BTreeMap<String, i64> = counts.iter().map(|count| (count.state.clone(), count.jobs)).collect();
        let finished = count_finished(counts);
        let charged = effects.iter().filter(|effect| effect.count > 0).count() as u64;
        let succeeded = states.get(FinalState::Succeeded.name()).map_or(0, |jobs| jobs.unsigned_abs());
        let in_review = states.get(FinalState::Review.name()).map_or(0, |jobs| jobs.unsigned_abs());
        let hold_ms = provider.hold_ms();
        let rate = steady_rate(arrivals_us, limit);
        let possible = f64::from(limit.max_requests()) / (limit.window().as_secs_f64() + hold_ms / 1_000.0);
        Self {
            jobs,
            finished,
            lost: jobs.saturating_sub(finished),
            double: report.doubles,
            // A payment in review may have been charged or not.
            disagreed: charged.abs_diff(succeeded).saturating_sub(in_review),
            limit: limit.to_string(),
            largest_in_any_window: report.limits.iter().map(|limit| limit.largest).max().unwrap_or(0),
            breaches: report.limits.iter().map(|limit| limit.breaches).sum(),
            refused_429: report.refused_429,
            requests: report.requests,
            answers_lost_by_provider: report.lost_answers,
            rate_per_second: rate,
            hold_ms,
            response_ms: provider.response_ms(),
            utilisation: rate.map(|rate| rate / possible),
            possible_per_second: possible,
            states,
            chart: chart(arrivals_us, limit),
        }
    }

    /// Whether G1, G2 and G3 held.
    pub fn holds(&self) -> bool {
        self.breaches == 0 && self.refused_429 == 0 && self.lost == 0 && self.double == 0 && self.disagreed == 0
    }

    pub fn print(&self, json: bool, console: &mut Console) -> Result<(), CommandError> {
        if json {
            return Ok(console.json(self)?);
        }
        let mark = |held: bool| if held { "held" } else { "BROKEN" }.to_owned();
        let states: Vec<String> = self.states.iter().map(|(state, jobs)| format!("{jobs} {state}")).collect();
        let rows = [
            [
                "never more than the limit".to_owned(),
                mark(self.breaches == 0 && self.refused_429 == 0),
                format!(
                    "at most {} of {} in any window, {}, {} × 429, over {}",
                    self.largest_in_any_window,
                    self.limit,
                    count(self.breaches, "breach"),
                    self.refused_429,
                    count(self.requests, "request")
                ),
            ],
            [
                "no payment lost".to_owned(),
                mark(self.lost == 0 && self.disagreed == 0),
                format!("{} of {} finished: {}", self.finished, self.jobs, states.join(", ")),
            ],
            [
                "none charged twice".to_owned(),
                mark(self.double == 0),
                format!(
                    "{} charged twice, though {} {} lost",
                    self.double,
                    count(self.answers_lost_by_provider, "response"),
                    if self.answers_lost_by_provider == 1 { "was" } else { "were" }
                ),
            ],
            [
                "the limit used in full".to_owned(),
                self.utilisation.map_or_else(|| "not measured".to_owned(), |share| format!("{:.1} %", share * 100.0)),
                self.utilisation_text(),
            ],
            ["requests per second".to_owned(), String::new(), self.chart.clone()],
        ];
        console.table(&["guarantee", "", "counted by the provider"], &rows.map(Vec::from))?;
        Ok(())
    }

    fn utilisation_text(&self) -> String {
        let mut allowed = format!(
            "the {:.1}/s that {} allows with responses after {:.0} ms",
            self.possible_per_second, self.limit, self.response_ms
        );
        if self.answers_lost_by_provider > 0 {
            let _ = write!(allowed, " and {} lost", self.answers_lost_by_provider);
        }
        match self.rate_per_second {
            Some(rate) => format!("{rate:.1}/s of {allowed}"),
            None => format!("use more --jobs: {} are less than two windows of {allowed}", self.jobs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::simulated::{FakeOptions, StrictProvider};

    #[test]
    fn rate_at_limit_is_a_full_block() {
        let limit: Rate = "4/1s".parse().unwrap();
        let arrivals = [0, 1, 2, 3, 1_000_000, 3_000_000, 3_000_001];
        assert_eq!(chart(&arrivals, limit), "█▃▁▅");
        assert_eq!(chart(&[], limit), "");
    }

    fn record(report: FakeProviderReport, arrivals_us: Vec<u64>) -> ProviderRecord {
        ProviderRecord { report, effects: Vec::new(), arrivals_us, lost_hold: Duration::from_secs(3) }
    }

    fn proof(states: &[(&str, i64)], change: impl FnOnce(&mut FakeProviderReport)) -> Proof {
        let counts: Vec<StateCount> = states
            .iter()
            .map(|(state, jobs)| StateCount { provider: "p".into(), state: (*state).into(), jobs: *jobs })
            .collect();
        let limit: Rate = "10/1s".parse().unwrap();
        let options = FakeOptions { limits: vec![limit], ..FakeOptions::default() };
        let mut report = StrictProvider::new(options).report();
        change(&mut report);
        Proof::from_counts(3, limit, &counts, &record(report, Vec::new()))
    }

    /// A burst into free slots has no steady rate: twenty thousand per second do not measure 10/1s.
    #[test]
    fn short_run_measures_no_rate() {
        let limit: Rate = "10/1s".parse().unwrap();
        let report = StrictProvider::new(FakeOptions { limits: vec![limit], ..FakeOptions::default() }).report();
        let judged = |arrivals_us: Vec<u64>| Proof::from_counts(3, limit, &[], &record(report.clone(), arrivals_us));
        let short = judged(vec![0, 50, 100]);
        assert_eq!((short.rate_per_second, short.utilisation), (None, None));
        assert_eq!(
            short.utilisation_text(),
            "use more --jobs: 3 are less than two windows of the 10.0/s that 10/1s allows with responses after 0 ms"
        );
        let turns: Vec<u64> = (0..60).map(|i| i / 10 * 1_000_000).collect();
        assert!((judged(turns).utilisation.unwrap() - 1.0).abs() < 0.001);
    }

    /// A request whose response is lost holds its slot for longer, which is no unused part of the limit.
    #[test]
    fn lost_responses_count_as_they_hold_slots() {
        let lost = proof(&[("declined", 3)], |report| (report.requests, report.lost_answers) = (300, 3));
        assert_eq!((lost.hold_ms, lost.possible_per_second), (30.0, 10.0 / 1.03));
        assert!(lost.utilisation_text().ends_with("that 10/1s allows with responses after 0 ms and 3 lost"));
    }

    #[test]
    fn each_broken_guarantee_fails_the_proof() {
        assert!(proof(&[("declined", 3)], |_| {}).holds());
        assert!(!proof(&[("declined", 2), ("waiting", 1)], |_| {}).holds(), "lost");
        assert!(!proof(&[("declined", 3)], |report| report.doubles = 1).holds(), "double");
        assert!(!proof(&[("declined", 3)], |report| report.refused_429 = 1).holds(), "refused");
        assert!(!proof(&[("declined", 3)], |report| report.limits[0].breaches = 1).holds(), "breach");
        assert!(!proof(&[("succeeded", 3)], |_| {}).holds(), "said to be made, never charged");
    }
}
