//! Writes what [`super::decode`] reads, and the events that tell what became of it.
//!
//! Refuses to fail: every value it is given can be written.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::VERSION;
use super::fields::FIRST_INSTANT;
use crate::domain::job::Job;
use crate::domain::time::EpochMs;
use crate::ledger::OutcomeEvent;

/// The message for a job, with its payload byte for byte as the producer wrote it.
#[must_use]
pub fn encode(job: &Job) -> Vec<u8> {
    let mut fields = Map::new();
    fields.insert("v".to_owned(), json!(VERSION));
    fields.insert("provider".to_owned(), json!(job.provider.as_str()));
    with_fields(fields, job)
}

/// The same without what the lane says anyway, so that a job whose first message just fitted still fits.
#[must_use]
pub fn encode_for_lane(job: &Job) -> Vec<u8> {
    with_fields(Map::new(), job)
}

fn with_fields(mut fields: Map<String, Value>, job: &Job) -> Vec<u8> {
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(key.to_owned(), value);
        }
    };
    put("id", Some(json!(job.id.as_str())));
    put("amount", Some(json!(job.amount)));
    put("currency", Some(json!(job.currency)));
    put("account", job.account.as_ref().map(|account| json!(account.as_str())));
    put("reference", job.reference.as_ref().map(|reference| json!(reference)));
    put("idempotency_key", job.idempotency_key.as_ref().map(|key| json!(key.as_str())));
    put("cost", (job.cost != 1).then(|| json!(job.cost)));
    put("priority", (job.priority != 0).then(|| json!(job.priority)));
    put("not_before", job.not_before.map(|at| json!(rfc3339(at))));
    put("expires_at", job.expires_at.map(|at| json!(rfc3339(at))));
    let mut text = Value::Object(fields).to_string();
    if let Some(payload) = &job.payload {
        text.pop();
        text.push_str(r#","payload":"#);
        text.push_str(payload);
        text.push('}');
    }
    text.into_bytes()
}

/// The body of an event on `payments.outcomes`; absent fields are `null`.
#[must_use]
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

/// With milliseconds, in UTC. An instant beyond the years that RFC 3339 can write becomes the last (or first) that it can.
fn rfc3339(at: EpochMs) -> String {
    let timestamp = Timestamp::from_millisecond(at.max(FIRST_INSTANT).0).unwrap_or(Timestamp::MAX);
    format!("{timestamp:.3}")
}
