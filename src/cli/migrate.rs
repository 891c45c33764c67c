//! The `migrate` command: brings the database to the current schema and reports whether that changed anything.
//!
//! `run` does not migrate PostgreSQL: the operator decides which user may change a schema.

use serde_json::json;

use super::connect::Services;
use super::{CommandError, Console, Exit};
use crate::config::Config;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the database cannot be reached or refuses a step.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let changed = services.migrate(config).await?;
    if args.json {
        console.json(&json!({ "database": config.database.url.to_string(), "changed": changed }))?;
        return Ok(Exit::Success);
    }
    let outcome = if changed { "is up to date now" } else { "was already up to date" };
    console.message(&format!("{} {outcome}", config.database.url))?;
    Ok(Exit::Success)
}
