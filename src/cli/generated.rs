//! The `completions` and `man` commands: what is generated from the same definition as the help.
//!
//! A completion script is printed, not installed; each shell and each package has its own directory for it. The manual
//! pages have no text of their own: each text is the help of its flag.

use std::path::PathBuf;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::{Cli, CommandError, Console, Exit};

#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell to complete for.
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command.
pub fn completions(args: &CompletionsArgs, console: &mut Console) -> Result<Exit, CommandError> {
    // The generator panics when a write fails, so it writes to memory first.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sluicegate", &mut script);
    console.data().write_all(&script)?;
    Ok(Exit::Success)
}

#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Write one page per command into this directory instead of the main page to stdout.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// When stdout or the directory cannot be written to.
pub fn man(args: &ManArgs, console: &mut Console) -> Result<Exit, CommandError> {
    let Some(dir) = &args.out else {
        clap_mangen::Man::new(Cli::command()).render(console.data())?;
        return Ok(Exit::Success);
    };
    let failed = |error| CommandError::Failed(format!("{}: {error}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), dir).map_err(failed)?;
    console.message(&format!("manual pages are in {}", dir.display()))?;
    Ok(Exit::Success)
}
