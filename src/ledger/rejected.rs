//! The rejected messages as operators see them: the list, one message, and the decision about it.
//!
//! The row is the only copy of a message: its body and its properties, until an operator decides. If they hold what must
//! not be stored, or the body is longer than a message may be, they are stored masked, and can only be discarded.

use serde::Serialize;
use utoipa::ToSchema;

use super::operator::{DatabaseTime, UnreadableRow};
use crate::domain::job::{ContentHash, JobId};
use crate::domain::provider::ProviderName;

/// A message that never became a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedMessage {
    pub lane: ProviderName,
    pub job_id: Option<String>,
    pub reason: &'static str,
    pub detail: String,
    pub body_sha256: [u8; 32],
    pub body_bytes: usize,
    /// How the body begins, without sensitive text.
    pub head: String,
    pub stored: StoredMessage,
}

/// A rejected message as the ledger keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredMessage {
    pub body: Vec<u8>,
    /// As a JSON object.
    pub properties: String,
    /// It is not what came: it held sensitive text, or was longer. It can only be discarded.
    pub is_masked: bool,
}

/// Open messages that are counted; a count that is reached means "at least".
pub const COUNTED_MAX: u64 = 10_000;

/// An operator's decision about a rejected message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectedDecision {
    /// Its message was published to its lane again.
    Republished,
    /// Its message is not needed any more.
    Discarded,
}

impl RejectedDecision {
    /// As it is stored, and for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Republished => "republished",
            Self::Discarded => "discarded",
        }
    }
}

/// Filter of a list; all given conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RejectedFilter {
    pub provider: Option<ProviderName>,
    /// The code of the reason.
    pub reason: Option<String>,
    /// Those that were decided, in place of the open ones.
    pub decided: bool,
}

/// A message that could not be a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RejectedSummary {
    pub id: i64,
    pub at: DatabaseTime,
    /// The provider whose lane it came in.
    pub provider: String,
    /// The id in the message, if it could be read.
    pub job_id: Option<String>,
    pub reason: String,
    /// The field and the fix; never a value.
    pub detail: String,
    /// How the body begins, without sensitive text. `null`: an older program recorded it, or it was discarded.
    pub head: Option<String>,
    pub body_bytes: u64,
    /// In hexadecimal.
    pub body_sha256: String,
    /// What is stored is not what came: it can only be discarded.
    pub masked: bool,
    /// `republished` or `discarded`. `null`: open.
    pub decision: Option<String>,
    pub decided_at: Option<DatabaseTime>,
    /// The database's user.
    pub decided_by: Option<String>,
    /// `user@host` of the operator.
    pub os_user: Option<String>,
    pub program: Option<String>,
    pub because: Option<String>,
}

/// One page, newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RejectedPage {
    pub messages: Vec<RejectedSummary>,
    pub unreadable: Vec<UnreadableRow>,
    /// The id before which the next page begins; `null` at the end.
    pub next: Option<i64>,
}

/// The id of a message, and the hash of its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentOfId {
    pub id: JobId,
    pub hash: ContentHash,
}

/// Room that stored messages take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredSize {
    pub messages: u64,
    pub bytes: u64,
}

/// What the ledger has under a message's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedContent {
    /// No job.
    Nothing,
    /// The message's job, in any state.
    Same,
    /// A payment of another provider, or with other content.
    Other,
}

/// A rejected message as its producer learns of it: without content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedEvent {
    pub id: i64,
    pub at: DatabaseTime,
    pub provider: String,
    /// The id in the message, if it could be read.
    pub job_id: Option<String>,
    /// The producer's id of the message, if it set one.
    pub message_id: Option<String>,
    pub reason: String,
}

/// Open messages of one provider's lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedCount {
    pub provider: String,
    pub messages: u64,
}

/// Why no decision was recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectedRefusal {
    #[error("there is no rejected message {0}")]
    NoSuchMessage(i64),
    #[error("rejected message {id} is {decision} already")]
    Decided { id: i64, decision: String },
}
