//! The filter of a list as flags, the same for `jobs list` and `dlq list`, and the exports and totals of both.

use crate::cli::console::group_thousands;
use crate::cli::{CommandContext, CommandError, Exit};
use crate::domain::amount::display_amount;
use crate::domain::format::count;
use crate::domain::job_filter::JobFilter;
use crate::ledger::job_filter_input::RawJobFilter;
use crate::ledger::operator::{JobSearchError, JobTotals};
use crate::ops::export::{ExportFormat, JobExport};

/// A payment must match all of these.
#[derive(Clone, Debug, clap::Args)]
pub struct FilterArgs {
    #[arg(long)]
    pub provider: Option<String>,
    /// Payments of this account.
    #[arg(long, allow_hyphen_values = true)]
    account: Option<String>,
    /// The beginning of an id or of a reference, or a provider's whole reference of a charge.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    search: Option<String>,
    /// The code of a reason to wait, or the beginning of the reason of a finished payment.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    reason: Option<String>,
    /// Three capital letters.
    #[arg(long, value_name = "CODE")]
    currency: Option<String>,
    /// The smallest amount, in units of --currency, like 12.99.
    #[arg(long, value_name = "AMOUNT", allow_hyphen_values = true)]
    min_amount: Option<String>,
    /// The largest amount, in units of --currency.
    #[arg(long, value_name = "AMOUNT", allow_hyphen_values = true)]
    max_amount: Option<String>,
    /// Created at this instant or later: 2026-11-27T14:00:00Z, or a date, which begins at 00:00 UTC.
    #[arg(long, value_name = "INSTANT", allow_hyphen_values = true)]
    created_from: Option<String>,
    /// Created before this instant.
    #[arg(long, value_name = "INSTANT", allow_hyphen_values = true)]
    created_to: Option<String>,
    /// Finished at this instant or later.
    #[arg(long, value_name = "INSTANT", allow_hyphen_values = true)]
    finished_from: Option<String>,
    /// Finished before this instant.
    #[arg(long, value_name = "INSTANT", allow_hyphen_values = true)]
    finished_to: Option<String>,
}

impl FilterArgs {
    /// The filter, with these states.
    ///
    /// # Errors
    /// Names the first invalid flag.
    pub fn validate(&self, states: &[&str]) -> Result<JobFilter, CommandError> {
        let args = self.clone();
        let raw = RawJobFilter {
            state: (!states.is_empty()).then(|| states.join(",")),
            provider: args.provider,
            account: args.account,
            id: None,
            search: args.search,
            reason: args.reason,
            currency: args.currency,
            min_amount: args.min_amount,
            max_amount: args.max_amount,
            created_from: args.created_from,
            created_to: args.created_to,
            finished_from: args.finished_from,
            finished_to: args.finished_to,
        };
        raw.validate().map_err(|invalid| CommandError::Usage(invalid.as_flag()))
    }
}

impl From<JobSearchError> for CommandError {
    fn from(error: JobSearchError) -> Self {
        match error {
            JobSearchError::UnknownCursor(id) => {
                Self::Usage(format!("--after: the ledger has no payment `{id}`: use the id that the page before names"))
            }
            JobSearchError::Ledger(error) => error.into(),
        }
    }
}

/// Reads the name of a format.
pub fn parse_format(name: &str) -> Result<ExportFormat, String> {
    ExportFormat::from_name(name).ok_or_else(|| "write csv or jsonl".to_owned())
}

/// Writes all payments that match to stdout, page by page.
///
/// # Errors
/// When the database fails or the output is closed. Then the output ends early.
pub async fn export(
    filter: JobFilter,
    format: ExportFormat,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    let mut export = JobExport::new(cx.ledger().await?, filter, format);
    while let Some(part) = export.next_part().await? {
        cx.console.data().write_all(part.as_bytes())?;
    }
    cx.console.flush()?;
    Ok(Exit::Success)
}

/// Prints the number and the sums of the payments that match.
pub async fn print_totals(filter: &JobFilter, json: bool, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let totals = cx.ledger().await?.job_totals(filter).await?;
    if json {
        cx.console.json(&totals)?;
        return Ok(Exit::Success);
    }
    let JobTotals { at_least, jobs, currencies } = totals;
    let at_least = if at_least { "at least " } else { "" };
    cx.console.line(&format!("{at_least}{}", count(jobs, "payment")))?;
    let rows: Vec<Vec<String>> = currencies
        .iter()
        .map(|total| {
            let sum = format!("{at_least}{}", display_amount(total.amount, &total.currency));
            vec![total.currency.clone(), group_thousands(total.jobs), sum]
        })
        .collect();
    if !rows.is_empty() {
        cx.console.table(&["currency", "payments", "sum"], &rows)?;
    }
    Ok(Exit::Success)
}
