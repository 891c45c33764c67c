//! The columns of a job's wait: assignments for the writes after which a job waits, and their reading.
//!
//! `wait_reason` and `wait_limit` say why the job waits, as code and limit, and `wait_detail` has the free text that
//! belongs to it. While the job is `waiting` or `unknown`, that is its present wait. Later it is its last one. `reason`
//! is an operator's decision, or says why the job is finished: a wait clears it.

use super::engine::Value;
use super::row::SqlRow;
use super::storable;
use crate::domain::wait_reason::{Wait, WaitReason, past_sentence, sentence};
use crate::ledger::LedgerError;

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

/// The values of [`WaitParameters`], in their order.
pub fn wait_args(wait: &Wait) -> [Value; 3] {
    [wait.detail.as_deref().map(storable).into(), wait.reason.code().into(), wait.reason.limit().into()]
}

/// The columns of a wait's reason. A later program may have written a code that this one does not know.
pub struct StoredWait {
    pub code: Option<String>,
    pub limit: Option<String>,
    pub detail: Option<String>,
}

impl StoredWait {
    /// Reads the columns.
    pub fn read(row: &SqlRow) -> Result<Self, LedgerError> {
        Ok(Self {
            code: row.opt_text("wait_reason")?,
            limit: row.opt_text("wait_limit")?,
            detail: row.opt_text("wait_detail")?,
        })
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
        let code = self.code.as_deref()?;
        let known = WaitReason::from_columns(code, self.limit.clone());
        Some(known.map_or_else(|| code.to_owned(), |reason| sentence(&reason, self.detail.as_deref())))
    }
}
