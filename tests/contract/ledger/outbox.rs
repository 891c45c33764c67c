//! The outbox: outcome events that are committed with a final state and published afterwards. Also rejected messages
//! and counts by state.

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::copies::ReturnPlan;
use sluicegate::ledger::copies::{RejectedMessage, StoredMessage};
use sluicegate::ledger::{AttemptEnd, BatchOptions, BeginResult, FencedWrite, JobState, StateCount};
use sluicegate::ledger::{EventSelection, UnpublishedEvents};

use super::*;

on_every_database!(
    each_final_state_leaves_one_event,
    finishing_write_claims_its_event,
    rejected_events_back_off,
    rejected_messages_are_kept,
    states_are_counted
);

/// An event that a queue rejects does not hold up other events. The more often it was rejected, the later it is tried
/// again.
async fn rejected_events_back_off(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    assert_eq!(ledger.unpublished_events().await.unwrap(), UnpublishedEvents::default());
    for id in ["stuck", "new"] {
        let hold = fixture.take(&job(id)).await.lease;
        let next = JobState::Final { state: FinalState::Expired, reason: "late".to_owned(), reference: None };
        assert_eq!(ledger.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
    }
    let taken = ledger.lease_events(1, SECOND).await.unwrap();
    let stuck = taken[0].sequence;
    let next_in_s = match kind {
        Kind::Postgres => "SELECT round(extract(epoch FROM next_try_at - now())) FROM outcome_events WHERE tries > 0",
        _ => "SELECT round((next_try_at - unixepoch('subsec') * 1000) / 1000.0) FROM outcome_events WHERE tries > 0",
    };
    for wait_s in [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0] {
        ledger.mark_events_rejected(&[stuck]).await.unwrap();
        let got: f64 = fixture.one(next_in_s).await.parse().unwrap();
        assert!((got - wait_s).abs() <= 3.0, "{got} s, not {wait_s} s");
        assert_eq!(ledger.lease_selected_events(EventSelection::RejectedBefore, 10, SECOND).await.unwrap(), Vec::new());
        fixture.sql("UPDATE outcome_events SET next_try_at = at WHERE next_try_at IS NOT NULL").await.unwrap();
        let again = ledger.lease_selected_events(EventSelection::RejectedBefore, 10, LEASE).await.unwrap();
        assert_eq!(again.iter().map(|event| event.sequence).collect::<Vec<_>>(), [stuck]);
        assert_eq!(
            ledger.lease_selected_events(EventSelection::RejectedBefore, 10, LEASE).await.unwrap(),
            Vec::new(),
            "the event is leased"
        );
    }
    let unpublished = ledger.unpublished_events().await.unwrap();
    assert_eq!((unpublished.events, unpublished.rejected, unpublished.oldest.is_some()), (2, 1, true));
    let fresh = ledger.lease_events(10, SECOND).await.unwrap();
    assert_eq!(fresh.iter().map(|event| event.id.as_str()).collect::<Vec<_>>(), ["new"]);
    // An event whose confirm is late stays leased to its publisher.
    ledger.renew_event_leases(&[fresh[0].sequence], LEASE).await.unwrap();
    tokio::time::sleep(SECOND).await;
    assert_eq!(ledger.lease_events(10, SECOND).await.unwrap(), Vec::new());
    ledger.mark_events_published(&[stuck, fresh[0].sequence]).await.unwrap();
    assert_eq!(ledger.unpublished_events().await.unwrap(), UnpublishedEvents::default());
}

async fn each_final_state_leaves_one_event(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    // Workers never cancel jobs; operators do (`operator.rs`).
    let states = FinalState::ALL.into_iter().filter(|state| *state != FinalState::Cancelled);
    for state in states {
        let next = |way| JobState::Final {
            state,
            reason: format!("r-{}", state.name()),
            reference: Some(format!("ch_{way}-{}", state.name())),
        };
        let put = fixture.take(&job(&format!("put-{}", state.name()))).await.lease;
        assert_eq!(ledger.transition(&put, &next("put")).await.unwrap(), FencedWrite::Applied);
        assert_eq!(ledger.transition(&put, &next("put")).await.unwrap(), FencedWrite::Stale);
        let sent = fixture.take(&job(&format!("sent-{}", state.name()))).await.lease;
        assert_eq!(ledger.begin_attempt(&sent, &request("x")).await.unwrap(), BeginResult::Attempt(1));
        let end =
            AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: "ok".to_owned(), counts: true };
        assert_eq!(ledger.finish_attempt(&sent, &end, &next("sent")).await.unwrap(), FencedWrite::Applied);
        assert_eq!(ledger.finish_attempt(&sent, &end, &next("sent")).await.unwrap(), FencedWrite::Stale);
    }
    let events = ledger.lease_events(100, Duration::ZERO).await.unwrap();
    assert_eq!(events.len(), 2 * (FinalState::ALL.len() - 1));
    assert!(events.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
    for event in &events {
        assert_eq!(fixture.state(&event.id).await, event.state.name());
        assert_eq!(event.reason, Some(format!("r-{}", event.state.name())));
        assert_eq!(event.attempts, u32::from(event.id.starts_with("sent")));
        let reference = format!("ch_{}", event.id);
        assert_eq!((event.provider.as_str(), event.provider_reference.as_deref()), ("stripe", Some(&*reference)));
        let age_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap() - event.at_ms;
        assert!((-1_000..60_000).contains(&age_ms), "{age_ms}");
    }
    let first: Vec<i64> = events.iter().take(3).map(|event| event.sequence).collect();
    ledger.mark_events_published(&first).await.unwrap();
    ledger.mark_events_published(&[]).await.unwrap();
    // The first lease is over, so these events can be leased again. While a lease lasts, no other publisher gets its
    // events.
    let left = ledger.lease_events(4, Duration::from_secs(3_600)).await.unwrap();
    let others = ledger.lease_events(100, Duration::from_secs(3_600)).await.unwrap();
    assert_eq!(others, events[7..]);
    assert_eq!(ledger.lease_events(100, Duration::ZERO).await.unwrap(), []);
    assert_eq!(left, events[3..7]);
}

async fn finishing_write_claims_its_event(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let end = AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: "ok".to_owned(), counts: true };
    let next = |reference: &str| JobState::Final {
        state: FinalState::Succeeded,
        reason: "accepted".to_owned(),
        reference: Some(reference.to_owned()),
    };
    let mut taken = Vec::new();
    for (id, reference) in [("p1", "ch_1"), ("p2", "ch_2"), ("p3", "ch_2")] {
        let hold = fixture.take(&job(id)).await.lease;
        assert_eq!(ledger.begin_attempt(&hold, &request(id)).await.unwrap(), BeginResult::Attempt(1));
        let lease = Duration::from_secs(3_600);
        let (written, event, _) =
            ledger.finish_attempt_batched(&hold, &end, &next(reference), BatchOptions::immediate(lease)).await.unwrap();
        assert_eq!(written, FencedWrite::Applied);
        taken.push(event.unwrap());
        assert_eq!(
            ledger.finish_attempt_batched(&hold, &end, &next(reference), BatchOptions::immediate(lease)).await.unwrap(),
            (FencedWrite::Stale, None, None)
        );
    }
    // Each event has the state that was written: the charge of the third job belongs to another payment.
    let states: Vec<(&str, FinalState)> = taken.iter().map(|event| (event.id.as_str(), event.state)).collect();
    assert_eq!(states, [("p1", FinalState::Succeeded), ("p2", FinalState::Succeeded), ("p3", FinalState::Review)]);
    assert_eq!(ledger.lease_events(100, Duration::ZERO).await.unwrap(), [], "the events are leased");
    // The publisher that leased the events is lost, and none is published.
    fixture.sql("UPDATE outcome_events SET taken_until = at").await.unwrap();
    assert_eq!(ledger.lease_events(100, Duration::ZERO).await.unwrap(), taken);
    ledger.mark_events_published(&taken.iter().map(|event| event.sequence).collect::<Vec<_>>()).await.unwrap();
    assert_eq!(ledger.lease_events(100, Duration::ZERO).await.unwrap(), []);
    // A job that must wait leaves no event.
    let hold = fixture.take(&job("p4")).await.lease;
    assert_eq!(ledger.begin_attempt(&hold, &request("p4")).await.unwrap(), BeginResult::Attempt(1));
    let rests = JobState::Waiting { wait: SECOND, reason: WaitReason::Throttled.into() };
    let rested = ledger.finish_attempt_batched(&hold, &end, &rests, BatchOptions::immediate(SECOND)).await.unwrap();
    let back = ReturnPlan { copy: 1, unqueued: false };
    assert_eq!(rested, (FencedWrite::Applied, None, Some(back)));
}

async fn rejected_messages_are_kept(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let message = RejectedMessage {
        lane: name("stripe"),
        job_id: Some(format!("odd id\0{}", "x".repeat(400))),
        reason: "malformed",
        detail: "not JSON".to_owned(),
        body_sha256: [7; 32],
        body_bytes: 70_000,
        head: String::new(),
        stored: StoredMessage::default(),
    };
    fixture.database.reject(&message).await.unwrap();
    fixture.database.reject(&RejectedMessage { job_id: None, ..message }).await.unwrap();
    let row = "SELECT lane || '|' || coalesce(length(job_id), 0) || '|' || reason || '|' || detail || '|' || body_bytes \
               FROM rejected_messages ORDER BY id";
    let rows: Vec<String> = fixture.column(row).await.into_iter().flatten().collect();
    assert_eq!(rows, ["stripe|255|malformed|not JSON|70000", "stripe|0|malformed|not JSON|70000"]);
}

async fn states_are_counted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.database.ping().await.unwrap();
    assert_eq!(fixture.database.state_counts().await.unwrap(), []);
    fixture.take(&job("p1")).await;
    let hold = fixture.take(&job("p2")).await.lease;
    fixture.take(&Job { provider: name("adyen"), ..job("p3") }).await;
    assert_eq!(fixture.database.begin_attempt(&hold, &request("p2")).await.unwrap(), BeginResult::Attempt(1));
    let mut counts = fixture.database.state_counts().await.unwrap();
    counts.sort_by(|a, b| (&a.provider, &a.state).cmp(&(&b.provider, &b.state)));
    let count = |provider: &str, state: &str| StateCount { provider: provider.into(), state: state.into(), jobs: 1 };
    assert_eq!(counts, [count("adyen", "waiting"), count("stripe", "sending"), count("stripe", "waiting")]);
}
