//! The page of the demo (`demo --serve`): the ops server of a worker on the demo's data, until a stop signal.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cli::run::{identity, ops_state};
use crate::cli::{CommandError, Console};
use crate::config::Config;
use crate::ops::openapi::Deployment;
use crate::ops::{self, People, StartupGate};
use crate::worker::Backends;
use crate::worker::heartbeat::HeartbeatReporter;
use crate::worker::supervisor::WorkerStatus;

/// Where the page is, if that port is free. Only this machine reaches it, since it has no token.
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9464);

/// The listener of the page: the usual port, or any.
pub async fn bind(console: &mut Console) -> Result<TcpListener, CommandError> {
    let listener = match TcpListener::bind(ADDRESS).await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind((ADDRESS.ip(), 0)).await?,
    };
    console.message(&format!("the page: http://{}/", listener.local_addr()?))?;
    Ok(listener)
}

/// Serves the page of the worker with this status, and reports that worker, until `stop` fires.
pub async fn run(
    listener: TcpListener,
    config: &Config,
    backends: &Backends,
    status: watch::Receiver<WorkerStatus>,
    stop: CancellationToken,
) -> Result<(), CommandError> {
    let deployment = Deployment { id: backends.ledger.deployment().await?, database: config.database.url.location() };
    let identity = identity(config, super::OWNER);
    let reporter = HeartbeatReporter { backends: backends.clone(), status, identity };
    let state = ops_state(config, People::default(), &reporter, deployment);
    let (collector, gate) = (state.collector.clone(), StartupGate::default());
    gate.open(state);
    let ((), (), served) =
        tokio::join!(collector.run(stop.clone()), reporter.run(stop.clone()), ops::serve(listener, gate, stop));
    Ok(served?)
}
