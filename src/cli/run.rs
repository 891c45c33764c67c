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

use super::connect::{Engines, RunLock};
use super::signals::Signals;
use super::{CommandError, Console, Exit, os_user};
use crate::config::{Config, DatabaseUrl, LimiterUrl, QueueUrl};
use crate::domain::explain::words::count;
use crate::ledger::fleet::Fleet;
use crate::ledger::operator::Operator;
use crate::ops::api::Desk;
use crate::ops::deployment::Deployment;
use crate::ops::metrics::{Looked, Metrics};
use crate::ops::{self, Lookout, OpsState, Sources};
use crate::worker::deployment::{self, DrainReport, Progress};
use crate::worker::patience::{GivenUp, until_back};
use crate::worker::reporting::{Identity, Kinds, Reporter};
use crate::worker::{self, WorkerOptions, settings_watch, sweeper};

/// How long the last report may hold up the exit.
const FAREWELL_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command until a signal asks for its end.
///
/// # Errors
/// When the worker cannot start.
pub async fn run(config: &Config, engines: &dyn Engines, console: &mut Console) -> Result<Exit, CommandError> {
    let stop = CancellationToken::new();
    watch_signals(stop.clone())?;
    let listener = match config.ops.listen {
        None => None,
        Some(address) => Some(listen(address, config, engines).await?),
    };
    let front = ops::Front::default();
    if let Some(listener) = listener {
        console.message(&format!("ops server on http://{}", listener.local_addr()?))?;
        // Probes and peeks must not hold up the drain, so nobody waits for this server.
        tokio::spawn(serve(listener, front.clone(), stop.clone()));
    }
    let opened = until_back("open the database", &stop, async || {
        open(config, engines).await.inspect_err(|error| front.waits_for(error.to_string()))
    });
    let (opened, (engines, _lock)) = match opened.await {
        Ok(opened) => opened,
        Err(GivenUp::Stopped) => return Ok(say(DrainReport::default(), console)?),
        Err(GivenUp::Failed(error)) => return Err(error),
    };
    let (progress, progress_rx) = watch::channel(Progress::default());
    let options = options(config);
    let identity = identity(config, &options.owner);
    let reports_end = CancellationToken::new();
    if config.ops.listen.is_some() {
        let state = ops_state(config, &engines, &opened, &progress_rx, &identity);
        let (lookout, looking_ends) = (state.lookout.clone(), reports_end.clone());
        tokio::spawn(async move { lookout.run(looking_ends).await });
        front.open(state);
    }
    let reporter = Reporter { fleet: opened.fleet, engines: engines.clone(), progress: progress_rx, identity };
    let reporting = tokio::spawn(reporter.run(reports_end.clone()));
    let report = deployment::run(engines, options, stop, progress).await;
    reports_end.cancel();
    if timeout(FAREWELL_MAX, reporting).await.is_err() {
        tracing::debug!("the worker's report was not deleted in time; it is forgotten after a day");
    }
    Ok(say(report?, console)?)
}

async fn open(config: &Config, engines: &dyn Engines) -> Result<(Opened, (worker::Engines, RunLock)), CommandError> {
    let operator = engines.operator(config).await?;
    let (fleet, _) = engines.fleet(config).await?;
    let deployment = Deployment { id: fleet.deployment().await?, database: config.database.url.location() };
    Ok((Opened { operator, fleet, deployment }, engines.worker(config).await?))
}

/// Takes the port of the ops server. The port of another `run` on the same embedded engines is the smaller trouble.
async fn listen(address: SocketAddr, config: &Config, engines: &dyn Engines) -> Result<TcpListener, CommandError> {
    let error = match TcpListener::bind(address).await {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    if error.kind() == std::io::ErrorKind::AddrInUse
        && let Err(reason @ CommandError::Configuration(_)) = engines.has_no_other_run(config).await
    {
        return Err(reason);
    }
    Err(CommandError::Configuration(format!("ops.listen: {address}: {error}; choose another address, or `none`")))
}

async fn serve(listener: TcpListener, front: ops::Front, stop: CancellationToken) {
    if let Err(error) = ops::serve(listener, front, CancellationToken::new()).await {
        tracing::error!(%error, "ops server ended");
        stop.cancel();
    }
}

/// The database, as the ops server needs it.
struct Opened {
    operator: Arc<dyn Operator>,
    fleet: Arc<dyn Fleet>,
    deployment: Deployment,
}

fn ops_state(
    config: &Config,
    engines: &worker::Engines,
    opened: &Opened,
    progress: &watch::Receiver<Progress>,
    identity: &Identity,
) -> OpsState {
    let worker::Engines { queue, upkeep, settings, limiter, .. } = engines.clone();
    let Opened { operator, fleet, deployment } = opened;
    let sources = Sources {
        progress: progress.clone(),
        settings: settings.clone(),
        fleet: Arc::clone(fleet),
        upkeep: upkeep.clone(),
        queue: queue.clone(),
        limiter: limiter.clone(),
        worker: identity.id.clone(),
        version: identity.version.clone(),
    };
    let lookout = Arc::new(Lookout::new(sources));
    let looked = Looked {
        settings: settings.clone(),
        queue: queue.clone(),
        limiter: limiter.clone(),
        lookout: Arc::clone(&lookout),
    };
    OpsState {
        deployment: deployment.clone(),
        metrics: Arc::new(Metrics::new(progress.clone(), looked)),
        lookout,
        progress: progress.clone(),
        limiter,
        upkeep,
        token: config.ops.token.clone(),
        wrong_tokens: Arc::default(),
        desk: Desk { operator: Arc::clone(operator), settings, queue, card_numbers: config.worker.card_numbers },
    }
}

/// How this process signs its reports.
fn identity(config: &Config, id: &str) -> Identity {
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
    Identity {
        id: id.to_owned(),
        host: os_user::host().chars().take(255).collect(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kinds: Kinds { database, queue, limiter },
    }
}

fn options(config: &Config) -> WorkerOptions {
    WorkerOptions {
        owner: uuid::Uuid::now_v7().to_string(),
        card_numbers: config.worker.card_numbers,
        drain_timeout: config.worker.drain_timeout,
        settings_poll: settings_watch::POLL,
        sweep_every: sweeper::EVERY,
        scrub_after: config.scrub_after,
        scrub_review_after: config.scrub_review_after,
    }
}

/// The first signal that asks for the end stops the worker. Later ones change nothing: the drain has its own time.
fn watch_signals(stop: CancellationToken) -> Result<(), CommandError> {
    let mut signals = Signals::watch()?;
    tokio::spawn(async move {
        let signal = signals.stop().await;
        tracing::info!(signal, "stopping: no more jobs are taken");
        stop.cancel();
        loop {
            let signal = signals.stop().await;
            tracing::info!(signal, "already stopping: the drain ends after worker.drain_timeout_ms");
        }
    });
    Ok(())
}

fn say(report: DrainReport, console: &mut Console) -> std::io::Result<Exit> {
    let DrainReport { timed_out, left_in_hand, abandoned_on_wire } = report;
    if !timed_out {
        console.message("stopped: everything was finished or handed back")?;
        return Ok(Exit::Fine);
    }
    console.message(&format!(
        "stopped after worker.drain_timeout_ms: {} left in hand, {abandoned_on_wire} of them with a request on the wire; \
         other workers take over what is left",
        count(left_in_hand as u64, "job")
    ))?;
    Ok(if abandoned_on_wire == 0 { Exit::Fine } else { Exit::Failed })
}
