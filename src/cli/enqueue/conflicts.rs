//! The check of published jobs against the ledger: an id that was recorded before with other content is a conflict.
//!
//! A file's lines are checked after they were published, in batches by the primary key, so that it costs one statement for a thousand lines.
//! A worker that recorded a published line in between recorded the same content. Two lines of one file with one id are a
//! conflict that only the ledger sees, once it has recorded the first.

use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::rejected::ContentOfId;

/// Published lines that one statement checks.
const BATCH: usize = 1_000;

/// Published lines that were not checked yet, by their numbers.
pub struct ConflictCheck {
    ledger: Database,
    lines: Vec<u64>,
    jobs: Vec<ContentOfId>,
}

/// A published line that workers reject, and why.
pub struct LineConflict {
    pub line: u64,
    pub reason: String,
}

impl ConflictCheck {
    pub fn new(ledger: Database) -> Self {
        Self { ledger, lines: Vec::new(), jobs: Vec::new() }
    }

    /// Adds a line; returns the conflicts of a full batch.
    pub async fn add(&mut self, line: u64, job: ContentOfId) -> Result<Vec<LineConflict>, LedgerError> {
        self.lines.push(line);
        self.jobs.push(job);
        if self.lines.len() < BATCH { Ok(Vec::new()) } else { self.finish().await }
    }

    /// The conflicts of the lines that are left.
    pub async fn finish(&mut self) -> Result<Vec<LineConflict>, LedgerError> {
        let (lines, jobs) = (std::mem::take(&mut self.lines), std::mem::take(&mut self.jobs));
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.ledger.find_conflicts(&jobs).await?;
        let conflicts = lines.into_iter().zip(jobs).filter(|(_, job)| found.contains(job));
        Ok(conflicts.map(|(line, job)| LineConflict { line, reason: conflict_text(&job.id) }).collect())
    }
}

pub fn conflict_text(id: &JobId) -> String {
    format!(
        "conflict: id {id} was recorded before with other content; workers reject the message, and the first one stays"
    )
}
