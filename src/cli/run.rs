//! `run`: the worker deployment, from the first check to the last word about what was left.
//!
//! Refuses to start on a database that is not migrated, on a taken port, or beside another embedded `run`.

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::connect::Engines;
use super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::ops::api::Desk;
use crate::ops::{self, OpsState};
use crate::worker::deployment::{self, DrainReport, Progress};
use crate::worker::{WorkerOptions, settings_watch, sweeper};

#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command until SIGTERM or SIGINT.
///
/// # Errors
/// When the worker cannot start.
pub async fn run(config: &Config, engines: &dyn Engines, console: &mut Console) -> Result<Exit, CommandError> {
    let stop = CancellationToken::new();
    watch_signals(stop.clone())?;
    let listener = match config.ops.listen {
        None => None,
        Some(address) => Some(TcpListener::bind(address).await.map_err(|error| {
            CommandError::Configuration(format!("ops.listen: {address}: {error}; choose another address, or `none`"))
        })?),
    };
    let operator = engines.operator(config).await?;
    let (engines, _lock) = engines.worker(config).await?;
    let (progress, progress_rx) = watch::channel(Progress::default());
    if let Some(listener) = listener {
        console.message(&format!("ops server on http://{}", listener.local_addr()?))?;
        let state = OpsState {
            progress: progress_rx,
            limiter: engines.limiter.clone(),
            upkeep: engines.upkeep.clone(),
            token: config.ops.token.clone(),
            desk: Desk {
                operator,
                settings: engines.settings.clone(),
                queue: engines.queue.clone(),
                card_numbers: config.worker.card_numbers,
            },
        };
        let server_stop = stop.clone();
        // Probes and peeks must not hold up the drain, so nobody waits for this server.
        tokio::spawn(async move {
            if let Err(error) = ops::serve(listener, state, CancellationToken::new()).await {
                tracing::error!(%error, "ops server ended");
                server_stop.cancel();
            }
        });
    }
    let report = deployment::run(engines, options(config), stop, progress).await?;
    Ok(say(report, console)?)
}

fn options(config: &Config) -> WorkerOptions {
    WorkerOptions {
        owner: uuid::Uuid::now_v7().to_string(),
        card_numbers: config.worker.card_numbers,
        drain_timeout: config.worker.drain_timeout,
        settings_poll: settings_watch::POLL,
        sweep_every: sweeper::EVERY,
        scrub_after: config.scrub_after,
    }
}

/// SIGTERM and SIGINT stop the worker; a second one changes nothing, because the drain has its own time.
fn watch_signals(stop: CancellationToken) -> Result<(), CommandError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping: no more jobs are taken");
        stop.cancel();
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
        "stopped after worker.drain_timeout_ms: {left_in_hand} jobs left in hand, {abandoned_on_wire} of them with a \
         request on the wire; other workers take them over"
    ))?;
    Ok(if abandoned_on_wire == 0 { Exit::Fine } else { Exit::Failed })
}
