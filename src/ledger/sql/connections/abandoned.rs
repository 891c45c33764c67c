//! Abandoned connections: their callers have given up a statement that PostgreSQL has not answered.
//!
//! A `COMMIT` that waits for its synchronous standby is such a statement. If it is cancelled, it reports success though
//! no standby has it. If its connection is closed, its server process waits on, and a new connection is one more. So
//! nothing is cancelled. The connection is read, and counts against the bound, until the server answers, its socket
//! fails, or its server process does nothing any more.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::{Connections, PoolShared, PoolState, PooledConnection};
use crate::ledger::sql::session::{ServerProcess, URGENT_MAX, with_client_timeout};
use crate::ledger::sql::slots::ConnectionPurpose;

/// Time between two questions whether the server process still works.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// Reads the connection until it has an end, and then closes it.
pub(super) fn abandon(shared: &Arc<PoolShared>, open: PooledConnection, purpose: ConnectionPurpose) {
    let Ok(runtime) = Handle::try_current() else { return shared.end_abandoned(open, purpose) };
    shared.state.lock().record_abandoned();
    let shared = Arc::clone(shared);
    runtime.spawn(async move {
        let mut open = open;
        while timeout(ASK_EVERY, open.connection.ping()).await.is_err() {
            if !works(&shared, &open.backend).await {
                break;
            }
        }
        shared.state.lock().abandoned -= 1;
        shared.end_abandoned(open, purpose);
    });
}

/// Whether the server process runs a statement; true if the server cannot be asked. A network that drops answers leaves
/// it idle, and a fail-over leaves it behind.
async fn works(shared: &Arc<PoolShared>, backend: &ServerProcess) -> bool {
    let asked = async {
        let mut session = Connections(Arc::clone(shared)).lend(ConnectionPurpose::Polls).await?;
        let question = sqlx::raw_sql(AssertSqlSafe(backend.works_sql()));
        let rows = with_client_timeout(URGENT_MAX, question.fetch_all(session.connection()?)).await;
        session.end(rows)
    };
    asked.await.map_or(true, |rows: Vec<_>| !rows.is_empty())
}

impl PoolShared {
    fn end_abandoned(self: &Arc<Self>, open: PooledConnection, purpose: ConnectionPurpose) {
        let mut state = self.state.lock();
        state.slots.closed(purpose);
        state.discard(open);
        self.assign(&mut state);
        self.closed.notify_waiters();
    }
}

impl PoolState {
    fn record_abandoned(&mut self) {
        self.abandoned += 1;
        if self.abandoned == 1 {
            tracing::warn!(
                open = self.slots.open(),
                "PostgreSQL has not answered a statement in time; its connection is read until it does, and counts \
                 against database.max_connections. Does a synchronous standby miss?"
            );
        }
    }
}
