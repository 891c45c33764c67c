//! The `run` and `migrate` commands: a worker process from its start checks to its final report, and the schema that it
//! needs.
//!
//! A run does not start on an unmigrated database, on a used port, or beside another `run` with an embedded limiter. It
//! waits for an unreachable backend: alive, not ready. It does not migrate PostgreSQL: the operator decides which user may
//! change a schema.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::app::{RunLock, ServiceError};
use crate::cli::os::{Signals, host};
use crate::cli::{CommandContext, CommandError, Console, Exit, service_manager};
use crate::config::{Config, DatabaseUrl, LimiterUrl};
use crate::domain::format::count;
use crate::ops::api::OperatorContext;
use crate::ops::openapi::Deployment;
use crate::ops::{self, OpsState, OverviewCollector, OverviewSources, People};
use crate::worker::heartbeat::{BackendKinds, HeartbeatReporter, WorkerIdentity};
use crate::worker::retry::{RetryEnded, retry_while_unavailable};
use crate::worker::supervisor::{self, DrainReport, WorkerStatus};
use crate::worker::{self, WorkerOptions, settings_sync, sweeper};

/// Longest time that the last heartbeat may delay the exit.
const LAST_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs the command until a stop signal.
pub async fn run(cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let stop = CancellationToken::new();
    watch_signals(stop.clone())?;
    // Before any backend is awaited: a secret that cannot be used ends the start at once.
    let people = people(cx.config)?;
    let listener = match cx.config.ops.listen {
        None => None,
        Some(address) => Some(listen(address, cx).await?),
    };
    let startup_gate = ops::StartupGate::default();
    if let Some(listener) = listener {
        cx.console.message(&format!("ops server on http://{}", listener.local_addr()?))?;
        // Probes and peeks must not delay the drain, so the exit does not wait for this server.
        tokio::spawn(serve(listener, startup_gate.clone(), stop.clone()));
    }
    let opened = retry_while_unavailable("open the database", &stop, async || {
        open_database(cx).await.inspect_err(|error| {
            let cause = error.to_string();
            service_manager::set_waiting_for(&cause);
            startup_gate.set_waiting_for(cause);
        })
    });
    let (opened, (backends, _lock)) = match opened.await {
        Ok(opened) => opened,
        Err(RetryEnded::Stopped) => return Ok(print_report(DrainReport::default(), cx.console)?),
        Err(RetryEnded::Failed(error)) => return Err(error),
    };
    let (progress, progress_rx) = watch::channel(WorkerStatus::default());
    // Ends with the supervisor, which drops the status.
    tokio::spawn(service_manager::run(progress_rx.clone(), stop.clone()));
    let options = options(cx.config);
    let identity = identity(cx.config, &options.owner);
    let reporter = HeartbeatReporter { backends: backends.clone(), status: progress_rx, identity };
    let reports_end = CancellationToken::new();
    if cx.config.ops.listen.is_some() {
        let state = ops_state(cx.config, people, &reporter, opened);
        let (collector, collector_end) = (state.collector.clone(), reports_end.clone());
        tokio::spawn(async move { collector.run(collector_end).await });
        startup_gate.open(state);
    }
    let reporting = tokio::spawn(reporter.run(reports_end.clone()));
    let report = supervisor::run(backends, options, stop, progress).await;
    reports_end.cancel();
    if timeout(LAST_HEARTBEAT_TIMEOUT, reporting).await.is_err() {
        tracing::debug!("the worker's heartbeat was not deleted in time; the database forgets it after a day");
    }
    Ok(print_report(report?, cx.console)?)
}

async fn open_database(cx: &CommandContext<'_>) -> Result<(Deployment, (worker::Backends, RunLock)), CommandError> {
    let id = cx.ledger().await?.deployment().await?;
    let deployment = Deployment { id, database: cx.config.database.url.location() };
    Ok((deployment, cx.services.worker_backends(cx.config).await?))
}

/// Binds the port of the ops server. If another `run` with the same embedded limiter uses it, reports that instead.
async fn listen(address: SocketAddr, cx: &CommandContext<'_>) -> Result<TcpListener, CommandError> {
    let error = match TcpListener::bind(address).await {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    if error.kind() == std::io::ErrorKind::AddrInUse
        && let Err(reason @ ServiceError::AnotherRun) = cx.services.check_no_other_run(cx.config).await
    {
        return Err(reason.into());
    }
    Err(CommandError::Configuration(format!("ops.listen: {address}: {error}; choose another address, or `none`")))
}

async fn serve(listener: TcpListener, startup_gate: ops::StartupGate, stop: CancellationToken) {
    if let Err(error) = ops::serve(listener, startup_gate, CancellationToken::new()).await {
        tracing::error!(%error, "ops server ended");
        stop.cancel();
    }
}

pub(super) fn ops_state(
    config: &Config,
    people: People,
    reporter: &HeartbeatReporter,
    deployment: Deployment,
) -> OpsState {
    let HeartbeatReporter { backends, status, identity } = reporter;
    let worker::Backends { queue, ledger, limiter, .. } = backends.clone();
    let reads = ledger.for_reads();
    let sources = OverviewSources {
        worker_status: status.clone(),
        ledger: ledger.clone(),
        reads: reads.clone(),
        queue: queue.clone(),
        limiter: limiter.clone(),
        worker: identity.id.clone(),
        version: identity.version.clone(),
    };
    let collector = Arc::new(OverviewCollector::new(sources));
    OpsState {
        deployment,
        collector,
        worker_status: status.clone(),
        limiter,
        people: Arc::new(people),
        wrong_tokens: Arc::default(),
        operator_context: OperatorContext { ledger, queue, card_numbers: config.worker.card_numbers },
        reads,
    }
}

/// Reads the secrets of `ops.tokens`.
pub(super) fn people(config: &Config) -> Result<People, CommandError> {
    let variable = |name: &str| std::env::var(name).ok();
    People::load(&config.ops, variable)
        .map_err(|problems| CommandError::Configuration(format!("ops.tokens: {}", problems.join("; "))))
}

/// The identity of this process in its heartbeats.
pub(super) fn identity(config: &Config, id: &str) -> WorkerIdentity {
    let database = match config.database.url {
        DatabaseUrl::Sqlite { .. } => "sqlite",
        DatabaseUrl::Postgres(_) => "postgres",
    };
    let limiter = match config.limiter.url {
        LimiterUrl::Embedded => "embedded",
        LimiterUrl::Redis(_) => "redis",
        LimiterUrl::RedisCluster(_) => "redis_cluster",
    };
    WorkerIdentity {
        id: id.to_owned(),
        host: host().chars().take(255).collect(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kinds: BackendKinds { database, queue: "rabbitmq", limiter },
    }
}

fn options(config: &Config) -> WorkerOptions {
    WorkerOptions {
        owner: uuid::Uuid::now_v7().to_string(),
        card_numbers: config.worker.card_numbers,
        drain_timeout: config.worker.drain_timeout,
        max_open_jobs: config.max_open_jobs,
        settings_poll: settings_sync::POLL_INTERVAL,
        sweep_every: sweeper::SWEEP_INTERVAL,
        scrub_after: config.scrub_after,
        scrub_review_after: config.scrub_review_after,
    }
}

/// The first stop signal stops the worker. Later signals change nothing: the drain has its own timeout.
fn watch_signals(stop: CancellationToken) -> Result<(), CommandError> {
    let mut signals = Signals::watch()?;
    tokio::spawn(async move {
        let signal = signals.wait_for_stop().await;
        tracing::info!(signal, "stopping: the worker accepts no more jobs");
        stop.cancel();
        loop {
            let signal = signals.wait_for_stop().await;
            tracing::info!(signal, "already stopping: the drain ends after worker.drain_timeout_ms");
        }
    });
    Ok(())
}

fn print_report(report: DrainReport, console: &mut Console) -> std::io::Result<Exit> {
    let DrainReport { timed_out, left_active, abandoned_in_flight, unwritten } = report;
    if !timed_out {
        console.message("stopped: all requests finished, unsent jobs returned to the backlog")?;
        return Ok(Exit::Success);
    }
    console.message(&format!(
        "stopped after worker.drain_timeout_ms: {} still active, {abandoned_in_flight} of them with a request in flight; \
         other workers take them over",
        count(left_active as u64, "job")
    ))?;
    if unwritten > 0 {
        console.message(&format!(
            "the database did not accept {}: see the errors in the log",
            count(unwritten as u64, "outcome")
        ))?;
    }
    Ok(if abandoned_in_flight == 0 { Exit::Success } else { Exit::Failed })
}

#[derive(Debug, clap::Args)]
pub struct MigrateArgs {
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the database cannot be reached or refuses a step.
pub async fn migrate(args: &MigrateArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let changed = cx.services.migrate(cx.config).await?;
    if args.json {
        cx.console.json(&json!({ "database": cx.config.database.url.to_string(), "changed": changed }))?;
        return Ok(Exit::Success);
    }
    let outcome = if changed { "is up to date now" } else { "was already up to date" };
    cx.console.message(&format!("{} {outcome}", cx.config.database.url))?;
    Ok(Exit::Success)
}
