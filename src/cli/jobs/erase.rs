//! The `jobs erase` command: erases the personal data of one account's finished payments.
//!
//! It cannot be undone, so a reason is required, and it is audited with each payment. Payments that must stay for now
//! are counted, with the event to wait for.

use serde::Serialize;

use super::super::{CommandError, Console, Exit};
use super::{actor, parse_id};
use crate::app::Services;
use crate::config::Config;
use crate::domain::format::count;
use crate::domain::job::Identifier;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::operator::{Actor, ErasureCounts, ErasureResult};

/// Payments per statement: short statements, so that no worker waits for them.
const ERASE_BATCH: u32 = 500;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The account whose payments are erased.
    #[arg(long, value_parser = parse_id, allow_hyphen_values = true)]
    account: Identifier,
    /// Why, for the audit, which is kept for ever: name a ticket and no person.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: String,
    /// Show what would be erased and what would stay.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What was or would be erased, and what is left.
#[derive(Serialize)]
struct ErasureReport<'a> {
    account: &'a str,
    dry_run: bool,
    /// Payments.
    erased: u64,
    /// Requests whose account and reference were erased.
    requests_erased: u64,
    left: ErasureCounts,
}

/// Runs the command.
///
/// # Errors
/// When the database fails. Payments erased before that stay erased; run the command again to continue.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let ledger = services.ledger(config).await?;
    let by = actor(Some(&args.because));
    if by.reason.is_none() {
        return Err(CommandError::Usage("--because: is empty: write a reason for the audit".to_owned()));
    }
    let mut done = match args.dry_run {
        true => ErasureResult::default(),
        false => erase_all(&ledger, &args.account, &by).await?,
    };
    let mut left = ledger.erasure_counts(&args.account).await?;
    if args.dry_run {
        done.jobs = std::mem::take(&mut left.finished);
    }
    let waits = left.open + left.review + left.unpublished + left.finished + left.requests + left.rules;
    if args.json {
        let (account, dry_run) = (args.account.as_str(), args.dry_run);
        console.json(&ErasureReport { account, dry_run, erased: done.jobs, requests_erased: done.requests, left })?;
    } else {
        let at_least = if args.dry_run { at_least(&left) } else { "" };
        let would = if args.dry_run { "would be erased" } else { "erased" };
        console.line(&format!("{at_least}{} {would}", count(done.jobs, "payment")))?;
        for line in remainder_lines(&left) {
            console.message(&line)?;
        }
    }
    Ok(if waits > 0 && !args.dry_run { Exit::Failed } else { Exit::Success })
}

/// Erases in batches until nothing is left to erase.
async fn erase_all(ledger: &Database, account: &Identifier, by: &Actor) -> Result<ErasureResult, CommandError> {
    let mut done = ErasureResult::default();
    loop {
        let erased = ledger.erase_account(account, ERASE_BATCH, by).await?;
        if erased == ErasureResult::default() {
            return Ok(done);
        }
        done.jobs += erased.jobs;
        done.requests += erased.requests;
    }
}

/// Prefix of a count that may be too low.
fn at_least(left: &ErasureCounts) -> &'static str {
    if left.at_least { "at least " } else { "" }
}

/// The payments and rows that are left, each with what to do next.
fn remainder_lines(left: &ErasureCounts) -> Vec<String> {
    let mut lines = Vec::new();
    let at_least = at_least(left);
    let mut payments = |jobs: u64, what: &str| {
        if jobs > 0 {
            lines.push(format!("left: {at_least}{} {what}", count(jobs, "payment")));
        }
    };
    payments(left.open, "that may still be sent: run this again when they have finished");
    payments(left.review, "in review: use `jobs resolve`, then run this again");
    payments(left.unpublished, "whose outcome event is not published yet: run this again later");
    payments(left.finished, "that finished meanwhile: run this again");
    if let Some(until) = left.requests_until {
        lines.push(format!(
            "left: account and reference of {at_least}{} of the last 32 days, which a limit may count: run this again after {until}",
            count(left.requests, "request")
        ));
    }
    if left.rules > 0 {
        lines.push(format!("{} of account_overrides still name it: delete them", count(left.rules, "row")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::operator::DatabaseTime;

    #[test]
    fn remainder_names_what_to_wait_for() {
        assert_eq!(remainder_lines(&ErasureCounts::default()), [""; 0]);
        let all = ErasureCounts {
            at_least: false,
            finished: 1,
            open: 2,
            review: 1,
            unpublished: 1,
            requests: 3,
            requests_until: Some(DatabaseTime(1_795_000_000_123)),
            rules: 1,
        };
        let lines = remainder_lines(&all);
        assert_eq!(lines.len(), 6, "{lines:?}");
        assert_eq!(lines[0], "left: 2 payments that may still be sent: run this again when they have finished");
        let more = remainder_lines(&ErasureCounts { at_least: true, ..all });
        assert!(
            more[0].starts_with("left: at least 2 payments") && more[4].contains("of at least 3 requests"),
            "{more:?}"
        );
        assert!(lines[4].ends_with("run this again after 2026-11-18T11:06:40.123Z"), "{lines:?}");
    }
}
