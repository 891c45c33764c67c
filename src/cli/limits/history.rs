//! The `limits history` command: who changed which setting of a provider, when and why, as the audit triggers recorded
//! it.
//!
//! It names changed headers and templates without their values; `provider show` prints the current ones.

use super::super::provider::{parse_name, unknown_provider};
use super::super::{CommandError, Console, Exit};
use crate::ledger::database::Database;
use crate::ledger::settings::AuditedChange;

#[derive(Debug, clap::Args)]
pub struct Args {
    provider: Option<String>,
    /// Changes to show, 1 to 1000.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the database fails, or the provider has no row and no history.
pub async fn run(args: &Args, ledger: &Database, console: &mut Console) -> Result<Exit, CommandError> {
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    let changes = ledger.settings_audit(provider.as_ref(), args.limit).await?;
    // A deleted provider has a history.
    if let (Some(name), true) = (&args.provider, changes.is_empty()) {
        return Err(unknown_provider(name));
    }
    if args.json {
        console.json(&serde_json::json!({ "changes": changes }))?;
    } else if changes.is_empty() {
        console.message("no changes recorded")?;
    } else {
        let header = ["at", "provider", "what", "who", "program", "because"];
        console.table(&header, &changes.iter().map(cells).collect::<Vec<_>>())?;
    }
    Ok(Exit::Success)
}

fn cells(change: &AuditedChange) -> Vec<String> {
    let AuditedChange { at, who, what, program, because, provider, .. } = change;
    let text = |cell: &Option<String>| cell.clone().unwrap_or_default();
    vec![at.to_string(), text(provider), what.clone(), who.clone(), text(program), text(because)]
}
