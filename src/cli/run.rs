//! `run`: the worker deployment, from the first check to the last word about what was left.
//!
//! Refuses to start on a database that is not migrated, on a taken port, or beside another embedded `run`. Waits for a
//! database that is away as for the other engines: alive, not ready.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::connect::{RunLock, Services};
use super::signals::Signals;
use super::{CommandError, Console, Exit, os_user};
use crate::config::{Config, DatabaseUrl, LimiterUrl, QueueUrl};
use crate::domain::explain::format::count;
use crate::ledger::fleet::Fleet;
use crate::ledger::operator::Operator;
use crate::ops::api::OperatorContext;
use crate::ops::deployment::Deployment;
use crate::ops::metrics::{Metrics, MetricsSources};
use crate::ops::{self, OpsState, OverviewCollector, OverviewSources};
use crate::worker::heartbeat::{BackendKinds, HeartbeatReporter, WorkerIdentity};
use crate::worker::retry::{RetryEnded, retry_while_unavailable};
use crate::worker::supervisor::{self, DrainReport, WorkerStatus};
use crate::worker::{self, WorkerOptions, settings_sync, sweeper};

/// How long the last report may hold up the exit.
const LAST_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command until a signal asks for its end.
///
/// # Errors
/// When the worker cannot start.
pub async fn run(config: &Config, engines: &dyn Services, console: &mut Console) -> Result<Exit, CommandError> {
    let stop = CancellationToken::new();
    watch_signals(stop.clone())?;
    let listener = match config.ops.listen {
        None => None,
        Some(address) => Some(listen(address, config, engines).await?),
    };
    let front = ops::StartupGate::default();
    if let Some(listener) = listener {
        console.message(&format!("ops server on http://{}", listener.local_addr()?))?;
        // Probes and peeks must not hold up the drain, so nobody waits for this server.
        tokio::spawn(serve(listener, front.clone(), stop.clone()));
    }
    let opened = retry_while_unavailable("open the database", &stop, async || {
        open_database(config, engines).await.inspect_err(|error| front.set_waiting_for(error.to_string()))
    });
    let (opened, (engines, _lock)) = match opened.await {
        Ok(opened) => opened,
        Err(RetryEnded::Stopped) => return Ok(print_report(DrainReport::default(), console)?),
        Err(RetryEnded::Failed(error)) => return Err(error),
    };
    let (progress, progress_rx) = watch::channel(WorkerStatus::default());
    let options = options(config);
    let identity = identity(config, &options.owner);
    let reports_end = CancellationToken::new();
    if config.ops.listen.is_some() {
        let state = ops_state(config, &engines, &opened, &progress_rx, &identity);
        let (lookout, looking_ends) = (state.collector.clone(), reports_end.clone());
        tokio::spawn(async move { lookout.run(looking_ends).await });
        front.open(state);
    }
    let reporter = HeartbeatReporter { fleet: opened.fleet, backends: engines.clone(), status: progress_rx, identity };
    let reporting = tokio::spawn(reporter.run(reports_end.clone()));
    let report = supervisor::run(engines, options, stop, progress).await;
    reports_end.cancel();
    if timeout(LAST_HEARTBEAT_TIMEOUT, reporting).await.is_err() {
        tracing::debug!("the worker's report was not deleted in time; it is forgotten after a day");
    }
    Ok(print_report(report?, console)?)
}

async fn open_database(
    config: &Config,
    engines: &dyn Services,
) -> Result<(DatabaseHandles, (worker::Backends, RunLock)), CommandError> {
    let operator = engines.operator(config).await?;
    let (fleet, _) = engines.fleet(config).await?;
    let deployment = Deployment { id: fleet.deployment().await?, database: config.database.url.location() };
    Ok((DatabaseHandles { operator, fleet, deployment }, engines.worker_backends(config).await?))
}

/// Takes the port of the ops server. The port of another `run` on the same embedded engines is the smaller trouble.
async fn listen(address: SocketAddr, config: &Config, engines: &dyn Services) -> Result<TcpListener, CommandError> {
    let error = match TcpListener::bind(address).await {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    if error.kind() == std::io::ErrorKind::AddrInUse
        && let Err(reason @ CommandError::Configuration(_)) = engines.check_no_other_run(config).await
    {
        return Err(reason);
    }
    Err(CommandError::Configuration(format!("ops.listen: {address}: {error}; choose another address, or `none`")))
}

async fn serve(listener: TcpListener, front: ops::StartupGate, stop: CancellationToken) {
    if let Err(error) = ops::serve(listener, front, CancellationToken::new()).await {
        tracing::error!(%error, "ops server ended");
        stop.cancel();
    }
}

/// The database, as the ops server needs it.
struct DatabaseHandles {
    operator: Arc<dyn Operator>,
    fleet: Arc<dyn Fleet>,
    deployment: Deployment,
}

fn ops_state(
    config: &Config,
    engines: &worker::Backends,
    opened: &DatabaseHandles,
    progress: &watch::Receiver<WorkerStatus>,
    identity: &WorkerIdentity,
) -> OpsState {
    let worker::Backends { queue, upkeep, settings, limiter, .. } = engines.clone();
    let DatabaseHandles { operator, fleet, deployment } = opened;
    let sources = OverviewSources {
        worker_status: progress.clone(),
        settings: settings.clone(),
        fleet: Arc::clone(fleet),
        upkeep: upkeep.clone(),
        queue: queue.clone(),
        limiter: limiter.clone(),
        worker: identity.id.clone(),
        version: identity.version.clone(),
    };
    let lookout = Arc::new(OverviewCollector::new(sources));
    let looked = MetricsSources {
        settings: settings.clone(),
        queue: queue.clone(),
        limiter: limiter.clone(),
        collector: Arc::clone(&lookout),
    };
    OpsState {
        deployment: deployment.clone(),
        metrics: Arc::new(Metrics::new(progress.clone(), looked)),
        collector: lookout,
        worker_status: progress.clone(),
        limiter,
        upkeep,
        token: config.ops.token.clone(),
        wrong_tokens: Arc::default(),
        operator_context: OperatorContext {
            operator: Arc::clone(operator),
            settings,
            queue,
            card_numbers: config.worker.card_numbers,
        },
    }
}

/// How this process signs its reports.
fn identity(config: &Config, id: &str) -> WorkerIdentity {
    let database = match config.database.url {
        DatabaseUrl::Sqlite { .. } => "sqlite",
        DatabaseUrl::Postgres(_) => "postgres",
    };
    let queue = match config.queue.url {
        QueueUrl::Embedded => "embedded",
        QueueUrl::Amqp(_) => "rabbitmq",
    };
    let limiter = match config.limiter.url {
        LimiterUrl::Embedded => "embedded",
        LimiterUrl::Redis(_) => "redis",
        LimiterUrl::RedisCluster(_) => "redis_cluster",
    };
    WorkerIdentity {
        id: id.to_owned(),
        host: os_user::host().chars().take(255).collect(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kinds: BackendKinds { database, queue, limiter },
    }
}

fn options(config: &Config) -> WorkerOptions {
    WorkerOptions {
        owner: uuid::Uuid::now_v7().to_string(),
        card_numbers: config.worker.card_numbers,
        drain_timeout: config.worker.drain_timeout,
        settings_poll: settings_sync::POLL_INTERVAL,
        sweep_every: sweeper::SWEEP_INTERVAL,
        scrub_after: config.scrub_after,
        scrub_review_after: config.scrub_review_after,
    }
}

/// The first signal that asks for the end stops the worker. Later ones change nothing: the drain has its own time.
fn watch_signals(stop: CancellationToken) -> Result<(), CommandError> {
    let mut signals = Signals::watch()?;
    tokio::spawn(async move {
        let signal = signals.wait_for_stop().await;
        tracing::info!(signal, "stopping: no more jobs are taken");
        stop.cancel();
        loop {
            let signal = signals.wait_for_stop().await;
            tracing::info!(signal, "already stopping: the drain ends after worker.drain_timeout_ms");
        }
    });
    Ok(())
}

fn print_report(report: DrainReport, console: &mut Console) -> std::io::Result<Exit> {
    let DrainReport { timed_out, left_active: left_in_hand, abandoned_in_flight: abandoned_on_wire } = report;
    if !timed_out {
        console.message("stopped: everything was finished or handed back")?;
        return Ok(Exit::Success);
    }
    console.message(&format!(
        "stopped after worker.drain_timeout_ms: {} left in hand, {abandoned_on_wire} of them with a request on the wire; \
         other workers take over what is left",
        count(left_in_hand as u64, "job")
    ))?;
    Ok(if abandoned_on_wire == 0 { Exit::Success } else { Exit::Failed })
}
