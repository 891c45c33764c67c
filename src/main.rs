//! The program's entry point: reads the command line and the configuration, starts telemetry, runs one command, returns
//! its exit code.
//!
//! What a command does is in [`cli`]. The exit codes are [`cli::Exit`].

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use sluicegate::app::Services;
use sluicegate::cli::{self, Cli, Command, CommandError, Console, Exit};
use sluicegate::config::{self, Purpose};
use sluicegate::telemetry;

/// Threads free jobs that other threads allocated: with glibc's allocator that cost a seventh of a worker's time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Longest time that unread messages may delay the exit.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let json = cli::asks_for_json(&arguments);
    let cli = Cli::from_arguments(arguments.clone()).unwrap_or_else(|error| {
        let error = cli::printable_usage_error(&arguments, error);
        if json && error.use_stderr() {
            // When stdout is closed, there is no reader to tell.
            Console::stdio().json_error(&cli::usage_error_text(&error)).unwrap_or_default();
        }
        error.exit()
    });
    // If the log thread cannot start, messages are written directly, as in short commands.
    let messages = cli.command.is_long_running().then(telemetry::non_blocking_stderr).and_then(Result::ok);
    let mut console = match &messages {
        Some(messages) => Console::with_messages_to(Box::new(messages.clone())),
        None => Console::stdio(),
    };
    let exit = execute(&cli, json, &mut console);
    if let Some(messages) = messages {
        // Messages that are still unread then are lost.
        let _all_read = messages.flush_within(FLUSH_TIMEOUT);
    }
    ExitCode::from(exit.code())
}

fn execute(cli: &Cli, json: bool, console: &mut Console) -> Exit {
    let ended = run(cli, console).and_then(|exit| Ok(console.flush().map(|()| exit)?));
    ended.unwrap_or_else(|error| {
        let exit = error.exit();
        if exit != Exit::Success {
            if json {
                console.json_error(&error.to_string()).unwrap_or_default();
            }
            // If stderr is closed too, only the exit code reports the failure.
            console.error(&error).unwrap_or_default();
        }
        exit
    })
}

fn run(cli: &Cli, console: &mut Console) -> Result<Exit, CommandError> {
    // All drivers share one TLS provider. Without one, the first connection would panic.
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| CommandError::Failed("a TLS provider was installed before main".to_owned()))?;
    if let Some(ended) = cli.command.without_config(console) {
        return ended;
    }
    let environment = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    let purpose = if matches!(cli.command, Command::Migrate(_)) { Purpose::Migrate } else { Purpose::Run };
    let config = match (config::load_for(purpose, cli.config.as_deref(), environment, &cli.set), &cli.command) {
        (Ok(config), _) => config,
        (Err(problems), Command::Check(args)) => {
            return cli::check::report_invalid_configuration(args, &problems, console);
        }
        (Err(problems), _) => return Err(problems.into()),
    };
    let telemetry = telemetry::init(cli.command.log(config.log), config.otlp_endpoint.as_deref(), &config.authorities);
    let _until_the_end = telemetry.map_err(CommandError::Failed)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let services = Services::new(cli.command.missing_database());
    let ended = runtime.block_on(async {
        let ended = cli::execute(&cli.command, &config, &services, console).await;
        services.close().await;
        ended
    });
    // Never shut down: a pending read from a terminal would delay the exit, and the broker's client panics in
    // its own thread when its tasks are cancelled. The process ends with its open tasks.
    std::mem::forget(runtime);
    ended
}
