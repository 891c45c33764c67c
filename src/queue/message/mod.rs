//! The job message of the contract, decoded into a [`Job`] and encoded from it.
//!
//! What would have to be guessed is invalid: duplicate keys, unknown fields, inexact amounts, text that SQL cannot
//! hold. An error names the field and the fix and never repeats a value, because a payload may hold what must not be
//! logged.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::domain::job::{BODY_BYTES_MAX, ContentHash, InvalidMessage, InvalidReason, Job, JobId};
use crate::domain::provider::ProviderName;
pub use crate::domain::sensitive::CardNumbers;
use crate::domain::sensitive::{TextContext, find_sensitive};
use crate::domain::time::EpochMs;
use crate::ledger::OutcomeEvent;

mod content;
mod fields;
mod json;

pub use json::describe_error;

use fields::MessageFields;
use json::{Json, Member};

/// The version of the message format that this program writes and reads.
pub const VERSION: u64 = 1;

/// A message that is a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    pub job: Job,
    pub hash: ContentHash,
    /// What was let through but should be looked at; names fields, holds no value.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Can never be a job. The id is what the message claims, if it has the form of one.
    #[error("{invalid}")]
    Invalid { invalid: InvalidMessage, claimed_id: Option<JobId> },
    /// Written by a newer producer: it waits for a newer worker, it is not invalid.
    #[error("message format {0} is newer than this program's: update the workers")]
    NewerVersion(u64),
}

/// Reads one message of a lane.
///
/// # Errors
/// [`DecodeError::Invalid`] names the field and the fix; [`DecodeError::NewerVersion`] when `v` is above [`VERSION`].
pub fn decode(body: &[u8], lane: &ProviderName, card_numbers: CardNumbers) -> Result<Decoded, DecodeError> {
    read(body, lane, Some(card_numbers))
}

/// Reads the message of a job that was judged when it was recorded: what a new job's content must not hold, which may
/// have become more since then, is no matter.
///
/// # Errors
/// As [`decode`], but never for a card number or a secret.
pub fn decode_recorded(body: &[u8], lane: &ProviderName) -> Result<Decoded, DecodeError> {
    read(body, lane, None)
}

/// With `rules` as one of a new job, whose content is judged.
fn read(body: &[u8], lane: &ProviderName, rules: Option<CardNumbers>) -> Result<Decoded, DecodeError> {
    // Size first: nothing longer is ever parsed.
    if body.len() > BODY_BYTES_MAX {
        let detail = format!("the message has {} bytes: at most {BODY_BYTES_MAX} are taken", body.len());
        return Err(invalid(InvalidMessage::new(InvalidReason::TooLarge, detail)));
    }
    let text = text_of(body).map_err(invalid)?;
    let json = json::parse(text).map_err(|detail| invalid(InvalidMessage::new(InvalidReason::Malformed, detail)))?;
    let Json::Object(members) = json else {
        return Err(invalid(InvalidMessage::new(InvalidReason::Malformed, "the message must be a JSON object")));
    };
    let fields = MessageFields::new(&members);
    // A rejected message's id is written down and shown.
    let cards = rules.unwrap_or(CardNumbers::Off);
    let claimed_id =
        fields.claimed_id().filter(|id| find_sensitive(id.as_str(), TextContext::Identifier, cards).is_none());
    let with_id = |invalid| DecodeError::Invalid { invalid, claimed_id: claimed_id.clone() };
    // Before all other fields: a newer format may have more of them.
    let version = fields.version().map_err(with_id)?;
    if version > VERSION {
        return Err(DecodeError::NewerVersion(version));
    }
    let job = fields.job(lane).map_err(with_id)?;
    let warnings = match rules {
        Some(card_numbers) => check_content(&members, card_numbers).map_err(with_id)?,
        None => Vec::new(),
    };
    let hash = fields::content_hash(&job, fields.payload_json());
    Ok(Decoded { job, hash, warnings })
}

/// What is let through but should be looked at.
fn check_content(members: &[Member<'_>], card_numbers: CardNumbers) -> Result<Vec<String>, InvalidMessage> {
    let content = content::scan_content(members, card_numbers);
    match (content.card_data, content.secret) {
        (Some(card), _) if card_numbers == CardNumbers::Refuse => {
            Err(InvalidMessage::new(InvalidReason::CardNumber, card.detail()))
        }
        (_, Some(secret)) => Err(InvalidMessage::new(InvalidReason::Secret, secret.detail())),
        (card, None) => Ok(card.map(content::SensitiveField::detail).into_iter().collect()),
    }
}

fn text_of(body: &[u8]) -> Result<&str, InvalidMessage> {
    let malformed = |detail: &str| InvalidMessage::new(InvalidReason::Malformed, detail);
    if body.is_empty() {
        return Err(malformed("the message is empty"));
    }
    let text = std::str::from_utf8(body)
        .map_err(|error| malformed(&format!("not UTF-8 from byte {} on", error.valid_up_to())))?;
    if text.starts_with('\u{feff}') {
        return Err(malformed("begins with a byte order mark: leave it out"));
    }
    Ok(text)
}

fn invalid(invalid: InvalidMessage) -> DecodeError {
    DecodeError::Invalid { invalid, claimed_id: None }
}

/// The message for a job, with its payload byte for byte as the producer wrote it.
///
/// What [`decode`] took, it takes again: where the fields that can be left out would make a message too long that
/// was not, they are.
pub fn encode(job: &Job) -> Vec<u8> {
    let whole = text(job, true);
    if whole.len() <= BODY_BYTES_MAX { whole.into_bytes() } else { text(job, false).into_bytes() }
}

fn text(job: &Job, whole: bool) -> String {
    let mut fields = Map::new();
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(key.to_owned(), value);
        }
    };
    put("v", whole.then(|| json!(VERSION)));
    put("id", Some(json!(job.id.as_str())));
    put("provider", whole.then(|| json!(job.provider.as_str())));
    put("amount", Some(json!(job.amount)));
    put("currency", Some(json!(job.currency)));
    put("account", job.account.as_ref().map(|account| json!(account.as_str())));
    put("reference", job.reference.as_ref().map(|reference| json!(reference)));
    put("idempotency_key", job.idempotency_key.as_ref().map(|key| json!(key.as_str())));
    put("cost", (job.cost != 1).then(|| json!(job.cost)));
    put("priority", (job.priority != 0).then(|| json!(job.priority)));
    put("not_before", job.not_before.map(|at| json!(timestamp(at).to_string())));
    put("expires_at", job.expires_at.map(|at| json!(timestamp(at).to_string())));
    let mut text = Value::Object(fields).to_string();
    if let Some(payload) = &job.payload {
        text.pop();
        text.push_str(r#","payload":"#);
        text.push_str(payload);
        text.push('}');
    }
    text
}

/// The body of an event on `payments.outcomes`; absent fields are `null`.
pub fn outcome_event_json(event: &OutcomeEvent) -> Vec<u8> {
    json!({
        "id": event.id,
        "provider": event.provider.as_str(),
        "state": event.state.name(),
        "provider_reference": event.provider_reference,
        "reason": event.reason,
        "attempts": event.attempts,
        "at": rfc3339(EpochMs(event.at_ms)),
    })
    .to_string()
    .into_bytes()
}

/// With milliseconds, in UTC.
fn rfc3339(at: EpochMs) -> String {
    format!("{:.3}", timestamp(at))
}

/// An instant beyond the years that RFC 3339 can write becomes the last (or first) that it can.
fn timestamp(at: EpochMs) -> Timestamp {
    Timestamp::from_millisecond(at.max(EpochMs::FIRST).0).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;
