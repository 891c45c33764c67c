//! The `completions` command: prints a completion script for a shell, generated from the same definition as the help.
//!
//! It does not install the script; each shell and each package has its own directory for it.

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Cli, CommandError, Console, Exit};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell to complete for.
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command.
pub fn run(args: &Args, console: &mut Console) -> Result<Exit, CommandError> {
    // The generator panics when a write fails, so it writes to memory first.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sluicegate", &mut script);
    console.data().write_all(&script)?;
    Ok(Exit::Success)
}
