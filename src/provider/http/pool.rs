//! Idle connections to one target.
//!
//! A connection leaves the pool before its server is likely to close it, so that no request meets the close.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hyper::header::HeaderMap;
use tokio::time::{Instant, sleep_until};

use super::connection::Connection;

/// Longest time that a connection is kept idle. Common servers (Node, Apache) close after 5 s.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// Left of a server's own time, for the way of the next request.
const IDLE_MARGIN: Duration = Duration::from_secs(1);

/// Whether, and for how long, requests share connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reuse {
    pub(super) is_allowed: bool,
    /// From making a connection to the last request that may begin on it.
    pub(super) max_age: Duration,
}

/// How long a connection may stay idle after an answer with these headers.
fn idle_for(headers: &HeaderMap) -> Duration {
    announced(headers).map_or(IDLE_MAX, |server| server.saturating_sub(IDLE_MARGIN).min(IDLE_MAX))
}

/// `Keep-Alive: timeout=5, max=100`: the server closes the connection when it was idle for so long, or after so many
/// requests. A last request leaves no time.
fn announced(headers: &HeaderMap) -> Option<Duration> {
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

pub(super) struct Pool {
    reuse: Reuse,
    shelf: Mutex<Shelf>,
}

#[derive(Default)]
struct Shelf {
    /// The one that was used last stands last.
    idle: Vec<Idle>,
    /// A task closes connections whose time is over.
    is_swept: bool,
}

struct Idle {
    connection: Connection,
    until: Instant,
}

impl Pool {
    pub(super) fn new(reuse: Reuse) -> Arc<Self> {
        Arc::new(Self { reuse, shelf: Mutex::default() })
    }

    /// Whether a connection carries more than one request.
    pub(super) fn keeps(&self) -> bool {
        self.reuse.is_allowed
    }

    /// The connection that was used last. Its server may have closed it, or said something on it, meanwhile.
    pub(super) fn take(&self) -> Option<Connection> {
        loop {
            let idle = self.shelf().idle.pop()?;
            if Instant::now() < idle.until {
                return Some(idle.connection);
            }
        }
    }

    /// Keeps a connection for the next request, if it may carry one after an answer with these headers.
    pub(super) fn put(self: &Arc<Self>, connection: Connection, headers: &HeaderMap) {
        let until = (Instant::now() + idle_for(headers)).min(connection.opened() + self.reuse.max_age);
        if !self.reuse.is_allowed || until <= Instant::now() {
            return;
        }
        let mut shelf = self.shelf();
        shelf.idle.push(Idle { connection, until });
        if !std::mem::replace(&mut shelf.is_swept, true) {
            drop(shelf);
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
    }

    /// Closes connections whose time is over; the next instant at which there is one.
    fn close_old(&self) -> Option<Instant> {
        let mut shelf = self.shelf();
        let now = Instant::now();
        let old: Vec<Idle> = shelf.idle.extract_if(.., |idle| idle.until <= now).collect();
        let next = shelf.idle.iter().map(|idle| idle.until).min();
        shelf.is_swept = next.is_some();
        drop(shelf);
        drop(old);
        next
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends with the last idle connection, or with the pool.
async fn sweep(pool: Weak<Pool>) {
    while let Some(next) = pool.upgrade().and_then(|pool| pool.close_old()) {
        sleep_until(next).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_left_before_its_server_closes_it() {
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
            assert_eq!(idle_for(&headers), Duration::from_secs(seconds), "{lines:?}");
        }
    }
}
