//! `migrate`: brings the database to the current schema, and says which steps that took.
//!
//! Refuses to run by itself at the start of `run`: who may change a schema is the operator's choice.

use serde_json::json;

use super::connect::Engines;
use super::{CommandError, Console, Exit};
use crate::config::Config;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the steps as JSON.
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
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let steps = engines.migrate(config).await?;
    if args.json {
        console.json(&json!({ "database": config.database.url.to_string(), "steps": steps }))?;
        return Ok(Exit::Fine);
    }
    for step in &steps {
        console.line(step)?;
    }
    let outcome = if steps.is_empty() { "was up to date" } else { "is up to date now" };
    console.message(&format!("{} {outcome}", config.database.url))?;
    Ok(Exit::Fine)
}
