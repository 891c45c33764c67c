//! The return of limits and account rules that an operator has changed for a time, at the instant that their rows name.
//!
//! Each worker asks the database when the next one goes back, and sleeps until then. It asks again after each change of
//! the settings, and each minute, because clocks can step. Before the first settings are loaded, it applies what came
//! due while no worker ran, so that no request uses a rate that is over. The database lets one worker apply a return.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::settings_sync::LoadedSettings;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::settings::PlannedReturn;

/// Longest time between two looks while a return is planned.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);
/// Pause after a failed look, and after a return that another worker applied.
const RETRY: Duration = Duration::from_secs(1);
/// Pause after a return that the database rejected.
const RETRY_FAILED: Duration = Duration::from_secs(10);

/// What one look did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Limits and rules that this worker set back.
    pub returned: u32,
    /// Time until the next return; `None`: none is planned.
    pub next: Option<Duration>,
}

/// Sets back every limit and every account's rule whose time has come.
///
/// # Errors
/// When the returns cannot be read. A return that fails is logged, and holds up no other.
pub async fn apply_due(ledger: &Database, worker: &str) -> Result<Look, LedgerError> {
    let mut look = Look::default();
    for planned in ledger.planned_returns().await? {
        if planned.in_ms > 0 {
            let left = Duration::from_millis(u64::try_from(planned.in_ms).unwrap_or(0));
            look.next = Some(look.next.map_or(left, |next| next.min(left)));
            continue;
        }
        let PlannedReturn { provider, row, at, .. } = &planned;
        let by = Actor {
            os_user: format!("worker {worker}"),
            program: None,
            reason: Some(format!("it was set until {at}")),
        };
        match ledger.return_row(&planned, &by).await {
            Ok(true) => {
                look.returned += 1;
                tracing::info!(provider, %row, until = %at, "limit or account rule went back as planned");
            }
            // Another worker did it, or a change ended the return: the next look knows.
            Ok(false) => look.next = Some(RETRY),
            Err(error) => {
                look.next = Some(RETRY_FAILED);
                tracing::error!(provider, %row, until = %at, %error, "limit or account rule did not go back, retrying");
            }
        }
    }
    Ok(look)
}

/// Applies returns until `stop` fires. `hinted` triggers a poll of the settings.
pub async fn run(
    ledger: Database,
    worker: String,
    mut known: watch::Receiver<Arc<LoadedSettings>>,
    hinted: Arc<Notify>,
    stop: CancellationToken,
) {
    let mut failing = false;
    loop {
        // A change while the database is asked needs another look.
        known.borrow_and_update();
        let next = match apply_due(&ledger, &worker).await {
            Ok(Look { returned, next }) => {
                failing = false;
                if returned > 0 {
                    hinted.notify_one();
                }
                next
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "planned returns cannot be read, retrying");
                }
                Some(RETRY)
            }
        };
        let wait = async {
            match next {
                Some(next) => sleep(next.min(LOOK_INTERVAL)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = wait => {}
            changed = known.changed() => if changed.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}
