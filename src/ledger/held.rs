//! Messages of a newer format that wait in the ledger for a worker that can read them.
//!
//! The row is the only copy, because the message is acknowledged once the row is committed.

use std::time::Duration;

use super::rejected::StoredMessage;
use crate::domain::provider::ProviderName;

/// A message to be held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewHeldMessage {
    pub lane: ProviderName,
    pub body_sha256: [u8; 32],
    /// The version of its format.
    pub version: u64,
    /// Never masked.
    pub stored: StoredMessage,
}

/// A held message that is due: a worker can read it, or it is too old.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldMessage {
    pub lane: ProviderName,
    pub body_sha256: Vec<u8>,
    pub version: u64,
    pub body: Vec<u8>,
    /// As a JSON object.
    pub properties: String,
    /// Time since the lane received it first.
    pub age: Duration,
}
