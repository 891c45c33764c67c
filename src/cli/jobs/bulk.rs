//! A runner for one operation on many payments, a bounded number at a time: their ids, and its report.
//!
//! The ids come from an argument, a file or the ledger's dead jobs. A file is read line by line and the ledger page by
//! page, so memory stays bounded. An id that is refused does not stop the runner. A failed backend stops it, because
//! the next id would fail too.

use std::collections::{BTreeMap, VecDeque};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde::Serialize;
use tokio::io::{AsyncBufRead, BufReader};

use crate::cli::input::{InputLine, LineReader};
use crate::cli::jobs::{IdArgs, parse_id};
use crate::cli::{CommandError, Console, Exit, input};
use crate::domain::job::JobId;
use crate::ledger::database::Database;
use crate::ledger::operator::{JobFilter, JobPage, JobResolution, LIST_MAX, ResolutionError};
use crate::worker::resend::ResendError;

/// Longest line with an id, in bytes; longer lines are invalid.
const LINE_BYTES_MAX: usize = 1_024;

/// One id, with its line number if it came from a file.
pub struct IdEntry {
    pub line: Option<u64>,
    pub id: Result<JobId, String>,
}

type FileLines = LineReader<Box<dyn AsyncBufRead + Send + Unpin>>;

pub enum IdSource<'a> {
    Argument(Option<JobId>),
    File {
        lines: Box<FileLines>,
        name: String,
    },
    Ledger {
        ledger: &'a Database,
        filter: Box<JobFilter>,
        page: VecDeque<IdEntry>,
        after: Option<JobId>,
        has_more: bool,
    },
}

impl IdSource<'_> {
    /// Opens the source that the arguments name.
    pub async fn from_args(ids: &IdArgs) -> Result<Self, CommandError> {
        let Some(path) = &ids.file else { return Ok(Self::Argument(ids.id.clone())) };
        let name = path.display().to_string();
        let opened = input::open(path).await.map_err(|error| CommandError::Failed(format!("{name}: {error}")))?;
        let reader: Box<dyn AsyncBufRead + Send + Unpin> = Box::new(BufReader::new(opened.reader));
        Ok(Self::File { lines: Box::new(LineReader::new(reader, LINE_BYTES_MAX)), name })
    }

    /// The next id; `None` at the end. Cancel-safe: no id is lost when the future is dropped.
    ///
    /// # Errors
    /// When the file or the ledger cannot be read.
    pub async fn next(&mut self) -> Result<Option<IdEntry>, CommandError> {
        match self {
            Self::Argument(id) => Ok(id.take().map(|id| IdEntry { line: None, id: Ok(id) })),
            Self::File { lines, name } => loop {
                let line = lines.next().await.map_err(|error| CommandError::Failed(format!("{name}: {error}")))?;
                match line.map(parse_id_line) {
                    Some(None) => {}
                    Some(entry) => return Ok(entry),
                    None => return Ok(None),
                }
            },
            Self::Ledger { ledger, filter, page, after, has_more: more } => {
                if page.is_empty() && *more {
                    let JobPage { jobs, unreadable, next, .. } =
                        ledger.list_jobs(filter, after.as_ref(), LIST_MAX).await?;
                    *after = next
                        .map(JobId::new)
                        .transpose()
                        .map_err(|problem| CommandError::Failed(problem.to_string()))?;
                    *more = after.is_some();
                    let ids = jobs.into_iter().map(|job| JobId::new(job.id).map_err(|problem| problem.to_string()));
                    let unreadable = unreadable.into_iter().map(|row| Err(row.to_string()));
                    *page = ids.chain(unreadable).map(|id| IdEntry { line: None, id }).collect();
                }
                Ok(page.pop_front())
            }
        }
    }
}

/// `None` for an empty line. An invalid line is not quoted: it may contain anything.
fn parse_id_line(line: InputLine) -> Option<IdEntry> {
    let (number, text) = match line {
        InputLine::Text { number, bytes } => (number, String::from_utf8_lossy(&bytes).trim().to_owned()),
        // Not an id, and its text was not kept.
        InputLine::TooLong { number } => (number, "too long a line".to_owned()),
    };
    (!text.is_empty())
        .then(|| IdEntry { line: Some(number), id: parse_id(&text).map_err(|why| format!("an id {why}")) })
}

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
                Some((line, id, result)) = in_flight.next(), if !in_flight.is_empty() => {
                    self.record(line, &id, result, console)?;
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
        result: JobActionResult,
        console: &mut Console,
    ) -> Result<(), CommandError> {
        match result {
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
