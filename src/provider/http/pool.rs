//! Idle connections to one target.
//!
//! A connection leaves the pool before its server is likely to close it, so that no request meets the close.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::connection::Connection;

/// Longest time that a connection is kept idle. Common servers (Node, Apache) close after 5 s.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(4);

#[derive(Default)]
pub(super) struct Pool {
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
    /// A connection that is open as far as this machine knows: the one that was used last.
    pub(super) async fn take(&self) -> Option<Connection> {
        loop {
            let mut idle = self.shelf().idle.pop()?;
            if Instant::now() < idle.until && idle.connection.is_alive().await {
                return Some(idle.connection);
            }
        }
    }

    /// Keeps a connection for the next request, until the given instant.
    pub(super) fn put(self: &Arc<Self>, connection: Connection, until: Instant) {
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
