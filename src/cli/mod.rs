//! The command line: one module per command, and one definition that help, completions and manual pages are made from.
//!
//! Data goes to stdout, messages to stderr. A command asks questions only at a terminal. Commands reach the backends
//! through [`Services`].

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};

use crate::app::{MissingDatabase, ServiceError, Services};
use crate::config::{Config, ConfigProblems, LogConfig};
use crate::domain::printable::{is_hidden, printable};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::limiter::Limiter;
use crate::queue::{Queue, QueueError};
use crate::worker::retry::Transient;

pub mod accounts;
pub mod batches;
pub mod check;
mod colour;
pub mod console;
pub mod demo;
pub mod enqueue;
pub mod fake_provider;
pub mod generated;
mod hyphen_values;
pub mod init;
mod input;
pub mod jobs;
pub mod limits;
mod next_page;
mod ops_client;
mod os;
pub mod provider;
pub mod rejected;
mod row_risks;
pub mod run;
mod service_manager;
pub mod simulate;
pub mod status;

pub use console::Console;

/// Calls payment providers at their full rate limit without losing or duplicating a payment.
#[derive(Debug, Parser)]
#[command(name = "sluicegate", version, after_help = EXIT_CODES, propagate_version = true)]
pub struct Cli {
    /// Configuration file (TOML); also SLUICEGATE_CONFIG.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Set one configuration key, over file and environment; repeatable. Secrets are refused: process lists show them.
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
        if taken && let Some((kind, problem)) = hyphen_values::find_option_as_value(&Self::command(), &arguments) {
            return Err(Self::command().error(kind, problem));
        }
        let mut cli = parsed?;
        // clap lets a global flag behind the command replace those before it, silently: a database.url would be lost.
        cli.set = flag_values("--set", &arguments);
        if flag_values("--config", &arguments).len() > 1 {
            let message = "--config is given both before and after the command: write it once";
            return Err(Self::command().error(ErrorKind::ArgumentConflict, message));
        }
        Ok(cli)
    }
}

/// The values of a global flag, anywhere in a valid command line.
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

/// A usage error whose arguments are printable: arguments from a script can hold control characters.
pub fn printable_usage_error(arguments: &[OsString], error: clap::Error) -> clap::Error {
    let texts: Vec<String> = arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    if !texts.iter().any(|text| text.chars().any(is_hidden)) {
        return error;
    }
    let shown = Cli::from_arguments(texts.iter().map(|text| OsString::from(printable(text).into_owned())));
    shown.err().unwrap_or_else(|| {
        Cli::command().error(ErrorKind::InvalidValue, "an argument holds a control character or an invisible character")
    })
}

/// Whether a command line asks for JSON, even an invalid one.
pub fn asks_for_json(arguments: &[OsString]) -> bool {
    arguments.iter().take_while(|argument| *argument != "--").any(|argument| argument == "--json")
}

/// The message of a usage error, without the usage line and the hint to the help.
pub fn usage_error_text(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let message = text.split("\n\nUsage:").next().and_then(|text| text.split("\n\nFor more information").next());
    let message = message.unwrap_or_default().trim();
    message.strip_prefix("error: ").unwrap_or(message).to_owned()
}

/// What a command works with: the configuration, the backends and the output.
pub struct CommandContext<'a> {
    pub config: &'a Config,
    pub services: &'a Services,
    pub console: &'a mut Console,
}

impl CommandContext<'_> {
    pub async fn ledger(&self) -> Result<Database, CommandError> {
        Ok(self.services.ledger(self.config).await?)
    }

    /// The broker; `None` if `queue.url` names none.
    pub async fn queue(&self) -> Result<Option<Arc<dyn Queue>>, CommandError> {
        Ok(self.services.queue(self.config).await?)
    }

    pub async fn limiter(&self) -> Result<Arc<dyn Limiter>, CommandError> {
        Ok(self.services.limiter(self.config).await?)
    }
}

const EXIT_CODES: &str = "Exit codes: 0 success, 1 failed, 2 usage, 78 bad configuration.\n\
    With --json a command that fails prints {\"error\": …} on stdout and its message on stderr.\n\
    Environment: SLUICEGATE_<SECTION>__<KEY> sets a configuration key, …_FILE reads a secret from a file; NO_COLOR.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a worker until SIGTERM: a lane for every enabled provider, and the ops server.
    Run,
    /// Watch a run in memory against a strict provider, with a proof at the end.
    Demo(demo::Args),
    /// Write a provider file with comments, to start from.
    Init(init::Args),
    /// Bring the database to the current schema; safe to repeat, and to run in several places at once.
    Migrate(run::MigrateArgs),
    /// Validate configuration and providers, connect to every backend, report unsafe settings.
    Check(check::Args),
    /// Payment providers: apply a file, list, show, pause, resume.
    Provider(provider::Args),
    /// Limits of the providers: list, set, peek, history.
    Limits(limits::Args),
    /// Rules of single accounts: list, set (block, refuse, exempt, limit), unset.
    Accounts(accounts::Args),
    /// Publish jobs, one from flags or many from a file.
    Enqueue(Box<enqueue::Args>),
    /// Show the state, the usage and the backlog of every provider.
    Status(status::Args),
    /// Payments: show one, explain why it waits, list, resolve those in review, cancel, erase.
    Jobs(Box<jobs::Args>),
    /// Dead payments: list, show, replay, discard.
    Dlq(Box<jobs::decide::DlqArgs>),
    /// Messages that could not be a payment: list, show, republish, discard.
    Rejected(Box<rejected::Args>),
    /// List, show and stop decisions about many payments.
    Batches(batches::Args),
    /// Run a strict provider for rehearsals: it counts every window, deduplicates, and can inject faults by seed.
    FakeProvider(Box<fake_provider::FakeProviderArgs>),
    /// Rehearse a change in virtual time: waits, drain time and deadlines under other limits, side by side.
    Simulate(Box<simulate::Args>),
    /// Print a completion script for a shell.
    Completions(generated::CompletionsArgs),
    /// Print the manual page, or write those of all commands.
    Man(generated::ManArgs),
}

/// The result of a command that has printed its own report, and the process's exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Success = 0,
    Failed = 1,
    /// The arguments are invalid together, as for arguments that clap rejects.
    Usage = 2,
    /// Already reported.
    BadConfiguration = 78,
}

impl Exit {
    /// The process's exit code.
    pub fn code(self) -> u8 {
        self as u8
    }
}

/// Why a command failed, as text for the terminal.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub enum CommandError {
    /// The configuration or a file is invalid; nothing was changed.
    Configuration(String),
    /// The arguments are valid for clap, and invalid together; nothing was changed.
    Usage(String),
    Failed(String),
    /// Several problems of a configuration, a file or arguments, one per line; nothing was changed.
    #[error("{}", .lines.join("\n"))]
    Problems {
        exit: Exit,
        lines: Vec<String>,
    },
    /// The file of an embedded database does not exist. Only `run`, `migrate` and `provider apply` create one.
    #[error(
        "no deployment here: there is no database {} (database.url). Run this where it lies or set database.url; `sluicegate \
         provider apply FILE`, `migrate` and `run` make a new one",
        .path.display()
    )]
    DatabaseMissing {
        path: PathBuf,
    },
    /// The process on `ops.listen` uses another database than the configured one.
    OtherDeployment(String),
    /// A backend is unreachable now; a retry may succeed.
    BackendUnavailable(String),
    #[error("writing the output: {0}")]
    Output(#[from] std::io::Error),
}

impl CommandError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Configuration(_) => Exit::BadConfiguration,
            Self::Usage(_) => Exit::Usage,
            Self::Problems { exit, .. } => *exit,
            // The reader of our output closed the pipe (`sluicegate provider list | head -1`).
            Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Exit::Success,
            Self::Failed(_)
            | Self::DatabaseMissing { .. }
            | Self::OtherDeployment(_)
            | Self::BackendUnavailable(_)
            | Self::Output(_) => Exit::Failed,
        }
    }

    /// The message, line by line. A line is not escaped yet.
    pub fn lines(&self) -> Vec<String> {
        match self {
            Self::Problems { lines, .. } => lines.clone(),
            error => vec![error.to_string()],
        }
    }
}

impl From<LedgerError> for CommandError {
    fn from(error: LedgerError) -> Self {
        match error.is_unavailable() {
            true => Self::BackendUnavailable(error.to_string()),
            false => Self::Failed(error.to_string()),
        }
    }
}

impl From<ServiceError> for CommandError {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::DatabaseMissing { path } => Self::DatabaseMissing { path },
            ServiceError::Ledger(error) => error.into(),
            ServiceError::Queue(error) => error.into(),
            ServiceError::Lock { .. } | ServiceError::Thread(_) => Self::Failed(error.to_string()),
            ServiceError::AnotherRun | ServiceError::OutboundAllow(_) | ServiceError::Limiter(_) => {
                Self::Configuration(error.to_string())
            }
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

impl From<QueueError> for CommandError {
    fn from(error: QueueError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Command {
    /// The log level of the command. Commands that print a report log only errors, unless `debug` or `trace` is
    /// configured.
    pub fn log(&self, configured: LogConfig) -> LogConfig {
        if matches!(self, Self::Run) {
            return configured;
        }
        let detail = configured.level > tracing::Level::INFO;
        let level = if detail { configured.level } else { tracing::Level::ERROR };
        LogConfig { level, ..configured }
    }

    /// Whether the command runs until it is stopped. Such a command must not wait for the reader of its messages.
    pub fn is_long_running(&self) -> bool {
        match self {
            Self::Run | Self::Demo(_) | Self::FakeProvider(_) => true,
            Self::Status(args) => args.watch,
            _ => false,
        }
    }

    /// What the command does when the file of an embedded database does not exist.
    pub fn missing_database(&self) -> MissingDatabase {
        match self {
            Self::Run | Self::Demo(_) | Self::Migrate(_) => MissingDatabase::Create,
            Self::Provider(args) => args.missing_database(),
            _ => MissingDatabase::Fail,
        }
    }

    /// Runs the commands that need neither configuration nor backends; `None` for all others.
    pub fn without_config(&self, console: &mut Console) -> Option<Result<Exit, CommandError>> {
        match self {
            Self::Completions(args) => Some(generated::completions(args, console)),
            Self::Man(args) => Some(generated::man(args, console)),
            Self::Init(args) => Some(init::run(args, console)),
            Self::FakeProvider(args) => Some(run_fake_provider(args, console)),
            _ => None,
        }
    }
}

/// Runs the fake provider in its own runtime, because it needs no configuration.
fn run_fake_provider(args: &fake_provider::FakeProviderArgs, console: &mut Console) -> Result<Exit, CommandError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(fake_provider::run(args.clone(), console));
    // An unread report must not delay the exit.
    runtime.shutdown_background();
    ended.map(|()| Exit::Success)
}

/// Runs one command with its configuration.
///
/// # Errors
/// [`CommandError`] when the command failed; the caller prints it and exits with [`CommandError::exit`].
pub async fn execute(
    command: &Command,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let cx = &mut CommandContext { config, services, console };
    // Process 1, such as a container's command, has no default reaction to signals: it would wait for a pipe for ever.
    // `run` handles its own signals.
    if std::process::id() != 1 || matches!(command, Command::Run) {
        return dispatch(command, cx).await;
    }
    let mut signals = os::Signals::watch()?;
    tokio::select! {
        biased;
        ended = dispatch(command, cx) => ended,
        signal = signals.wait_for_stop() => Err(CommandError::Failed(format!("stopped by {signal}"))),
    }
}

async fn dispatch(command: &Command, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    match command {
        Command::Migrate(args) => run::migrate(args, cx).await,
        Command::Check(args) => check::run(args, cx).await,
        Command::Provider(args) => provider::run(args, cx).await,
        Command::Limits(args) => limits::run(args, cx).await,
        Command::Accounts(args) => accounts::run(args, cx).await,
        Command::Enqueue(args) => enqueue::run(args, cx).await,
        Command::Status(args) => status::run(args, cx).await,
        Command::Jobs(args) => jobs::run(args, cx).await,
        Command::Dlq(args) => jobs::decide::dlq(args, cx).await,
        Command::Rejected(args) => rejected::run(args, cx).await,
        Command::Batches(args) => batches::run(args, cx).await,
        Command::Simulate(args) => simulate::run(args, cx).await,
        Command::Completions(args) => generated::completions(args, cx.console),
        Command::Man(args) => generated::man(args, cx.console),
        Command::Init(args) => init::run(args, cx.console),
        Command::FakeProvider(args) => run_fake_provider(args, cx.console),
        Command::Run => run::run(cx).await,
        Command::Demo(args) => demo::run(args, cx.services, cx.console).await,
    }
}
