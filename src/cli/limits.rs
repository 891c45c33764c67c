//! The `limits` command: lists the limits and their usage, changes them while workers run, and shows who changed the
//! settings, when and why.
//!
//! It does not create or remove limits; the provider file does, so that the file stays complete.

use std::time::Duration;

use clap::Subcommand;

use crate::cli::console::{TableShape, width, wrap_words};
use crate::cli::jobs::parse_id;
use crate::cli::provider::{
    LIMIT_HEADER, drop_default_columns, limit_cells, load_readable_rows, parse_name, unknown_provider,
};
use crate::cli::{CommandContext, CommandError, Console, Exit, ops_client};
use crate::config::LimiterUrl;
use crate::domain::format::duration;
use crate::domain::job::Identifier;
use crate::domain::limit::Rate;
use crate::ledger::database::Database;
use crate::ledger::provider_row::{LimitSummary, ProviderRow};
use crate::ledger::settings::AuditedChange;
use crate::ops::row_in_force::unusable_row;
use crate::ops::{AccountBacklog, PeekError, PeekedLimit, peek, peek_backlog};
use crate::worker::settings_sync::LoadedSettings;

mod set;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List all limits of all providers.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the usage of each limit of a provider, without acquiring a permit.
    Peek {
        provider: String,
        /// Include the limits of scope account, with the usage of this account, and its payments in the backlog.
        #[arg(long, value_parser = parse_id, allow_hyphen_values = true)]
        account: Option<Identifier>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Change a limit's rate; every worker follows within 2 s, and the recorded usage stays.
    Set(set::SetArgs),
    /// Show who changed a provider's row, limits and account rules, when and why; newest first. Without a name: all
    /// settings.
    History(HistoryArgs),
}

/// Runs the command.
///
/// # Errors
/// When the database fails, or the provider or limit does not exist.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let ledger = cx.ledger().await?;
    match &args.action {
        Action::Peek { provider, account, json } => {
            let (limits, backlog) = fetch_usage(provider, account.as_ref(), &ledger, cx).await?;
            print_usage(&limits, backlog, *json, cx.console)
        }
        Action::List { json } => list(&ledger, *json, cx.console).await,
        Action::History(args) => history(args, &ledger, cx.console).await,
        Action::Set(args) => set::run(args, &ledger, cx).await,
    }
}

/// The limits, and what waits of the account that is asked for. Asks the Redis that all workers share, or the one
/// process with the embedded limiter.
async fn fetch_usage(
    provider: &str,
    account: Option<&Identifier>,
    ledger: &Database,
    cx: &CommandContext<'_>,
) -> Result<(Vec<PeekedLimit>, Option<AccountBacklog>), CommandError> {
    let name = parse_name(provider)?;
    if let Some(unusable) = unusable_row(ledger, &name).await? {
        return Err(CommandError::Failed(unusable.to_string()));
    }
    if matches!(cx.config.limiter.url, LimiterUrl::Embedded) {
        // An identifier needs no escaping in a query. The database answered just now, so the deployment is verified.
        let path = format!("/api/v1/limits/{name}");
        let Some(account) = account else {
            let limits = ops_client::get(cx, &path).await?.value;
            return Ok((limits, None));
        };
        let limits = ops_client::get(cx, &format!("{path}?account={account}")).await?.value;
        let backlog = ops_client::get(cx, &format!("{path}/backlog?account={account}")).await?.value;
        return Ok((limits, Some(backlog)));
    }
    let known = LoadedSettings::default().with_snapshot(ledger.load_settings().await?);
    let limiter = cx.limiter().await?;
    let failed = |error: PeekError| match error {
        PeekError::NoProvider(_) => unknown_provider(provider),
        error => CommandError::Failed(error.to_string()),
    };
    let account = account.map(Identifier::as_str);
    let limits = peek(limiter.as_ref(), &known, &name, account).await.map_err(failed)?;
    let backlog = match account {
        Some(account) => {
            let waits = peek_backlog(limiter.as_ref(), ledger, &known, &name, account).await;
            Some(waits.map_err(failed)?)
        }
        None => None,
    };
    Ok((limits, backlog))
}

/// Of a limit of requests in flight: nothing names the instant.
const WHEN_ONE_ENDS: &str = "when requests end";

/// Why no time is named until the next permit.
fn no_start_text(limit: &PeekedLimit) -> &'static str {
    let is_open = Rate::parse_limit(&limit.allows).is_ok_and(|rate| rate.max_requests() > 0);
    if is_open { WHEN_ONE_ENDS } else { "never" }
}

fn print_usage(
    limits: &[PeekedLimit],
    backlog: Option<AccountBacklog>,
    json: bool,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    if json {
        console.json(&limits)?;
    } else {
        let shadow = |l: &PeekedLimit| match &l.shadow {
            Some(would) => {
                format!("would have refused {}, delayed {}", would.would_have_refused, would.would_have_waited)
            }
            None => String::new(),
        };
        let wait = |ms: u64| duration(Duration::from_millis(ms));
        let cells = limits.iter().map(|l| {
            vec![
                l.limit.clone(),
                l.allows.clone(),
                l.used.to_string(),
                l.remaining.to_string(),
                l.retry_after_ms.map_or_else(|| no_start_text(l).to_owned(), wait),
                l.reset_after_ms.map_or_else(|| WHEN_ONE_ENDS.to_owned(), wait),
                shadow(l),
            ]
        });
        let header = ["limit", "allows", "used", "remaining", "retry after", "reset after", "shadow"];
        console.table(&header, &cells.collect::<Vec<_>>())?;
        if let Some(backlog) = backlog {
            console.line("")?;
            console.lines(&wrap_words("", &backlog.text, width(console.shape())))?;
        }
    }
    Ok(Exit::Success)
}

async fn list(ledger: &Database, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    let (rows, exit) = load_readable_rows(ledger, console).await?;
    let of_row =
        |row: &ProviderRow| row.limits.iter().map(|limit| LimitSummary::from_row(&row.name, limit)).collect::<Vec<_>>();
    let lines: Vec<LimitSummary> = rows.iter().flat_map(of_row).collect();
    let cells: Vec<Vec<String>> = lines.iter().map(limit_cells).collect();
    if json {
        console.json(&lines)?;
    } else if cells.is_empty() && exit == Exit::Success {
        console.message("no limits yet: `sluicegate provider apply FILE` adds providers with theirs")?;
    } else {
        let (header, cells) = match console.shape() {
            // Scripts need fixed columns; a terminal has limited width.
            TableShape::Plain => (LIMIT_HEADER.to_vec(), cells),
            TableShape::Terminal { .. } => drop_default_columns(cells),
        };
        console.table(&header, &cells)?;
    }
    Ok(exit)
}

#[derive(Debug, clap::Args)]
pub struct HistoryArgs {
    provider: Option<String>,
    /// Changes to show, 1 to 1000.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// The changes with numbers below this one.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(1..))]
    before: Option<i64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the database fails, or the provider has no row and no history.
pub async fn history(args: &HistoryArgs, ledger: &Database, console: &mut Console) -> Result<Exit, CommandError> {
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    let page = ledger.settings_audit_page(provider.as_ref(), args.before, args.limit).await?;
    let is_empty = page.changes.is_empty() && page.next.is_none();
    // A deleted provider has a history.
    if let (Some(name), None, true) = (&args.provider, args.before, is_empty) {
        return Err(unknown_provider(name));
    }
    if args.json {
        console.json(&page)?;
        return Ok(Exit::Success);
    }
    if is_empty {
        console.message(if args.before.is_some() { "no more changes" } else { "no changes recorded" })?;
    }
    if !page.changes.is_empty() {
        let header = ["at", "provider", "what", "who", "program", "because"];
        console.table(&header, &page.changes.iter().map(change_cells).collect::<Vec<_>>())?;
    }
    if let Some(next) = page.next {
        console.next_page("--before", &next.to_string())?;
    }
    Ok(Exit::Success)
}

fn change_cells(change: &AuditedChange) -> Vec<String> {
    let AuditedChange { at, who, what, program, because, provider, .. } = change;
    let text = |cell: &Option<String>| cell.clone().unwrap_or_default();
    vec![at.to_string(), text(provider), what.clone(), who.clone(), text(program), text(because)]
}
