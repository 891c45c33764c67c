//! Messages of a newer format: each held once, read when a worker knows its version or when it is too old.

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::held::{HeldMessage, NewHeldMessage};
use sluicegate::ledger::rejected::RecordedContent;
use sluicegate::ledger::rejected::{RejectedMessage, StoredMessage};
use sluicegate::ledger::{FencedWrite, JobState};

use super::*;

on_every_database!(
    a_message_is_held_once,
    readable_and_old_messages_are_due,
    held_message_becomes_a_rejected_one,
    every_rule_of_a_held_message_is_a_check,
    recorded_content_is_compared,
);

const DAY: Duration = Duration::from_secs(86_400);

fn held(lane: &str, number: u8, version: u64) -> NewHeldMessage {
    NewHeldMessage {
        lane: name(lane),
        body_sha256: [number; 32],
        version,
        stored: StoredMessage {
            body: format!("{{\"v\":{version}}}").into_bytes(),
            properties: "{\"message_id\":\"m\\u0000\"}".to_owned(),
            is_masked: false,
        },
    }
}

async fn due(fixture: &Fixture, lane: &str, version: u64, max_age: Duration) -> Vec<HeldMessage> {
    fixture.database.due_held(&name(lane), version, max_age, 10).await.unwrap()
}

fn numbers(messages: &[HeldMessage]) -> Vec<u8> {
    messages.iter().map(|message| message.body_sha256[0]).collect()
}

async fn a_message_is_held_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    for _ in 0..2 {
        ledger.hold(&held("acme", 1, 2)).await.unwrap();
        ledger.hold(&held("bolt", 1, u64::MAX)).await.unwrap();
    }
    let counts = ledger.count_held().await.unwrap();
    assert_eq!(counts, [("acme".to_owned(), 1), ("bolt".to_owned(), 1)].into());
    let mut lanes = ledger.lanes_with_held().await.unwrap();
    lanes.sort();
    assert_eq!(lanes, ["acme", "bolt"].map(name));
    let size = ledger.held_size(10).await.unwrap();
    let bytes = held("acme", 1, 2).stored.body.len() + held("bolt", 1, u64::MAX).stored.body.len();
    assert_eq!((size.messages, size.bytes), (2, bytes as u64));
    assert_eq!(ledger.held_size(1).await.unwrap().messages, 1);
    let found = due(&fixture, "acme", 2, DAY).await;
    let [message] = &found[..] else { panic!("{found:?}") };
    assert_eq!((message.lane.as_str(), message.version, &message.body[..]), ("acme", 2, &br#"{"v":2}"#[..]));
    assert!(message.age < DAY);
    let properties: serde_json::Value = serde_json::from_str(&message.properties).unwrap();
    assert_eq!(properties["message_id"], "m", "PostgreSQL stores no U+0000");
    ledger.delete_held(message).await.unwrap();
    ledger.delete_held(message).await.unwrap();
    assert_eq!(due(&fixture, "acme", 2, DAY).await, []);
    assert_eq!(ledger.count_held().await.unwrap().len(), 1);
}

async fn readable_and_old_messages_are_due(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (number, version) in [(1, 3), (2, 2), (3, 9), (4, 2)] {
        fixture.database.hold(&held("acme", number, version)).await.unwrap();
    }
    fixture.database.hold(&held("bolt", 5, 2)).await.unwrap();
    let hash = |number: u8| match kind {
        Kind::Postgres => format!("'\\x{}'", hex::encode([number; 32])),
        _ => format!("x'{}'", hex::encode([number; 32])),
    };
    let ago = |seconds: u32| match kind {
        Kind::Postgres => format!("received_at - interval '{seconds} seconds'"),
        _ => format!("received_at - {seconds}000"),
    };
    for (number, seconds) in [(3_u8, 90_000), (4, 60)] {
        let change = format!("received_at = {} WHERE body_sha256 = {}", ago(seconds), hash(number));
        fixture.sql(&format!("UPDATE held_messages SET {change}")).await.unwrap();
    }
    assert_eq!(numbers(&due(&fixture, "acme", 1, 2 * DAY).await), [0_u8; 0]);
    assert_eq!(numbers(&due(&fixture, "acme", 2, 2 * DAY).await), [4, 2]);
    assert_eq!(numbers(&due(&fixture, "acme", 1, DAY).await), [3]);
    assert_eq!(numbers(&due(&fixture, "acme", u64::MAX, DAY).await), [3, 4, 1, 2]);
    assert_eq!(fixture.database.due_held(&name("acme"), 9, DAY, 2).await.unwrap().len(), 2);
}

async fn held_message_becomes_a_rejected_one(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    ledger.hold(&held("acme", 1, 2)).await.unwrap();
    let message = due(&fixture, "acme", 2, DAY).await.remove(0);
    let rejected = RejectedMessage {
        lane: name("acme"),
        job_id: None,
        reason: "newer_version",
        detail: "v: 2".to_owned(),
        body_sha256: [1; 32],
        body_bytes: 7,
        head: String::new(),
        stored: held("acme", 1, 2).stored,
    };
    // Two workers at once: the second one finds no held message.
    ledger.reject_held(&message, &rejected).await.unwrap();
    ledger.reject_held(&message, &rejected).await.unwrap();
    assert!(ledger.count_held().await.unwrap().is_empty());
    let stored = ledger.stored_rejected(1).await.unwrap().unwrap();
    assert_eq!(stored.properties.replace(' ', ""), "{\"message_id\":\"m\"}", "PostgreSQL stores no U+0000");
    let rows = fixture.column("SELECT lane || ' ' || reason FROM rejected_messages").await;
    assert_eq!(rows, [Some("acme newer_version".to_owned())]);
}

async fn every_rule_of_a_held_message_is_a_check(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.database.hold(&held("acme", 1, 2)).await.unwrap();
    let is_postgres = kind == Kind::Postgres;
    let future = if is_postgres { "'infinity'" } else { "253402207200000" };
    let short = if is_postgres { "'\\x00'" } else { "x'00'" };
    let long = if is_postgres { "decode(repeat('00', 65537), 'hex')" } else { "zeroblob(65537)" };
    for (change, rule) in [
        ("lane = 'Acme'".to_owned(), "held_lane_is_a_provider_name"),
        (format!("body_sha256 = {short}"), "held_body_sha256_is_32_bytes"),
        ("version = 0".to_owned(), "held_version_is_above_0"),
        (format!("body = {long}"), "held_body_is_at_most_64_kib"),
        (format!("received_at = {future}"), "instants_are_finite"),
    ] {
        let error = fixture.sql(&format!("UPDATE held_messages SET {change}")).await.expect_err(&change);
        assert!(error.contains(rule), "{change}: {error}");
    }
}

async fn recorded_content_is_compared(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("open")).await;
    let lease = fixture.take(&job("done")).await.lease;
    let done = JobState::Final { state: FinalState::Cancelled, reason: "by hand".to_owned(), reference: None };
    assert_eq!(fixture.database.transition(&lease, &done).await.unwrap(), FencedWrite::Applied);
    let elsewhere = Job { provider: name("adyen"), ..job("open") };
    for (job, hash, expected) in [
        (job("new"), hash(1), RecordedContent::Nothing),
        (job("open"), hash(1), RecordedContent::Same),
        (job("open"), hash(2), RecordedContent::Other),
        (elsewhere, hash(1), RecordedContent::Other),
        (job("done"), hash(1), RecordedContent::Same),
        (job("done"), hash(2), RecordedContent::Other),
    ] {
        let found = fixture.database.recorded_content(&job, hash).await.unwrap();
        assert_eq!(found, expected, "{} {hash:?}", job.id);
    }
}
