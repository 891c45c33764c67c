//! The publisher of outcome events to the exchange `payments.outcomes`: in the one order, at least once.
//!
//! One process at a time has the publisher's cursor. It gives new events their places, publishes them page by page, and
//! moves the cursor past each page by one update. An event that some queue rejects, or whose confirm is late, leaves the
//! order: the cursor passes it, and it is published again beside the later ones. An event that cannot be published stays
//! in the ledger, and holds up no payment.
//!
//! Each write of the holder raises the cursor's turn. Another process takes the cursor if the turn stands still, and
//! continues after its position. The first one then writes nothing, because its turn is not current.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use self::turn::Turn;
use super::timing::{POLL_INTERVAL, TAKE_OVER_AFTER, TURN_INTERVAL};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::events::EventCursor;
use crate::queue::Queue;

mod publish;
mod turn;

/// What publishing needs of a process.
pub struct Publisher {
    pub ledger: Database,
    /// `None`: there is no broker, and events are only passed.
    pub queue: Option<Arc<dyn Queue>>,
    /// Names this process as the cursor's holder.
    pub holder: String,
    /// Says that this process has written an event.
    pub new_events: Arc<Notify>,
}

impl Publisher {
    /// Publishes whenever this process has the cursor, until `drained`. Then it publishes what is left, as long as every
    /// backend is available, and leaves the cursor to the others.
    pub async fn run(self, drained: CancellationToken) {
        let mut watch = CursorWatch::default();
        loop {
            match watch.take_cursor(&self).await {
                Ok(Some(cursor)) => {
                    Turn::new(&self, &drained, cursor).run().await;
                    if drained.is_cancelled() {
                        return;
                    }
                }
                Ok(None) if drained.is_cancelled() && !self.has_unpublished().await => return,
                Ok(None) => {}
                Err(_) if drained.is_cancelled() => return,
                Err(error) => tracing::debug!(%error, "failed to take the cursor of outcome events, retrying"),
            }
            if drained.run_until_cancelled(sleep(TURN_INTERVAL)).await.is_none() {
                sleep(POLL_INTERVAL).await;
            }
        }
    }

    /// Whether events wait that another process has not published, as far as the ledger says.
    async fn has_unpublished(&self) -> bool {
        self.ledger.unpublished_events().await.is_ok_and(|unpublished| unpublished.events > unpublished.rejected)
    }
}

/// A process that waits for the cursor. No clock decides: it must see the same turn for long enough.
#[derive(Default)]
struct CursorWatch {
    seen: Option<SeenTurn>,
}

struct SeenTurn {
    turn: i64,
    since: Instant,
}

impl CursorWatch {
    /// Takes the cursor, if it has no holder or its holder writes nothing.
    async fn take_cursor(&mut self, publisher: &Publisher) -> Result<Option<EventCursor>, LedgerError> {
        let cursor = publisher.ledger.event_cursor().await?;
        let seen = self.seen.take().filter(|seen| seen.turn == cursor.turn);
        let seen = self.seen.insert(seen.unwrap_or(SeenTurn { turn: cursor.turn, since: Instant::now() }));
        if cursor.holder.is_some() && seen.since.elapsed() < TAKE_OVER_AFTER {
            return Ok(None);
        }
        publisher.ledger.take_event_cursor(cursor.turn, &publisher.holder).await
    }
}
