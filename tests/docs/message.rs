//! docs/message.md: the documented job message, reasons and outcomes are those that the code reads and writes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use sluicegate::domain::job::{BODY_BYTES_MAX, InvalidReason};
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::events::OutcomeEvent;
use sluicegate::ledger::operator::DatabaseTime;
use sluicegate::ledger::rejected::RejectedEvent;
use sluicegate::queue::message::{CardNumbers, DecodeError, decode, outcome_event_json, rejected_event_json};

use crate::page::{Page, plain};

fn acme() -> ProviderName {
    ProviderName::new("acme").unwrap()
}

fn read(message: &Value) -> Result<(), InvalidReason> {
    match decode(message.to_string().as_bytes(), &acme(), CardNumbers::Refuse) {
        Ok(_) => Ok(()),
        Err(DecodeError::Invalid { invalid, .. }) => Err(invalid.reason),
        Err(DecodeError::NewerVersion(version)) => panic!("version {version}"),
    }
}

/// A valid value for every field that exists.
fn values() -> BTreeMap<&'static str, Value> {
    BTreeMap::from([
        ("id", json!("invoice-1")),
        ("amount", json!(1299)),
        ("currency", json!("EUR")),
        ("account", json!("customer-17")),
        ("reference", json!("r".repeat(255))),
        ("payload", json!({ "n": 1 })),
        ("idempotency_key", json!("k-1")),
        ("cost", json!(1000)),
        ("priority", json!(9)),
        ("not_before", json!("2027-01-31T23:00:00Z")),
        ("expires_at", json!("2027-02-01T00:00:00+01:00")),
        ("provider", json!("acme")),
        ("v", json!(1)),
    ])
}

#[test]
fn field_table_matches_the_format() {
    let rows = Page::read("docs/message.md").table("## Fields", "field");
    let mut documented = BTreeMap::new();
    for row in &rows {
        for field in row[0].split(", ") {
            documented.insert(plain(field).to_owned(), row[1].starts_with("required"));
        }
    }
    let values = values();
    assert_eq!(documented.keys().collect::<Vec<_>>(), values.keys().collect::<Vec<_>>());
    let all: Value = values.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    assert_eq!(read(&all), Ok(()));
    for (field, required) in documented {
        let mut without = all.clone();
        without.as_object_mut().unwrap().remove(&field);
        assert_eq!(read(&without).is_err(), required, "{field}");
    }
    let mut more = all;
    more["colour"] = json!("red");
    assert_eq!(read(&more), Err(InvalidReason::UnknownField), "fields beyond the table are refused");
}

#[test]
fn every_reason_is_documented() {
    let page = Page::read("docs/message.md");
    let rows = page.table("## What is refused", "reason");
    let documented: Vec<&str> = rows.iter().map(|row| plain(&row[0])).collect();
    assert_eq!(documented, InvalidReason::ALL.map(InvalidReason::code));
    let bytes = "65,536";
    assert_eq!(bytes.replace(',', ""), BODY_BYTES_MAX.to_string());
    assert!(page.text.contains(&format!("at most {bytes} bytes")));
}

#[test]
fn every_final_state_is_documented() {
    let rows = Page::read("docs/message.md").table("## What comes back", "state");
    let documented: BTreeSet<&str> = rows.iter().map(|row| plain(&row[0])).collect();
    assert_eq!(documented, FinalState::ALL.map(FinalState::name).into_iter().collect());
}

#[test]
fn message_examples_match_the_code() {
    let event = OutcomeEvent {
        sequence: 1,
        event_id: "b6f2a8e0-3c41-4d0c-9a53-0d4d6f3f2a10".to_owned(),
        n: 1,
        id: "invoice-4711".to_owned(),
        provider: acme(),
        state: FinalState::Succeeded,
        provider_reference: Some("ch_2".to_owned()),
        charged_amount: None,
        reason: Some("accepted".to_owned()),
        attempts: 1,
        at_ms: 1_795_262_320_259,
    };
    let written: Value = serde_json::from_slice(&outcome_event_json(&event)).unwrap();
    let rejected = RejectedEvent {
        id: 1,
        at: DatabaseTime(1_795_262_320_259),
        provider: "acme".to_owned(),
        job_id: Some("invoice-4712".to_owned()),
        message_id: Some("m-1".to_owned()),
        reason: "bad_amount".to_owned(),
    };
    let rejected: Value = serde_json::from_slice(&rejected_event_json(&rejected)).unwrap();
    let (mut jobs, mut events) = (0, 0);
    for page in [Page::read("README.md"), Page::read("docs/message.md")] {
        for block in page.blocks_of("json") {
            let value: Value = serde_json::from_str(&block).unwrap();
            if value.get("state").is_some() {
                let expected = if value["state"] == "rejected" { &rejected } else { &written };
                assert_eq!(value, *expected, "{}", page.path);
                events += 1;
            } else {
                assert_eq!(read(&value), Ok(()), "{}: {block}", page.path);
                jobs += 1;
            }
        }
    }
    assert_eq!((jobs, events), (2, 2));
}
