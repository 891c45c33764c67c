//! A finding of `check`, and how findings are shown: a list in a terminal, a table in a pipe, or JSON.
//!
//! The probes and the static checks produce findings; this module only prints them.

use serde::Serialize;

use crate::cli::console::{TableShape, width, wrap_words};
use crate::cli::{CommandError, Console};

/// Width of the column of levels, with the blanks behind it.
const LEVEL_WIDTH: usize = 9;

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
    pub fn ok(subject: impl Into<String>, what: impl Into<String>) -> Self {
        Self { level: FindingLevel::Ok, subject: subject.into(), what: what.into(), fix: None }
    }

    pub fn warning(subject: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level: FindingLevel::Warning, subject: subject.into(), what: what.into(), fix: Some(fix.into()) }
    }

    pub fn error(subject: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level: FindingLevel::Error, subject: subject.into(), what: what.into(), fix: Some(fix.into()) }
    }
}

/// Shows findings as data.
pub fn print_findings(findings: &[Finding], json: bool, console: &mut Console) -> Result<(), CommandError> {
    if json {
        console.json(&findings)?;
        return Ok(());
    }
    match console.shape() {
        TableShape::Plain => {
            let rows: Vec<Vec<String>> = findings.iter().map(cells).collect();
            console.table(&["", "what", "finding", "fix"], &rows)?;
        }
        shape @ TableShape::Terminal { .. } => {
            let width = width(shape);
            findings.iter().try_for_each(|finding| console.lines(&entry(finding, width)))?;
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    console.message(&format!("errors: {}, warnings: {}", count(FindingLevel::Error), count(FindingLevel::Warning)))?;
    Ok(())
}

/// One entry of the list: the finding, and its fix below it.
fn entry(finding: &Finding, width: Option<usize>) -> String {
    let level = format!("{:<LEVEL_WIDTH$}", finding.level.code());
    let what = wrap_words(&level, &format!("{}: {}", finding.subject, finding.what), width);
    let fix = finding.fix.iter().map(|fix| wrap_words(&format!("{:LEVEL_WIDTH$}fix: ", ""), fix, width));
    [what].into_iter().chain(fix).collect::<Vec<_>>().join("\n")
}

fn cells(finding: &Finding) -> Vec<String> {
    let fix = finding.fix.clone().unwrap_or_default();
    vec![finding.level.code().to_owned(), finding.subject.clone(), finding.what.clone(), fix]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_shows_each_fix_below_its_finding() {
        let finding = Finding::warning(
            "provider stripe",
            "limit per-account does not count a message without account",
            "Set require = [\"account\"] to reject such a message",
        );
        assert_eq!(
            entry(&finding, Some(60)),
            "warning  provider stripe: limit per-account does not count\n         a message without account\n         \
             fix: Set require = [\"account\"] to reject such a\n              message"
        );
        let fine = Finding::ok("queue amqp://localhost/%2f", "answers");
        assert_eq!(entry(&fine, None), "ok       queue amqp://localhost/%2f: answers");
    }
}
