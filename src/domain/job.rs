//! A validated payment job: every field checked, money in minor units.
//!
//! It does not know the message format (that is `queue::message`) or the tables. A message that can never be a job is a
//! value too: [`InvalidMessage`], whose code is the public reason on `payments.invalid`.

use std::fmt;

use super::provider::ProviderName;
use super::time::EpochMs;

/// Longest job id, account and idempotency key, in characters.
pub const ID_CHARS_MAX: usize = 64;
/// Longest reference, in characters.
pub const REFERENCE_CHARS_MAX: usize = 255;
/// Largest message body, in bytes.
pub const BODY_BYTES_MAX: usize = 64 * 1024;
/// Most permits that one call may use.
pub const COST_MAX: u16 = 1_000;

/// 1–64 of `A-Z a-z 0-9 _ -`: identifies a payment, an account or an idempotency key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identifier(String);

impl Identifier {
    /// # Errors
    /// If the text is empty, longer than 64 characters or holds any other character.
    pub fn new(text: impl Into<String>) -> Result<Self, String> {
        let text = text.into();
        let fits = (1..=ID_CHARS_MAX).contains(&text.len());
        if fits && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
            return Ok(Self(text));
        }
        Err("must be 1 to 64 characters of A-Z a-z 0-9 _ -".to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identity of a payment, for ever and over all providers.
pub type JobId = Identifier;

/// One payment to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    pub id: JobId,
    pub provider: ProviderName,
    /// Minor units of `currency`, always positive.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
    pub account: Option<Identifier>,
    pub reference: Option<String>,
    pub idempotency_key: Option<Identifier>,
    /// Permits that the call uses, 1–1000.
    pub cost: u16,
    /// 0–9, higher first.
    pub priority: u8,
    pub not_before: Option<EpochMs>,
    pub expires_at: Option<EpochMs>,
    /// A JSON object, as text, exactly as the producer wrote it.
    pub payload: Option<String>,
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidMessage {
    pub reason: InvalidReason,
    pub detail: String,
}

impl InvalidMessage {
    pub fn new(reason: InvalidReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}

impl fmt::Display for InvalidMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason.code(), self.detail)
    }
}

/// A field of a message that a provider may require.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobField {
    Account,
    Reference,
}

impl JobField {
    pub const ALL: [Self; 2] = [Self::Account, Self::Reference];

    /// The name in a message and in column `require`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Account => "account",
            Self::Reference => "reference",
        }
    }

    /// Reason to reject a message without the field.
    pub fn missing_reason(self) -> InvalidReason {
        match self {
            Self::Account => InvalidReason::MissingAccount,
            Self::Reference => InvalidReason::MissingReference,
        }
    }
}

/// Closed list of reasons to reject a message; [`InvalidReason::code`] is the value of header `x-sluicegate-reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InvalidReason {
    Malformed,
    TooLarge,
    UnknownField,
    BadId,
    BadAmount,
    BadCurrency,
    BadField,
    WrongProvider,
    CardNumber,
    Secret,
    /// The provider's row requires the field (`require`).
    MissingAccount,
    MissingReference,
    Conflict,
    /// The broker reached its delivery limit again and again, and the message never became a job.
    Undeliverable,
    /// The format is newer, and no worker that knows it came in time.
    NewerVersion,
}

impl InvalidReason {
    pub const ALL: [Self; 15] = [
        Self::Malformed,
        Self::TooLarge,
        Self::UnknownField,
        Self::BadId,
        Self::BadAmount,
        Self::BadCurrency,
        Self::BadField,
        Self::WrongProvider,
        Self::CardNumber,
        Self::Secret,
        Self::MissingAccount,
        Self::MissingReference,
        Self::Conflict,
        Self::Undeliverable,
        Self::NewerVersion,
    ];

    pub fn code(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::TooLarge => "too_large",
            Self::UnknownField => "unknown_field",
            Self::BadId => "bad_id",
            Self::BadAmount => "bad_amount",
            Self::BadCurrency => "bad_currency",
            Self::BadField => "bad_field",
            Self::WrongProvider => "wrong_provider",
            Self::CardNumber => "card_number",
            Self::Secret => "secret",
            Self::MissingAccount => "missing_account",
            Self::MissingReference => "missing_reference",
            Self::Conflict => "conflict",
            Self::Undeliverable => "undeliverable",
            Self::NewerVersion => "newer_version",
        }
    }
}
