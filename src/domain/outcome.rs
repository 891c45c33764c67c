//! Outcome of one request, charge or look-up: the closed list of meanings that a response, or its absence, can have.
//!
//! It has no HTTP types (`provider::http::classify` translates). The decision that follows is in
//! [`super::disposition`].

use std::time::Duration;

use super::local_fault::LocalFault;
use super::names::named_enum;
use super::response::{RESPONSE_BODY_BYTES_MAX, RESPONSE_HEADERS_MAX};
use super::sensitive::{CardNumbers, REDACTED, Sensitive, TextContext, find_sensitive};

/// Outcome of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Charged, with the provider's reference if it named one.
    Accepted { reference: Option<String> },
    /// Charged with a smaller sum than the one that was sent, where the row accepts that.
    PartlyAccepted(PartialCharge),
    /// The provider has this payment with another sum than the one that was sent.
    Differs { reason: String, reference: Option<String> },
    /// Declined finally by the provider; nothing was charged.
    Declined { reason: String },
    /// The provider refused with 429. Nothing was charged, and no attempt counts.
    Throttled { retry_after: Option<Duration> },
    /// The provider locks or limits one object, and did nothing: only this job waits, and no attempt counts.
    Busy { retry_after: Option<Duration> },
    /// The provider refuses our set-up (credentials, path, method): the lane pauses and the job waits.
    Misconfigured { status: u16 },
    /// The provider is still working on the same key: ask again later with the same key.
    InProgress { retry_after: Option<Duration> },
    /// The payment may have been charged. `retry_after` pauses the lane if the provider named a wait (503).
    Unknown { cause: UnknownCause, retry_after: Option<Duration> },
    /// The provider understood the request and refuses it as it is: manual review.
    Rejected { reason: String },
    /// No byte of the request was sent: confirmed not charged.
    NotSent { cause: String },
    /// No byte was sent, for a reason that says nothing about the provider: this job waits, and no attempt counts.
    LocalFault(LocalFault),
    /// A refusal that may answer an earlier request of the same connection: its wait is kept, but this request may have
    /// charged.
    Unconfirmed { refusal: Refusal, status: u16 },
}

/// A charge with a smaller sum than the one that was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialCharge {
    pub reference: Option<String>,
    /// ISO 4217 minor units.
    pub amount: i64,
}

/// A response that says that the provider did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Throttled { retry_after: Option<Duration> },
    Busy { retry_after: Option<Duration> },
    Misconfigured { status: u16 },
}

impl From<Refusal> for Outcome {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Throttled { retry_after } => Self::Throttled { retry_after },
            Refusal::Busy { retry_after } => Self::Busy { retry_after },
            Refusal::Misconfigured { status } => Self::Misconfigured { status },
        }
    }
}

/// Progress of a request; decides how its permit is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmission {
    /// No byte was sent.
    NotSent,
    /// It was sent, and it is unknown when, or whether, the provider counted it.
    NoResponse,
    Responded,
}

/// Reason of a job that rule `refuse` declined without a request: a public, stable code.
pub const ACCOUNT_REFUSED: &str = "account_refused";

/// Code of a request whose response has another sum.
const DIFFERS: &str = "differs";

/// Begins the reason of a payment that the provider has with another sum: a public, stable code.
pub const AMOUNT_DIFFERS: &str = "amount_differs";

/// Reason of a success with a smaller sum.
pub const PARTLY_ACCEPTED: &str = "accepted in part";

/// Code of a request that was never sent, charge or look-up.
pub const NOT_SENT: &str = "not_sent";

impl Outcome {
    /// Stable code for the `outcome` column of `attempts`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Accepted { .. } | Self::PartlyAccepted(_) => "accepted",
            Self::Differs { .. } => DIFFERS,
            Self::Declined { .. } => "declined",
            Self::Throttled { .. } => "throttled",
            Self::Busy { .. } => "busy",
            Self::Misconfigured { .. } => "misconfigured",
            Self::InProgress { .. } => "in_progress",
            Self::Unknown { .. } | Self::Unconfirmed { .. } => "unknown",
            Self::Rejected { .. } => "rejected",
            Self::NotSent { .. } | Self::LocalFault(_) => NOT_SENT,
        }
    }

    /// Text for the `detail` column; empty if the code says everything.
    pub fn detail(&self) -> String {
        match self {
            Self::Declined { reason } | Self::Rejected { reason } | Self::Differs { reason, .. } => reason.clone(),
            Self::PartlyAccepted(_) => PARTLY_ACCEPTED.to_owned(),
            Self::Unknown { cause, .. } => cause.describe(),
            Self::NotSent { cause } => cause.clone(),
            Self::LocalFault(fault) => fault.to_string(),
            Self::Unconfirmed { status, .. } => {
                format!("provider answered {status} on a reused connection, perhaps to an earlier request")
            }
            _ => String::new(),
        }
    }

    /// The refusal that this outcome is, confirmed or not.
    pub fn refusal(&self) -> Option<Refusal> {
        match *self {
            Self::Throttled { retry_after } => Some(Refusal::Throttled { retry_after }),
            Self::Busy { retry_after } => Some(Refusal::Busy { retry_after }),
            Self::Misconfigured { status } => Some(Refusal::Misconfigured { status }),
            Self::Unconfirmed { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    /// Whether the job may be charged after this outcome alone.
    pub fn may_have_charged(&self) -> bool {
        matches!(self, Self::Unknown { .. } | Self::InProgress { .. } | Self::Unconfirmed { .. } | Self::Differs { .. })
    }

    /// Removes sensitive text that must not be stored, and returns what it was. The outcome itself stays.
    pub fn redact(&mut self, cards: CardNumbers) -> Option<Sensitive> {
        match self {
            Self::Accepted { reference } => redact_reference(reference, cards),
            Self::PartlyAccepted(charge) => redact_reference(&mut charge.reference, cards),
            Self::Differs { reason, reference } => redact_reference(reference, cards).or(redact_text(reason, cards)),
            Self::Declined { reason } | Self::Rejected { reason } | Self::NotSent { cause: reason } => {
                redact_text(reason, cards)
            }
            _ => None,
        }
    }

    /// Whether the provider's limit certainly let the request through. Wrong credentials may be refused before it
    /// counts.
    pub fn passed_rate_limit(&self) -> bool {
        match self {
            Self::Accepted { .. } | Self::Declined { .. } | Self::Rejected { .. } | Self::Busy { .. } => true,
            Self::PartlyAccepted(_) | Self::Differs { .. } | Self::InProgress { .. } => true,
            Self::Throttled { .. } | Self::Misconfigured { .. } | Self::Unknown { .. } => false,
            Self::NotSent { .. } | Self::LocalFault(_) | Self::Unconfirmed { .. } => false,
        }
    }

    pub fn transmission(&self) -> Transmission {
        match self {
            Self::NotSent { .. } | Self::LocalFault(_) => Transmission::NotSent,
            Self::Unknown { cause, .. } if cause.is_no_response() => Transmission::NoResponse,
            Self::Unconfirmed { .. } => Transmission::NoResponse,
            _ => Transmission::Responded,
        }
    }
}

/// Drops a sensitive reference instead of replacing it by a marker, because each succeeded payment's reference is
/// unique.
fn redact_reference(reference: &mut Option<String>, cards: CardNumbers) -> Option<Sensitive> {
    let found = find_sensitive(reference.as_deref()?, TextContext::Identifier, cards)?;
    *reference = None;
    Some(found)
}

fn redact_text(text: &mut String, cards: CardNumbers) -> Option<Sensitive> {
    let found = find_sensitive(text, TextContext::Text, cards)?;
    REDACTED.clone_into(text);
    Some(found)
}

/// Note on a success whose reference was dropped.
pub fn redacted_reference_note(what: Sensitive) -> String {
    format!("its reference is {REDACTED}: it holds {}", what.describe())
}

/// Cause of an unknown outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnknownCause {
    Timeout,
    ConnectionLost,
    ServerError(u16),
    UnreadableResponse(u16),
    /// The response has more headers, or a larger body, than is read.
    ResponseTooLarge(u16),
    /// The response does not repeat what the row's `echo` names: it may belong to another payment.
    NotEchoed(u16),
    /// Another response followed this refusal on its connection: one of them answers an earlier request.
    OtherResponse(u16),
    /// A worker was lost between `sending` and the outcome.
    WorkerLost,
}

impl UnknownCause {
    /// Whether no response to this request is known, so that the provider may count it later.
    pub fn is_no_response(self) -> bool {
        matches!(self, Self::Timeout | Self::ConnectionLost | Self::NotEchoed(_) | Self::OtherResponse(_))
    }

    /// Stable text for `reason` columns, events and logs.
    pub fn describe(self) -> String {
        match self {
            Self::Timeout => "no answer in time".to_owned(),
            Self::ConnectionLost => "connection lost after the request was begun".to_owned(),
            Self::ServerError(status) => format!("provider answered {status}"),
            Self::UnreadableResponse(status) => format!("provider answered {status} with a body that cannot be read"),
            Self::ResponseTooLarge(status) => {
                let kib = RESPONSE_BODY_BYTES_MAX / 1024;
                format!("provider answered {status} with more than {RESPONSE_HEADERS_MAX} headers or {kib} KiB")
            }
            Self::NotEchoed(status) => {
                format!("provider answered {status} without what echo names of this payment, perhaps about another one")
            }
            Self::OtherResponse(status) => {
                format!("provider answered {status}, and another response followed on the same connection")
            }
            Self::WorkerLost => "a worker was lost while the request was in flight".to_owned(),
        }
    }
}

/// Result of one look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupResult {
    /// Charged.
    Accepted { reference: Option<String> },
    /// Charged with a smaller sum than the one that was sent, where the row accepts that.
    PartlyAccepted(PartialCharge),
    /// Declined finally; nothing was charged.
    Declined { reason: String },
    /// The provider is still working on it.
    InProgress { retry_after: Option<Duration> },
    /// The provider knows no such payment, so far.
    NotFound,
    /// The provider has the payment with another sum than the one that was sent.
    Differs { reason: String },
    /// The response decides nothing.
    Unclear { reason: String },
    /// There was no response, or none that can be read. `retry_after` pauses the lane if the provider named a wait
    /// (503).
    Unknown { cause: UnknownCause, retry_after: Option<Duration> },
    /// The provider's limit was hit.
    Throttled { retry_after: Option<Duration> },
    /// The provider locks or limits this payment's object.
    Busy { retry_after: Option<Duration> },
    /// The provider refuses our credentials.
    Misconfigured { status: u16 },
    /// No byte of the request was sent.
    NotSent { cause: String },
    /// No byte was sent, for a reason that says nothing about the provider.
    LocalFault(LocalFault),
}

impl LookupResult {
    /// Stable code for the `outcome` column of `attempts`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Accepted { .. } | Self::PartlyAccepted(_) => "accepted",
            Self::Declined { .. } => "declined",
            Self::InProgress { .. } => "in_progress",
            Self::NotFound => "not_found",
            Self::Differs { .. } => DIFFERS,
            Self::Unclear { .. } => "unclear",
            Self::Unknown { .. } => "unknown",
            Self::Throttled { .. } => "throttled",
            Self::Busy { .. } => "busy",
            Self::Misconfigured { .. } => "misconfigured",
            Self::NotSent { .. } | Self::LocalFault(_) => NOT_SENT,
        }
    }

    /// Text for the `detail` column; empty if the code says everything.
    pub fn detail(&self) -> String {
        match self {
            Self::Declined { reason } | Self::Differs { reason } | Self::Unclear { reason } => reason.clone(),
            Self::PartlyAccepted(_) => PARTLY_ACCEPTED.to_owned(),
            Self::Unknown { cause, .. } => cause.describe(),
            Self::NotSent { cause } => cause.clone(),
            Self::LocalFault(fault) => fault.to_string(),
            _ => String::new(),
        }
    }

    /// Removes sensitive text that must not be stored, and returns what it was. The result itself stays.
    pub fn redact(&mut self, cards: CardNumbers) -> Option<Sensitive> {
        match self {
            Self::Accepted { reference } => redact_reference(reference, cards),
            Self::PartlyAccepted(charge) => redact_reference(&mut charge.reference, cards),
            Self::Declined { reason }
            | Self::Differs { reason }
            | Self::Unclear { reason }
            | Self::NotSent { cause: reason } => redact_text(reason, cards),
            _ => None,
        }
    }

    /// Whether the provider's limit certainly let the request through. Wrong credentials may be refused before it
    /// counts.
    pub fn passed_rate_limit(&self) -> bool {
        match self {
            Self::Accepted { .. } | Self::Declined { .. } | Self::Differs { .. } | Self::InProgress { .. } => true,
            Self::PartlyAccepted(_) | Self::NotFound | Self::Unclear { .. } | Self::Busy { .. } => true,
            Self::Throttled { .. } | Self::Misconfigured { .. } | Self::Unknown { .. } => false,
            Self::NotSent { .. } | Self::LocalFault(_) => false,
        }
    }

    pub fn transmission(&self) -> Transmission {
        match self {
            Self::NotSent { .. } | Self::LocalFault(_) => Transmission::NotSent,
            Self::Unknown { cause, .. } if cause.is_no_response() => Transmission::NoResponse,
            _ => Transmission::Responded,
        }
    }
}

named_enum! {
    /// Final states of a job.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum FinalState {
        Succeeded = "succeeded",
        Declined = "declined",
        Dead = "dead",
        Expired = "expired",
        /// An operator decides.
        Review = "review",
        Cancelled = "cancelled",
    }
    /// The name in the ledger and in outcome events.
    pub fn name(self);
}

impl FinalState {
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}
