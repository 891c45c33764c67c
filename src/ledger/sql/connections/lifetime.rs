//! How long a connection is used: until it is too old, or leads to another server than the newest connection.

use std::time::Duration;

use tokio::sync::watch;

use super::{Connections, PoolShared, PoolState, PooledConnection};

const AGE_MAX: Duration = Duration::from_secs(1_800);
/// The same while the server is short of connections, so that other workers get one too.
const AGE_MAX_SHORT: Duration = Duration::from_secs(2);

impl Connections {
    /// How often a connection led to another server than the one before. It is counted before the connection is lent.
    pub fn server_changes(&self) -> watch::Receiver<u64> {
        self.0.server_changes.subscribe()
    }
}

impl PoolShared {
    /// Counts a connection to another server, and closes the idle ones to the former one.
    pub(super) fn note_server(&self, server: &str) {
        let mut state = self.state.lock();
        let former = state.server.replace(server.to_owned());
        if former.is_some_and(|former| former != server) {
            self.server_changes.send_modify(|changes| *changes += 1);
            let left = state.slots.prune(|open| open.backend.server != server);
            left.into_iter().for_each(|open| state.discard(open));
        }
    }
}

impl PoolState {
    /// Whether the connection is closed when it comes back.
    pub(super) fn is_expired(&self, open: &PooledConnection) -> bool {
        let age_max = if self.is_short() { AGE_MAX_SHORT } else { AGE_MAX };
        let is_of_former_server = self.server.as_ref().is_some_and(|server| *server != open.backend.server);
        self.unusable.is_some() || self.is_closed || is_of_former_server || open.since.elapsed() > age_max
    }
}
