//! Encoding of what [`super::decode`] reads, and of outcome events. Every value that it is given can be encoded.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::VERSION;
use crate::domain::job::{BODY_BYTES_MAX, Job};
use crate::domain::time::EpochMs;
use crate::ledger::OutcomeEvent;

/// The message for a job, with its payload byte for byte as the producer wrote it.
///
/// What [`super::decode`] took, it takes again: where the fields that can be left out would make a message too long that
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
