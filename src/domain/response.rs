//! Rules of a row about responses: what a status means, where a wait is named, and which fields a response must repeat
//! of a payment.
//!
//! HTTP/1.1 matches a response to its request only by its place on the connection. The repeated fields, the echo,
//! detect a provider or gateway that sends a response twice or mixes up its connections.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::job::{Identifier, Job, JobId};
use super::names::named_enum;
use super::sum::SentSum;

/// Largest body of a response that is read, in bytes, as sent and decoded. No payment response needs more, and memory
/// stays bounded.
pub const RESPONSE_BODY_BYTES_MAX: usize = 256 * 1024;
/// Largest number of headers of a response. Their bytes are bounded by the HTTP client's read buffer (about 400 KiB).
pub const RESPONSE_HEADERS_MAX: usize = 256;

/// Place where a response without `Retry-After` names its wait: a throttled one, or, in its body, a busy one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitField {
    pub location: ResponseLocation,
    pub unit: WaitUnit,
}

/// Place of a value in a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseLocation {
    /// Compared without regard to case.
    Header(String),
    /// JSON pointer into the body. <https://www.rfc-editor.org/rfc/rfc6901>
    Body(String),
}

impl ResponseLocation {
    /// Whether this is `Retry-After` itself, which then has another unit than the standard's.
    pub fn is_retry_after(&self) -> bool {
        matches!(self, Self::Header(name) if name.eq_ignore_ascii_case("retry-after"))
    }
}

named_enum! {
    /// Unit of a wait.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum WaitUnit {
        Seconds = "s",
        Milliseconds = "ms",
        /// End of the wait, in seconds since 1970.
        EpochSeconds = "epoch_s",
        /// End of the wait, in milliseconds since 1970.
        EpochMilliseconds = "epoch_ms",
    }
    /// The name in the `request` column.
    pub fn name(self);
}

named_enum! {
    /// Meaning that an operator gives an HTTP status, in place of the default table.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum StatusMeaning {
        Accepted = "accepted",
        Declined = "declined",
        Misconfigured = "misconfigured",
        Unknown = "unknown",
        InProgress = "in_progress",
        Throttled = "throttled",
        /// The provider locks or limits one object, and did nothing: only this payment waits.
        Busy = "busy",
        Unavailable = "unavailable",
        Review = "review",
    }
    /// The name in the `statuses` column.
    pub fn name(self);
}

/// One case of a status. It applies if all its conditions hold; the first case of a list that applies counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusCase {
    pub header: Option<HeaderCondition>,
    pub code: Option<CodeCondition>,
    pub means: StatusMeaning,
}

impl StatusCase {
    /// A case without conditions.
    pub fn always(means: StatusMeaning) -> Self {
        Self { header: None, code: None, means }
    }
}

/// The response has this header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderCondition {
    /// Compared without regard to case.
    pub name: String,
    /// The whole value, without regard to case; `None`: any value.
    pub value: Option<String>,
}

/// The response body is JSON and holds this code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeCondition {
    /// Text, or the digits of a number.
    pub code: String,
    /// JSON pointer to the code or to a list that holds it; `None`: the usual places of codes.
    pub pointer: Option<String>,
}

/// The validated `echo` of a `request` or a `lookup`. Empty: no response is compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Echo {
    /// All of these fields are compared.
    pub fields: Vec<EchoedField>,
    /// Statuses whose responses need not repeat anything; fields that they do repeat are compared.
    pub exempt_statuses: BTreeSet<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EchoedField {
    pub field: EchoField,
    /// A response has the field at one or more of these places.
    pub locations: Vec<ResponseLocation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EchoField {
    Id,
    IdempotencyKey,
    Reference,
    /// In the provider's minor units.
    Amount,
}

named_enum! {
    /// Unit of an amount in a response.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum AmountUnit {
        /// The provider's minor units.
        #[default]
        Minor = "minor",
        /// Units of the currency, as a number or as text: `12.99`.
        Decimal = "decimal",
    }
    /// The name in the columns `request` and `lookup`.
    pub fn name(self);
}

/// Where a response has the sum that was charged. The default compares nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SumFields {
    /// JSON pointer. <https://www.rfc-editor.org/rfc/rfc6901>
    pub amount: Option<String>,
    /// JSON pointer to the ISO 4217 code, in any case of letters.
    pub currency: Option<String>,
    pub unit: AmountUnit,
    /// A smaller sum than the one that was sent is a success, too.
    pub accepts_partial: bool,
}

/// Values of one payment that responses are compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaymentIdentity {
    pub id: JobId,
    pub idempotency_key: Identifier,
    pub reference: Option<Arc<str>>,
    /// As it was sent.
    pub sum: SentSum,
    /// ISO 4217 code.
    pub currency: Arc<str>,
}

impl PaymentIdentity {
    pub fn new(job: &Job, sum: SentSum) -> Self {
        Self {
            id: job.id.clone(),
            idempotency_key: job.effective_key().clone(),
            reference: job.reference.clone(),
            sum,
            currency: job.currency.clone(),
        }
    }
}
