//! The report of a file: what was handed over, which lines were not, and the progress until then.

use std::time::Duration;
use std::{fmt, io};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::HandedOver;
use crate::cli::{CommandError, Console, Exit};

/// Payments that were handed over.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum HandedOverCount {
    Published {
        published: u64,
    },
    Recorded {
        recorded: u64,
        /// Recorded before, with the same content.
        known: u64,
    },
}

impl HandedOverCount {
    pub fn add(&mut self, handed: &HandedOver) {
        match (self, handed) {
            (Self::Published { published }, HandedOver::Published) => *published += 1,
            (Self::Recorded { recorded, .. }, HandedOver::Recorded) => *recorded += 1,
            (Self::Recorded { known, .. }, HandedOver::Known) => *known += 1,
            _ => {}
        }
    }
}

impl fmt::Display for HandedOverCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Published { published } => write!(f, "{published} published"),
            Self::Recorded { recorded, known: 0 } => write!(f, "{recorded} recorded"),
            Self::Recorded { recorded, known } => write!(f, "{recorded} recorded, {known} already known"),
        }
    }
}

#[derive(Debug, Serialize)]
pub struct EnqueueReport {
    #[serde(flatten)]
    pub count: HandedOverCount,
    pub bad: Vec<FailedLine>,
    /// Lines whose ids were recorded before with other content. Published ones are rejected by workers.
    pub conflicts: Vec<FailedLine>,
    /// The ledger did not answer: `conflicts` may lack lines.
    pub conflicts_unknown: bool,
    /// Lines that the broker did not confirm, or that were not certainly recorded.
    pub unconfirmed: Vec<FailedLine>,
    /// The backend failed, and the remaining lines were not read.
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
    pub fn new(count: HandedOverCount) -> Self {
        Self {
            count,
            bad: Vec::new(),
            conflicts: Vec::new(),
            conflicts_unknown: false,
            unconfirmed: Vec::new(),
            stopped: false,
            read_error: None,
        }
    }

    /// What is done so far.
    pub fn progress(&self) -> String {
        format!("{}, {} invalid", self.count, self.bad.len())
    }

    pub fn print(&self, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
        if json {
            console.json(self)?;
        } else {
            let conflicts = match self.conflicts.len() {
                0 => String::new(),
                conflicts => format!(", {conflicts} in conflict"),
            };
            console.line(&format!("{}{conflicts}", self.progress()))?;
        }
        let again = "run the same file again: no id is charged twice";
        if self.read_error.is_some() {
            console.message(&format!("stopped because the file cannot be read any further; fix that and {again}"))?;
        } else if self.stopped {
            let backend = match self.count {
                HandedOverCount::Published { .. } => "queue",
                HandedOverCount::Recorded { .. } => "database",
            };
            console.message(&format!("stopped because the {backend} failed; {again}"))?;
        } else if !self.unconfirmed.is_empty() {
            let left = self.unconfirmed.len();
            let why = match self.count {
                HandedOverCount::Published { .. } => "published, because their queues are declared differently",
                HandedOverCount::Recorded { .. } => "recorded, because their provider rows cannot be used",
            };
            console.message(&format!("{left} not {why}; fix that and {again}"))?;
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
