//! The progress of a benchmark phase: a bar at a terminal, elsewhere a line every few seconds.
//!
//! It only draws; the caller counts, so that the progress does not slow down the measurement.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use sluicegate::cli::Console;

const LINE_EVERY: Duration = Duration::from_secs(5);

pub struct Phase {
    bar: Option<ProgressBar>,
    what: &'static str,
    total: u64,
    last_line_at: Instant,
}

impl Phase {
    /// Begins a phase of `total` steps; `what` names them, such as `jobs published`.
    pub fn begin(what: &'static str, total: u64, console: &mut Console) -> std::io::Result<Self> {
        let bar = console.draws_progress.then(|| {
            let bar = ProgressBar::new(total);
            // An invalid template would only lose the colours.
            if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} [{bar:40.green/blue}] {pos}/{len} {msg}")
            {
                bar.set_style(style.progress_chars("━╸─"));
            }
            bar.set_message(what);
            bar
        });
        if bar.is_none() {
            console.message(&format!("0 of {total} {what}"))?;
        }
        Ok(Self { bar, what, total, last_line_at: Instant::now() })
    }

    pub fn show(&mut self, done: u64, console: &mut Console) -> std::io::Result<()> {
        match &self.bar {
            Some(bar) => bar.set_position(done),
            None if self.last_line_at.elapsed() >= LINE_EVERY => {
                self.last_line_at = Instant::now();
                console.message(&format!("{done} of {} {}", self.total, self.what))?;
            }
            None => {}
        }
        Ok(())
    }
}

impl Drop for Phase {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
