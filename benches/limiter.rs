//! The bench target `limiter`: the command `sluicegate bench limiter`, optimised, under `cargo bench --bench limiter`.
//! Arguments after `--` are passed on.

use std::ffi::OsString;
use std::process::ExitCode;

use sluicegate::cli::{Cli, Console, Exit};

fn main() -> ExitCode {
    // Cargo adds `--bench`, which the command does not know.
    let given = std::env::args_os().skip(1).filter(|argument| argument != "--bench");
    let command = ["sluicegate", "bench", "limiter"].map(OsString::from);
    let cli = Cli::from_arguments(command.into_iter().chain(given)).unwrap_or_else(|error| error.exit());
    let mut console = Console::stdio();
    // The benchmark needs no configuration, so the command always ends here.
    let ended = cli.command.without_config(&mut console).unwrap_or(Ok(Exit::Failed));
    let ended = ended.and_then(|exit| Ok(console.flush().map(|()| exit)?));
    let exit = ended.unwrap_or_else(|error| {
        console.message(&format!("error: {error}")).unwrap_or_default();
        error.exit()
    });
    ExitCode::from(exit.code())
}
