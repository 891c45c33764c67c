//! The `man` command: prints the manual page or writes the pages of all commands, from the same definition as the help.
//!
//! The pages have no text of their own: each text is the help of its flag.

use std::path::PathBuf;

use clap::CommandFactory as _;

use super::{Cli, CommandError, Console, Exit};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write one page per command into this directory instead of the main page to stdout.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// When stdout or the directory cannot be written to.
pub fn run(args: &Args, console: &mut Console) -> Result<Exit, CommandError> {
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
