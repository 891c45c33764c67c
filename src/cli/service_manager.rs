//! The messages of `run` to systemd (`Type=notify`): a status line, ready, stopping, and the watchdog's heartbeat.
//!
//! Nothing is sent without `NOTIFY_SOCKET`. The watchdog hears of this process only while the worker's loops respond
//! ([`liveness::check`]): systemd restarts a worker that is stuck, and none that waits for a backend.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;
use std::{env, io};

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::domain::format::count;
use crate::domain::printable::printable;
use crate::worker::liveness;
use crate::worker::supervisor::WorkerStatus;

/// Time between two status lines, if they differ.
const STATUS_INTERVAL: Duration = Duration::from_secs(5);
/// Longest status line, in characters.
const STATUS_MAX: usize = 200;
/// Checks within the time that the watchdog allows: one may take its whole third, and the next is still in time.
const CHECKS_PER_TIMEOUT: u32 = 3;

/// Sends one assignment of sd_notify(3).
fn send(message: &str) {
    let Some(address) = env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send_to(&address, message) {
        tracing::warn!(%error, "the service manager was not notified; it may wait for this process, or restart it");
    }
}

/// The address is a path, or a name in the abstract namespace after `@`.
fn send_to(address: &OsStr, message: &str) -> io::Result<()> {
    let address = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(address)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address).map(drop)
}

/// The timeout of the watchdog, if it watches this process.
fn watchdog_timeout() -> Option<Duration> {
    let number = |name| env::var(name).ok()?.parse::<u64>().ok();
    let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|us| is_ours && *us > 0).map(Duration::from_micros)
}

/// Says what the start waits for.
pub fn set_waiting_for(cause: &str) {
    send_status(&format!("starting: {cause}"));
}

fn send_status(text: &str) {
    // systemd reads one line.
    let line: String = printable(text).replace('\n', " ").chars().take(STATUS_MAX).collect();
    send(&format!("STATUS={line}"));
}

/// Reports the worker with this status until its supervisor ends.
pub async fn run(status: watch::Receiver<WorkerStatus>, stop: CancellationToken) {
    let report = report(status.clone(), stop);
    match watchdog_timeout() {
        None => report.await,
        Some(timeout) => tokio::select! {
            () = report => {}
            () = feed_watchdog(&status, timeout) => {}
        },
    }
}

async fn report(mut status: watch::Receiver<WorkerStatus>, stop: CancellationToken) {
    let (mut was_ready, mut is_stopping, mut line) = (false, false, String::new());
    let mut tick = interval(STATUS_INTERVAL);
    loop {
        let now = status.borrow_and_update().clone();
        if now.ready && !std::mem::replace(&mut was_ready, now.ready) {
            send("READY=1");
        }
        let next = status_line(&now, is_stopping);
        if next != line {
            send_status(&next);
            line = next;
        }
        tokio::select! {
            () = stop.cancelled(), if !is_stopping => {
                is_stopping = true;
                send("STOPPING=1");
            }
            changed = await_ready(&mut status), if !was_ready => if changed.is_err() { return },
            _ = tick.tick() => if status.has_changed().is_err() { return },
        }
    }
}

/// Returns when the worker becomes ready; other changes of the status may wait for the next line.
async fn await_ready(status: &mut watch::Receiver<WorkerStatus>) -> Result<(), watch::error::RecvError> {
    status.wait_for(|status| status.ready).await.map(drop)
}

fn status_line(status: &WorkerStatus, is_stopping: bool) -> String {
    let jobs = count(status.active_jobs.count() as u64, "active job");
    if is_stopping || status.draining {
        return format!("stopping: {jobs}");
    }
    let lanes = count(status.lanes.len() as u64, "lane");
    if status.ready { format!("ready: {lanes}, {jobs}") } else { "starting".to_owned() }
}

/// Tells the watchdog that this process is alive, each time that its loops have responded.
async fn feed_watchdog(status: &watch::Receiver<WorkerStatus>, timeout: Duration) {
    let within = timeout / CHECKS_PER_TIMEOUT;
    let mut tick = interval(within);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        match liveness::check(status, within).await {
            Ok(()) => send("WATCHDOG=1"),
            Err(stuck) => tracing::error!(
                %stuck,
                timeout_s = timeout.as_secs(),
                "this worker sends no sign of life to the watchdog; systemd restarts it after the timeout"
            ),
        }
    }
}
