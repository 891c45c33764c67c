//! The command line: one file per command, one definition from which help, completions and man pages come.
//!
//! Data goes to stdout, messages to stderr. Refuses to ask where nobody sits at a terminal, and refuses to know an engine: [`connect`] does.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};

use crate::config::{Config, ConfigProblems, LogConfig};
use crate::domain::printable::{is_hidden, printable};
use crate::worker::retry::Transient;

pub mod bench;
pub mod check;
pub mod completions;
pub mod connect;
pub mod console;
pub mod demo;
pub mod dlq;
pub mod enqueue;
pub mod fake_provider;
mod hyphen_values;
mod input;
mod job_count;
pub mod jobs;
mod lane_declaration;
pub mod limits;
pub mod man;
pub mod migrate;
mod ops_client;
mod os_user;
pub mod provider;
mod rows;
pub mod run;
mod signals;
pub mod simulate;
pub mod status;

pub use console::Console;

use connect::{MissingDatabase, Services};

/// Calls payment providers exactly as fast as they allow, and loses or doubles no payment doing it.
#[derive(Debug, Parser)]
#[command(name = "sluicegate", version, after_help = EXIT_CODES, propagate_version = true)]
pub struct Cli {
    /// Configuration file (TOML); also SLUICEGATE_CONFIG.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Sets one configuration key, over file and environment; repeatable. Secrets are refused: process lists show them.
    #[arg(long, global = true, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads the command line.
    ///
    /// # Errors
    /// Help and version as well as usage errors, for [`clap::Error::exit`].
    pub fn from_arguments(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let arguments: Vec<OsString> = arguments.into_iter().collect();
        let parsed = Self::try_parse_from(&arguments);
        let taken = parsed.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::UnknownArgument);
        if taken && let Some(problem) = hyphen_values::find_option_as_value(&Self::command(), &arguments) {
            return Err(Self::command().error(problem.kind(), problem));
        }
        let mut cli = parsed?;
        // clap lets a global flag behind the command replace those before it, silently: a database.url would be lost.
        cli.set = flag_values("--set", &arguments);
        if flag_values("--config", &arguments).len() > 1 {
            let message = "--config stands both before and behind the command: write it once";
            return Err(Self::command().error(ErrorKind::ArgumentConflict, message));
        }
        Ok(cli)
    }
}

/// The values of a global flag, wherever it stands in a command line that parses. No other option has taken it for its value.
fn flag_values(flag: &str, arguments: &[OsString]) -> Vec<String> {
    let mut words = arguments.iter().take_while(|word| *word != "--").filter_map(|word| word.to_str());
    let mut values = Vec::new();
    while let Some(word) = words.next() {
        match word.strip_prefix(flag) {
            Some("") => values.extend(words.next().map(str::to_owned)),
            Some(rest) => values.extend(rest.strip_prefix('=').map(str::to_owned)),
            None => {}
        }
    }
    values
}

/// A usage error whose arguments are printable: they may come from a script, and hold anything.
#[must_use]
pub fn printable_usage_error(arguments: &[OsString], error: clap::Error) -> clap::Error {
    let texts: Vec<String> = arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    if !texts.iter().any(|text| text.chars().any(is_hidden)) {
        return error;
    }
    let shown = Cli::from_arguments(texts.iter().map(|text| OsString::from(printable(text).into_owned())));
    shown.err().unwrap_or_else(|| {
        Cli::command()
            .error(ErrorKind::InvalidValue, "an argument holds a control character, or one that shows nothing")
    })
}

/// Whether a command line asks for JSON, even one that cannot be meant.
#[must_use]
pub fn asks_for_json(arguments: &[OsString]) -> bool {
    arguments.iter().take_while(|argument| *argument != "--").any(|argument| argument == "--json")
}

/// What a usage error says, in plain text: without the usage and the way to the help, which are for people.
#[must_use]
pub fn usage_error_text(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let said = text.split("\n\nUsage:").next().and_then(|text| text.split("\n\nFor more information").next());
    let said = said.unwrap_or_default().trim();
    said.strip_prefix("error: ").unwrap_or(said).to_owned()
}

const EXIT_CODES: &str = "Exit codes: 0 fine, 1 failed, 2 usage, 78 bad configuration.\n\
    With --json a command that fails prints {\"error\": …} on stdout, beside its message on stderr.\n\
    Environment: SLUICEGATE_<SECTION>__<KEY> sets a configuration key, …_FILE reads a secret from a file; NO_COLOR.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the worker deployment until SIGTERM: lanes for every enabled provider, and the ops server.
    Run(run::Args),
    /// See it work: in memory, with its own strict provider, and the proof at the end.
    Demo(demo::Args),
    /// Bring the database to the current schema; safe to run twice and from several places at once.
    Migrate(migrate::Args),
    /// Validate configuration and providers, reach every dependency, report what is unsafe.
    Check(check::Args),
    /// Payment providers: apply a file, list, show, pause, resume.
    Provider(provider::Args),
    /// Limits of the providers: list, set, peek, history.
    Limits(limits::Args),
    /// Publish jobs, one from flags or many from a file.
    Enqueue(Box<enqueue::Args>),
    /// How many payments are in which state, per provider.
    Status(status::Args),
    /// Payments: show one, list, settle those in review, cancel.
    Jobs(Box<jobs::Args>),
    /// Dead payments: list, show, replay, discard.
    Dlq(Box<dlq::Args>),
    /// A strict provider for rehearsals: counts every window, deduplicates, can misbehave by seed.
    FakeProvider(Box<fake_provider::FakeProviderArgs>),
    /// Rehearse a change in virtual time: waits, drain time and deadlines under other limits, side by side.
    Simulate(Box<simulate::Args>),
    /// What things cost, measured here.
    Bench(bench::Args),
    /// Print a completion script for a shell.
    Completions(completions::Args),
    /// Print the manual page, or write those of all commands.
    Man(man::Args),
}

/// How a command that reported for itself ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Success,
    Failed,
    /// The command line asks for what cannot be meant; exit code 2, as for what clap refuses.
    Usage,
    /// Already reported; exit code 78.
    BadConfiguration,
}

impl Exit {
    /// The process's exit code.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::BadConfiguration => 78,
        }
    }
}

/// Why a command could not do its work, in words for the terminal.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// What the operator wrote cannot be meant; nothing was changed.
    #[error("{0}")]
    Configuration(String),
    /// Arguments that clap took and that cannot be meant; nothing was changed.
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Failed(String),
    /// Several problems of a configuration, a file or arguments, a line each; nothing was changed.
    #[error("{}", .lines.join("\n"))]
    Problems { exit: Exit, lines: Vec<String> },
    /// What an embedded deployment starts with; only `run`, `migrate` and `provider apply` make a database.
    #[error(
        "no deployment here: there is no database {} (database.url). Run this where it lies or set database.url; `sluicegate \
         provider apply FILE`, `migrate` and `run` make a new one",
        .path.display()
    )]
    DatabaseMissing { path: PathBuf },
    /// The process on `ops.listen` works for another database than the configured one.
    #[error("{0}")]
    OtherDeployment(String),
    /// An engine cannot be reached now; trying again may succeed.
    #[error("{0}")]
    BackendUnavailable(String),
    #[error("writing the output: {0}")]
    Output(#[from] std::io::Error),
}

impl CommandError {
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Configuration(_) => Exit::BadConfiguration,
            Self::Usage(_) => Exit::Usage,
            Self::Problems { exit, .. } => *exit,
            // Whoever reads our output has seen enough (`sluicegate provider list | head -1`).
            Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Exit::Success,
            Self::Failed(_)
            | Self::DatabaseMissing { .. }
            | Self::OtherDeployment(_)
            | Self::BackendUnavailable(_)
            | Self::Output(_) => Exit::Failed,
        }
    }
}

impl CommandError {
    /// What it says, line by line. A text within a line may hold anything.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        match self {
            Self::Problems { lines, .. } => lines.clone(),
            error => vec![error.to_string()],
        }
    }
}

impl From<crate::ledger::LedgerError> for CommandError {
    fn from(error: crate::ledger::LedgerError) -> Self {
        match error {
            crate::ledger::LedgerError::Unavailable(_) => Self::BackendUnavailable(error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl Transient for CommandError {
    fn is_transient(&self) -> bool {
        matches!(self, Self::BackendUnavailable(_))
    }
}

impl From<ConfigProblems> for CommandError {
    fn from(problems: ConfigProblems) -> Self {
        Self::Problems { exit: Exit::BadConfiguration, lines: problems.lines() }
    }
}

impl From<crate::queue::QueueError> for CommandError {
    fn from(error: crate::queue::QueueError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Command {
    /// What the command logs: one that reports for itself stays quiet below `error`, unless somebody asks for detail.
    #[must_use]
    pub fn log(&self, configured: LogConfig) -> LogConfig {
        if matches!(self, Self::Run(_)) {
            return configured;
        }
        let detail = configured.level > tracing::Level::INFO;
        let level = if detail { configured.level } else { tracing::Level::ERROR };
        LogConfig { level, ..configured }
    }

    /// Whether it runs until it is stopped, or works beside what it shows: it must not wait for whoever reads its messages.
    #[must_use]
    pub fn is_long_running(&self) -> bool {
        match self {
            Self::Run(_) | Self::Demo(_) | Self::FakeProvider(_) => true,
            Self::Status(args) => args.is_watching(),
            _ => false,
        }
    }

    /// What becomes of an embedded database that is not there yet: most commands only look into one, or change one.
    #[must_use]
    pub fn missing_database(&self) -> MissingDatabase {
        match self {
            Self::Run(_) | Self::Demo(_) | Self::Migrate(_) | Self::Bench(_) => MissingDatabase::Create,
            Self::Provider(args) => args.missing_database(),
            _ => MissingDatabase::Fail,
        }
    }

    /// Runs the commands that need neither configuration nor engines; `None` for all others.
    pub fn without_config(&self, console: &mut Console) -> Option<Result<Exit, CommandError>> {
        match self {
            Self::Completions(args) => Some(completions::run(args, console)),
            Self::Man(args) => Some(man::run(args, console)),
            Self::FakeProvider(args) => Some(run_fake_provider(args, console)),
            Self::Bench(args) => bench::without_config(args, console),
            _ => None,
        }
    }
}

/// The fake provider has a runtime of its own, because it needs no configuration.
fn run_fake_provider(args: &fake_provider::FakeProviderArgs, console: &mut Console) -> Result<Exit, CommandError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(fake_provider::run(args.clone(), console));
    // A report that nothing reads must not hold up the exit.
    runtime.shutdown_background();
    ended.map(|()| Exit::Success)
}

/// Runs one command with its configuration.
///
/// # Errors
/// [`CommandError`] when it could not do its work; the caller prints it and exits with [`CommandError::exit`].
pub async fn execute(
    command: &Command,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    // Process 1, as a container's command is, has no default reaction to signals: it would wait for ever for a pipe. `run` has its
    // own for each.
    if std::process::id() != 1 || matches!(command, Command::Run(_)) {
        return dispatch(command, config, engines, console).await;
    }
    let mut signals = signals::Signals::watch()?;
    tokio::select! {
        biased;
        ended = dispatch(command, config, engines, console) => ended,
        signal = signals.wait_for_stop() => Err(CommandError::Failed(format!("stopped by {signal}"))),
    }
}

async fn dispatch(
    command: &Command,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match command {
        Command::Migrate(args) => migrate::run(args, config, engines, console).await,
        Command::Check(args) => check::run(args, config, engines, console).await,
        Command::Provider(args) => provider::run(args, config, engines, console).await,
        Command::Limits(args) => limits::run(args, config, engines, console).await,
        Command::Enqueue(args) => enqueue::run(args, config, engines, console).await,
        Command::Status(args) => status::run(args, config, engines, console).await,
        Command::Jobs(args) => jobs::run(args, config, engines, console).await,
        Command::Dlq(args) => dlq::run(args, config, engines, console).await,
        Command::Simulate(args) => simulate::run(args, config, engines, console).await,
        Command::Completions(args) => completions::run(args, console),
        Command::Man(args) => man::run(args, console),
        Command::FakeProvider(args) => run_fake_provider(args, console),
        Command::Bench(args) => bench::run(args, config, engines, console).await,
        Command::Run(_) => run::run(config, engines, console).await,
        Command::Demo(args) => demo::run(args, engines, console).await,
    }
}
