//! `limits`: what each provider allows and has used, changing it while everything runs, and who did.
//!
//! Refuses to create or remove limits: the provider file does, so that it stays the whole truth.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;

use super::connect::Engines;
use super::console::Shape;
use super::jobs::{by, parse_id};
use super::provider::{parse_name, readable, unknown};
use super::rows::{LIMIT_HEADER, limit_cells, without_defaults};
use super::{CommandError, Console, Exit, ops_client};
use crate::config::{Config, LimiterUrl};
use crate::domain::explain::words::span;
use crate::domain::job::Token;
use crate::domain::limit::Rate;
use crate::ledger::provider_row::{LimitLine, ProviderRow};
use crate::ledger::said;
use crate::ledger::settings::Settings;
use crate::ops::{LimitUsed, PeekError, change, peek};
use crate::worker::settings_watch::Known;

mod history;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// All limits of all providers.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// What each limit of a provider has used now; takes nothing.
    Peek {
        provider: String,
        /// The limits of scope account too, as they stand for this account.
        #[arg(long, value_parser = parse_id, allow_hyphen_values = true)]
        account: Option<Token>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Change a limit's rate; in force in every worker within 2 s, consumption carried over.
    Set {
        provider: String,
        limit: String,
        /// N/DURATION, like 200/1s, 50/s or 600/1m; 0/1s closes it.
        rate: Rate,
        /// Why, for the audit.
        #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
        because: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Who changed a provider's row, limits and account rules, when, and why; newest first. Without a name: all settings.
    History(history::Args),
}

/// Runs the command.
///
/// # Errors
/// When the database fails, or the provider or limit does not exist.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let settings = engines.settings(config).await?;
    match &args.action {
        Action::Peek { provider, account, json } => {
            let used = used(provider, account.as_ref(), settings.as_ref(), config, engines).await?;
            print_used(&used, *json, console)
        }
        Action::List { json } => list(settings.as_ref(), *json, console).await,
        Action::History(args) => history::run(args, settings.as_ref(), console).await,
        Action::Set { provider, limit, rate, because, json } => {
            let name = parse_name(provider)?;
            let by = by(because.as_deref());
            let old = change::set_rate(settings.as_ref(), &name, limit, *rate, false, Some(&by)).await?.from;
            if *json {
                let change = json!({
                    "provider": provider, "limit": limit, "from": old.to_string(), "to": rate.to_string()
                });
                console.json(&change)?;
            } else {
                console.line(&format!("{provider} {limit}: {old} → {rate}"))?;
            }
            Ok(Exit::Fine)
        }
    }
}

/// Asks the store that all workers share, or the one process that has the embedded limiter.
async fn used(
    provider: &str,
    account: Option<&Token>,
    settings: &dyn Settings,
    config: &Config,
    engines: &dyn Engines,
) -> Result<Vec<LimitUsed>, CommandError> {
    let name = parse_name(provider)?;
    if matches!(config.limiter.url, LimiterUrl::Embedded) {
        // What has this form needs no escaping in a query.
        let account = account.map(|account| format!("?account={account}")).unwrap_or_default();
        // The settings were read from the database just now, so that it could name its deployment.
        let answered = ops_client::get(config, engines, &format!("/api/v1/limits/{name}{account}")).await?;
        return Ok(answered.value);
    }
    let known = Known::default().after(settings.load().await?);
    let limiter = engines.limiter(config).await?;
    peek(limiter.as_ref(), &known, &name, account.map(Token::as_str)).await.map_err(|error| match error {
        PeekError::NothingCounts if !known.providers.contains_key(&name) => unknown(provider),
        PeekError::NothingCounts => CommandError::Failed(format!("{provider} is disabled: nothing counts for it")),
        error => said(&error),
    })
}

fn said(error: &PeekError) -> CommandError {
    CommandError::Failed(error.to_string())
}

fn print_used(used: &[LimitUsed], json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    if json {
        console.json(&used)?;
    } else {
        let shadow = |l: &LimitUsed| match &l.shadow {
            Some(would) => {
                format!("would have refused {}, delayed {}", would.would_have_refused, would.would_have_waited)
            }
            None => String::new(),
        };
        let wait = |ms: u64| span(Duration::from_millis(ms));
        let cells = used.iter().map(|l| {
            vec![
                l.limit.clone(),
                l.allows.clone(),
                l.used.to_string(),
                l.remaining.to_string(),
                l.retry_after_ms.map_or_else(|| "never".to_owned(), wait),
                wait(l.reset_after_ms),
                shadow(l),
            ]
        });
        let header = ["limit", "allows", "used", "remaining", "retry after", "reset after", "shadow"];
        console.table(&header, &cells.collect::<Vec<_>>())?;
    }
    Ok(Exit::Fine)
}

async fn list(settings: &dyn Settings, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    let (rows, exit) = readable(settings, console).await?;
    let of_row = |row: &ProviderRow| row.limits.iter().map(|limit| LimitLine::of(&row.name, limit)).collect::<Vec<_>>();
    let lines: Vec<LimitLine> = rows.iter().flat_map(of_row).collect();
    let cells: Vec<Vec<String>> = lines.iter().map(limit_cells).collect();
    if json {
        console.json(&lines)?;
    } else if cells.is_empty() && exit == Exit::Fine {
        console.message("no limits yet: `sluicegate provider apply FILE` adds providers with theirs")?;
    } else {
        let (header, cells) = match console.shape() {
            // Scripts count columns; people count the room that they have.
            Shape::Plain => (LIMIT_HEADER.to_vec(), cells),
            Shape::Terminal { .. } => without_defaults(cells),
        };
        console.table(&header, &cells)?;
    }
    Ok(exit)
}
