//! The export of payments as CSV or JSON lines, one page after another: the memory that it needs does not depend on
//! their number.
//!
//! Each text of a CSV file is quoted, so that no separator within begins another cell. A text that a spreadsheet would run
//! as a formula begins with an apostrophe (<https://owasp.org/www-community/attacks/CSV_Injection>). Payments that are created meanwhile are left out. A
//! payment whose row cannot be read has a line with its id, in state `unreadable`.

use std::borrow::Cow;

use serde_json::json;

use crate::domain::amount::decimal_amount;
use crate::domain::job::JobId;
use crate::domain::job_filter::{JobFilter, is_finished};
use crate::domain::names::named_enum;
use crate::domain::printable::{printable, printable_json};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{JobSearchError, JobSummary, LIST_MAX, UnreadableRow};

named_enum! {
    /// The format of an export.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ExportFormat {
        Csv = "csv",
        /// One JSON object on each line, as in the list.
        JsonLines = "jsonl",
    }
    /// The name, and the end of a file's name.
    pub fn name(self);
}

impl ExportFormat {
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Self::Csv => "text/csv; charset=utf-8; header=present",
            Self::JsonLines => "application/x-ndjson",
        }
    }
}

const COLUMNS: [&str; 17] = [
    "id",
    "provider",
    "state",
    "amount",
    "currency",
    "account",
    "reference",
    "provider_reference",
    "charged_amount",
    "attempts",
    "reason",
    "wait_reason",
    "wait_limit",
    "wake_at",
    "created_at",
    "updated_at",
    "finished_at",
];

/// Columns of numbers that this program writes itself; all others are texts.
const NUMBERS: [&str; 3] = ["amount", "charged_amount", "attempts"];

/// An export in progress.
pub struct JobExport {
    ledger: Database,
    filter: JobFilter,
    format: ExportFormat,
    after: Option<JobId>,
    progress: Progress,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Begins,
    Continues,
    Ended,
}

impl JobExport {
    pub fn new(ledger: Database, filter: JobFilter, format: ExportFormat) -> Self {
        Self { ledger, filter, format, after: None, progress: Progress::Begins }
    }

    /// The next lines; `None` at the end.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub async fn next_part(&mut self) -> Result<Option<String>, JobSearchError> {
        let mut part = String::new();
        if self.progress == Progress::Begins && self.format == ExportFormat::Csv {
            part = csv_line(COLUMNS.map(csv_text));
        }
        while self.progress != Progress::Ended {
            let page = self.ledger.list_jobs(&self.filter, self.after.as_ref(), LIST_MAX).await?;
            part.extend(page.jobs.iter().map(|job| self.line(job)));
            part.extend(page.unreadable.iter().map(|row| self.unreadable_line(row)));
            let next = page.next.map(JobId::new).transpose();
            self.after = next.map_err(|why| LedgerError::Corrupt(format!("an id {why}")))?;
            self.progress = if self.after.is_some() { Progress::Continues } else { Progress::Ended };
            if !part.is_empty() {
                break;
            }
        }
        Ok((!part.is_empty()).then_some(part))
    }

    fn line(&self, job: &JobSummary) -> String {
        match self.format {
            ExportFormat::JsonLines => json_line(&serde_json::to_string(job).unwrap_or_default()),
            ExportFormat::Csv => csv_row(cells(job)),
        }
    }

    fn unreadable_line(&self, row: &UnreadableRow) -> String {
        match self.format {
            ExportFormat::JsonLines => {
                json_line(&json!({"id": row.id, "state": "unreadable", "reason": row.problem}).to_string())
            }
            ExportFormat::Csv => csv_row(COLUMNS.map(|column| match column {
                "id" => Cow::Borrowed(row.id.as_str()),
                "state" => "unreadable".into(),
                "reason" => Cow::Borrowed(row.problem.as_str()),
                _ => "".into(),
            })),
        }
    }
}

fn json_line(document: &str) -> String {
    format!("{}\n", printable_json(document))
}

fn cells(job: &JobSummary) -> [Cow<'_, str>; COLUMNS.len()] {
    fn text(text: &Option<String>) -> Cow<'_, str> {
        text.as_deref().unwrap_or_default().into()
    }
    let is_finished = is_finished(&job.state);
    [
        job.id.as_str().into(),
        job.provider.as_str().into(),
        job.state.as_str().into(),
        decimal_amount(job.amount, &job.currency).into(),
        job.currency.as_str().into(),
        text(&job.account),
        text(&job.reference),
        text(&job.provider_reference),
        job.charged_amount.map(|charged| decimal_amount(charged, &job.currency)).unwrap_or_default().into(),
        job.attempts.to_string().into(),
        text(&job.reason),
        text(&job.wait_reason),
        text(&job.wait_limit),
        if is_finished { "".into() } else { job.wake_at.to_string().into() },
        job.created_at.to_string().into(),
        job.updated_at.to_string().into(),
        if is_finished { job.updated_at.to_string().into() } else { "".into() },
    ]
}

/// One line as RFC 4180 has it.
fn csv_line(cells: [String; COLUMNS.len()]) -> String {
    format!("{}\r\n", cells.join(","))
}

/// The line of these values, in the order of [`COLUMNS`].
fn csv_row(values: [Cow<'_, str>; COLUMNS.len()]) -> String {
    let mut columns = COLUMNS.into_iter();
    csv_line(values.map(|value| match columns.next() {
        Some(column) if NUMBERS.contains(&column) => value.into_owned(),
        _ => csv_text(&value),
    }))
}

/// Characters that begin a formula, also in the forms that East Asian keyboards write.
const FORMULA_STARTS: [char; 12] = ['=', '+', '-', '@', '＝', '＋', '－', '＠', '﹦', '﹢', '﹣', '﹫'];

/// A text in quotes; no text is an empty cell. Spreadsheets skip blanks before a formula.
fn csv_text(text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    let is_formula = text.trim_start().starts_with(FORMULA_STARTS) || text.starts_with(['\t', '\r', '\n']);
    let guard = if is_formula { "'" } else { "" };
    format!("\"{guard}{}\"", printable(text).replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cell_is_a_formula() {
        for (text, cell) in [
            ("", ""),
            ("0012", "\"0012\""),
            ("pay-1", "\"pay-1\""),
            ("-pay", "\"'-pay\""),
            ("-1", "\"'-1\""),
            ("=1+1", "\"'=1+1\""),
            ("x;=1", "\"x;=1\""),
            ("x\t=1", "\"x\\t=1\""),
            ("＝1+1", "\"'＝1+1\""),
            ("﹫x", "\"'﹫x\""),
            ("  =1", "\"'  =1\""),
            ("\u{a0}\u{3000}@x", "\"'\u{a0}\u{3000}@x\""),
            ("+49", "\"'+49\""),
            ("@SUM(A1)", "\"'@SUM(A1)\""),
            ("\tx", "\"'\\tx\""),
            ("\r=1", "\"'\\r=1\""),
            ("a \"b\", c", "\"a \"\"b\"\", c\""),
            ("=HYPERLINK(\"x\",\"y\")", "\"'=HYPERLINK(\"\"x\"\",\"\"y\"\")\""),
            ("two\nlines", "\"two\\nlines\""),
        ] {
            assert_eq!(csv_text(text), cell, "{text:?}");
        }
    }
}
