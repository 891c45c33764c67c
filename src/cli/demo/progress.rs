//! The progress of the demo: finished payments, the rate against the limit, and the waiting jobs.
//!
//! At a terminal it is a progress bar; elsewhere it is one line every two seconds.

use std::io;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::cli::Console;
use crate::domain::limit::Rate;
use crate::ledger::StateCount;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_at_limit_is_a_full_block() {
        let limit: Rate = "4/1s".parse().unwrap();
        let arrivals = [0, 1, 2, 3, 1_000_000, 3_000_000, 3_000_001];
        assert_eq!(chart(&arrivals, limit), "█▃▁▅");
        assert_eq!(chart(&[], limit), "");
    }
}
