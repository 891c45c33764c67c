//! Asking a provider what became of a payment: how a row says it is asked, and what its answer can mean.
//!
//! Refuses to decide ([`super::disposition`] does) and refuses to know HTTP.

use std::time::Duration;

use super::echo::Echo;
use super::expansion::{RequestBuildError, RequestPart};
use super::job::Job;
use super::local_fault::LocalFault;
use super::outcome::{NOT_SENT, Transmission, UnknownCause, redact_reference, redact_text};
use super::sensitive::{CardNumbers, Sensitive};
use super::url_template::UrlTemplate;

/// The `lookup` column, as meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupConfig {
    pub url: LookupUrl,
    pub method: LookupMethod,
    /// JSON pointer to the word that tells, and what the words mean. <https://www.rfc-editor.org/rfc/rfc6901>
    pub state: String,
    pub accepted: Vec<String>,
    pub declined: Vec<String>,
    pub in_progress: Vec<String>,
    /// JSON pointer to the provider's reference.
    pub reference: String,
    /// JSON pointer to the amount in minor units; `None`: not compared.
    pub amount: Option<String>,
    /// JSON pointer to the currency's ISO 4217 code, in any case of letters; `None`: not compared.
    pub currency: Option<String>,
    pub echo: Echo,
    pub not_found: WhenNotFound,
    /// Since the last charge of unknown outcome was begun: a payment that is then still undecided goes to a person.
    pub give_up_after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupMethod {
    Get,
    Post,
}

/// What follows once a payment that may have been charged is not known to its provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenNotFound {
    Review,
    /// Sent once more, with the same key and the frozen request.
    Resend,
}

/// What one look-up found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupResult {
    /// Charged.
    Accepted { reference: Option<String> },
    /// Refused for good; nothing was charged.
    Declined { reason: String },
    /// The provider is still working on it.
    InProgress,
    /// The provider knows no such payment, so far.
    NotFound,
    /// It is known with another amount or currency than ours.
    Differs { reason: String },
    /// An answer that decides nothing.
    Unclear { reason: String },
    /// No answer, or none that can be read. `retry_after` rests the lane when the provider named a wait (503).
    Unknown { cause: UnknownCause, retry_after: Option<Duration> },
    /// The provider's limit was hit.
    Throttled { retry_after: Option<Duration> },
    /// A lock or a limit on this payment's object.
    Busy { retry_after: Option<Duration> },
    /// Our credentials are wrong.
    Misconfigured { status: u16 },
    /// No byte of the request left.
    NotSent { cause: String },
    /// The same, for a reason that says nothing of the provider.
    LocalFault(LocalFault),
}

impl LookupResult {
    /// Stable word for the `outcome` column of `attempts`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Accepted { .. } => "accepted",
            Self::Declined { .. } => "declined",
            Self::InProgress => "in_progress",
            Self::NotFound => "not_found",
            Self::Differs { .. } => "differs",
            Self::Unclear { .. } => "unclear",
            Self::Unknown { .. } => "unknown",
            Self::Throttled { .. } => "throttled",
            Self::Busy { .. } => "busy",
            Self::Misconfigured { .. } => "misconfigured",
            Self::NotSent { .. } | Self::LocalFault(_) => NOT_SENT,
        }
    }

    /// For the `detail` column; empty when the word says it all.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            Self::Declined { reason } | Self::Differs { reason } | Self::Unclear { reason } => reason.clone(),
            Self::Unknown { cause, .. } => cause.describe(),
            Self::NotSent { cause } => cause.clone(),
            Self::LocalFault(fault) => fault.to_string(),
            _ => String::new(),
        }
    }

    /// Leaves out what no text may hold that is kept, and says what it was. The finding stays what it is.
    pub fn redact(&mut self, cards: CardNumbers) -> Option<Sensitive> {
        match self {
            Self::Accepted { reference } => redact_reference(reference, cards),
            Self::Declined { reason } | Self::Differs { reason } | Self::Unclear { reason } => {
                redact_text(reason, cards)
            }
            Self::NotSent { cause } => redact_text(cause, cards),
            _ => None,
        }
    }

    /// Whether the provider's limit surely let the request through. Wrong credentials may be seen before it counts.
    #[must_use]
    pub fn passed_rate_limit(&self) -> bool {
        match self {
            Self::Accepted { .. } | Self::Declined { .. } | Self::Differs { .. } | Self::InProgress => true,
            Self::NotFound | Self::Unclear { .. } | Self::Busy { .. } => true,
            Self::Throttled { .. } | Self::Misconfigured { .. } | Self::Unknown { .. } => false,
            Self::NotSent { .. } | Self::LocalFault(_) => false,
        }
    }

    #[must_use]
    pub fn transmission(&self) -> Transmission {
        match self {
            Self::NotSent { .. } | Self::LocalFault(_) => Transmission::NotSent,
            Self::Unknown { cause, .. } if cause.is_no_response() => Transmission::NoResponse,
            _ => Transmission::Responded,
        }
    }
}

/// Address of a look-up, which names the payment: `https://api.example.com/charges?id=${job:id}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupUrl(UrlTemplate);

impl LookupUrl {
    /// Reads the placeholders; whether the rest is an address is for others to judge, by its [sample](Self::sample).
    ///
    /// # Errors
    /// Says what is wrong with the placeholders and how to fix it. Never quotes the text, which may hold a secret.
    pub fn parse(text: &str) -> Result<Self, String> {
        let url = UrlTemplate::parse(text)?;
        if !url.names_payment() {
            return Err("names no payment, so every payment would get the same answer: put ${job:id} in it".to_owned());
        }
        Ok(Self(url))
    }

    /// The address with `x` at every placeholder, for judging where it leads.
    #[must_use]
    pub fn sample(&self) -> String {
        self.0.sample()
    }

    /// The address that asks about this job.
    ///
    /// # Errors
    /// As [`UrlTemplate::of`].
    pub fn for_job(&self, job: &Job) -> Result<String, RequestBuildError> {
        self.0.for_job(job, RequestPart::LookupUrl)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_url_without_payment_field_is_rejected() {
        for url in ["", "https://x.example/charges", "https://x.example/${job:account}"] {
            assert!(LookupUrl::parse(url).unwrap_err().contains("names no payment"), "{url}");
        }
        assert!(LookupUrl::parse("https://x.example/${reference}").is_ok());
    }
}
