//! The `approvals` command: actions that wait for a second person, and the decision about one; and the gate before each
//! command that changes payments, limits or pauses.
//!
//! A command's caller is the operating system's user. It works on the database, so it also decides while no worker runs.

use clap::Subcommand;
use serde_json::json;

use crate::cli::jobs::actor;
use crate::cli::jobs::bulk_decision::print_sums;
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::approval::GatedAction;
use crate::ledger::approvals::{ApprovalState, Party};
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::operator::{Actor, LIST_MAX};
use crate::ledger::provider_row::ProviderRow;
use crate::ops::approval::decide::{Sender, approve, find_approval, needs_queue, refuse, withdraw};
use crate::ops::approval::view::{ApprovalView, ApprovalViewPage};
use crate::ops::approval::{ApprovalError, ApprovalGate, AwaitedApproval, Caller};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List actions that need two people, newest first.
    List {
        /// Also those that were decided or are expired.
        #[arg(long)]
        all: bool,
        /// Begin after this id; the end of a full page names it.
        #[arg(long, value_name = "ID", allow_hyphen_values = true)]
        after: Option<String>,
        /// Approvals per page.
        #[arg(long, default_value = "50", value_parser = clap::value_parser!(u32).range(1..=i64::from(LIST_MAX)))]
        limit: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one action: what would be done, by whose request, and what became of it.
    Show {
        #[arg(allow_hyphen_values = true)]
        id: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Approve another person's action: it is executed now, under both names.
    Approve(DecideArgs),
    /// Refuse another person's action; a reason is required.
    Refuse(DecideArgs),
    /// Withdraw your own action.
    Withdraw(DecideArgs),
}

#[derive(Debug, clap::Args)]
struct DecideArgs {
    #[arg(allow_hyphen_values = true)]
    id: String,
    /// Why; the request keeps it.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl From<ApprovalError> for CommandError {
    fn from(error: ApprovalError) -> Self {
        match error {
            ApprovalError::Ledger(error) => error.into(),
            ApprovalError::Batch(error) => error.into(),
            ApprovalError::NoReason => Self::Usage("--because: is missing: write why it is refused".to_owned()),
            error => Self::Failed(error.to_string()),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When the database fails, there is no such request, or the caller may not decide it.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let ledger = cx.ledger().await?;
    let caller = |because: Option<&str>| Caller::of_command(actor(because));
    match &args.action {
        Action::List { all, after, limit, json } => {
            let state = (!all).then_some(ApprovalState::Pending);
            let page = ledger.list_approvals(state, after.as_deref(), *limit).await?;
            let view = |approval| ApprovalView::new(approval, &caller(None));
            let approvals = page.approvals.into_iter().map(view).collect();
            list(&ApprovalViewPage { approvals, next: page.next }, *json, cx.console)
        }
        Action::Show { id, json } => {
            let approval = find_approval(&ledger, id).await?;
            show(&ApprovalView::new(approval, &caller(None)), *json, cx.console)
        }
        Action::Approve(DecideArgs { id, because, json }) => {
            let (caller, stored) = (caller(because.as_deref()), find_approval(&ledger, id).await?);
            let queue = if needs_queue(&stored.action) { Some(cx.queue().await?) } else { None };
            let card_numbers = cx.config.worker.card_numbers;
            let sender = queue.as_ref().map(|queue| Sender { queue: queue.as_ref(), card_numbers });
            let approval = approve(&ledger, sender, id, &caller).await?;
            show(&ApprovalView::new(approval, &caller), *json, cx.console)
        }
        Action::Refuse(DecideArgs { id, because, json }) => {
            let caller = caller(because.as_deref());
            show(&ApprovalView::new(refuse(&ledger, id, &caller).await?, &caller), *json, cx.console)
        }
        Action::Withdraw(DecideArgs { id, because, json }) => {
            let caller = caller(because.as_deref());
            show(&ApprovalView::new(withdraw(&ledger, id, &caller).await?, &caller), *json, cx.console)
        }
    }
}

fn list(page: &ApprovalViewPage, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    if json {
        console.json(page)?;
        return Ok(Exit::Success);
    }
    if page.approvals.is_empty() {
        console.message("no action awaits a second person")?;
        return Ok(Exit::Success);
    }
    let row = |approval: &ApprovalView| {
        vec![
            approval.id.clone(),
            approval.state.name().to_owned(),
            approval.text.clone(),
            named(&approval.requested_by),
            approval.expires_at.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = page.approvals.iter().map(row).collect();
    console.table(&["id", "state", "action", "requested by", "until"], &rows)?;
    if let Some(next) = &page.next {
        console.next_page("--after", next)?;
    }
    Ok(Exit::Success)
}

fn show(approval: &ApprovalView, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    if json {
        console.json(approval)?;
        return Ok(Exit::Success);
    }
    let all = [
        ("approval", Some(approval.id.clone())),
        ("state", Some(approval.state.name().to_owned())),
        ("action", Some(approval.text.clone())),
        ("requested by", Some(named(&approval.requested_by))),
        ("requested", Some(approval.requested_at.to_string())),
        ("until", Some(approval.expires_at.to_string())),
        ("because", approval.because.clone()),
        ("needs", Some(format!("role {}", approval.needed_role))),
        ("decided by", approval.decided_by.as_ref().map(named)),
        ("decided", approval.decided_at.map(|at| at.to_string())),
        ("decided because", approval.decided_because.clone()),
        ("result", approval.result.clone()),
    ];
    let rows: Vec<Vec<String>> =
        all.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect();
    console.table(&["field", "value"], &rows)?;
    print_sums(&approval.sums, console)?;
    Ok(Exit::Success)
}

fn named(party: &Party) -> String {
    format!("{} ({}, {})", party.name, party.role, party.path)
}

/// The gate before an action of this command.
pub fn gate<'a>(ledger: &'a Database, config: &'a Config, by: Actor) -> ApprovalGate<'a> {
    ApprovalGate { ledger, policy: &config.approvals, caller: Caller::of_command(by) }
}

/// Says that nothing was changed yet, and how a second person approves. The exit code is 1, because a script must not go
/// on as if it were done.
pub fn print_awaited(awaited: &AwaitedApproval, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    let AwaitedApproval { id, expires_at } = awaited;
    if json {
        let text = awaited.to_string();
        console.json(&json!({ "awaits_approval": id, "text": text, "expires_at": expires_at }))?;
    }
    console.message(&format!(
        "nothing was changed: {awaited}, until {expires_at}; another person runs `sluicegate approvals approve {id}`, or \
         approves it on the page"
    ))?;
    Ok(Exit::Failed)
}

/// Why a provider file cannot be applied here: it would change what needs a second person, and a file is not stored.
///
/// # Errors
/// The provider and the change.
pub fn check_provider_file(
    present: &[ProviderRow],
    wanted: &[ProviderRow],
    gate: &ApprovalGate<'_>,
) -> Result<(), CommandError> {
    for before in present {
        let Some(after) = wanted.iter().find(|row| row.name == before.name) else { continue };
        let paused = if after.pause_unmentioned { before.paused } else { after.paused };
        let stops = (paused && !before.paused) || (before.enabled && !after.enabled);
        let starts = (before.paused && !paused) || (after.enabled && !before.enabled);
        let changed = if stops && gate.concerns(GatedAction::Pause) {
            GatedAction::Pause
        } else if starts && gate.concerns(GatedAction::Resume) {
            GatedAction::Resume
        } else if gate.concerns(GatedAction::Limit) && rate_keys(before) != rate_keys(after) {
            GatedAction::Limit
        } else {
            continue;
        };
        let command = match changed {
            GatedAction::Pause => "provider pause",
            GatedAction::Resume => "provider resume",
            _ => "limits set",
        };
        return Err(CommandError::Failed(format!(
            "{}: `{changed}` needs two people (approvals.require), and a file is not stored for a second person: leave \
             the present value in the file, and use `sluicegate {command}`. Nothing was changed",
            before.name
        )));
    }
    Ok(())
}

/// What decides how fast a provider is called.
fn rate_keys(row: &ProviderRow) -> serde_json::Value {
    json!([
        row.limits,
        row.accounts,
        row.quota.as_deref().unwrap_or(&row.name),
        row.reserve_percent,
        row.store_down,
        row.share_of
    ])
}
