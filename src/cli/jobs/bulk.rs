//! Carrying something out on many payments, a bounded number at a time, and reporting what became of each.
//!
//! Refuses to stop at an id that cannot be done; stops where an engine fails, because the next would fare no better.

use std::collections::BTreeMap;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde::Serialize;

use super::super::{CommandError, Console, Exit};
use super::ids::{IdEntry, IdSource};
use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::operator::{JobResolution, ResolutionRefusal};
use crate::worker::resend::ResendError;

/// Payments under way at once: enough to hide a commit's time, few enough to leave the workers their connections.
const IN_FLIGHT_MAX: usize = 8;

/// What became of one.
pub enum JobActionResult {
    Done,
    /// A dry run would have done it, at this provider.
    WouldChange(String),
    Refused(String),
    /// Changed, but its message is missing.
    Unpublished {
        reason: String,
        aborts_batch: bool,
    },
    /// Nothing was changed, and nothing more will be tried.
    Aborted(String),
    /// Not tried, because another ended it all.
    Skipped,
}

impl From<Result<Result<(), ResolutionRefusal>, LedgerError>> for JobActionResult {
    fn from(decided: Result<Result<(), ResolutionRefusal>, LedgerError>) -> Self {
        match decided {
            Ok(Ok(())) => Self::Done,
            Ok(Err(refusal)) => Self::Refused(refusal.to_string()),
            Err(error) => ResendError::Ledger(error).into(),
        }
    }
}

impl JobActionResult {
    /// Whether the next would fare no better.
    #[must_use]
    pub fn aborts_batch(&self) -> bool {
        matches!(self, Self::Aborted(_) | Self::Unpublished { aborts_batch: true, .. })
    }
}

impl From<ResendError> for JobActionResult {
    fn from(error: ResendError) -> Self {
        let (reason, ends_it_all) = (error.to_string(), error.aborts_batch());
        match (error, ends_it_all) {
            (ResendError::Unpublished(_), _) => Self::Unpublished { reason, aborts_batch: ends_it_all },
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
    /// In a dry run: how many would be changed, by provider.
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
    #[must_use]
    pub fn new(verdict: &JobResolution, dry_run: bool, json: bool) -> Self {
        Self {
            from: verdict.required_state(),
            to: verdict.resulting_state(),
            changed: Vec::new(),
            refused: Vec::new(),
            unpublished: Vec::new(),
            would_change: dry_run.then(BTreeMap::new),
            json,
            stopped: false,
        }
    }

    /// Carries it out on every id of the source, and prints the report.
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
            JobActionResult::Unpublished { reason, aborts_batch: ends_it_all } => {
                self.stopped |= ends_it_all;
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
            console.message("stopped: what comes behind is as it was; run the same again once this is mended")?;
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
