//! Look-up of a payment: how a provider row says to ask for the outcome, and what the response can mean.
//!
//! The decision that follows is in [`super::disposition`]; HTTP is in `provider::http`.

use std::time::Duration;

use super::echo::Echo;
use super::expansion::{RequestBuildError, RequestPart};
use super::job::Job;
use super::local_fault::LocalFault;
use super::outcome::{NOT_SENT, Transmission, UnknownCause, redact_reference, redact_text};
use super::sensitive::{CardNumbers, Sensitive};
use super::url_template::UrlTemplate;

/// The validated `lookup` column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupConfig {
    pub url: LookupUrl,
    pub method: LookupMethod,
    /// JSON pointer to the value that tells the payment's state. <https://www.rfc-editor.org/rfc/rfc6901>
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
    /// Time since the start of the last charge of unknown outcome; a payment that is still undecided then goes to
    /// review.
    pub give_up_after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupMethod {
    Get,
    Post,
}

/// Next step if the provider does not know a payment that may have been charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenNotFound {
    Review,
    /// Sends the frozen request once more, with the same key.
    Resend,
}

/// Result of one look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupResult {
    /// Charged.
    Accepted { reference: Option<String> },
    /// Declined finally; nothing was charged.
    Declined { reason: String },
    /// The provider is still working on it.
    InProgress,
    /// The provider knows no such payment, so far.
    NotFound,
    /// The provider has the payment with another amount or currency.
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

    /// Text for the `detail` column; empty if the code says everything.
    pub fn detail(&self) -> String {
        match self {
            Self::Declined { reason } | Self::Differs { reason } | Self::Unclear { reason } => reason.clone(),
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
            Self::Declined { reason } | Self::Differs { reason } | Self::Unclear { reason } => {
                redact_text(reason, cards)
            }
            Self::NotSent { cause } => redact_text(cause, cards),
            _ => None,
        }
    }

    /// Whether the provider's limit certainly let the request through. Wrong credentials may be refused before it
    /// counts.
    pub fn passed_rate_limit(&self) -> bool {
        match self {
            Self::Accepted { .. } | Self::Declined { .. } | Self::Differs { .. } | Self::InProgress => true,
            Self::NotFound | Self::Unclear { .. } | Self::Busy { .. } => true,
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

/// Address of a look-up, which contains the payment's id: `https://api.example.com/charges?id=${job:id}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupUrl(UrlTemplate);

impl LookupUrl {
    /// Parses the placeholders. The caller validates the address by its [sample](Self::sample).
    ///
    /// # Errors
    /// If a placeholder is wrong; the text says how to fix it. It never quotes the address, which may hold a secret.
    pub fn parse(text: &str) -> Result<Self, String> {
        let url = UrlTemplate::parse(text)?;
        if !url.names_payment() {
            return Err("names no payment, so every payment would get the same answer: put ${job:id} in it".to_owned());
        }
        Ok(Self(url))
    }

    /// The address with `x` at every placeholder, to check its host.
    pub fn sample(&self) -> String {
        self.0.sample()
    }

    /// The address of the look-up for this job.
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
