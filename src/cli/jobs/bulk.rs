//! A runner for one operation on many payments, a bounded number at a time, and its report.
//!
//! An id that is refused does not stop it. A failed backend stops it, because the next id would fail too.

use std::collections::BTreeMap;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde::Serialize;

use super::super::{CommandError, Console, Exit};
use super::ids::{IdEntry, IdSource};
use crate::domain::job::JobId;
use crate::ledger::operator::{JobResolution, ResolutionError};
use crate::worker::resend::ResendError;

/// Concurrent payments: enough to hide the time of a commit, few enough to leave connections to the workers.
const IN_FLIGHT_MAX: usize = 8;

/// The result for one payment.
pub enum JobActionResult {
    Done,
    /// A dry run would change it, at this provider.
    WouldChange(String),
    Refused(String),
    /// Changed, but its message is missing.
    Unpublished {
        reason: String,
        aborts_batch: bool,
    },
    /// Nothing was changed, and no other id is tried.
    Aborted(String),
    /// Not tried, because an earlier result ended the batch.
    Skipped,
}

impl From<Result<(), ResolutionError>> for JobActionResult {
    fn from(result: Result<(), ResolutionError>) -> Self {
        result.map_or_else(|error| ResendError::from(error).into(), |()| Self::Done)
    }
}

impl JobActionResult {
    /// Whether the next id would fail too.
    pub fn aborts_batch(&self) -> bool {
        matches!(self, Self::Aborted(_) | Self::Unpublished { aborts_batch: true, .. })
    }
}

impl From<ResendError> for JobActionResult {
    fn from(error: ResendError) -> Self {
        let (reason, aborts_batch) = (error.to_string(), error.aborts_batch());
        match (error, aborts_batch) {
            (ResendError::Unpublished(_), _) => Self::Unpublished { reason, aborts_batch },
            (_, true) => Self::Aborted(reason),
            (_, false) => Self::Refused(reason),
        }
    }
}

#[derive(Debug, Serialize)]
pub struct BulkReport {
    from: &'static str,
    to: &'static str,
    changed: Vec<String>,
    refused: Vec<JobActionFailure>,
    unpublished: Vec<JobActionFailure>,
    /// In a dry run: the number of payments that would be changed, by provider.
    #[serde(skip_serializing_if = "Option::is_none")]
    would_change: Option<BTreeMap<String, u64>>,
    #[serde(skip)]
    json: bool,
    #[serde(skip)]
    stopped: bool,
}

#[derive(Debug, Serialize)]
struct JobActionFailure {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    reason: String,
}

impl BulkReport {
    pub fn new(resolution: &JobResolution, dry_run: bool, json: bool) -> Self {
        Self {
            from: resolution.required_state(),
            to: resolution.resulting_state(),
            changed: Vec::new(),
            refused: Vec::new(),
            unpublished: Vec::new(),
            would_change: dry_run.then(BTreeMap::new),
            json,
            stopped: false,
        }
    }

    /// Runs `act` on every id of the source, and prints the report.
    ///
    /// # Errors
    /// When the ids cannot be read or the output is closed.
    pub async fn run_on_all<F>(
        mut self,
        source: &mut IdSource<'_>,
        act: impl Fn(JobId) -> F,
        console: &mut Console,
    ) -> Result<Exit, CommandError>
    where
        F: Future<Output = JobActionResult>,
    {
        let mut in_flight = FuturesUnordered::new();
        let mut ended = false;
        loop {
            tokio::select! {
                biased;
                Some((line, id, outcome)) = in_flight.next(), if !in_flight.is_empty() => {
                    self.record(line, &id, outcome, console)?;
                    ended |= self.stopped;
                }
                entry = source.next(), if !ended && in_flight.len() < IN_FLIGHT_MAX => match entry? {
                    None => ended = true,
                    Some(IdEntry { line, id: Ok(id) }) => {
                        let acting = act(id.clone());
                        in_flight.push(async move { (line, id, acting.await) });
                    }
                    Some(IdEntry { line, id: Err(reason) }) => self.record_refusal(line, None, reason, console)?,
                },
                else => return self.finish(console),
            }
        }
    }

    fn record(
        &mut self,
        line: Option<u64>,
        id: &JobId,
        outcome: JobActionResult,
        console: &mut Console,
    ) -> Result<(), CommandError> {
        match outcome {
            JobActionResult::Done => {
                if !self.json {
                    console.line(&format!("{id}: {} → {}", self.from, self.to))?;
                }
                self.changed.push(id.as_str().to_owned());
            }
            JobActionResult::WouldChange(provider) => {
                *self.would_change.get_or_insert_default().entry(provider).or_default() += 1;
            }
            JobActionResult::Refused(reason) => self.record_refusal(line, Some(id), reason, console)?,
            JobActionResult::Unpublished { reason, aborts_batch } => {
                self.stopped |= aborts_batch;
                console.message(&format!("{id}: {reason}"))?;
                self.unpublished.push(JobActionFailure { line, id: Some(id.as_str().to_owned()), reason });
            }
            JobActionResult::Skipped => {}
            JobActionResult::Aborted(reason) => {
                self.stopped = true;
                self.record_refusal(line, Some(id), reason, console)?;
            }
        }
        Ok(())
    }

    fn record_refusal(
        &mut self,
        line: Option<u64>,
        id: Option<&JobId>,
        reason: String,
        console: &mut Console,
    ) -> Result<(), CommandError> {
        let line_text = line.map(|line| format!("line {line}: ")).unwrap_or_default();
        let id_text = id.map(|id| format!("{id}: ")).unwrap_or_default();
        console.message(&format!("{line_text}{id_text}{reason}"))?;
        self.refused.push(JobActionFailure { line, id: id.map(|id| id.as_str().to_owned()), reason });
        Ok(())
    }

    fn finish(self, console: &mut Console) -> Result<Exit, CommandError> {
        if self.stopped {
            console
                .message("stopped: the remaining ids are unchanged; fix the cause and run the same command again")?;
        }
        if self.json {
            console.json(&self)?;
        } else if let Some(would_change) = &self.would_change {
            let rows = would_change.iter().map(|(provider, jobs)| vec![provider.clone(), jobs.to_string()]);
            console.table(&["provider", &format!("{} → {}", self.from, self.to)], &rows.collect::<Vec<_>>())?;
            console.message("dry run: nothing was changed")?;
        }
        Ok(if self.refused.is_empty() && self.unpublished.is_empty() { Exit::Success } else { Exit::Failed })
    }
}
