//! Benchmarks of Sluicegate: the limiter beside other limiters, jobs per second through the whole path, and the used part
//! of a limit.
//!
//! A benchmark is no test: a missed target gives exit code 0, and only a failed measurement gives 1.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use sluicegate::app::{MissingDatabase, Services};
use sluicegate::cli::{CommandError, Console, Exit};
use sluicegate::config::{self, Config, LimiterUrl, LogConfig};
use sluicegate::telemetry;

mod broker;
mod conditions;
mod contender;
mod cores;
mod crowd;
mod fidelity;
mod full_log;
mod idle;
mod interruption;
mod limiter;
mod machine;
mod measure;
mod meter;
mod ours;
mod path;
mod print;
mod progress;
mod quantile;
mod reference;
mod report;
mod scratch;
mod sequence;
mod server;
mod stage;
mod targets;
mod workers;

/// The allocator of the program that is measured.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures the cost of the limiter and of the payment path on this machine.
#[derive(Debug, Parser)]
#[command(name = "sluicegate-bench", version)]
struct Program {
    /// Configuration file of Sluicegate (TOML); also SLUICEGATE_CONFIG.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set one configuration key, over file and environment; repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Debug, Subcommand)]
enum Benchmark {
    /// Measure the limiter in Redis: cost per call and per permit, memory, stalls, many waiting tasks. Starts its own
    /// redis-server.
    Limiter(limiter::LimiterArgs),
    /// Measure the jobs per second through the whole path, without an effective limit, to a provider that answers at
    /// once. Runs on the configured backends; the database must have no other providers.
    Path(path::Args),
    /// Measure the use of a strict provider's limit, the lateness of starts, and breaches. Runs on the configured
    /// backends; the database must have no other providers.
    Fidelity(Box<fidelity::Args>),
}

fn main() -> ExitCode {
    let program = Program::parse();
    let mut console = Console::stdio();
    let ended = run(&program, &mut console).and_then(|exit| Ok(console.flush().map(|()| exit)?));
    let exit = ended.unwrap_or_else(|error| {
        // If stderr is closed too, only the exit code reports the failure.
        console.error(&error).unwrap_or_default();
        error.exit()
    });
    ExitCode::from(exit.code())
}

fn run(program: &Program, console: &mut Console) -> Result<Exit, CommandError> {
    // All drivers share one TLS provider. Without one, the first connection would panic.
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| CommandError::Failed("a TLS provider was installed before main".to_owned()))?;
    if let Benchmark::Limiter(args) = &program.benchmark {
        return limiter::run(args, console);
    }
    let environment = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    let config = config::load(program.config.as_deref(), environment, &program.set)?;
    let log = LogConfig { level: config.log.level.max(tracing::Level::ERROR), ..config.log };
    let telemetry = telemetry::init(log, config.otlp_endpoint.as_deref(), &config.authorities);
    let _until_the_end = telemetry.map_err(CommandError::Failed)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let services = Services::new(MissingDatabase::Create);
    let ended = runtime.block_on(async {
        let ended = match &program.benchmark {
            Benchmark::Path(args) => path::run(args, &config, &services, console).await,
            Benchmark::Fidelity(args) => fidelity::run(args, &config, &services, console).await,
            Benchmark::Limiter(args) => limiter::run(args, console),
        };
        services.close().await;
        ended
    });
    // Never shut down: the broker's client panics in its own thread when its tasks are cancelled.
    std::mem::forget(runtime);
    ended
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if (0.01..=600.0).contains(&seconds) { Ok(seconds) } else { Err("must be between 0.01 and 600 seconds".to_owned()) }
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
enum BenchError {
    #[error("{0}")]
    Server(String),
    #[error("Redis: {0}")]
    Redis(#[from] redis::RedisError),
    /// The measurement does not show what the figure claims.
    #[error("nothing measured: {0}")]
    InvalidMeasurement(String),
    #[error("interrupted; nothing is left behind")]
    Interrupted,
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl From<BenchError> for CommandError {
    fn from(error: BenchError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Several workers need a shared limiter: an embedded one supports one worker.
fn require_one_limiter(workers: u16, config: &Config) -> Result<(), CommandError> {
    if workers > 1 && matches!(config.limiter.url, LimiterUrl::Embedded) {
        let text = "--workers: more than one needs a limiter in Redis (limiter.url)";
        return Err(CommandError::Configuration(text.to_owned()));
    }
    Ok(())
}
