//! Lane holds, the comparison of commits, and the claims that repair lost payments.

use sluicegate::domain::commit_memory::{End, HoldCause, Mark};
use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::fleet::WorkerReport;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};
use sluicegate::ops::change;

use super::*;

on_every_database!(
    holds_are_written_once_and_released_with_a_reason,
    holds_are_read_with_the_heartbeat,
    every_rule_of_a_hold_is_a_check,
    marks_come_from_a_commit,
    lost_payments_are_claimed_from_wherever_they_wait,
    lost_outcome_is_written_again,
);

fn by(reason: Option<&str>) -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: reason.map(str::to_owned) }
}

async fn holds_are_written_once_and_released_with_a_reason(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.sql("INSERT INTO providers (name, url) VALUES ('acme', 'https://x.example/')").await.unwrap();
    let (ledger, acme) = (&fixture.database, name("acme"));
    let version = ledger.settings_version().await.unwrap();
    ledger.hold_lanes(&[acme.clone(), name("bolt")], HoldCause::DatabaseWentBack, "2 payments").await.unwrap();
    assert!(ledger.settings_version().await.unwrap() > version);
    ledger.hold_lanes(std::slice::from_ref(&acme), HoldCause::Recover, "another").await.unwrap();
    let hold = ledger.lane_hold(&acme).await.unwrap().unwrap();
    assert_eq!((hold.cause, hold.evidence.as_str()), (HoldCause::DatabaseWentBack, "2 payments"));

    let held = change::resume(ledger, &acme, false, &by(None)).await.unwrap();
    assert_eq!(held, Some(hold), "a resume alone releases nothing");
    let error = change::resume(ledger, &acme, true, &by(None)).await.unwrap_err().to_string();
    assert!(error.contains("needs a reason"), "{error}");
    assert_eq!(change::resume(ledger, &acme, true, &by(Some("compared"))).await.unwrap(), None);
    let error = change::resume(ledger, &acme, true, &by(Some("again"))).await.unwrap_err().to_string();
    assert!(error.contains("is not held"), "{error}");
    assert!(ledger.lane_hold(&name("bolt")).await.unwrap().is_some());

    let audit = ledger.settings_audit(Some(&acme), 10).await.unwrap();
    let released = audit.iter().find(|change| change.because.as_deref() == Some("compared") && change.new.is_none());
    assert!(released.is_some_and(|change| change.what.contains("hold")), "{audit:?}");
}

async fn holds_are_read_with_the_heartbeat(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    let read = async || ledger.holds_and_heartbeat("worker-a").await.unwrap();
    assert_eq!((read().await.reported_at, read().await.holds.len()), (None, 0));
    let report = WorkerReport {
        id: "worker-a".to_owned(),
        host: "here".to_owned(),
        pid: 1,
        version: "0".to_owned(),
        uptime: SECOND,
        format: 1,
        body: "{}".to_owned(),
    };
    ledger.write_report(&report).await.unwrap();
    ledger.hold_lanes(&[name("acme"), name("bolt")], HoldCause::TwoWritableServers, "a and b").await.unwrap();
    let found = read().await;
    assert!(found.reported_at.is_some());
    assert_eq!(found.holds.keys().map(ProviderName::as_str).collect::<Vec<_>>(), ["acme", "bolt"]);
}

async fn every_rule_of_a_hold_is_a_check(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.database.hold_lanes(&[name("acme")], HoldCause::Recover, "evidence").await.unwrap();
    let future = if kind == Kind::Postgres { "'infinity'" } else { "253402207200000" };
    for (change, rule) in [
        ("provider = 'Acme'".to_owned(), "held_provider_is_a_provider_name"),
        ("provider = ''".to_owned(), "held_provider_is_a_provider_name"),
        ("cause = 'because'".to_owned(), "hold_cause_is_known"),
        ("evidence = ''".to_owned(), "evidence_is_1_to_1000_characters"),
        (format!("since = {future}"), "instants_are_finite"),
    ] {
        let error = fixture.sql(&format!("UPDATE lane_holds SET {change}")).await.expect_err(&change);
        assert!(error.contains(rule), "{change}: {error}");
    }
}

async fn marks_come_from_a_commit(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    let long_ago = if kind == Kind::Postgres { "'2001-01-01'" } else { "1" };
    fixture.sql(&format!("UPDATE commit_checks SET checked_at = {long_ago}")).await.unwrap();
    let checked = fixture.one("SELECT checked_at FROM commit_checks").await;
    let lease = fixture.take(&job("p1")).await.lease;
    let BeginResult::Attempt(number) = ledger.begin_attempt(&lease, &request("p1"), AT_ONCE).await.unwrap() else {
        panic!()
    };
    let ids = ["p1", "gone"].map(|id| Identifier::new(id).unwrap());
    let marks = ledger.committed_marks(&ids).await.unwrap();
    assert_eq!(marks.get(&ids[0]), Some(&Mark { fence: lease.fence, number, end: End::Open }));
    assert_eq!(marks.len(), 1, "a payment that is gone has no mark");
    assert_ne!(fixture.one("SELECT checked_at FROM commit_checks").await, checked);
    fixture.sql("DELETE FROM commit_checks").await.unwrap();
    assert!(ledger.committed_marks(&ids).await.is_err(), "nothing was committed");
}

async fn lost_payments_are_claimed_from_wherever_they_wait(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    ledger.record_backlog(&job("waits"), hash(1), Duration::ZERO).await.unwrap();
    let sending = fixture.take(&job("sending")).await.lease;
    assert_eq!(ledger.begin_attempt(&sending, &request("sending"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    let claim = async |id: &str, fence| {
        let lost = LeaseToken { id: Identifier::new(id).unwrap(), fence };
        ledger.claim_for_repair(&lost, "worker-b", None).await.unwrap()
    };
    assert_eq!(claim("gone", 1).await, None);
    assert_eq!(claim("sending", 1).await, None, "another worker has it");
    let waiting = claim("waits", 77).await.unwrap();
    assert_eq!((waiting.claimed.lease.fence, waiting.claimed.maybe_charged, &waiting.job), (78, false, &job("waits")));
    assert_eq!(fixture.one("SELECT waiting FROM flows").await, "0", "its flow has counted it out");

    fixture.expire_lease(&sending).await;
    let sent = claim("sending", 1).await.unwrap();
    assert!(sent.claimed.maybe_charged && sent.claimed.lease.fence > sending.fence);
    assert_eq!(fixture.one("SELECT outcome FROM attempts").await, "unknown");
    assert_eq!(fixture.one("SELECT count(*) FROM job_audit").await, "0", "a worker's own change");
}

async fn lost_outcome_is_written_again(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    ledger.record_backlog(&job("p1"), hash(1), Duration::ZERO).await.unwrap();
    let lost = LeaseToken { id: job("p1").id, fence: 9 };
    let lease = ledger.claim_for_repair(&lost, "worker-b", None).await.unwrap().unwrap().claimed.lease;
    assert_eq!(ledger.begin_attempt(&lease, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    let end =
        AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: "again".to_owned(), counts: true };
    let paid = JobState::Final {
        state: FinalState::Succeeded,
        reason: "accepted".to_owned(),
        reference: Some("ch_1".to_owned()),
    };
    assert_eq!(ledger.finish_attempt(&lease, &end, &paid).await.unwrap(), FencedWrite::Applied);
    assert_eq!(
        (fixture.state("p1").await, fixture.one("SELECT count(*) FROM events").await),
        ("succeeded".to_owned(), "1".to_owned())
    );
    let mark = ledger.committed_marks(&[job("p1").id]).await.unwrap()[&job("p1").id];
    assert_eq!((mark.end, mark.number), (End::Final, 1));
}
