//! The report of decisions that a command applies itself: what became of each payment, as lines or as one JSON object.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cli::{CommandError, Console, Exit};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::JobResolution;
use crate::worker::resend::ResendError;

#[derive(Debug, Serialize)]
pub struct DecisionReport {
    from: &'static str,
    to: &'static str,
    changed: Vec<String>,
    refused: Vec<DecisionFailure>,
    /// In a dry run: the number of payments that would be changed, by provider.
    #[serde(skip_serializing_if = "Option::is_none")]
    would_change: Option<BTreeMap<String, u64>>,
    /// Whether changes are printed when they happen.
    #[serde(skip)]
    has_lines: bool,
}

#[derive(Debug, Serialize)]
struct DecisionFailure {
    id: String,
    reason: String,
}

impl DecisionReport {
    pub fn new(resolution: &JobResolution, json: bool) -> Self {
        Self {
            from: resolution.required_state(),
            to: resolution.resulting_state(),
            changed: Vec::new(),
            refused: Vec::new(),
            would_change: None,
            has_lines: !json,
        }
    }

    /// Adds a payment that a dry run would change, or why not.
    pub fn record_preview(
        &mut self,
        id: &JobId,
        result: Result<ProviderName, ResendError>,
        console: &mut Console,
    ) -> Result<(), CommandError> {
        let would_change = self.would_change.get_or_insert_default();
        match result {
            Ok(provider) => *would_change.entry(provider.to_string()).or_default() += 1,
            Err(error) => self.record_failure(id, &error, console)?,
        }
        Ok(())
    }

    /// Adds a payment that was changed, or why not. True: the next one would fail in the same way.
    pub fn record(
        &mut self,
        id: &JobId,
        result: Result<(), ResendError>,
        console: &mut Console,
    ) -> Result<bool, CommandError> {
        let Err(error) = result else {
            if self.has_lines {
                console.line(&format!("{id}: {} → {}", self.from, self.to))?;
            }
            self.changed.push(id.to_string());
            return Ok(false);
        };
        self.record_failure(id, &error, console)?;
        Ok(error.aborts_batch())
    }

    fn record_failure(&mut self, id: &JobId, error: &ResendError, console: &mut Console) -> Result<(), CommandError> {
        let failure = DecisionFailure { id: id.to_string(), reason: error.to_string() };
        console.message(&format!("{id}: {}", failure.reason))?;
        self.refused.push(failure);
        Ok(())
    }

    pub fn exit(&self) -> Exit {
        if self.refused.is_empty() { Exit::Success } else { Exit::Failed }
    }

    /// Prints the report.
    ///
    /// # Errors
    /// When the output is closed.
    pub fn print(&self, console: &mut Console) -> Result<Exit, CommandError> {
        if !self.has_lines {
            console.json(self)?;
        } else if let Some(would_change) = &self.would_change {
            let rows = would_change.iter().map(|(provider, jobs)| vec![provider.clone(), jobs.to_string()]);
            console.table(&["provider", &format!("{} → {}", self.from, self.to)], &rows.collect::<Vec<_>>())?;
            console.message("dry run: nothing was changed")?;
        }
        Ok(self.exit())
    }
}
