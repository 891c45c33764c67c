//! The `accounts` command: what single accounts of a provider may do. It lists the rules with their authors, and sets and
//! unsets them while workers run.

use clap::Subcommand;
use serde_json::json;

use crate::cli::jobs::{actor, parse_id};
use crate::cli::provider::{parse_name, report_if_unusable};
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::domain::job::Identifier;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::operator::DatabaseTime;
use crate::ledger::provider_row::{AccountReturn, AccountRow};
use crate::ops::account_rules::{
    AccountRuleLine, RuleChange, RuleSubject, WantedRule, WrittenRule, change_rule, list_rules,
};
use crate::ops::until::Until;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the account rules of a provider: who made them, why, and until when they apply.
    List {
        provider: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Block, refuse, exempt or limit an account; every worker follows within 2 s. `provider apply` keeps the rule.
    Set(SetArgs),
    /// Remove an account's rule, and its weight. `provider apply` does not bring it back.
    Unset(UnsetArgs),
}

/// The account of a rule, and why it changes.
#[derive(Debug, clap::Args)]
struct SubjectArgs {
    provider: String,
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    account: Identifier,
    /// The rule is for this limit alone; default: for all limits of scope account.
    #[arg(long, value_name = "NAME")]
    limit: Option<String>,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct SetArgs {
    #[command(flatten)]
    of: SubjectArgs,
    /// blocked: its payments wait. refuse: they end as declined. exempt: from account limits. Or a rate: 5/1s.
    #[arg(required_unless_present = "weight")]
    rule: Option<WrittenRule>,
    /// The account's share among the accounts of its lane, 1 to 1000.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..=1_000))]
    weight: Option<i64>,
    /// Until when; then the rule before comes back. A time of day such as 06:00 or '06:00 Europe/Berlin', an RFC 3339
    /// instant, or none: it stays.
    #[arg(long, value_name = "TIME")]
    until: Option<Until>,
}

#[derive(Debug, clap::Args)]
struct UnsetArgs {
    #[command(flatten)]
    of: SubjectArgs,
}

/// Runs the command.
///
/// # Errors
/// When the database fails, the provider does not exist, or its row cannot use the rule.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let ledger = cx.ledger().await?;
    match &args.action {
        Action::List { provider, json } => list(&ledger, provider, *json, cx.console).await,
        Action::Set(SetArgs { of, rule, weight, until }) => {
            let until = until.clone().unwrap_or(Until::NoEnd);
            let wanted = WantedRule::Set { rule: *rule, weight: *weight, until };
            change(&ledger, of, &wanted, cx.console).await
        }
        Action::Unset(UnsetArgs { of }) => change(&ledger, of, &WantedRule::Unset, cx.console).await,
    }
}

async fn change(
    ledger: &Database,
    args: &SubjectArgs,
    wanted: &WantedRule,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let SubjectArgs { provider, account, limit, because, json } = args;
    if because.trim().is_empty() {
        return Err(CommandError::Usage("--because is empty: write why, for the audit".to_owned()));
    }
    let name = parse_name(provider)?;
    let of = RuleSubject { provider: &name, account, limit: limit.as_deref() };
    let change = change_rule(ledger, &of, wanted, Some(&actor(Some(because)))).await?;
    if let Some(warning) = change.warning(&of) {
        console.message(&format!("warning: {warning}"))?;
    }
    print_change(&change, args, *json, console)?;
    // An invalid row of its quota may keep the rule from being in force.
    report_if_unusable(ledger, &name, console).await
}

fn print_change(
    change: &RuleChange,
    args: &SubjectArgs,
    json: bool,
    console: &mut Console,
) -> Result<(), CommandError> {
    let RuleChange { before, after, .. } = change;
    let SubjectArgs { provider, account, limit, .. } = args;
    let returns = after.as_ref().and_then(|row| row.returns.as_ref());
    if json {
        console.json(&json!({
            "provider": provider, "account": account.as_str(), "limit": limit,
            "from": before.as_ref().map(AccountRow::describe), "to": after.as_ref().map(AccountRow::describe),
            "until": returns.map(|returns| returns.until), "then": returns.map(AccountReturn::describe_then),
            "unknown_account": change.unknown_account,
        }))?;
        return Ok(());
    }
    let words = |row: &Option<AccountRow>| row.as_ref().map_or_else(|| "no rule".to_owned(), AccountRow::describe);
    let at_limit = limit.as_ref().map(|limit| format!(" at limit {limit}")).unwrap_or_default();
    let until = returns.map(|returns| format!(" {returns}")).unwrap_or_default();
    console.line(&format!("{provider} {account}{at_limit}: {} → {}{until}", words(before), words(after)))?;
    Ok(())
}

/// The columns of a list.
const HEADER: [&str; 9] = ["account", "limit", "rule", "weight", "until", "then", "who", "at", "because"];

async fn list(ledger: &Database, provider: &str, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    let name = parse_name(provider)?;
    let rules = list_rules(ledger, &name).await?;
    if json {
        console.json(&rules)?;
    } else if rules.is_empty() {
        console.message(&format!(
            "no account of {name} has a rule: `sluicegate accounts set {name} ACCOUNT blocked --because …` sets one"
        ))?;
    } else {
        console.table(&HEADER, &rules.iter().map(cells).collect::<Vec<_>>())?;
    }
    report_if_unusable(ledger, &name, console).await
}

fn cells(line: &AccountRuleLine) -> Vec<String> {
    let text = |cell: &Option<String>| cell.clone().unwrap_or_default();
    let burst = line.burst.map(|burst| format!(" with burst {burst}")).unwrap_or_default();
    let time = |at: Option<DatabaseTime>| at.map(|at| at.to_string()).unwrap_or_default();
    vec![
        line.account.clone(),
        text(&line.limit),
        text(&line.rule) + &burst,
        line.weight.to_string(),
        time(line.until),
        text(&line.then),
        text(&line.who),
        time(line.at),
        text(&line.because),
    ]
}
