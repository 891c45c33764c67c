//! Messages of a newer format on their way to the ledger, where they wait for a newer worker.
//!
//! A worker that cannot read a message holds it, and acknowledges it once the row is committed. So no broker keeps it
//! alive, and no producer has to publish it again. The sweeper of a newer worker records its job.

use sha2::{Digest as _, Sha256};

use super::WorkerContext;
use super::publish::MessageCopy;
use crate::domain::job::{InvalidMessage, InvalidReason};
use crate::ledger::LedgerError;
use crate::ledger::held::NewHeldMessage;
use crate::queue::message::{masked_because, stored_message};

pub const NEWER_VERSION_TEXT: &str = "message of a newer format waits for a newer worker";

/// Holds a message; `Some` is why it must be rejected instead.
pub async fn hold(
    worker: &WorkerContext,
    copy: &MessageCopy,
    version: u64,
) -> Result<Option<InvalidMessage>, LedgerError> {
    let stored = stored_message(&copy.body, &copy.properties);
    if stored.is_masked {
        let reason = masked_because(&copy.body, &copy.properties);
        let detail = format!(
            "v: {version} is a newer format, and the message cannot be held for a newer worker: its text holds what must \
             not be stored, or its headers are too large"
        );
        return Ok(Some(InvalidMessage::new(reason, detail)));
    }
    if worker.has_no_room_for_held().await? {
        let detail = format!("v: {version} is a newer format, and the ledger has no room for further held messages");
        return Ok(Some(InvalidMessage::new(InvalidReason::NewerVersion, detail)));
    }
    let lane = copy.provider.clone();
    let body_sha256 = Sha256::digest(&copy.body).into();
    worker.backends.ledger.hold(&NewHeldMessage { lane, body_sha256, version, stored }).await?;
    if worker.log_throttle.admits(copy.provider.as_str(), NEWER_VERSION_TEXT, InvalidReason::NewerVersion.code()) {
        tracing::error!(provider = %copy.provider, version, "{NEWER_VERSION_TEXT}");
    }
    Ok(None)
}
