//! Carrying something out on many payments, a bounded number at a time, and reporting what became of each.
//!
//! Refuses to stop at an id that cannot be done; stops where an engine fails, because the next would fare no better.

use std::collections::BTreeMap;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde::Serialize;

use super::super::{CommandError, Console, Exit};
use super::ids::{Entry, Source};
use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::operator::{Refusal, Verdict};
use crate::worker::send_again::NotSent;

/// Payments under way at once: enough to hide a commit's time, few enough to leave the workers their connections.
const IN_FLIGHT_MAX: usize = 8;

/// What became of one.
pub enum Outcome {
    Done,
    /// A dry run would have done it, at this provider.
    Would(String),
    Refused(String),
    /// Changed, but its message is missing.
    Unpublished {
        reason: String,
        ends_it_all: bool,
    },
    /// Nothing was changed, and nothing more will be tried.
    Ends(String),
    /// Not tried, because another ended it all.
    Left,
}

impl From<Result<Result<(), Refusal>, LedgerError>> for Outcome {
    fn from(decided: Result<Result<(), Refusal>, LedgerError>) -> Self {
        match decided {
            Ok(Ok(())) => Self::Done,
            Ok(Err(refusal)) => Self::Refused(refusal.to_string()),
            Err(error) => NotSent::Ledger(error).into(),
        }
    }
}

impl Outcome {
    /// Whether the next would fare no better.
    #[must_use]
    pub fn ends_it_all(&self) -> bool {
        matches!(self, Self::Ends(_) | Self::Unpublished { ends_it_all: true, .. })
    }
}

impl From<NotSent> for Outcome {
    fn from(error: NotSent) -> Self {
        let (reason, ends_it_all) = (error.to_string(), error.ends_it_all());
        match (error, ends_it_all) {
            (NotSent::Unpublished(_), _) => Self::Unpublished { reason, ends_it_all },
            (_, true) => Self::Ends(reason),
            (_, false) => Self::Refused(reason),
        }
    }
}

#[derive(Debug, Serialize)]
pub struct Report {
    from: &'static str,
    to: &'static str,
    changed: Vec<String>,
    refused: Vec<NotDone>,
    unpublished: Vec<NotDone>,
    /// In a dry run: how many would be changed, by provider.
    #[serde(skip_serializing_if = "Option::is_none")]
    would_change: Option<BTreeMap<String, u64>>,
    #[serde(skip)]
    json: bool,
    #[serde(skip)]
    stopped: bool,
}

#[derive(Debug, Serialize)]
struct NotDone {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    reason: String,
}

impl Report {
    #[must_use]
    pub fn new(verdict: &Verdict, dry_run: bool, json: bool) -> Self {
        Self {
            from: verdict.from(),
            to: verdict.to(),
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
    pub async fn run<F>(
        mut self,
        source: &mut Source<'_>,
        act: impl Fn(JobId) -> F,
        console: &mut Console,
    ) -> Result<Exit, CommandError>
    where
        F: Future<Output = Outcome>,
    {
        let mut in_flight = FuturesUnordered::new();
        let mut ended = false;
        loop {
            tokio::select! {
                biased;
                Some((line, id, outcome)) = in_flight.next(), if !in_flight.is_empty() => {
                    self.note(line, &id, outcome, console)?;
                    ended |= self.stopped;
                }
                entry = source.next(), if !ended && in_flight.len() < IN_FLIGHT_MAX => match entry? {
                    None => ended = true,
                    Some(Entry { line, id: Ok(id) }) => {
                        let acting = act(id.clone());
                        in_flight.push(async move { (line, id, acting.await) });
                    }
                    Some(Entry { line, id: Err(reason) }) => self.refuse(line, None, reason, console)?,
                },
                else => return self.conclude(console),
            }
        }
    }

    fn note(
        &mut self,
        line: Option<u64>,
        id: &JobId,
        outcome: Outcome,
        console: &mut Console,
    ) -> Result<(), CommandError> {
        match outcome {
            Outcome::Done => {
                if !self.json {
                    console.line(&format!("{id}: {} → {}", self.from, self.to))?;
                }
                self.changed.push(id.as_str().to_owned());
            }
            Outcome::Would(provider) => {
                *self.would_change.get_or_insert_default().entry(provider).or_default() += 1;
            }
            Outcome::Refused(reason) => self.refuse(line, Some(id), reason, console)?,
            Outcome::Unpublished { reason, ends_it_all } => {
                self.stopped |= ends_it_all;
                console.message(&format!("{id}: {reason}"))?;
                self.unpublished.push(NotDone { line, id: Some(id.as_str().to_owned()), reason });
            }
            Outcome::Left => {}
            Outcome::Ends(reason) => {
                self.stopped = true;
                self.refuse(line, Some(id), reason, console)?;
            }
        }
        Ok(())
    }

    fn refuse(
        &mut self,
        line: Option<u64>,
        id: Option<&JobId>,
        reason: String,
        console: &mut Console,
    ) -> Result<(), CommandError> {
        let line_text = line.map(|line| format!("line {line}: ")).unwrap_or_default();
        let id_text = id.map(|id| format!("{id}: ")).unwrap_or_default();
        console.message(&format!("{line_text}{id_text}{reason}"))?;
        self.refused.push(NotDone { line, id: id.map(|id| id.as_str().to_owned()), reason });
        Ok(())
    }

    fn conclude(self, console: &mut Console) -> Result<Exit, CommandError> {
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
        Ok(if self.refused.is_empty() && self.unpublished.is_empty() { Exit::Fine } else { Exit::Failed })
    }
}
