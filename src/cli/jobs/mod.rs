//! The `jobs` command: the details of one payment, lists of payments, and an operator's decisions about them. `explain`
//! and `erase` are here.
//!
//! It does not show payloads and request bodies. Every change is checked against the state that the ledger has at that
//! moment, and audited. Without a running process, `explain` explains from the ledger and from a shared Redis, and says
//! so on stderr. `erase` cannot be undone, so a reason is required. Payments that must stay for now are counted, with
//! the event to wait for.

use std::path::PathBuf;

use clap::Subcommand;
use serde::Serialize;

use super::console::{width, wrap_words};
use super::{CommandContext, CommandError, Console, Exit, ops_client};
use crate::config::LimiterUrl;
use crate::domain::format::count;
use crate::domain::job::{Identifier, JobId};
use crate::domain::names::InvalidName;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::operator::{Actor, ErasureCounts, ErasureResult};
use crate::ops::explain::{ExplainResponse, ExplainedCheck, FactSources, explain_job};
use crate::worker::settings_sync::LoadedSettings;

pub mod bulk_decision;
pub mod decide;
pub mod filter;
mod ids;
mod report;
pub mod show;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show one payment: its state, its requests, its events, and manual changes.
    Show(show::ShowArgs),
    /// Show why a payment is in its state: the checks it passed, the one it waits for, and the estimated start.
    Explain(ExplainArgs),
    /// List payments, page by page, newest first; with `--totals` their sums, with `--export` all of them as a file.
    List(Box<show::ListArgs>),
    /// Resolve a payment in `review`: record its outcome, or send it again.
    Resolve(decide::ResolveArgs),
    /// Cancel payments that are `waiting`; a request in flight is not stopped.
    Cancel(decide::CancelArgs),
    /// Erase the personal data of one account's finished payments. Ids and hashes stay.
    Erase(EraseArgs),
}

/// One payment, many from a file, or all that match a filter.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct IdArgs {
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: Option<JobId>,
    /// One id per line; `-` is stdin. One invalid line rejects the list.
    #[arg(long, value_name = "IDS")]
    file: Option<PathBuf>,
    /// All payments that match, written like the address of the page's list: `state=review&provider=acme`.
    #[arg(long, value_name = "QUERY", allow_hyphen_values = true)]
    filter: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// When a backend fails, or the one payment does not exist. An id that is refused is reported and gives exit code 1.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    match &args.action {
        Action::Show(args) => show::show(args, None, cx).await,
        Action::Explain(args) => explain(args, cx).await,
        Action::List(args) => show::print_page(&args.state, &args.page, cx).await,
        Action::Resolve(args) => decide::resolve(args, cx).await,
        Action::Cancel(args) => decide::cancel(args, cx).await,
        Action::Erase(args) => erase(args, cx).await,
    }
}

pub(super) fn parse_id(text: &str) -> Result<JobId, InvalidName> {
    JobId::new(text)
}

/// The user of this command, for the audit.
pub(crate) fn actor(because: Option<&str>) -> Actor {
    Actor {
        os_user: super::os::user_at_host(),
        program: None,
        reason: because.filter(|because| !because.trim().is_empty()).map(str::to_owned),
    }
}

#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: JobId,
    /// List each check, also those that passed as usual or are not reached.
    #[arg(long)]
    all: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Explains one payment. An id that the ledger does not know gives exit code 1.
///
/// # Errors
/// When neither a running process nor the database answers.
async fn explain(args: &ExplainArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let id = &args.id;
    let path = format!("/api/v1/jobs/{id}/explain");
    let answer = match ops_client::get_if_running::<ExplainResponse>(cx, &path).await? {
        Some(answered) => {
            answered.unverified.iter().try_for_each(|why| cx.console.message(why))?;
            answered.value
        }
        None => {
            cx.console.message(
                "no running process on `ops.listen`: explained from the ledger alone, without lanes and wait queues",
            )?;
            explain_without_process(id, cx).await?
        }
    };
    if args.json {
        cx.console.json(&answer)?;
    } else {
        print_explanation(&answer, args.all, cx.console)?;
    }
    Ok(if answer.state == "unrecorded" { Exit::Failed } else { Exit::Success })
}

async fn explain_without_process(id: &JobId, cx: &CommandContext<'_>) -> Result<ExplainResponse, CommandError> {
    let ledger = cx.ledger().await?;
    let known = LoadedSettings::default().with_snapshot(ledger.load_settings().await?);
    let queue = cx.queue().await?;
    // An embedded limiter exists only in its process.
    let limiter = match cx.config.limiter.url {
        LimiterUrl::Embedded => None,
        LimiterUrl::Redis(_) | LimiterUrl::RedisCluster(_) => Some(cx.limiter().await?),
    };
    let sources = FactSources {
        ledger: &ledger,
        settings: &known,
        queue: queue.as_deref(),
        limiter_facts: limiter.as_deref(),
        process: None,
        collector: None,
    };
    Ok(explain_job(&sources, id).await?)
}

fn print_explanation(answer: &ExplainResponse, all: bool, console: &mut Console) -> Result<(), CommandError> {
    let provider = answer.provider.as_deref().map(|provider| format!(" of {provider}")).unwrap_or_default();
    let sentence = format!("{}{provider} is `{}`: {}", answer.id, answer.state, answer.summary);
    console.lines(&wrap_words("", &sentence, width(console.shape())))?;
    if answer.checks.is_empty() {
        return Ok(());
    }
    console.line("")?;
    Ok(console.table(&["check", "", "why"], &check_rows(answer, all))?)
}

/// How a check is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CheckRow {
    Passed,
    Routine,
    Here,
    NotReached,
}

impl CheckRow {
    fn status(self) -> &'static str {
        match self {
            Self::Passed | Self::Routine => "passed",
            Self::Here => "here",
            Self::NotReached => "",
        }
    }
}

/// One row per check. Unless all are wanted, neighbours that passed as usual or are not reached share a row.
fn check_rows(answer: &ExplainResponse, all: bool) -> Vec<Vec<String>> {
    let here = answer.blocked_at.as_ref().map(|block| block.check.as_str());
    let kind = |check: &ExplainedCheck| match (check.passed, check.is_routine) {
        (true, true) => CheckRow::Routine,
        (true, false) => CheckRow::Passed,
        (false, _) if here == Some(check.name.as_str()) => CheckRow::Here,
        (false, _) => CheckRow::NotReached,
    };
    let shares = |kind| !all && matches!(kind, CheckRow::Routine | CheckRow::NotReached);
    let runs = answer.checks.chunk_by(|check, next| shares(kind(check)) && kind(check) == kind(next));
    let row = |run: &[ExplainedCheck]| {
        let [first, others @ ..] = run else { return Vec::new() };
        let name = match others.len() as u64 {
            0 => first.name.clone(),
            others => count(others + 1, "check"),
        };
        let why = match kind(first) {
            // The summary names the cause.
            CheckRow::Here => "see above",
            CheckRow::Routine if !others.is_empty() => "",
            _ => first.text.as_str(),
        };
        vec![name, kind(first).status().to_owned(), why.to_owned()]
    };
    runs.map(row).collect()
}

/// Payments per statement: short statements, so that no worker waits for them.
const ERASE_BATCH: u32 = 500;

#[derive(Debug, clap::Args)]
pub struct EraseArgs {
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
async fn erase(args: &EraseArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let ledger = cx.ledger().await?;
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
        cx.console.json(&ErasureReport {
            account,
            dry_run,
            erased: done.jobs,
            requests_erased: done.requests,
            left,
        })?;
    } else {
        let at_least = if args.dry_run { at_least(&left) } else { "" };
        let would = if args.dry_run { "would be erased" } else { "erased" };
        cx.console.line(&format!("{at_least}{} {would}", count(done.jobs, "payment")))?;
        for line in remainder_lines(&left) {
            cx.console.message(&line)?;
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
    use crate::ops::explain::ExplainedBlock;

    #[test]
    fn neighbouring_routine_checks_share_a_row() {
        let check = |name: &str, passed, is_routine, text: &str| ExplainedCheck {
            name: name.to_owned(),
            passed,
            is_routine,
            at: None,
            text: text.to_owned(),
        };
        let checks = vec![
            check("recorded", true, false, "in the ledger"),
            check("provider", true, true, "enabled"),
            check("time", true, false, "due"),
            check("lane", true, true, "takes jobs"),
            check("limiter", true, true, "grants permits"),
            check("limit", false, false, "waits for limit all"),
            check("queue", false, false, "not reached"),
            check("sent", false, false, "not reached"),
        ];
        let block = ExplainedBlock { check: "limit".to_owned(), ..ExplainedBlock::default() };
        let answer = ExplainResponse { checks, blocked_at: Some(block), ..ExplainResponse::default() };
        let shown = [
            ["recorded", "passed", "in the ledger"],
            ["provider", "passed", "enabled"],
            ["time", "passed", "due"],
            ["2 checks", "passed", ""],
            ["limit", "here", "see above"],
            ["2 checks", "", "not reached"],
        ];
        assert_eq!(check_rows(&answer, false), shown);
        assert_eq!(check_rows(&answer, true).len(), 8);
    }

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
