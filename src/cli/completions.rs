//! `completions`: a completion script on stdout, from the same definition as the help.
//!
//! Refuses to install it: where scripts belong is the shell's and the packager's business.

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
///
/// # Errors
/// When stdout is closed.
pub fn run(args: &Args, console: &mut Console) -> Result<Exit, CommandError> {
    // The generator panics when it cannot write, so it writes to memory.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sluicegate", &mut script);
    console.data().write_all(&script)?;
    Ok(Exit::Success)
}
