//! The `rejected` command: lists and shows messages that could not be a job, publishes them again, and discards them.
//!
//! The row has the only copy of a message, and no command prints it. A filter is applied to what is open when the command
//! starts, oldest first.

use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use serde::Serialize;

use crate::cli::enqueue::door::declare_lanes;
use crate::cli::jobs::actor;
use crate::cli::jobs::show::check_provider_exists;
use crate::cli::provider::parse_name;
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::domain::format::{count, plural};
use crate::domain::job::InvalidReason;
use crate::ledger::decision_input;
use crate::ledger::operator::LIST_MAX;
use crate::ledger::rejected::{COUNTED_MAX, RejectedDecision, RejectedFilter, RejectedPage, RejectedSummary};
use crate::worker::rejected::RejectedDecider;
use crate::worker::resend::provider_names;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List rejected messages that are open, newest first.
    List(ListArgs),
    /// Show one rejected message, and the decision about it.
    Show {
        /// Its number, from the list.
        #[arg(value_parser = clap::value_parser!(i64).range(1..))]
        number: i64,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Publish rejected messages to their lanes again, byte for byte.
    Republish(RepublishArgs),
    /// Discard rejected messages: their bodies are removed for good.
    Discard(DiscardArgs),
}

#[derive(Debug, clap::Args)]
struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Those that were decided, in place of the open ones.
    #[arg(long)]
    decided: bool,
    /// Messages per page, 1 to 1000.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// The page with numbers below this one.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(1..))]
    before: Option<i64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct FilterArgs {
    /// Messages of this provider's lane.
    #[arg(long)]
    provider: Option<String>,
    /// Messages that were rejected for this reason.
    #[arg(long, value_parser = PossibleValuesParser::new(InvalidReason::ALL.map(InvalidReason::code)).map(|code| code))]
    reason: Option<String>,
}

/// Which messages, and why.
#[derive(Debug, clap::Args)]
struct DecideArgs {
    /// Their numbers, from the list.
    #[arg(value_parser = clap::value_parser!(i64).range(1..), conflicts_with_all = ["provider", "reason"],
          required_unless_present_any = ["provider", "reason"])]
    numbers: Vec<i64>,
    #[command(flatten)]
    filter: FilterArgs,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct RepublishArgs {
    #[command(flatten)]
    which: DecideArgs,
    /// Republish all that match the filter without a confirmation; without a terminal there is none.
    #[arg(long, conflicts_with = "numbers")]
    yes: bool,
}

#[derive(Debug, clap::Args)]
struct DiscardArgs {
    #[command(flatten)]
    which: DecideArgs,
    /// Required: a discarded message cannot be restored.
    #[arg(long, required = true)]
    yes: bool,
}

/// Runs the command.
///
/// # Errors
/// When a backend fails, or the one message does not exist. A message that is refused is reported and gives exit code 1.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    match &args.action {
        Action::List(args) => list(args, cx).await,
        Action::Show { number, json } => show(*number, *json, cx).await,
        Action::Republish(RepublishArgs { which, yes }) => decide(RejectedDecision::Republished, which, !yes, cx).await,
        Action::Discard(DiscardArgs { which, .. }) => decide(RejectedDecision::Discarded, which, false, cx).await,
    }
}

impl FilterArgs {
    fn filter(&self, decided: bool) -> Result<RejectedFilter, CommandError> {
        let provider = self.provider.as_deref().map(parse_name).transpose()?;
        Ok(RejectedFilter { provider, reason: self.reason.clone(), decided })
    }
}

async fn list(args: &ListArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let filter = args.filter.filter(args.decided)?;
    let page = cx.ledger().await?.list_rejected(&filter, args.before, args.limit).await?;
    if page.messages.is_empty() {
        check_provider_exists(filter.provider.as_ref(), cx).await?;
    }
    for row in &page.unreadable {
        cx.console.message(&format!("warning: {row}"))?;
    }
    if args.json {
        cx.console.json(&page)?;
        return Ok(Exit::Success);
    }
    let RejectedPage { messages, unreadable, next } = page;
    if messages.is_empty() && unreadable.is_empty() {
        cx.console.message(if args.before.is_some() { "no more rejected messages" } else { "no rejected messages" })?;
        return Ok(Exit::Success);
    }
    let cells = messages.iter().map(|message| {
        vec![
            message.id.to_string(),
            message.at.to_string(),
            message.provider.clone(),
            message.reason.clone(),
            message.job_id.clone().unwrap_or_default(),
            message.decision.clone().unwrap_or_else(|| message.detail.clone()),
        ]
    });
    let last = if args.decided { "decision" } else { "what is wrong" };
    if !messages.is_empty() {
        cx.console.table(&["number", "at", "provider", "reason", "id", last], &cells.collect::<Vec<_>>())?;
    }
    if let Some(next) = next {
        cx.console.next_page("--before", &next.to_string())?;
    }
    Ok(Exit::Success)
}

async fn show(number: i64, json: bool, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let Some(message) = cx.ledger().await?.rejected_message(number).await? else {
        return Err(CommandError::Failed(format!("there is no rejected message {number}")));
    };
    if json {
        cx.console.json(&message)?;
    } else {
        cx.console.table(&["field", "value"], &field_rows(message))?;
    }
    Ok(Exit::Success)
}

fn field_rows(message: RejectedSummary) -> Vec<Vec<String>> {
    let decided = message.decision.map(|decision| match message.decided_at {
        Some(at) => format!("{decision} at {at}"),
        None => decision,
    });
    let who = match (message.os_user, message.decided_by) {
        (Some(user), Some(role)) => Some(format!("{user} as {role}")),
        (user, role) => user.or(role),
    };
    let all = [
        ("number", Some(message.id.to_string())),
        ("at", Some(message.at.to_string())),
        ("provider", Some(message.provider)),
        ("reason", Some(message.reason)),
        ("what is wrong", Some(message.detail)),
        ("id in the message", message.job_id),
        ("begins", message.head),
        ("body", Some(format!("{}, sha256 {}", count(message.body_bytes, "byte"), message.body_sha256))),
        ("stored", Some(if message.masked { "masked: it can only be discarded" } else { "as it came" }.to_owned())),
        ("decision", Some(decided.unwrap_or_else(|| "open".to_owned()))),
        ("by", who),
        ("program", message.program),
        ("because", message.because),
    ];
    all.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect()
}

/// What was done to each message.
#[derive(Debug, Default, Serialize)]
struct DecisionReport {
    decision: &'static str,
    changed: Vec<i64>,
    refused: Vec<RefusedMessage>,
}

#[derive(Debug, Serialize)]
struct RefusedMessage {
    number: i64,
    reason: String,
}

async fn decide(
    decision: RejectedDecision,
    args: &DecideArgs,
    asks: bool,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    let ledger = cx.ledger().await?;
    let mut report = DecisionReport { decision: decision.name(), ..DecisionReport::default() };
    let numbers = numbers(args, &mut report.refused, cx).await?;
    let total = numbers.len() as u64;
    let question = format!("Republish {}?", count(total, "rejected message"));
    if asks && args.numbers.is_empty() && total > 0 && !cx.console.confirm(&question)?.unwrap_or(true) {
        cx.console.message("nothing was changed")?;
        return print(&report, args.json, Exit::Failed, cx.console);
    }
    let (providers, queue) = (provider_names(&ledger).await?, cx.queue().await?);
    if let (RejectedDecision::Republished, Some(queue)) = (decision, &queue) {
        for (name, why) in declare_lanes(queue.as_ref(), &providers, &providers).await? {
            cx.console.message(&format!("warning: {name}: {why}"))?;
        }
    }
    let actor = actor(args.because.as_deref());
    let decider = RejectedDecider { ledger: &ledger, queue: queue.as_deref(), providers: &providers, actor };
    for number in numbers {
        match decider.decide(number, decision).await {
            Ok(()) => {
                if !args.json {
                    cx.console.line(&format!("{number}: {}", decision.name()))?;
                }
                report.changed.push(number);
            }
            Err(error) => {
                cx.console.message(&format!("{number}: {error}"))?;
                let ends = error.aborts_batch();
                report.refused.push(RefusedMessage { number, reason: error.to_string() });
                if ends {
                    cx.console.message(
                        "stopped: the remaining messages are unchanged; fix the cause and run the same command again",
                    )?;
                    break;
                }
            }
        }
    }
    let exit = if report.refused.is_empty() { Exit::Success } else { Exit::Failed };
    print(&report, args.json, exit, cx.console)
}

fn print(report: &DecisionReport, json: bool, exit: Exit, console: &mut Console) -> Result<Exit, CommandError> {
    if json {
        console.json(report)?;
    }
    Ok(exit)
}

/// The given numbers, or those of the open messages that match the filter, oldest first. Unreadable rows are refused.
async fn numbers(
    args: &DecideArgs,
    refused: &mut Vec<RefusedMessage>,
    cx: &mut CommandContext<'_>,
) -> Result<Vec<i64>, CommandError> {
    if !args.numbers.is_empty() {
        return Ok(args.numbers.clone());
    }
    let (filter, ledger) = (args.filter.filter(false)?, cx.ledger().await?);
    let (mut numbers, mut before) = (Vec::new(), None);
    loop {
        let page = ledger.list_rejected(&filter, before, LIST_MAX).await?;
        numbers.extend(page.messages.iter().map(|message| message.id));
        for row in &page.unreadable {
            cx.console.message(&format!("warning: {row}"))?;
            refused.push(RefusedMessage { number: row.id.parse().unwrap_or_default(), reason: row.problem.clone() });
        }
        before = page.next;
        if before.is_none() {
            break;
        }
        if numbers.len() as u64 >= COUNTED_MAX {
            let taken = numbers.len() as u64;
            cx.console.message(&format!(
                "the newest {taken} {} are chosen: run it again for the rest",
                plural(taken, "message")
            ))?;
            break;
        }
    }
    if numbers.is_empty() {
        check_provider_exists(filter.provider.as_ref(), cx).await?;
        cx.console.message("no rejected messages")?;
    }
    numbers.reverse();
    Ok(numbers)
}
