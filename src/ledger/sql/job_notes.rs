//! Notes on payments in SQL: one insert each, only if the payment is in a state that takes the note, and their list.
//!
//! Triggers write author and instant, and no row ever changes.

use super::dialect::Template;
use super::engine::args;
use super::result::{SqlRow, from_row};
use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::job_notes::{ASSIGNED, COMMENT, JobNote, NewNote};
use crate::ledger::operator::{Actor, ResolutionError, ResolutionRefusal};

/// The state of a payment that can be assigned.
const REVIEW: &str = "review";

static ADD: Template = Template::new(
    "INSERT INTO job_notes (job_id, kind, text) \
     SELECT id, CAST($2 AS text), CAST($3 AS text) FROM jobs WHERE id = $1 AND ($4 IS NULL OR state = $4)",
);

static STATE: Template = Template::new("SELECT state FROM jobs WHERE id = $1");

pub(super) static NOTES: Template = Template::new(
    "SELECT {ms:at} AS at_ms, who, os_user, program, kind, text FROM job_notes WHERE job_id = $1 ORDER BY id",
);

from_row!(row => JobNote { at, who, os_user, program, kind, text });

impl Database {
    /// Adds a note to a payment. Only a payment in `review` can be assigned.
    ///
    /// # Errors
    /// [`ResolutionError::Refused`] when there is no such payment, or its state takes no such note.
    pub async fn add_note(&self, id: &JobId, note: &NewNote, by: &Actor) -> Result<(), ResolutionError> {
        let (kind, text, state) = match note {
            NewNote::Assigned(to) => (ASSIGNED, to.as_ref().map(|to| to.as_str()), Some(REVIEW)),
            NewNote::Comment(text) => (COMMENT, Some(text.as_str()), None),
        };
        let add = vec![self.must_affect(&ADD, args![id, kind, text, state])];
        if self.atomically_by(add, Some(by)).await?.is_some() {
            return Ok(());
        }
        let found = self.query_one(&STATE, args![id]).await?;
        let refusal = match found.map(|row: SqlRow| row.get::<String>("state")).transpose()? {
            None => ResolutionRefusal::NoSuchJob,
            Some(state) => ResolutionRefusal::WrongState { state, wanted: REVIEW, done: "assigned" },
        };
        Err(refusal.into())
    }

    /// The notes of a payment, oldest first.
    pub async fn job_notes(&self, id: &JobId) -> Result<Vec<JobNote>, LedgerError> {
        self.query_as(&NOTES, args![id]).await
    }
}
