//! The pool of PostgreSQL connections: it grows to what the server allows, and works with what it has.
//!
//! Library pools wait for a new connection while others become free, and hide why a connect failed. This pool lends any
//! free connection first ([`super::slots`] decides), and returns the server's own error. See
//! `docs/decisions/0027-own-postgresql-connection-pool.md`.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::io_error::name_closed;
use super::result::{ConnectFailure, is_connection_broken, is_transient};
use super::session::{ServerProcess, SessionRights, establish, pooler_error, set_up, with_client_timeout};
use super::slots::{ConnectionPurpose, PoolSlots, PurposeShares};
use crate::ledger::LedgerError;

mod abandoned;
mod lent;
mod lifetime;

pub use lent::Session;

/// How long a caller waits for a connection while the pool has none.
const WAIT_FOR_FIRST: Duration = Duration::from_secs(3);
/// How long a caller waits for one of the existing connections.
const WAIT_FOR_FREE: Duration = Duration::from_secs(10);
/// Time limit of one connect: of the first one, and at most. It doubles with each failure in a row: a network that drops
/// packets for a moment is left soon, and a slow server is still reached.
const CONNECT_LIMIT: (Duration, Duration) = (Duration::from_secs(3), Duration::from_secs(10));
/// How long the comparison of two connections may delay the first one.
const COMPARE_MAX: Duration = Duration::from_secs(2);
/// Pause after a failed connect: the first and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// A connection that was idle longer is pinged before use; a busy one costs no extra round trip.
const PING_AFTER_IDLE: Duration = Duration::from_secs(1);
/// Longest wait for the ping of a connection whose last statement failed, before it is lent again.
const RETURN_MAX: Duration = Duration::from_secs(3);
const IDLE_MAX: Duration = Duration::from_secs(600);
/// Most connections for reads of people.
const READS_MAX: u32 = 3;
/// The server counts as short of connections for this long after it rejected one.
const SHORT_FOR: Duration = Duration::from_secs(30);
/// Idle time after which a connection is closed in that state, so that other workers get one too.
const IDLE_MAX_SHORT: Duration = Duration::from_millis(500);

#[derive(Clone)]
pub struct Connections(Arc<PoolShared>);

struct PoolShared {
    options: PgConnectOptions,
    rights: SessionRights,
    state: Mutex<PoolState>,
    closed: Notify,
    /// Whether the server is short of connections.
    short: watch::Sender<bool>,
    /// How often a connection led to another server than the one before.
    server_changes: watch::Sender<u64>,
}

type ConnectionWaiter = oneshot::Sender<Result<Session, ConnectFailure>>;

struct PoolState {
    slots: PoolSlots<PooledConnection, ConnectionWaiter>,
    /// Server processes of the open connections, with the number of connections to each.
    backends: HashMap<ServerProcess, u32>,
    /// The server of the newest connection. Connections to others are not used again.
    server: Option<String>,
    /// Why no connection may be used any more.
    unusable: Option<ConnectFailure>,
    last_failure: Option<ConnectFailure>,
    failed_in_a_row: u32,
    refused_at: Option<Instant>,
    was_compared: bool,
    /// Connections whose callers have given up their statement.
    abandoned: u32,
    is_closed: bool,
}

/// A connection with its age and settings.
struct PooledConnection {
    connection: PgConnection,
    backend: ServerProcess,
    since: Instant,
    used_at: Instant,
}

impl Connections {
    /// A pool that connects at first use.
    pub fn new(max_connections: u32, options: PgConnectOptions) -> Self {
        Self::with_shares(PurposeShares::split(max_connections), SessionRights::All, options)
    }

    fn with_shares(shares: PurposeShares, rights: SessionRights, options: PgConnectOptions) -> Self {
        let state = PoolState {
            slots: PoolSlots::new(shares),
            backends: HashMap::new(),
            server: None,
            unusable: None,
            last_failure: None,
            failed_in_a_row: 0,
            refused_at: None,
            was_compared: false,
            abandoned: 0,
            is_closed: false,
        };
        Self(Arc::new(PoolShared {
            options,
            rights,
            state: Mutex::new(state),
            closed: Notify::new(),
            short: watch::Sender::new(false),
            server_changes: watch::Sender::new(0),
        }))
    }

    /// A pool of read-only sessions, taken from the bound of this one. `None`: the bound is too small.
    pub fn split_off_reads(&self) -> Option<Self> {
        let (rest, reads) = self.0.state.lock().slots.split_off(READS_MAX)?;
        tracing::debug!(rest, reads, "connections for reads of people are apart");
        Some(Self::with_shares(PurposeShares::undivided(reads), SessionRights::ReadOnly, self.0.options.clone()))
    }

    pub fn rights(&self) -> SessionRights {
        self.0.rights
    }

    pub fn options(&self) -> &PgConnectOptions {
        &self.0.options
    }

    /// Whether the server is short of connections: then connections that are not needed are closed.
    pub fn short(&self) -> watch::Receiver<bool> {
        self.0.short.subscribe()
    }

    /// Lends a connection that is set up for the purpose.
    ///
    /// # Errors
    /// The last failure to connect, if there is no connection in time.
    pub async fn lend(&self, purpose: ConnectionPurpose) -> Result<Session, sqlx::Error> {
        let until = Instant::now() + WAIT_FOR_FREE;
        loop {
            let mut session = self.wait(purpose, until).await?;
            match session.prepare().await {
                Ok(()) => return Ok(session),
                // The connection is closed; another one may work.
                Err(error) if is_connection_broken(&error) && Instant::now() < until => session.discard(),
                Err(error) => {
                    session.discard();
                    return Err(error);
                }
            }
        }
    }

    async fn wait(&self, purpose: ConnectionPurpose, until: Instant) -> Result<Session, sqlx::Error> {
        let (waiter, mut lent) = oneshot::channel();
        {
            let mut state = self.0.state.lock();
            if state.is_closed {
                return Err(sqlx::Error::PoolClosed);
            }
            if let Some(failure) = &state.unusable {
                return Err(failure.clone().into());
            }
            state.slots.wait(purpose, waiter);
            self.0.assign(&mut state);
        }
        let mut first = timeout(WAIT_FOR_FIRST, &mut lent).await.ok();
        if first.is_none() && self.0.state.lock().slots.open() > 0 {
            first = tokio::time::timeout_at(until, &mut lent).await.ok();
        }
        match first {
            Some(Ok(Ok(lent))) => Ok(lent),
            Some(Ok(Err(failure))) => Err(failure.into()),
            Some(Err(_)) => Err(sqlx::Error::PoolClosed),
            None => {
                lent.close();
                if let Ok(Ok(lent)) = lent.try_recv() {
                    return Ok(lent);
                }
                let mut state = self.0.state.lock();
                state.slots.remove_waiters(oneshot::Sender::is_closed);
                Err(state.last_failure.clone().map_or_else(|| state.no_connection(), Into::into))
            }
        }
    }

    /// A dedicated connection outside the pool.
    pub async fn open_dedicated(&self) -> Result<PgConnection, sqlx::Error> {
        let (first, backend) = connect(&self.0, CONNECT_LIMIT.1).await?;
        // Two open connections have two server processes, unless a pooler lends one to both.
        if let Ok((second, other)) = connect(&self.0, COMPARE_MAX).await {
            close(second);
            if backend == other {
                return Err(pooler_error());
            }
        }
        Ok(first)
    }

    /// Closes idle connections, waits for lent ones but those that are abandoned, and fails all waiting callers.
    pub async fn close(&self) {
        loop {
            let closed = self.0.closed.notified();
            {
                let mut state = self.0.state.lock();
                state.is_closed = true;
                drop(state.slots.take_waiters());
                let idle = state.slots.prune(|_| true);
                idle.into_iter().for_each(|open| state.discard(open));
                if state.slots.open() <= state.abandoned {
                    return;
                }
            }
            closed.await;
        }
    }
}

impl PoolShared {
    /// Lends and connects, as the slots decide.
    fn assign(self: &Arc<Self>, state: &mut PoolState) {
        if state.is_closed {
            return;
        }
        let mut connects = Vec::new();
        loop {
            let served = state.slots.assign();
            connects.extend(served.connects);
            let mut has_unwanted = false;
            for (waiter, purpose, open, set_up_for) in served.assigned {
                let lent = Session::new(open, purpose, set_up_for, Arc::clone(self));
                // Its own drop would wait for the lock that is held here.
                if let Err(Ok(unwanted)) = waiter.send(Ok(lent)) {
                    unwanted.take_back(state);
                    has_unwanted = true;
                }
            }
            // A caller that left has another one behind it.
            if !has_unwanted {
                break;
            }
        }
        let Ok(runtime) = Handle::try_current() else { return };
        for purpose in connects {
            runtime.spawn(Arc::clone(self).grow(purpose));
        }
    }

    /// Opens one more connection; after a failure, pauses before the next may begin.
    async fn grow(self: Arc<Self>, purpose: ConnectionPurpose) {
        let pause = match self.open_for(purpose).await {
            Ok((open, is_shared)) => {
                let mut state = self.state.lock();
                state.add_connection(purpose, open, is_shared);
                self.note_recovery(&mut state);
                self.assign(&mut state);
                return;
            }
            Err(error) => self.state.lock().record_failure(error, &self.short),
        };
        {
            // Waiting callers can use the existing connections.
            let mut state = self.state.lock();
            self.assign(&mut state);
        }
        sleep(pause).await;
        let mut state = self.state.lock();
        state.slots.may_connect_again();
        self.assign(&mut state);
    }

    async fn open_for(&self, purpose: ConnectionPurpose) -> Result<(PooledConnection, bool), sqlx::Error> {
        let failed_in_a_row = self.state.lock().failed_in_a_row;
        let (mut connection, backend) = connect(self, connect_limit(failed_in_a_row)).await?;
        let is_shared = self.compare(&backend).await;
        if purpose == ConnectionPurpose::Batches {
            with_client_timeout(RETURN_MAX, set_up(&mut connection, purpose)).await?;
        }
        Ok((PooledConnection { connection, backend, since: Instant::now(), used_at: Instant::now() }, is_shared))
    }

    /// Gives other workers time to use the freed connection before this one asks for another.
    fn delay_reconnect(self: &Arc<Self>, state: &mut PoolState) {
        let Ok(runtime) = Handle::try_current() else { return };
        state.slots.hold_connects();
        let shared = Arc::clone(self);
        runtime.spawn(async move {
            sleep(PAUSE.1.mul_f64(rand::random())).await;
            let mut state = shared.state.lock();
            state.slots.may_connect_again();
            shared.assign(&mut state);
        });
    }

    fn prune_later(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let shared = Arc::clone(self);
        runtime.spawn(async move {
            sleep(IDLE_MAX_SHORT.saturating_add(PAUSE.0)).await;
            shared.state.lock().prune();
        });
    }

    /// Compares the pool's first connection with a second one: whether a pooler lends one server process to both. Such
    /// a pooler would also share it, and its settings, with strangers.
    async fn compare(&self, first: &ServerProcess) -> bool {
        if std::mem::replace(&mut self.state.lock().was_compared, true) {
            return false;
        }
        let Ok((second, other)) = connect(self, COMPARE_MAX).await else { return false };
        close(second);
        *first == other
    }

    fn note_recovery(&self, state: &mut PoolState) {
        if state.refused_at.is_some_and(|at| at.elapsed() > SHORT_FOR) {
            tracing::info!(open = state.slots.open(), "PostgreSQL accepts connections again; the pool may grow");
            state.refused_at = None;
            state.slots.is_refused = false;
            self.short.send_replace(false);
        }
    }
}

impl PoolState {
    fn is_short(&self) -> bool {
        self.refused_at.is_some_and(|at| at.elapsed() <= SHORT_FOR)
    }

    fn add_connection(&mut self, purpose: ConnectionPurpose, open: PooledConnection, is_shared: bool) {
        self.failed_in_a_row = 0;
        self.last_failure = None;
        self.slots.is_refused = self.is_short();
        let met = self.backends.entry(open.backend.clone()).or_insert(0);
        *met += 1;
        let is_shared = is_shared || *met > 1;
        self.slots.connected(purpose, open);
        if is_shared && self.unusable.is_none() {
            let failure = ConnectFailure::from(pooler_error());
            tracing::error!(error = %failure, "PostgreSQL is not used: connections share a server process");
            self.slots.take_waiters().into_iter().for_each(|waiter| drop(waiter.send(Err(failure.clone()))));
            self.unusable = Some(failure);
        }
    }

    /// Why a caller got no connection in time, if no connect has failed.
    fn no_connection(&self) -> sqlx::Error {
        let words = match (self.slots.open(), self.abandoned) {
            (0, _) => format!("PostgreSQL has not accepted a connection within {} s", WAIT_FOR_FIRST.as_secs()),
            (_, 0) => format!("every connection was busy for {} s (database.max_connections)", WAIT_FOR_FREE.as_secs()),
            (_, abandoned) => format!(
                "every connection was busy for {} s (database.max_connections); PostgreSQL has not answered {abandoned} \
                 of them, as if a synchronous standby were missing",
                WAIT_FOR_FREE.as_secs()
            ),
        };
        sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, words))
    }

    /// Stores the failure, and returns the pause before the next try.
    fn record_failure(&mut self, error: sqlx::Error, short: &watch::Sender<bool>) -> Duration {
        let (open, is_passing, words) = (self.slots.open(), is_transient(&error), LedgerError::from(&error));
        let failure = ConnectFailure::from(error);
        if failure.is_full() || open > 0 && !failure.is_down() {
            if !self.is_short() {
                tracing::warn!(
                    open, configured = self.slots.total(), error = %words,
                    "PostgreSQL accepts no further connection; continuing with the open ones"
                );
            }
            self.refused_at = Some(Instant::now());
            short.send_replace(true);
        }
        if open == 0 && !is_passing {
            self.slots.take_waiters().into_iter().for_each(|waiter| drop(waiter.send(Err(failure.clone()))));
        }
        self.slots.is_refused = true;
        self.last_failure = Some(failure);
        let (base, max) = PAUSE;
        let pause = base.saturating_mul(2_u32.saturating_pow(self.failed_in_a_row.min(10))).min(max);
        self.failed_in_a_row += 1;
        // Workers that compete for a connection must not try in step.
        pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)
    }

    /// Closes a connection that is no longer among the slots.
    fn discard(&mut self, open: PooledConnection) {
        if let Some(met) = self.backends.get_mut(&open.backend) {
            *met -= 1;
            if *met == 0 {
                self.backends.remove(&open.backend);
            }
        }
        close(open.connection);
    }

    /// Removes connections that were idle for too long.
    fn prune(&mut self) {
        let idle_max = if self.is_short() { IDLE_MAX_SHORT } else { IDLE_MAX };
        let over = self.slots.prune(|open| open.used_at.elapsed() > idle_max);
        over.into_iter().for_each(|open| self.discard(open));
    }
}

fn connect_limit(failed_in_a_row: u32) -> Duration {
    let (first, longest) = CONNECT_LIMIT;
    first.saturating_mul(2_u32.saturating_pow(failed_in_a_row)).min(longest)
}

async fn connect(pool: &PoolShared, limit: Duration) -> Result<(PgConnection, ServerProcess), sqlx::Error> {
    with_client_timeout(limit, async {
        let mut connection = PgConnection::connect_with(&pool.options).await.map_err(name_closed)?;
        let backend = establish(&mut connection, pool.rights).await?;
        pool.note_server(&backend.server);
        Ok((connection, backend))
    })
    .await
}

/// Closes the session with the server, without making the caller wait.
fn close(connection: PgConnection) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(timeout(RETURN_MAX, connection.close()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connects_have_longer_after_failures() {
        let seconds = [0, 1, 2, 3, u32::MAX].map(|failed_in_a_row| connect_limit(failed_in_a_row).as_secs());
        assert_eq!(seconds, [3, 6, 10, 10, 10]);
    }
}
