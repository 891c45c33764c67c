//! A validated payment job: every field checked, money in minor units. And its flow: one account's jobs of one class on
//! one lane.
//!
//! It does not know the message format (that is `queue::message`) or the tables. A message that can never be a job is a
//! value too: [`InvalidMessage`], whose code is the public reason of a rejected message.
//!
//! Flows share a lane fairly, and a limit of an account blocks its flows alone. See
//! `docs/decisions/0040-flows-and-backlog.md`.

use std::sync::Arc;

pub use super::names::{ID_CHARS_MAX, Identifier, JobId};
use super::names::{ProviderName, named_enum};
use super::time::EpochMs;

/// Longest reference, in characters.
pub const REFERENCE_CHARS_MAX: usize = 255;
/// Largest message body, in bytes.
pub const BODY_BYTES_MAX: usize = 64 * 1024;
/// Most permits that one call may use.
pub const COST_MAX: u16 = 1_000;

/// One payment to make. Its clones share its texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    pub id: JobId,
    pub provider: ProviderName,
    /// Minor units of `currency`, always positive.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: Arc<str>,
    pub account: Option<Identifier>,
    pub reference: Option<Arc<str>>,
    pub idempotency_key: Option<Identifier>,
    /// Permits that the call uses, 1–1000.
    pub cost: u16,
    /// 0–9, higher first.
    pub priority: u8,
    pub not_before: Option<EpochMs>,
    pub expires_at: Option<EpochMs>,
    /// A JSON object, as text, exactly as the producer wrote it.
    pub payload: Option<Arc<str>>,
}

impl Job {
    /// The key that the provider deduplicates by: the job's own if one is given, else its id.
    pub fn effective_key(&self) -> &Identifier {
        self.idempotency_key.as_ref().unwrap_or(&self.id)
    }

    pub fn account_name(&self) -> Option<&str> {
        self.account.as_ref().map(Identifier::as_str)
    }

    /// Whether the message had this field.
    pub fn has(&self, field: JobField) -> bool {
        match field {
            JobField::Account => self.account.is_some(),
            JobField::Reference => self.reference.is_some(),
        }
    }
}

/// SHA-256 over a job's parsed fields. Two messages with the same hash have the same content, whatever their
/// formatting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentHash(pub [u8; 32]);

impl ContentHash {
    /// Hash of a payment that was cancelled before its message came: its content is unknown.
    pub const UNSEEN: Self = Self([0; 32]);
}

/// Reason why a message can never be a job. The detail names the field and the fix, never a value of the payload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {detail}", .reason.code())]
pub struct InvalidMessage {
    pub reason: InvalidReason,
    pub detail: String,
}

impl InvalidMessage {
    pub fn new(reason: InvalidReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}
named_enum! {
    /// A field of a message that a provider may require.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum JobField {
        Account = "account",
        Reference = "reference",
    }
    /// The name in a message and in column `require`.
    pub fn name(self);
}

impl JobField {
    /// Reason to reject a message without the field.
    pub fn missing_reason(self) -> InvalidReason {
        match self {
            Self::Account => InvalidReason::MissingAccount,
            Self::Reference => InvalidReason::MissingReference,
        }
    }
}

named_enum! {
    /// Closed list of reasons to reject a message; [`InvalidReason::code`] is the value of header `x-sluicegate-reason`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum InvalidReason {
        Malformed = "malformed",
        TooLarge = "too_large",
        UnknownField = "unknown_field",
        BadId = "bad_id",
        BadAmount = "bad_amount",
        BadCurrency = "bad_currency",
        BadField = "bad_field",
        WrongProvider = "wrong_provider",
        CardNumber = "card_number",
        Secret = "secret",
        /// The provider's row requires the field (`require`).
        MissingAccount = "missing_account",
        MissingReference = "missing_reference",
        /// The provider's row does not list the currency (`currencies`).
        UnsupportedCurrency = "unsupported_currency",
        /// The provider cannot express the amount exactly (`decimals`, `amount_step`).
        UnsupportedAmount = "unsupported_amount",
        Conflict = "conflict",
        /// The broker gave the message up before it became a job.
        Undeliverable = "undeliverable",
        /// The format is newer, and no worker that knows it came in time.
        NewerVersion = "newer_version",
    }
    pub fn code(self);
}

/// The class of a flow: 0 for an unknown outcome, then 1 to 10 for the priorities 9 to 0. Lower is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowClass(u8);

impl FlowClass {
    /// Jobs whose outcome is unknown: their idempotency key ages.
    pub const UNKNOWN: Self = Self(0);
    /// Jobs of priority 0.
    pub const LAST: Self = Self(Self::MAX);
    const MAX: u8 = 10;

    /// The class of a job of this priority, 0 to 9, whose outcome is not unknown. A higher priority counts as 9.
    pub fn of_priority(priority: u8) -> Self {
        Self(Self::MAX - priority.min(Self::MAX - 1))
    }

    /// The priority of its jobs; `None`: their outcome is unknown.
    pub fn priority(self) -> Option<u8> {
        (self != Self::UNKNOWN).then_some(Self::MAX - self.0)
    }

    /// `None` above 10.
    pub fn from_number(number: u8) -> Option<Self> {
        (number <= Self::MAX).then_some(Self(number))
    }

    pub fn number(self) -> u8 {
        self.0
    }
}

/// The name of a flow on its lane. Jobs without an account share one flow of each class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow<A> {
    pub class: FlowClass,
    pub account: Option<A>,
}

/// A flow by its account's name, as the ledger has it.
pub type FlowKey = Flow<Identifier>;

impl FlowKey {
    /// The flow of a job whose outcome is not unknown.
    pub fn of(job: &Job) -> Self {
        Self { class: FlowClass::of_priority(job.priority), account: job.account.clone() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A job for the provider `acme`, without optional fields.
    pub(crate) fn job(id: &str) -> Job {
        Job {
            id: Identifier::new(id).unwrap(),
            provider: ProviderName::new("acme").unwrap(),
            amount: 1_299,
            currency: "EUR".into(),
            account: None,
            reference: None,
            idempotency_key: None,
            cost: 1,
            priority: 0,
            not_before: None,
            expires_at: None,
            payload: None,
        }
    }

    #[test]
    fn classes_follow_priorities() {
        let of = |priority| FlowClass::of_priority(priority).number();
        assert_eq!([of(9), of(5), of(0), of(200)], [1, 5, 10, 1]);
        assert!(FlowClass::UNKNOWN < FlowClass::of_priority(9));
        assert_eq!([0, 1, 5, 10].map(|class| FlowClass(class).priority()), [None, Some(9), Some(5), Some(0)]);
        assert_eq!((FlowClass::from_number(10).map(FlowClass::number), FlowClass::from_number(11)), (Some(10), None));
    }
}
