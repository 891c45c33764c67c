//! `jobs erase`: what says whose payments were, of one account, once they have ended.
//!
//! Nothing brings it back, so a reason is needed and audited with each payment. What must stay for now is counted, with what
//! to wait for.

use serde::Serialize;

use super::super::connect::Engines;
use super::super::{CommandError, Console, Exit};
use super::{by, parse_id};
use crate::config::Config;
use crate::domain::explain::words::count;
use crate::domain::job::Token;
use crate::ledger::operator::{By, Erasable, Erased, Operator};
use crate::ledger::said;

/// Payments that are erased at a time: short statements, so that no worker waits behind them.
const BATCH: u32 = 500;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose payments.
    #[arg(long, value_parser = parse_id, allow_hyphen_values = true)]
    account: Token,
    /// Why, for the audit, which stays for ever: name a ticket, and no person.
    #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
    because: String,
    /// Say what would be erased, and what would stay.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What was done, or would be, and what is left.
#[derive(Serialize)]
struct Report<'a> {
    account: &'a str,
    dry_run: bool,
    /// Payments.
    erased: u64,
    /// Requests that lost account and reference.
    requests_erased: u64,
    left: Erasable,
}

/// Runs the command.
///
/// # Errors
/// When the database fails. What was erased until then stays erased; the same again goes on.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let operator = engines.operator(config).await?;
    let by = by(Some(&args.because));
    if by.because.is_none() {
        return Err(CommandError::Usage("--because: is empty: write why, for the audit".to_owned()));
    }
    let mut done = match args.dry_run {
        true => Erased::default(),
        false => erase_all(operator.as_ref(), &args.account, &by).await?,
    };
    let mut left = operator.erasable(&args.account).await?;
    if args.dry_run {
        done.jobs = std::mem::take(&mut left.ended);
    }
    let waits = left.open + left.review + left.untold + left.ended;
    if args.json {
        let (account, dry_run) = (args.account.as_str(), args.dry_run);
        console.json(&Report { account, dry_run, erased: done.jobs, requests_erased: done.requests, left })?;
    } else {
        let would = if args.dry_run { "would be erased" } else { "erased" };
        console.line(&format!("{} {would}", count(done.jobs, "payment")))?;
        for line in words(&left) {
            console.message(&line)?;
        }
    }
    Ok(if waits > 0 && !args.dry_run { Exit::Failed } else { Exit::Fine })
}

/// Batch after batch, until nothing is left to erase.
async fn erase_all(operator: &dyn Operator, account: &Token, by: &By) -> Result<Erased, CommandError> {
    let mut done = Erased::default();
    loop {
        let erased = operator.erase(account, BATCH, by).await?;
        if erased == Erased::default() {
            return Ok(done);
        }
        done.jobs += erased.jobs;
        done.requests += erased.requests;
    }
}

/// What is left, and what to do about it.
fn words(left: &Erasable) -> Vec<String> {
    let mut lines = Vec::new();
    let mut payments = |jobs: u64, what: &str| {
        if jobs > 0 {
            lines.push(format!("left: {} {what}", count(jobs, "payment")));
        }
    };
    payments(left.open, "that may still be sent: run this again when they have ended");
    payments(left.review, "in review: decide by `jobs resolve`, then run this again");
    payments(left.untold, "whose outcome event is not published yet: run this again later");
    payments(left.ended, "that ended meanwhile: run this again");
    if let Some(until) = left.requests_until {
        lines.push(format!(
            "left: account and reference of {} of the last 32 days, which a limit may count: run this again after {until}",
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
    use crate::ledger::operator::At;

    #[test]
    fn what_is_left_is_told_with_what_to_wait_for() {
        assert_eq!(words(&Erasable::default()), [""; 0]);
        let all = Erasable {
            ended: 1,
            open: 2,
            review: 1,
            untold: 1,
            requests: 3,
            requests_until: Some(At(1_795_000_000_123)),
            rules: 1,
        };
        let lines = words(&all);
        assert_eq!(lines.len(), 6, "{lines:?}");
        assert_eq!(lines[0], "left: 2 payments that may still be sent: run this again when they have ended");
        assert!(lines[4].ends_with("run this again after 2026-11-18T11:06:40.123Z"), "{lines:?}");
    }
}
