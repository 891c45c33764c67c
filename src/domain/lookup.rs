//! Asking a provider what became of a payment: how a row says it is asked, and what its answer can mean.
//!
//! Refuses to decide ([`super::disposition`] does) and refuses to know HTTP: an address here is text with places for a
//! job's fields, and every field is percent-encoded into it.

use std::time::Duration;

use super::job::Job;
use super::outcome::{NOT_SENT, UnknownCause, Way};

/// The `lookup` column, as meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
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
pub enum Finding {
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
}

impl Finding {
    /// Stable word for the `outcome` column of `attempts`.
    #[must_use]
    pub fn word(&self) -> &'static str {
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
            Self::NotSent { .. } => NOT_SENT,
        }
    }

    /// For the `detail` column; empty when the word says it all.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            Self::Declined { reason } | Self::Differs { reason } | Self::Unclear { reason } => reason.clone(),
            Self::Unknown { cause, .. } => cause.describe(),
            Self::NotSent { cause } => cause.clone(),
            _ => String::new(),
        }
    }

    /// Whether the provider's limit surely let the request through. Wrong credentials may be seen before it counts.
    #[must_use]
    pub fn is_let_through(&self) -> bool {
        match self {
            Self::Accepted { .. } | Self::Declined { .. } | Self::Differs { .. } | Self::InProgress => true,
            Self::NotFound | Self::Unclear { .. } | Self::Busy { .. } => true,
            Self::Throttled { .. } | Self::Misconfigured { .. } | Self::Unknown { .. } | Self::NotSent { .. } => false,
        }
    }

    #[must_use]
    pub fn way(&self) -> Way {
        match self {
            Self::NotSent { .. } => Way::NotSent,
            Self::Unknown { cause, .. } if cause.is_silence() => Way::Lost,
            _ => Way::Answered,
        }
    }
}

/// An address with places: `https://api.example.com/charges?id=${job:id}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupUrl {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Place(Place),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Id,
    Account,
    Reference,
    IdempotencyKey,
}

const PLACES: &str = "${job:id}, ${job:idempotency_key}, ${job:reference} or ${job:account}";

impl LookupUrl {
    /// Reads the places; whether the rest is an address is for others to judge, by its [sample](Self::sample).
    ///
    /// # Errors
    /// Says what is wrong with the places and how to mend it; never quotes the text, because somebody will write a secret
    /// there.
    pub fn parse(text: &str) -> Result<Self, String> {
        let url = Self { parts: parts(text)? };
        let names_it = |part: &Part| matches!(part, Part::Place(place) if *place != Place::Account);
        if !url.parts.iter().any(names_it) {
            return Err("names no payment, so every payment would get the same answer: put ${job:id} in it".to_owned());
        }
        // Who is asked must not depend on what a job says.
        let host_ends = |text: &str| text.split_once("://").is_some_and(|(_, rest)| rest.contains(['/', '?']));
        if !matches!(url.parts.first(), Some(Part::Text(text)) if host_ends(text)) {
            return Err("has a place in its host: places belong behind it, in path or query".to_owned());
        }
        Ok(url)
    }

    /// The address with `x` at every place, for judging where it leads.
    #[must_use]
    pub fn sample(&self) -> String {
        let fill = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Place(_) => "x".to_owned(),
        };
        self.parts.iter().map(fill).collect()
    }

    /// The address that asks about this job.
    ///
    /// # Errors
    /// When the job has nothing for a place, or what it has would change the path.
    pub fn of(&self, job: &Job) -> Result<String, String> {
        let mut address = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => address.push_str(text),
                Part::Place(place) => push_encoded(&mut address, value(*place, job)?),
            }
        }
        if climbs(&address) {
            return Err("a field of the job would change the path of lookup.url".to_owned());
        }
        Ok(address)
    }
}

/// Whether a step of the path is `.` or `..`, which stay what they are when encoded.
/// <https://url.spec.whatwg.org/#double-dot-path-segment>
fn climbs(address: &str) -> bool {
    let path = address.split(['?', '#']).next().unwrap_or_default().to_ascii_lowercase().replace("%2e", ".");
    path.split('/').any(|step| matches!(step, "." | ".."))
}

fn parts(text: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, opened)) = rest.split_once("${") {
        let (name, after) = opened.split_once('}').ok_or("has a `${` that is never closed by `}`")?;
        if !before.is_empty() {
            parts.push(Part::Text(before.to_owned()));
        }
        parts.push(Part::Place(match name.strip_prefix("job:").unwrap_or(name) {
            "id" => Place::Id,
            "account" => Place::Account,
            "reference" => Place::Reference,
            "idempotency_key" => Place::IdempotencyKey,
            _ => return Err(format!("has a place that is none: use {PLACES}")),
        }));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(Part::Text(rest.to_owned()));
    }
    Ok(parts)
}

fn value(place: Place, job: &Job) -> Result<&str, String> {
    let (name, value) = match place {
        Place::Id => ("id", Some(job.id.as_str())),
        Place::IdempotencyKey => ("idempotency_key", Some(job.effective_key().as_str())),
        Place::Account => ("account", job.account.as_ref().map(|account| account.as_str())),
        Place::Reference => ("reference", job.reference.as_deref()),
    };
    value.filter(|value| !value.is_empty()).ok_or_else(|| format!("the job has no {name}, which lookup.url needs"))
}

/// Everything but the unreserved characters. <https://www.rfc-editor.org/rfc/rfc3986#section-2.3>
fn push_encoded(address: &mut String, value: &str) {
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            address.push(char::from(byte));
        } else {
            address.push_str(&format!("%{byte:02X}"));
        }
    }
}

#[cfg(test)]
#[path = "lookup_tests.rs"]
mod tests;
