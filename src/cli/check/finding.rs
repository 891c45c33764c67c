//! A finding of `check`, and the table or JSON that shows findings.
//!
//! The probes and the static checks produce findings; this module only prints them.

use serde::Serialize;

use crate::cli::{CommandError, Console};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingLevel {
    Ok,
    /// Works, with a cost or a risk that the operator should accept on purpose.
    Warning,
    /// Does not work, or breaks a guarantee.
    Error,
}

impl FindingLevel {
    fn code(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// What `check` found, and the fix of a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: FindingLevel,
    /// `database postgres://…`, `provider acme`, `configuration queue.url`.
    pub subject: String,
    pub what: String,
    /// The fix; `None` when there is nothing to fix.
    pub fix: Option<String>,
}

impl Finding {
    #[must_use]
    pub fn ok(subject: impl Into<String>, what: impl Into<String>) -> Self {
        Self { level: FindingLevel::Ok, subject: subject.into(), what: what.into(), fix: None }
    }

    #[must_use]
    pub fn warning(subject: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level: FindingLevel::Warning, subject: subject.into(), what: what.into(), fix: Some(fix.into()) }
    }

    #[must_use]
    pub fn error(subject: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level: FindingLevel::Error, subject: subject.into(), what: what.into(), fix: Some(fix.into()) }
    }
}

/// Shows findings as data: a table, or a JSON array.
///
/// # Errors
/// When the output is closed.
pub fn print_findings(findings: &[Finding], json: bool, console: &mut Console) -> Result<(), CommandError> {
    if json {
        console.json(&findings)?;
        return Ok(());
    }
    let rows: Vec<Vec<String>> = findings.iter().map(cells).collect();
    console.table(&["", "what", "finding", "fix"], &rows)?;
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    console.message(&format!("errors: {}, warnings: {}", count(FindingLevel::Error), count(FindingLevel::Warning)))?;
    Ok(())
}

fn cells(finding: &Finding) -> Vec<String> {
    let fix = finding.fix.clone().unwrap_or_default();
    vec![finding.level.code().to_owned(), finding.subject.clone(), finding.what.clone(), fix]
}
