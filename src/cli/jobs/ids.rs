//! The ids of a command: from its argument, the lines of a file, or the ledger's dead jobs.
//!
//! A file is read line by line and the ledger page by page, so memory stays bounded.

use std::collections::VecDeque;

use tokio::io::{AsyncBufRead, BufReader};

use super::super::CommandError;
use super::super::enqueue::lines::{InputLine, LineReader};
use super::super::input;
use super::{IdArgs, parse_id};
use crate::domain::job::JobId;
use crate::ledger::database::Database;
use crate::ledger::operator::{JobFilter, JobPage, LIST_MAX};

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
    File { lines: Box<FileLines>, name: String },
    Ledger { ledger: &'a Database, filter: JobFilter, page: VecDeque<IdEntry>, after: Option<JobId>, has_more: bool },
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
                    let JobPage { jobs, unreadable, next } = ledger.list_jobs(filter, after.as_ref(), LIST_MAX).await?;
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
