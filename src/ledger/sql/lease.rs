//! The statements on an active job without a request: it waits, ends, or is released; and the columns of a job's wait.
//!
//! Every statement checks the fencing token and that the job has a holder. The token alone would still match after a
//! release, until the next claim. See `docs/decisions/0030-leases-and-operator-decisions.md`.
//!
//! `wait_reason` and `wait_limit` say why the job waits, as code and limit, and `wait_detail` has the free text that
//! belongs to it. While the job is `waiting` or `unknown`, that is its present wait. Later it is its last one. `reason`
//! is an operator's decision, or says why the job is finished: a wait clears it.
//!
//! Three writes release a lease and let the job sleep until an instant: a delay, and the ends of an attempt and of a
//! look-up.

use std::time::Duration;

use super::attempt::{CLOSE_LEFT_OPEN, WRITTEN_COLUMNS};
use super::backlog::{COUNTED_AND_WRITTEN_COLUMNS, count_in};
use super::dialect::{JobWriteText, WriteTemplate};
use super::engine::{Args, Value, args};
use super::events::WRITE_EVENT;
use super::result::{FromRow, SqlRow, from_row};
use super::{fenced_write, storable};
use crate::domain::outcome::{FinalState, PARTLY_ACCEPTED, PartialCharge};
use crate::domain::wait_reason::{Wait, WaitReason, past_sentence, sentence};
use crate::ledger::database::Database;
use crate::ledger::{FencedWrite, JobState, LeaseToken, LedgerError};

/// A job that may have been charged never returns to `waiting`, whatever the caller says.
static WAIT: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET state = CASE WHEN maybe_charged OR $3 THEN 'unknown' ELSE 'waiting' END, \
             maybe_charged = (maybe_charged OR $3), {}, lost_holders = 0, \
             holder = NULL, response_by = NULL, updated_at = {{now}} {{from}} \
         WHERE id = $1 AND fence = $2 AND holder IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')",
        WaitParameters { detail: "$5", code: "$6", limit: "$7" }.begin_or_go_on("{after:$4}"),
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_LEFT_OPEN.into()],
    returning: "id",
});

static FINALIZE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: "UPDATE jobs SET state = $3, provider_reference = COALESCE($4, provider_reference), reason = $5, \
             charged_amount = $6, holder = NULL, response_by = NULL, updated_at = {now} {from} \
         WHERE id = $1 AND fence = $2 AND holder IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')"
        .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_LEFT_OPEN.into(), WRITE_EVENT.into()],
    returning: "id",
});

/// A worker that stops releases all of its jobs at once, except those that it may have sent.
static RELEASE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: "UPDATE jobs SET backlog = true, holder = NULL, response_by = NULL, updated_at = {now}, \
             wake_at = CASE WHEN wake_at > {now} THEN {now} ELSE wake_at END {from} \
         WHERE id = $1 AND fence = $2 AND holder IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')"
        .into(),
    written_columns: COUNTED_AND_WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_LEFT_OPEN.into(), count_in().into()],
    returning: "id",
});

impl Database {
    /// Commits a state change without an attempt: delayed, expired, or moved to review.
    pub async fn transition(&self, lease: &LeaseToken, next: &JobState) -> Result<FencedWrite, LedgerError> {
        let args: Args = args![&lease.id, lease.fence].into_iter().chain(next_args(next)).collect();
        let write = if next.wait().is_some() { &WAIT } else { &FINALIZE };
        Ok(fenced_write(self.write(write, args, Duration::ZERO).await?.is_some()))
    }

    /// Releases the lease; the job is in the backlog, and is due at once.
    pub async fn release(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        Ok(fenced_write(self.write(&RELEASE, args![&lease.id, lease.fence], Duration::ZERO).await?.is_some()))
    }
}

/// The parameters of a write's wait: detail, code and limit.
pub struct WaitParameters<'a> {
    pub detail: &'a str,
    pub code: &'a str,
    pub limit: &'a str,
}

impl WaitParameters<'_> {
    /// Assignments for a job that waits until `wake`, from now on.
    pub fn begin(&self, wake: &str) -> String {
        self.assignments(wake, wake, "{now}")
    }

    /// Assignments for a job that waits until `wake`. Delays for one reason before one request are one wait.
    pub fn begin_or_go_on(&self, wake: &str) -> String {
        self.begin_or_go_on_until(wake, wake)
    }

    /// [`WaitParameters::begin_or_go_on`] for a job that is due at `wake`, and that something else keeps until `until`.
    pub fn begin_or_go_on_until(&self, wake: &str, until: &str) -> String {
        let Self { code, limit, .. } = self;
        let since = format!(
            "CASE WHEN wait_reason = {code} AND wait_limit IS NOT DISTINCT FROM {limit} \
                 AND wait_request = last_attempt + 1 THEN COALESCE(wait_since, {{now}}) ELSE {{now}} END"
        );
        self.assignments(wake, until, &since)
    }

    fn assignments(&self, wake: &str, until: &str, since: &str) -> String {
        let Self { detail, code, limit } = self;
        format!(
            "wake_at = {wake}, reason = NULL, wait_reason = {code}, wait_limit = {limit}, wait_detail = {detail}, \
             wait_since = {since}, wait_until = {until}, wait_request = last_attempt + 1, wait_begun_at = {{now}}"
        )
    }
}

/// The arguments of the next state. Of a wait: whether the outcome is unknown, its time, detail, code and limit; of a
/// final state: name, reference and reason.
pub fn next_args(next: &JobState) -> Vec<Value> {
    match next {
        JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
            let [detail, code, limit] = wait_args(reason);
            let unknown = matches!(next, JobState::Unknown { .. });
            vec![unknown.into(), (*wait).into(), detail, code, limit]
        }
        JobState::Final { state, reason, reference } => {
            args![state.name(), reference.as_deref().map(storable), storable(reason), None::<i64>].into()
        }
        JobState::SucceededInPart(PartialCharge { reference, amount }) => {
            let state = FinalState::Succeeded.name();
            args![state, reference.as_deref().map(storable), PARTLY_ACCEPTED, Some(*amount)].into()
        }
    }
}

/// The values of [`WaitParameters`], in their order.
pub fn wait_args(wait: &Wait) -> [Value; 3] {
    args![wait.detail.as_deref().map(storable), wait.reason.code(), wait.reason.limit()]
}

/// The columns of a wait's reason. A later program may have written a code that this one does not know.
pub struct StoredWait {
    pub wait_reason: Option<String>,
    pub wait_limit: Option<String>,
    pub wait_detail: Option<String>,
}

from_row!(row => StoredWait { wait_reason, wait_limit, wait_detail });

impl StoredWait {
    /// The wait of a job that waits now.
    pub fn present(row: &SqlRow) -> Result<Option<Self>, LedgerError> {
        let waits = matches!(row.get::<String>("state")?.as_str(), "waiting" | "unknown");
        waits.then(|| Self::from_row(row)).transpose()
    }

    /// The sentence for people; `None` when no wait is recorded.
    pub fn sentence(&self) -> Option<String> {
        self.text(sentence)
    }

    /// The sentence once the wait is over.
    pub fn past_sentence(&self) -> Option<String> {
        self.text(past_sentence)
    }

    /// A code of another version is its own text.
    fn text(&self, sentence: fn(&WaitReason, Option<&str>) -> String) -> Option<String> {
        let code = self.wait_reason.as_deref()?;
        let known = WaitReason::from_columns(code, self.wait_limit.clone());
        Some(known.map_or_else(|| code.to_owned(), |reason| sentence(&reason, self.wait_detail.as_deref())))
    }
}
