//! The rows that a simulation starts with: those of the database or of a provider file.
//!
//! If there are several providers, the command line must name one.

use std::path::Path;

use super::Args;
use crate::cli::connect::Services;
use crate::cli::input::{self, PROVIDER_FILE_BYTES_MAX};
use crate::cli::{CommandError, Exit};
use crate::config::Config;
use crate::ledger::provider_row::ProviderRow;
use crate::ops::SettingsChangeError;

/// All rows, and the index of the one whose lane is simulated.
pub(super) async fn load(
    args: &Args,
    config: &Config,
    services: &dyn Services,
) -> Result<(Vec<ProviderRow>, usize), CommandError> {
    let rows = match &args.providers {
        Some(path) => {
            let text = input::read_text(path, PROVIDER_FILE_BYTES_MAX).await?;
            let file_error = |problems: Vec<String>| {
                let lines = problems.iter().map(|problem| format!("{}: {problem}", path.display())).collect();
                CommandError::Problems { exit: Exit::BadConfiguration, lines }
            };
            services.parse_provider_file(&text).map_err(file_error)?
        }
        None => services.ledger(config).await?.readable_rows(None).await?,
    };
    let index = match (&args.provider, rows.len()) {
        (Some(name), _) => rows
            .iter()
            .position(|row| row.name == *name)
            .ok_or_else(|| no_such_provider(name, args.providers.as_deref(), &rows))?,
        (None, 1) => 0,
        (None, 0) => {
            let text = "no providers yet: `sluicegate provider apply FILE` adds some, or name a file with --providers";
            return Err(CommandError::Failed(text.to_owned()));
        }
        (None, _) => {
            let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
            let text = format!("name one with --provider: {}", names.join(", "));
            return Err(CommandError::Usage(text));
        }
    };
    Ok((rows, index))
}

/// The error for an unknown provider, with the source of the rows.
fn no_such_provider(name: &str, file: Option<&Path>, rows: &[ProviderRow]) -> CommandError {
    let Some(file) = file else {
        return CommandError::Usage(SettingsChangeError::NoProvider(name.to_owned()).to_string());
    };
    let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    let has = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    CommandError::Usage(format!("there is no provider `{name}` in {}: it has {has}", file.display()))
}
