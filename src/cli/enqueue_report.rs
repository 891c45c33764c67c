//! The report of a file's publishing: what was published, which lines were not, and the progress until then.

use std::io;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{CommandError, Console, Exit};

#[derive(Debug, Default, Serialize)]
pub struct EnqueueReport {
    pub published: u64,
    pub bad: Vec<FailedLine>,
    /// Published lines that workers reject, because their ids were recorded before with other content.
    pub conflicts: Vec<FailedLine>,
    /// The ledger did not answer: `conflicts` may lack lines.
    pub conflicts_unknown: bool,
    /// Lines that the broker did not confirm.
    pub unconfirmed: Vec<FailedLine>,
    /// The queue failed, and the remaining lines were not read.
    #[serde(skip)]
    pub stopped: bool,
    /// The file cannot be read any further.
    #[serde(skip)]
    pub read_error: Option<io::Error>,
}

#[derive(Debug, Serialize)]
pub struct FailedLine {
    line: u64,
    reason: String,
}

impl EnqueueReport {
    pub fn print(&self, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
        if json {
            console.json(self)?;
        } else {
            let conflicts = match self.conflicts.len() {
                0 => String::new(),
                conflicts => format!(", {conflicts} in conflict"),
            };
            console.line(&format!("{} published, {} invalid{conflicts}", self.published, self.bad.len()))?;
        }
        if self.read_error.is_some() {
            console.message(
                "stopped because the file cannot be read any further; fix that and run the same file again: published ids are \
                 not charged twice",
            )?;
        } else if self.stopped {
            console.message(
                "stopped because the queue failed; run the same file again: published ids are not charged twice",
            )?;
        } else if !self.unconfirmed.is_empty() {
            let left = self.unconfirmed.len();
            console.message(&format!(
                "{left} not published, because their queues are declared differently; fix that and run the same file again: \
                 published ids are not charged twice"
            ))?;
        }
        let failed = [&self.bad, &self.conflicts, &self.unconfirmed];
        Ok(if failed.iter().all(|lines| lines.is_empty()) { Exit::Success } else { Exit::Failed })
    }
}

pub fn record_failed_line(
    list: &mut Vec<FailedLine>,
    line: u64,
    reason: String,
    bar: &ProgressBar,
    console: &mut Console,
) -> io::Result<()> {
    bar.suspend(|| console.message(&format!("line {line}: {reason}")))?;
    list.push(FailedLine { line, reason });
    Ok(())
}

pub fn progress_bar(bytes: Option<u64>, drawn: bool) -> ProgressBar {
    if !drawn {
        return ProgressBar::hidden();
    }
    let (bar, template) = match bytes {
        Some(bytes) => (ProgressBar::new(bytes), "{wide_bar} {percent} % · {msg} · {eta} left"),
        None => (ProgressBar::new_spinner(), "{spinner} {msg} · {elapsed}"),
    };
    // Redrawn by time, so that a slow broker shows as a moving clock.
    bar.enable_steady_tick(Duration::from_millis(200));
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
