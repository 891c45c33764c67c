//! Hints that another process has written to the database: they trigger a poll of the settings, and looks of idle lanes.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::ledger::database::{ChangeHint, ChangeHints};
use crate::ledger::record_notices::RecordNewsSender;

/// Forwards hints until `stop` fires: `settings` asks for a poll of them.
pub async fn follow(mut hints: ChangeHints, settings: Arc<Notify>, records: RecordNewsSender, stop: CancellationToken) {
    while let Some(hint) = stop.run_until_cancelled(hints.next()).await {
        match hint {
            ChangeHint::Settings => settings.notify_one(),
            ChangeHint::Records(lane) => records.send(Some(lane)),
            ChangeHint::Anything => {
                settings.notify_one();
                records.send(None);
            }
        }
    }
}
