//! A lent connection, and its return to the pool.
//!
//! After work without an error it returns at once. After an error it is pinged first, which also ends an open
//! transaction. A broken connection is closed.

use std::sync::Arc;

use sqlx::Connection;
use sqlx::postgres::PgConnection;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::abandoned::abandon;
use super::{PING_AFTER_IDLE, PoolShared, PoolState, PooledConnection, RETURN_MAX};
use crate::ledger::sql::result::{is_connection_broken, is_silent};
use crate::ledger::sql::session::{SessionRights, check_primary, set_up, with_client_timeout};
use crate::ledger::sql::slots::ConnectionPurpose;

/// A connection that is lent for one piece of work, or about to be.
pub struct Session {
    open: Option<PooledConnection>,
    purpose: ConnectionPurpose,
    set_up_for: ConnectionPurpose,
    shared: Arc<PoolShared>,
    is_good: bool,
    /// Nothing is left over from the last statement.
    is_clean: bool,
}

impl Session {
    pub(super) fn new(
        open: PooledConnection,
        purpose: ConnectionPurpose,
        set_up_for: ConnectionPurpose,
        shared: Arc<PoolShared>,
    ) -> Self {
        Self { open: Some(open), purpose, set_up_for, shared, is_good: true, is_clean: true }
    }

    /// Returns the connection while the pool is locked.
    pub(super) fn take_back(mut self, state: &mut PoolState) {
        if let Some(open) = self.open.take() {
            state.slots.closed(self.purpose);
            // With its current settings.
            state.slots.put(self.set_up_for, open);
        }
    }

    fn give_back(&mut self, is_good: bool) {
        let Some(mut open) = self.open.take() else { return };
        let mut state = self.shared.state.lock();
        state.slots.closed(self.purpose);
        let (is_over, is_short) = (state.is_expired(&open), state.is_short());
        if is_good && !is_over {
            open.used_at = Instant::now();
            state.slots.put(self.set_up_for, open);
        } else {
            state.discard(open);
            if is_good && is_short {
                self.shared.delay_reconnect(&mut state);
            }
        }
        state.prune();
        self.shared.note_recovery(&mut state);
        self.shared.assign(&mut state);
        self.shared.closed.notify_waiters();
        if is_short {
            self.shared.prune_later();
        }
    }

    /// The connection is closed at the end.
    pub(super) fn discard(mut self) {
        self.is_good = false;
    }

    pub fn connection(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        self.is_clean = false;
        self.open.as_mut().map(|open| &mut open.connection).ok_or(sqlx::Error::PoolClosed)
    }

    /// Ends the work with its result. A connection to a silent server, or to a demoted one that is read-only, is not
    /// used again: the primary may be another server by now.
    pub fn end<T>(mut self, result: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
        // A poll, and a read-only session, write nothing that could wait for a standby.
        let may_write = self.purpose != ConnectionPurpose::Polls && self.shared.rights == SessionRights::All;
        let is_abandoned = may_write && result.as_ref().is_err_and(is_silent);
        if let Some(open) = self.open.take_if(|_| is_abandoned) {
            abandon(&self.shared, open, self.purpose);
            return result;
        }
        self.is_good = !result.as_ref().is_err_and(is_connection_broken);
        self.is_clean = result.is_ok();
        result
    }

    /// Pings a connection that was idle, and sets it up for this purpose.
    pub(super) async fn prepare(&mut self) -> Result<(), sqlx::Error> {
        let Some(open) = &mut self.open else { return Ok(()) };
        self.is_clean = false;
        if open.used_at.elapsed() > PING_AFTER_IDLE {
            match self.shared.rights {
                SessionRights::All => with_client_timeout(RETURN_MAX, open.connection.ping()).await?,
                // No rejected write shows it that its server was demoted.
                rights @ SessionRights::ReadOnly => {
                    with_client_timeout(RETURN_MAX, check_primary(&mut open.connection, rights)).await?;
                }
            }
        }
        if self.set_up_for != self.purpose {
            with_client_timeout(RETURN_MAX, set_up(&mut open.connection, self.purpose)).await?;
            self.set_up_for = self.purpose;
        }
        self.is_clean = true;
        Ok(())
    }
}

impl Drop for Session {
    /// A connection whose receiver was gone when it came is clean.
    fn drop(&mut self) {
        // A read whose caller is gone ends with its connection.
        let may_ping = self.shared.rights == SessionRights::All;
        let is_unsure = self.is_good && !self.is_clean && may_ping;
        let (true, Ok(runtime)) = (is_unsure, Handle::try_current()) else {
            return self.give_back(self.is_good && self.is_clean);
        };
        let Some(open) = self.open.take() else { return };
        let mut session = Self::new(open, self.purpose, self.set_up_for, Arc::clone(&self.shared));
        // The last statement may have left a transaction open, which this rolls back.
        runtime.spawn(async move {
            let is_alive = match session.connection() {
                Ok(connection) => with_client_timeout(RETURN_MAX, connection.ping()).await.is_ok(),
                Err(_) => false,
            };
            session.give_back(is_alive);
        });
    }
}
