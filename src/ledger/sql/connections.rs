//! The pool of connections to PostgreSQL: it grows to what the server allows, and waits for what it has.
//!
//! A pool of a library waits for the connection that it is opening while others come free, and forgets why opening failed.
//! This one lends whatever is free first ([`super::slots`] decides), and an error is the server's own.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::meaning::{ConnectFailure, is_of_no_more_use, of_postgres, passes};
use super::server_settings::{Backend, establish, is_shared, set_up, shared_by_a_pooler};
use super::slots::{Purpose, Shares, Slots};

mod lent;

use lent::Lent;
pub use lent::Session;

/// How long a caller waits for a connection while there is none at all.
const WAIT_FOR_FIRST: Duration = Duration::from_secs(3);
/// How long a caller waits for one of the connections that there are.
const WAIT_FOR_TURN: Duration = Duration::from_secs(10);
/// How long one attempt to connect may take.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How long the comparison of two connections may hold up the first one.
const COMPARE_MAX: Duration = Duration::from_secs(2);
/// Pause after a failed connect: the first one, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// A connection that was idle longer is asked for a sign of life before use; a busy one costs no extra round trip.
const PING_AFTER_IDLE: Duration = Duration::from_secs(1);
/// Longest wait for that sign of a connection whose last statement failed, before it is lent again.
const RETURN_MAX: Duration = Duration::from_secs(3);
const IDLE_MAX: Duration = Duration::from_secs(600);
const AGE_MAX: Duration = Duration::from_secs(1_800);
/// The server counts as short of connections for so long after it refused one.
const SHORT_FOR: Duration = Duration::from_secs(30);
/// Idle time and age after which a connection is closed meanwhile, so that other workers get one, too.
const IDLE_MAX_SHORT: Duration = Duration::from_millis(500);
const AGE_MAX_SHORT: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub struct Connections(Arc<Shared>);

struct Shared {
    options: PgConnectOptions,
    state: Mutex<State>,
    closed: Notify,
    /// Whether the server is short of connections.
    short: watch::Sender<bool>,
}

type Waiter = oneshot::Sender<Result<Lent, ConnectFailure>>;

struct State {
    slots: Slots<Open, Waiter>,
    /// Server processes of the open connections, with the number of connections that met them.
    backends: HashMap<Backend, u32>,
    /// Why no connection may be used any more.
    unusable: Option<ConnectFailure>,
    last_failure: Option<ConnectFailure>,
    failed_in_a_row: u32,
    refused_at: Option<Instant>,
    was_compared: bool,
    is_closed: bool,
}

/// A connection and what the pool knows of it.
struct Open {
    connection: PgConnection,
    backend: Backend,
    since: Instant,
    used_at: Instant,
}

impl Connections {
    /// A pool that connects with its first use.
    pub fn new(max_connections: u32, options: PgConnectOptions) -> Self {
        let state = State {
            slots: Slots::new(Shares::of(max_connections)),
            backends: HashMap::new(),
            unusable: None,
            last_failure: None,
            failed_in_a_row: 0,
            refused_at: None,
            was_compared: false,
            is_closed: false,
        };
        let short = watch::Sender::new(false);
        Self(Arc::new(Shared { options, state: Mutex::new(state), closed: Notify::new(), short }))
    }

    pub fn options(&self) -> &PgConnectOptions {
        &self.0.options
    }

    /// Whether the server is short of connections: what is not needed is given up.
    pub fn short(&self) -> watch::Receiver<bool> {
        self.0.short.subscribe()
    }

    /// Lends a connection that is set up for the purpose.
    ///
    /// # Errors
    /// The last failure to connect, if there is no connection in time.
    pub async fn lend(&self, purpose: Purpose) -> Result<Session, sqlx::Error> {
        let until = Instant::now() + WAIT_FOR_TURN;
        loop {
            let mut session = self.wait(purpose, until).await?;
            match session.prepare().await {
                Ok(()) => return Ok(session),
                // It is closed; another one may do.
                Err(error) if is_of_no_more_use(&error) && Instant::now() < until => session.give_up(),
                Err(error) => {
                    session.give_up();
                    return Err(error);
                }
            }
        }
    }

    async fn wait(&self, purpose: Purpose, until: Instant) -> Result<Session, sqlx::Error> {
        let (waiter, mut lent) = oneshot::channel();
        {
            let mut state = self.0.lock();
            if state.is_closed {
                return Err(sqlx::Error::PoolClosed);
            }
            if let Some(failure) = &state.unusable {
                return Err(failure.clone().into());
            }
            state.slots.wait(purpose, waiter);
            self.0.serve(&mut state);
        }
        let mut first = timeout(WAIT_FOR_FIRST, &mut lent).await.ok();
        if first.is_none() && self.0.lock().slots.open() > 0 {
            first = tokio::time::timeout_at(until, &mut lent).await.ok();
        }
        match first {
            Some(Ok(Ok(lent))) => Ok(Session::new(lent)),
            Some(Ok(Err(failure))) => Err(failure.into()),
            Some(Err(_)) => Err(sqlx::Error::PoolClosed),
            None => {
                lent.close();
                if let Ok(Ok(lent)) = lent.try_recv() {
                    return Ok(Session::new(lent));
                }
                let mut state = self.0.lock();
                state.slots.forget(oneshot::Sender::is_closed);
                Err(state.last_failure.clone().map_or_else(all_busy, Into::into))
            }
        }
    }

    /// A connection beside the pool, for whoever keeps it.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub async fn own(&self) -> Result<PgConnection, sqlx::Error> {
        let (first, backend) = connect(&self.0.options).await?;
        // Two that are open at the same time have two server processes, unless a pooler lends one to both.
        if let Ok(Ok((second, other))) = timeout(COMPARE_MAX, connect(&self.0.options)).await {
            close(second);
            if is_shared(&backend, &other) {
                return Err(shared_by_a_pooler());
            }
        }
        Ok(first)
    }

    /// Closes what is idle, waits for what is lent, and fails whoever waits.
    pub async fn close(&self) {
        loop {
            let closed = self.0.closed.notified();
            {
                let mut state = self.0.lock();
                state.is_closed = true;
                drop(state.slots.take_waiters());
                let idle = state.slots.prune(|_| true);
                idle.into_iter().for_each(|open| state.discard(open));
                if state.slots.open() == 0 {
                    return;
                }
            }
            closed.await;
        }
    }
}

impl Shared {
    /// No holder panics while it has the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends and connects, as the slots decide.
    fn serve(self: &Arc<Self>, state: &mut State) {
        if state.is_closed {
            return;
        }
        let served = state.slots.serve();
        for (waiter, purpose, open, set_up_for) in served.lent {
            let lent = Lent::new(open, purpose, set_up_for, Arc::clone(self));
            // Its own drop would wait for the lock that is held here.
            if let Err(Ok(unwanted)) = waiter.send(Ok(lent)) {
                unwanted.take_back(state);
            }
        }
        let Ok(runtime) = Handle::try_current() else { return };
        for purpose in served.connects {
            runtime.spawn(Arc::clone(self).grow(purpose));
        }
    }

    /// Opens one more connection; after a failure, pauses before the next may begin.
    async fn grow(self: Arc<Self>, purpose: Purpose) {
        let pause = match self.open_for(purpose).await {
            Ok((open, is_shared)) => {
                let mut state = self.lock();
                state.admit(purpose, open, is_shared);
                self.note_recovery(&mut state);
                self.serve(&mut state);
                return;
            }
            Err(error) => self.lock().refused(error, &self.short),
        };
        {
            // Whoever waits can have what there is.
            let mut state = self.lock();
            self.serve(&mut state);
        }
        sleep(pause).await;
        let mut state = self.lock();
        state.slots.may_connect_again();
        self.serve(&mut state);
    }

    async fn open_for(&self, purpose: Purpose) -> Result<(Open, bool), sqlx::Error> {
        let (mut connection, backend) = connect(&self.options).await?;
        let is_shared = self.compare(&backend).await;
        if purpose == Purpose::Groups {
            within(RETURN_MAX, set_up(&mut connection, purpose)).await?;
        }
        Ok((Open { connection, backend, since: Instant::now(), used_at: Instant::now() }, is_shared))
    }

    /// Lets other workers have the connection that was closed, before this one asks for another.
    fn leave_it_to_others(self: &Arc<Self>, state: &mut State) {
        let Ok(runtime) = Handle::try_current() else { return };
        state.slots.hold_connects();
        let shared = Arc::clone(self);
        runtime.spawn(async move {
            sleep(PAUSE.1.mul_f64(rand::random())).await;
            let mut state = shared.lock();
            state.slots.may_connect_again();
            shared.serve(&mut state);
        });
    }

    fn prune_later(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let shared = Arc::clone(self);
        runtime.spawn(async move {
            sleep(IDLE_MAX_SHORT.saturating_add(PAUSE.0)).await;
            shared.lock().prune();
        });
    }

    /// Compares the pool's first connection with a second one: a pooler that lends one server process to both would lend it
    /// to strangers, too, with the settings of everybody.
    async fn compare(&self, first: &Backend) -> bool {
        if std::mem::replace(&mut self.lock().was_compared, true) {
            return false;
        }
        let Ok(Ok((second, other))) = timeout(COMPARE_MAX, connect(&self.options)).await else { return false };
        close(second);
        is_shared(first, &other)
    }

    fn note_recovery(&self, state: &mut State) {
        if state.refused_at.is_some_and(|at| at.elapsed() > SHORT_FOR) {
            tracing::info!(open = state.slots.open(), "the database refused no connection for a while");
            state.refused_at = None;
            state.slots.is_refused = false;
            self.short.send_replace(false);
        }
    }
}

impl State {
    fn is_short(&self) -> bool {
        self.refused_at.is_some_and(|at| at.elapsed() <= SHORT_FOR)
    }

    fn admit(&mut self, purpose: Purpose, open: Open, is_shared: bool) {
        self.failed_in_a_row = 0;
        self.last_failure = None;
        self.slots.is_refused = self.is_short();
        let met = self.backends.entry(open.backend.clone()).or_insert(0);
        *met += 1;
        let is_shared = is_shared || *met > 1;
        self.slots.connected(purpose, open);
        if is_shared && self.unusable.is_none() {
            let failure = ConnectFailure::from(shared_by_a_pooler());
            tracing::error!(error = %failure, "the database is not used");
            self.slots.take_waiters().into_iter().for_each(|waiter| drop(waiter.send(Err(failure.clone()))));
            self.unusable = Some(failure);
        }
    }

    /// Keeps the failure, and returns the pause before the next try.
    fn refused(&mut self, error: sqlx::Error, short: &watch::Sender<bool>) -> Duration {
        let (open, is_passing, words) = (self.slots.open(), passes(&error), of_postgres(&error));
        let failure = ConnectFailure::from(error);
        if open > 0 || failure.is_full() {
            if !self.is_short() {
                tracing::warn!(
                    open, configured = self.slots.total(), error = %words,
                    "the database refuses more connections; the open ones take turns"
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

    /// Whether the connection has served its time.
    fn is_over(&self, open: &Open) -> bool {
        let age_max = if self.is_short() { AGE_MAX_SHORT } else { AGE_MAX };
        self.unusable.is_some() || self.is_closed || open.since.elapsed() > age_max
    }

    /// Closes a connection that is no longer among the slots.
    fn discard(&mut self, open: Open) {
        if let Some(met) = self.backends.get_mut(&open.backend) {
            *met -= 1;
            if *met == 0 {
                self.backends.remove(&open.backend);
            }
        }
        close(open.connection);
    }

    /// Takes out what was idle for too long.
    fn prune(&mut self) {
        let idle_max = if self.is_short() { IDLE_MAX_SHORT } else { IDLE_MAX };
        let over = self.slots.prune(|open| open.used_at.elapsed() > idle_max);
        over.into_iter().for_each(|open| self.discard(open));
    }
}

async fn connect(options: &PgConnectOptions) -> Result<(PgConnection, Backend), sqlx::Error> {
    within(CONNECT_MAX, async {
        let mut connection = PgConnection::connect_with(options).await?;
        let backend = establish(&mut connection).await?;
        Ok((connection, backend))
    })
    .await
}

/// Takes leave of the server, without a wait for whoever closes.
fn close(connection: PgConnection) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(timeout(RETURN_MAX, connection.close()));
    }
}

async fn within<T>(at_most: Duration, work: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, sqlx::Error> {
    let words = format!("the database has said nothing for {} s", at_most.as_secs());
    let silent = || sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, words));
    timeout(at_most, work).await.unwrap_or_else(|_| Err(silent()))
}

fn all_busy() -> sqlx::Error {
    let words = format!("every connection was busy for {} s (database.max_connections)", WAIT_FOR_TURN.as_secs());
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, words))
}
