//! The job message of the contract, decoded into a [`Job`] and encoded from it.
//!
//! What would have to be guessed is invalid: duplicate keys, unknown fields, inexact amounts, text that SQL cannot
//! hold. An error names the field and the fix and never repeats a value, because a payload may hold what must not be
//! logged. `serde_json` parses every byte; [`Json`] is as strict as money needs it: no duplicate keys, no NUL, no lone
//! surrogates, numbers kept as digits.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use jiff::Timestamp;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::domain::job::{BODY_BYTES_MAX, ContentHash, InvalidMessage, InvalidReason, Job, JobId};
use crate::domain::provider::ProviderName;
pub use crate::domain::sensitive::CardNumbers;
use crate::domain::sensitive::{TextContext, find_sensitive};
use crate::domain::time::EpochMs;
use crate::ledger::events::OutcomeEvent;
use crate::ledger::rejected::RejectedEvent;

mod content;
mod fields;
mod head;

use fields::MessageFields;
pub use head::{HEAD_CHARS_MAX, body_head, masked_because, stored_message};

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

/// Whether a job is still what its message said. An emptied payload, or a row that was changed by hand, gives another
/// hash.
pub fn is_unchanged(job: &Job, hash: ContentHash) -> bool {
    let payload = job.payload.as_deref().map(parse_json).transpose();
    payload.is_ok_and(|payload| fields::content_hash(job, payload.as_ref()) == hash)
}

/// With `rules` as one of a new job, whose content is judged.
fn read(body: &[u8], lane: &ProviderName, rules: Option<CardNumbers>) -> Result<Decoded, DecodeError> {
    // Size first: nothing longer is ever parsed.
    if body.len() > BODY_BYTES_MAX {
        let detail = format!("the message has {} bytes: at most {BODY_BYTES_MAX} are taken", body.len());
        return Err(invalid(InvalidMessage::new(InvalidReason::TooLarge, detail)));
    }
    let text = text_of(body).map_err(invalid)?;
    let json = parse_json(text).map_err(|detail| invalid(InvalidMessage::new(InvalidReason::Malformed, detail)))?;
    let Json::Object(members) = json else {
        return Err(invalid(InvalidMessage::new(InvalidReason::Malformed, "the message must be a JSON object")));
    };
    let fields = MessageFields::new(&members);
    let with_id = |invalid| {
        // A rejected message's id is written down and shown.
        let cards = rules.unwrap_or(CardNumbers::Off);
        let is_shown = |id: &JobId| find_sensitive(id.as_str(), TextContext::Identifier, cards).is_none();
        DecodeError::Invalid { invalid, claimed_id: fields.claimed_id().filter(is_shown) }
    };
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
    put("currency", Some(json!(&*job.currency)));
    put("account", job.account.as_ref().map(|account| json!(account.as_str())));
    put("reference", job.reference.as_ref().map(|reference| json!(&**reference)));
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

/// The state in the event about a rejected message, and the end of its routing key.
pub const REJECTED_EVENT: &str = "rejected";

/// An event on `payments.outcomes`; absent fields are `null`.
#[derive(Serialize)]
struct OutcomeBody<'a> {
    at: Rfc3339,
    attempts: u32,
    charged_amount: Option<i64>,
    event_id: &'a str,
    id: &'a str,
    n: u32,
    provider: &'a str,
    provider_reference: Option<&'a str>,
    reason: Option<&'a str>,
    state: &'static str,
}

/// The body of an event on `payments.outcomes`.
pub fn outcome_event_json(event: &OutcomeEvent) -> Vec<u8> {
    let body = OutcomeBody {
        at: Rfc3339(EpochMs(event.at_ms)),
        attempts: event.attempts,
        charged_amount: event.charged_amount,
        event_id: &event.event_id,
        id: &event.id,
        n: event.n,
        provider: event.provider.as_str(),
        provider_reference: event.provider_reference.as_deref(),
        reason: event.reason.as_deref(),
        state: event.state.name(),
    };
    // Texts and numbers can always be written.
    serde_json::to_vec(&body).unwrap_or_default()
}

/// The body of the event about a rejected message: without its content.
pub fn rejected_event_json(event: &RejectedEvent) -> Vec<u8> {
    json!({
        "id": event.job_id,
        "message_id": event.message_id,
        "provider": event.provider,
        "state": REJECTED_EVENT,
        "reason": event.reason,
        "at": Rfc3339(EpochMs(event.at.0)),
    })
    .to_string()
    .into_bytes()
}

/// Written with milliseconds, in UTC.
struct Rfc3339(EpochMs);

impl Serialize for Rfc3339 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:.3}", timestamp(self.0)))
    }
}

/// An instant beyond the years that RFC 3339 can write becomes the last (or first) that it can.
fn timestamp(at: EpochMs) -> Timestamp {
    Timestamp::from_millisecond(at.max(EpochMs::FIRST).0).unwrap_or(Timestamp::MAX)
}

/// Deepest nesting that is read; the same as serde_json's own limit, which does not hold for raw values.
const DEPTH_MAX: usize = 128;

/// Room for the members of most objects.
const MEMBERS_USUAL: usize = 8;

/// A JSON value that keeps what [`serde_json::Value`] would lose.
#[derive(Debug)]
enum Json<'a> {
    Null,
    Bool(bool),
    /// As written.
    Number(&'a str),
    Text(Cow<'a, str>),
    Array(Vec<Json<'a>>),
    Object(Vec<Member<'a>>),
}

#[derive(Debug)]
struct Member<'a> {
    key: Cow<'a, str>,
    value: Json<'a>,
    /// The value exactly as written.
    raw: &'a str,
}

/// # Errors
/// Says what is wrong and where; never a value.
fn parse_json(text: &str) -> Result<Json<'_>, String> {
    let raw: &RawValue = serde_json::from_str(text).map_err(|error| describe_error(&error))?;
    read_json(raw.get(), 0)
}

/// `raw` is one whole value that serde_json has accepted.
fn read_json(raw: &str, depth: usize) -> Result<Json<'_>, String> {
    if depth >= DEPTH_MAX {
        return Err(format!("nested deeper than {DEPTH_MAX} levels"));
    }
    Ok(match raw.as_bytes().first() {
        Some(b'{') => {
            let Pairs(pairs) = serde_json::from_str(raw).map_err(|error| describe_error(&error))?;
            Json::Object(members(pairs, depth)?)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(raw).map_err(|error| describe_error(&error))?;
            Json::Array(items.into_iter().map(|item| read_json(item.get(), depth + 1)).collect::<Result<_, _>>()?)
        }
        Some(b'"') => {
            let Text(text) = serde_json::from_str(raw).map_err(|_| "a string holds an invalid escape".to_owned())?;
            Json::Text(without_nul(text)?)
        }
        Some(b't') => Json::Bool(true),
        Some(b'f') => Json::Bool(false),
        Some(b'n') => Json::Null,
        _ => Json::Number(raw),
    })
}

fn members<'a>(pairs: Vec<(Text<'a>, &'a RawValue)>, depth: usize) -> Result<Vec<Member<'a>>, String> {
    let mut seen = BTreeSet::new();
    if let Some((Text(key), _)) = pairs.iter().find(|(Text(key), _)| !seen.insert(&**key)) {
        return Err(format!("{} appears twice in one object", named(key)));
    }
    let mut members = Vec::with_capacity(pairs.len());
    for (Text(key), value) in pairs {
        members.push(Member { key: without_nul(key)?, value: read_json(value.get(), depth + 1)?, raw: value.get() });
    }
    Ok(members)
}

/// A key as it may be shown: only what can be a field's name, for a key can be as secret as a value.
fn named(key: &str) -> String {
    let plain = |b: u8| b.is_ascii_lowercase() || b == b'_';
    if !key.is_empty() && key.len() <= 32 && key.bytes().all(plain) {
        return format!("field `{key}`");
    }
    "a field".to_owned()
}

fn without_nul(text: Cow<'_, str>) -> Result<Cow<'_, str>, String> {
    if text.contains('\0') {
        return Err("a string holds U+0000, which SQL cannot store".to_owned());
    }
    Ok(text)
}

/// What is wrong with a text that is no JSON, and where; never what stands there.
pub fn describe_error(error: &serde_json::Error) -> String {
    use serde_json::error::Category;
    let what = match error.classify() {
        Category::Eof => "JSON ends too early",
        Category::Io | Category::Syntax | Category::Data => "not JSON",
    };
    format!("{what}: line {}, column {}", error.line(), error.column())
}

/// A string, borrowed if it has no escapes.
#[derive(serde::Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// An object's members in their order, duplicates included.
struct Pairs<'a>(Vec<(Text<'a>, &'a RawValue)>);

impl<'de: 'a, 'a> serde::Deserialize<'de> for Pairs<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;

        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Vec<(Text<'de>, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::with_capacity(MEMBERS_USUAL);
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(pairs)
            }
        }

        deserializer.deserialize_map(PairsVisitor).map(Pairs)
    }
}

#[cfg(test)]
mod tests;
