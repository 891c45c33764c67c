//! Pool of idle connections to one target.
//!
//! A connection leaves the pool before its server is likely to close it. So a request rarely meets the close
//! (`docs/decisions/0032-connection-reuse.md`).

use std::sync::{Arc, Weak};
use std::time::Duration;

use hyper::header::HeaderMap;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use super::connection::HttpConnection;

/// Longest time that a connection is kept idle. Common servers (Node, Apache) close after 5 s.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// Part of the server's own idle time that is left for the next request to arrive.
const IDLE_MARGIN: Duration = Duration::from_secs(1);

/// Whether, and for how long, requests share connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionReuse {
    pub(super) is_allowed: bool,
    /// Time from opening a connection to the last request that may begin on it.
    pub(super) max_age: Duration,
}

/// Longest idle time of a connection after a response with these headers.
fn max_idle_time(headers: &HeaderMap) -> Duration {
    keep_alive_timeout(headers).map_or(IDLE_MAX, |server| server.saturating_sub(IDLE_MARGIN).min(IDLE_MAX))
}

/// Idle time by `Keep-Alive: timeout=5, max=100`: the server closes the connection after `timeout` seconds, or after
/// `max` more requests. It is zero if no request is left.
fn keep_alive_timeout(headers: &HeaderMap) -> Option<Duration> {
    let lines = headers.get_all("keep-alive").iter().filter_map(|value| value.to_str().ok());
    let parameters = lines.flat_map(|line| line.split(',')).filter_map(|parameter| parameter.split_once('='));
    let parameters = parameters.filter_map(|(name, value)| {
        let number: u64 = value.trim().trim_matches('"').parse().ok()?;
        match name.trim().to_ascii_lowercase().as_str() {
            "timeout" => Some(Duration::from_secs(number)),
            "max" if number == 0 => Some(Duration::ZERO),
            _ => None,
        }
    });
    parameters.min()
}

pub(super) struct ConnectionPool {
    reuse: ConnectionReuse,
    idle: Mutex<IdleConnections>,
}

#[derive(Default)]
struct IdleConnections {
    /// In the order of use; the most recently used is last.
    connections: Vec<IdleConnection>,
    /// A task runs that closes expired connections.
    has_sweep_task: bool,
}

struct IdleConnection {
    connection: HttpConnection,
    expires_at: Instant,
}

impl ConnectionPool {
    pub(super) fn new(reuse: ConnectionReuse) -> Arc<Self> {
        Arc::new(Self { reuse, idle: Mutex::default() })
    }

    /// Whether a connection carries more than one request.
    pub(super) fn reuses_connections(&self) -> bool {
        self.reuse.is_allowed
    }

    /// Takes the most recently used connection. Its server may have closed it, or sent bytes on it, meanwhile.
    pub(super) fn take(&self) -> Option<HttpConnection> {
        loop {
            let idle = self.idle.lock().connections.pop()?;
            if Instant::now() < idle.expires_at {
                return Some(idle.connection);
            }
        }
    }

    /// Keeps a connection for the next request, if it may carry one after a response with these headers.
    pub(super) fn put(self: &Arc<Self>, connection: HttpConnection, headers: &HeaderMap) {
        let until = (Instant::now() + max_idle_time(headers)).min(connection.opened_at() + self.reuse.max_age);
        if !self.reuse.is_allowed || until <= Instant::now() {
            return;
        }
        let mut idle = self.idle.lock();
        idle.connections.push(IdleConnection { connection, expires_at: until });
        if !std::mem::replace(&mut idle.has_sweep_task, true) {
            drop(idle);
            tokio::spawn(close_expired_until_empty(Arc::downgrade(self)));
        }
    }

    /// Closes expired connections. Returns when the next one expires.
    fn close_expired(&self) -> Option<Instant> {
        let mut idle = self.idle.lock();
        let now = Instant::now();
        let expired: Vec<IdleConnection> = idle.connections.extract_if(.., |entry| entry.expires_at <= now).collect();
        let next = idle.connections.iter().map(|entry| entry.expires_at).min();
        idle.has_sweep_task = next.is_some();
        drop(idle);
        drop(expired);
        next
    }
}

/// Task that closes expired connections. It ends with the last idle connection, or with the pool.
async fn close_expired_until_empty(pool: Weak<ConnectionPool>) {
    while let Some(next) = pool.upgrade().and_then(|pool| pool.close_expired()) {
        sleep_until(next).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_connection_expires_before_the_server_closes() {
        for (lines, seconds) in [
            (&[][..], 4),
            (&["timeout=60"], 4),
            (&["timeout=5, max=100"], 4),
            (&["timeout=3"], 2),
            (&["max=7 , Timeout = 2"], 1),
            (&["timeout=\"2\""], 1),
            (&["timeout=1"], 0),
            (&["timeout=0"], 0),
            (&["timeout=60, max=0"], 0),
            (&["timeout=60", "timeout=2"], 1),
            (&["timeout=soon", "timeout", ""], 4),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("keep-alive", line.parse().unwrap());
            }
            assert_eq!(max_idle_time(&headers), Duration::from_secs(seconds), "{lines:?}");
        }
    }
}
