//! Rejected messages for operators: lists by filter, the count, one decision for each with its author, and conflicts.

use sluicegate::domain::job::ContentHash;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::rejected::{ContentOfId, RejectedDecision, RejectedFilter, RejectedRefusal, RejectedSummary};
use sluicegate::ledger::rejected::{RejectedMessage, StoredMessage};

use super::*;

on_every_database!(
    rejected_messages_are_listed_by_filter,
    rejected_message_is_decided_once,
    decision_by_sql_is_audited,
    published_ids_are_compared_with_the_ledger,
    sensitive_id_of_an_older_program_is_withheld,
    properties_are_kept_whole,
);

async fn reject(fixture: &Fixture, lane: &str, reason: &'static str) {
    let message = RejectedMessage {
        lane: name(lane),
        job_id: Some("pay-1".to_owned()),
        reason,
        detail: "amount: must be above 0".to_owned(),
        body_sha256: [7; 32],
        body_bytes: 20,
        head: "{\"id\":\0\"pay-1\"".to_owned(),
        stored: StoredMessage::default(),
    };
    fixture.database.reject(&message).await.unwrap();
}

/// Headers are as long as a frame, and may hold U+0000, which PostgreSQL stores in no text.
async fn properties_are_kept_whole(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let long = "x".repeat(5_000);
    let message = RejectedMessage {
        lane: name("acme"),
        job_id: None,
        reason: "bad_id",
        detail: "id: is missing".to_owned(),
        body_sha256: [7; 32],
        body_bytes: 2,
        head: String::new(),
        stored: StoredMessage {
            body: b"{}".to_vec(),
            properties: serde_json::json!({ "headers": { "a\0": format!("{long}\0"), "b": "\\u0000" } }).to_string(),
            is_masked: false,
        },
    };
    fixture.database.reject(&message).await.unwrap();
    let stored = fixture.database.stored_rejected(1).await.unwrap().unwrap();
    let properties: serde_json::Value = serde_json::from_str(&stored.properties).unwrap();
    assert_eq!(properties, serde_json::json!({ "headers": { "a": long, "b": "\\u0000" } }));
}

fn alice() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some("ticket 4711".to_owned()) }
}

async fn ids(fixture: &Fixture, filter: &RejectedFilter, before: Option<i64>, at_most: u32) -> (Vec<i64>, Option<i64>) {
    let page = fixture.database.list_rejected(filter, before, at_most).await.unwrap();
    assert_eq!(page.unreadable, []);
    (page.messages.iter().map(|message| message.id).collect(), page.next)
}

async fn rejected_messages_are_listed_by_filter(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (lane, reason) in
        [("acme", "bad_id"), ("bolt", "bad_id"), ("acme", "secret"), ("acme", "bad_id"), ("bolt", "secret")]
    {
        reject(&fixture, lane, reason).await;
    }
    let all = RejectedFilter::default();
    assert_eq!(ids(&fixture, &all, None, 3).await, (vec![5, 4, 3], Some(3)));
    assert_eq!(ids(&fixture, &all, Some(3), 3).await, (vec![2, 1], None));
    let acme = RejectedFilter { provider: Some(name("acme")), ..all.clone() };
    assert_eq!(ids(&fixture, &acme, None, 9).await, (vec![4, 3, 1], None));
    let bad_id = RejectedFilter { reason: Some("bad_id".to_owned()), ..all.clone() };
    assert_eq!(ids(&fixture, &bad_id, None, 9).await, (vec![4, 2, 1], None));
    let both = RejectedFilter { provider: Some(name("acme")), ..bad_id.clone() };
    assert_eq!(ids(&fixture, &both, None, 9).await, (vec![4, 1], None));
    fixture.database.decide_rejected(4, RejectedDecision::Discarded, &alice()).await.unwrap();
    fixture.database.decide_rejected(2, RejectedDecision::Republished, &alice()).await.unwrap();
    assert_eq!(ids(&fixture, &all, None, 9).await, (vec![5, 3, 1], None));
    assert_eq!(ids(&fixture, &acme, None, 9).await, (vec![3, 1], None));
    let decided = RejectedFilter { decided: true, ..all };
    assert_eq!(ids(&fixture, &decided, None, 9).await, (vec![4, 2], None));
    let decided_at_acme = RejectedFilter { decided: true, ..both };
    assert_eq!(ids(&fixture, &decided_at_acme, None, 9).await, (vec![4], None));
    let counts = fixture.database.count_rejected().await.unwrap();
    let counts: Vec<_> = counts.iter().map(|count| (count.provider.as_str(), count.messages)).collect();
    assert_eq!(counts, [("acme", 2), ("bolt", 1)]);
}

async fn one(fixture: &Fixture, id: i64) -> RejectedSummary {
    fixture.database.rejected_message(id).await.unwrap().unwrap()
}

async fn rejected_message_is_decided_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    reject(&fixture, "acme", "bad_amount").await;
    let open = one(&fixture, 1).await;
    assert_eq!((open.provider.as_str(), open.reason.as_str(), open.body_bytes), ("acme", "bad_amount", 20));
    assert_eq!(open.body_sha256, "07".repeat(32));
    assert!(open.head.as_deref().is_some_and(|head| head.starts_with("{\"id\":") && !head.contains('\0')), "{open:?}");
    assert_eq!((&open.decision, open.decided_at, &open.os_user), (&None, None, &None));
    assert_eq!(ledger.decide_rejected(1, RejectedDecision::Republished, &alice()).await.unwrap(), None);
    let decided = one(&fixture, 1).await;
    assert_eq!(decided.decision.as_deref(), Some("republished"));
    assert!(decided.decided_at.is_some_and(|at| at >= open.at), "{decided:?}");
    let role = if kind == Kind::Postgres { "postgres" } else { "database file" };
    assert_eq!((decided.decided_by.as_deref(), decided.os_user.as_deref()), (Some(role), Some("alice@desk")));
    assert_eq!(decided.because.as_deref(), Some("ticket 4711"));
    assert!(decided.program.is_some());
    let again = ledger.decide_rejected(1, RejectedDecision::Discarded, &alice()).await.unwrap();
    assert_eq!(again, Some(RejectedRefusal::Decided { id: 1, decision: "republished".to_owned() }));
    let missing = ledger.decide_rejected(2, RejectedDecision::Discarded, &alice()).await.unwrap();
    assert_eq!(missing, Some(RejectedRefusal::NoSuchMessage(2)));
    assert_eq!(one(&fixture, 1).await, decided);
}

async fn decision_by_sql_is_audited(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    reject(&fixture, "acme", "bad_amount").await;
    for change in [
        "detail = 'x'",
        "decision = 'discarded', detail = 'x'",
        "head = 'x', decision = 'discarded'",
        "decision = 'forgotten'",
        "decided_at = at",
        "body_bytes = 1, decision = 'discarded'",
    ] {
        fixture.sql(&format!("UPDATE rejected_messages SET {change}")).await.unwrap_err();
    }
    fixture.sql("UPDATE rejected_messages SET decision = 'discarded', os_user = 'mallory'").await.unwrap();
    let decided = one(&fixture, 1).await;
    let role = if kind == Kind::Postgres { "postgres" } else { "database file" };
    assert_eq!((decided.decided_by.as_deref(), decided.os_user), (Some(role), None));
    assert!(decided.decided_at.is_some() && decided.head.is_none(), "a discard removes the body's beginning");
    assert_eq!(fixture.one("SELECT count(*) FROM rejected_messages WHERE body IS NOT NULL").await, "0");
    for change in ["decision = NULL", "decision = 'republished'", "because = 'x'", "decided_by = 'x'"] {
        let refused = fixture.sql(&format!("UPDATE rejected_messages SET {change}")).await.unwrap_err();
        assert!(
            refused.contains("rejected_messages_are_decided_once") || refused.contains("decided once"),
            "{refused}"
        );
    }
    assert_eq!(one(&fixture, 1).await.decision.as_deref(), Some("discarded"));
}

async fn published_ids_are_compared_with_the_ledger(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("same")).await;
    fixture.take(&job("other")).await;
    let actor = alice();
    fixture.database.precancel(&job("cancelled").id, &job("cancelled").provider, &actor).await.unwrap();
    let of = |id: &str, hash| ContentOfId { id: job(id).id, hash };
    let recorded = hash(1);
    let asked = [
        of("same", recorded),
        of("other", ContentHash([9; 32])),
        of("new", ContentHash([9; 32])),
        of("cancelled", ContentHash([9; 32])),
    ];
    let conflicts = fixture.database.find_conflicts(&asked).await.unwrap();
    assert_eq!(conflicts, [of("other", ContentHash([9; 32]))]);
    assert_eq!(fixture.database.find_conflicts(&[]).await.unwrap(), []);
}

async fn sensitive_id_of_an_older_program_is_withheld(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    reject(&fixture, "acme", "card_number").await;
    let digest =
        if kind == Kind::Postgres { format!("'\\x{}'", "07".repeat(32)) } else { format!("X'{}'", "07".repeat(32)) };
    let now = if kind == Kind::Postgres { "now()" } else { "1795000000000" };
    let row = format!(
        "INSERT INTO rejected_messages (at, lane, job_id, reason, detail, body_sha256, body_bytes) \
         VALUES ({now}, 'acme', '4111111111111111', 'card_number', 'id: holds a number', {digest}, 1)"
    );
    fixture.sql(&row).await.unwrap();
    let shown = one(&fixture, 2).await;
    assert_eq!((shown.job_id.as_deref(), shown.head), (Some("(withheld)"), None));
}
