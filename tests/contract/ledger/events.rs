//! Events: committed with a final state, given one order, and passed by the cursor of their publisher. Also rejected
//! messages and counts by state.

use std::collections::BTreeSet;

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::events::UnpublishedEvents;
use sluicegate::ledger::operator::{Actor, JobResolution};
use sluicegate::ledger::rejected::{RejectedMessage, StoredMessage};
use sluicegate::ledger::upkeep::CheckScope;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, StateCount};

use super::*;

mod numbered_late;

const DAY: Duration = Duration::from_secs(86_400);

on_every_database!(
    each_final_state_leaves_one_event,
    events_of_a_payment_are_numbered,
    finishing_write_returns_its_state,
    pages_follow_the_order,
    cursor_has_one_holder,
    rejected_events_back_off,
    old_events_are_deleted_by_payment,
    an_era_never_returns,
    rejected_messages_are_kept,
    states_are_counted
);

impl Fixture {
    /// Ends a new payment without a request.
    async fn finish_at_once(&self, id: &str) {
        let hold = self.take(&job(id)).await.lease;
        let next = JobState::Final { state: FinalState::Expired, reason: "late".to_owned(), reference: None };
        assert_eq!(self.database.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
    }

    /// Makes all events, and their places, older than any that are kept.
    async fn age_events(&self) {
        let aged = match self.postgres {
            Some(_) => "UPDATE event_batches SET at = at - interval '40 days'",
            None => "UPDATE events SET at = at - 40 * 86400000",
        };
        self.sql(aged).await.unwrap();
    }
}

fn by() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: None }
}

fn id(text: &str) -> Identifier {
    Identifier::new(text).unwrap()
}

fn ids(events: &[OutcomeEvent]) -> Vec<&str> {
    events.iter().map(|event| event.id.as_str()).collect()
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
        assert_eq!(ledger.begin_attempt(&sent, &request("x"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
        let end =
            AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: "ok".to_owned(), counts: true };
        assert_eq!(ledger.finish_attempt(&sent, &end, &next("sent")).await.unwrap(), FencedWrite::Applied);
        assert_eq!(ledger.finish_attempt(&sent, &end, &next("sent")).await.unwrap(), FencedWrite::Stale);
    }
    let events = fixture.ordered_events().await;
    assert_eq!(events.len(), 2 * (FinalState::ALL.len() - 1));
    assert!(events.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
    let names: BTreeSet<&str> = events.iter().map(|event| event.event_id.as_str()).collect();
    assert!(names.len() == events.len() && names.iter().all(|name| uuid::Uuid::parse_str(name).is_ok()), "{names:?}");
    for event in &events {
        assert_eq!(fixture.state(&event.id).await, event.state.name());
        assert_eq!(event.reason, Some(format!("r-{}", event.state.name())));
        assert_eq!((event.n, event.attempts), (1, u32::from(event.id.starts_with("sent"))));
        let reference = format!("ch_{}", event.id);
        assert_eq!((event.provider.as_str(), event.provider_reference.as_deref()), ("stripe", Some(&*reference)));
        let age_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap() - event.at_ms;
        assert!((-1_000..60_000).contains(&age_ms), "{age_ms}");
    }
}

async fn events_of_a_payment_are_numbered(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.finish_at_once("other").await;
    for _ in 0..2 {
        let hold = fixture.take(&job("p1")).await.lease;
        let next = JobState::Final { state: FinalState::Dead, reason: "refused".to_owned(), reference: None };
        assert_eq!(fixture.database.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
        settled(fixture.database.resolve_job(&id("p1"), &JobResolution::Replay, None, &by()).await).unwrap();
    }
    settled(fixture.database.resolve_job(&id("p1"), &JobResolution::Cancel, None, &by()).await).unwrap();
    let events = fixture.ordered_events().await;
    let of_p1: Vec<(u32, FinalState)> =
        events.iter().filter(|event| event.id == "p1").map(|event| (event.n, event.state)).collect();
    assert_eq!(of_p1, [(1, FinalState::Dead), (2, FinalState::Dead), (3, FinalState::Cancelled)]);
}

async fn finishing_write_returns_its_state(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let end = AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: "ok".to_owned(), counts: true };
    let next = |reference: &str| JobState::Final {
        state: FinalState::Succeeded,
        reason: "accepted".to_owned(),
        reference: Some(reference.to_owned()),
    };
    // The charge of the third job belongs to another payment.
    let payments = [
        ("p1", "ch_1", FinalState::Succeeded),
        ("p2", "ch_2", FinalState::Succeeded),
        ("p3", "ch_2", FinalState::Review),
    ];
    for (id, reference, state) in payments {
        let hold = fixture.take(&job(id)).await.lease;
        assert_eq!(ledger.begin_attempt(&hold, &request(id), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
        let written = ledger.finish_attempt_batched(&hold, &end, &next(reference), Duration::ZERO).await.unwrap();
        assert_eq!(written, (FencedWrite::Applied, Some(state)));
        let written = ledger.finish_attempt_batched(&hold, &end, &next(reference), Duration::ZERO).await.unwrap();
        assert_eq!(written, (FencedWrite::Stale, None));
    }
    let events = fixture.ordered_events().await;
    assert_eq!(events.iter().map(|event| event.state).collect::<Vec<_>>(), payments.map(|(_, _, state)| state));
    // A job that must wait leaves no event.
    let hold = fixture.take(&job("p4")).await.lease;
    assert_eq!(ledger.begin_attempt(&hold, &request("p4"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    let rests = JobState::Waiting { wait: SECOND, reason: WaitReason::Throttled.into() };
    let rested = ledger.finish_attempt_batched(&hold, &end, &rests, Duration::ZERO).await.unwrap();
    assert_eq!(rested, (FencedWrite::Applied, None));
    assert_eq!(fixture.ordered_events().await, events);
}

async fn pages_follow_the_order(kind: Kind) {
    const EVENTS: usize = 1_203;
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.database.events_after(0).await.unwrap(), EventsAfter::End);
    fixture.finish_at_once("p0").await;
    let more = format!(
        "INSERT INTO events (job_id, n, provider, state, attempts, at) \
         WITH RECURSIVE numbers (number) AS (SELECT 2 UNION ALL SELECT number + 1 FROM numbers WHERE number < {EVENTS}) \
         SELECT 'p0', number, provider, state, attempts, at FROM events CROSS JOIN numbers ORDER BY number"
    );
    fixture.sql(&more).await.unwrap();
    let numbers: Vec<usize> = fixture.ordered_events().await.iter().map(|event| event.n as usize).collect();
    assert_eq!(numbers, (1..=EVENTS).collect::<Vec<_>>());
    let page = fixture.page_after(500).await;
    assert_eq!((page.events[0].n, page.events.len(), page.upto), (501, 500, 1_000));
    assert_eq!(fixture.database.events_after(EVENTS as i64).await.unwrap(), EventsAfter::End);
}

/// A process that was frozen while another took the cursor moves nothing.
async fn cursor_has_one_holder(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    for id in ["p1", "p2"] {
        fixture.finish_at_once(id).await;
    }
    fixture.place_events().await;
    let free = ledger.event_cursor().await.unwrap();
    assert_eq!((free.position, free.holder), (0, None));
    let first = ledger.take_event_cursor(free.turn, "first").await.unwrap().unwrap();
    assert_eq!(ledger.take_event_cursor(free.turn, "second").await.unwrap(), None, "the first one was faster");
    let none = PublishResults::default();
    let turn = ledger.move_event_cursor(first.turn, 1, &none).await.unwrap().unwrap();
    // The first one freezes: its turn stands still.
    let second = ledger.take_event_cursor(turn, "second").await.unwrap().unwrap();
    assert_eq!((second.position, second.holder.as_deref()), (1, Some("second")));
    let late = PublishResults { rejected: vec![1], ..PublishResults::default() };
    assert_eq!(ledger.move_event_cursor(turn, 2, &late).await.unwrap(), None);
    assert_eq!(fixture.one("SELECT count(*) FROM event_retries").await, "0", "all or nothing");
    ledger.leave_event_cursor(turn).await.unwrap();
    assert_eq!(ledger.event_cursor().await.unwrap(), second);
    ledger.leave_event_cursor(second.turn).await.unwrap();
    assert_eq!(ledger.event_cursor().await.unwrap().holder, None);
}

/// An event that a queue rejects leaves the order. The more often it was rejected, the later it is tried again.
async fn rejected_events_back_off(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    assert_eq!(ledger.unpublished_events().await.unwrap(), UnpublishedEvents::default());
    for id in ["stuck", "slow", "new"] {
        fixture.finish_at_once(id).await;
        fixture.place_events().await;
    }
    let page = fixture.page_after(0).await;
    let [stuck, slow] = [0, 1].map(|at| page.events[at].sequence);
    let next_in_s = match kind {
        Kind::Postgres => "SELECT round(extract(epoch FROM next_try_at - now())) FROM event_retries WHERE tries > 0",
        _ => "SELECT round((next_try_at - unixepoch('subsec') * 1000) / 1000.0) FROM event_retries WHERE tries > 0",
    };
    let rejected = PublishResults { rejected: vec![stuck], ..PublishResults::default() };
    let mut turn = ledger.event_cursor().await.unwrap().turn;
    for wait_s in [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0] {
        turn = ledger.move_event_cursor(turn, 1, &rejected).await.unwrap().unwrap();
        let got: f64 = fixture.one(next_in_s).await.parse().unwrap();
        assert!((got - wait_s).abs() <= 3.0, "{got} s, not {wait_s} s");
        assert_eq!(ledger.events_to_retry(10).await.unwrap().events, []);
        let due = if kind == Kind::Postgres { "now()" } else { "0" };
        fixture.sql(&format!("UPDATE event_retries SET next_try_at = {due}")).await.unwrap();
        assert_eq!(ids(&ledger.events_to_retry(10).await.unwrap().events), ["stuck"]);
    }
    let unpublished = ledger.unpublished_events().await.unwrap();
    assert_eq!((unpublished.events, unpublished.rejected, unpublished.oldest.is_some()), (3, 1, true));
    assert_eq!(ids(&fixture.page_after(1).await.events), ["slow", "new"]);
    // A late confirm is no rejection.
    let unconfirmed = PublishResults { unconfirmed: vec![slow], ..PublishResults::default() };
    let turn = ledger.move_event_cursor(turn, 3, &unconfirmed).await.unwrap().unwrap();
    let unpublished = ledger.unpublished_events().await.unwrap();
    assert_eq!((unpublished.events, unpublished.rejected), (2, 1));
    let published = async |id: &str| fixture.details(id).await.events[0].published == Some(true);
    assert_eq!((published("stuck").await, published("slow").await, published("new").await), (false, false, true));
    let confirmed = PublishResults { published: vec![stuck, slow], ..PublishResults::default() };
    ledger.move_event_cursor(turn, 3, &confirmed).await.unwrap().unwrap();
    assert_eq!(ledger.unpublished_events().await.unwrap(), UnpublishedEvents::default());
    assert!(published("stuck").await && published("slow").await);
}

/// The count of a payment's events numbers the next one, so a payment that may have another event keeps them.
async fn old_events_are_deleted_by_payment(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    for id in ["old", "left"] {
        fixture.finish_at_once(id).await;
    }
    let hold = fixture.take(&job("dead")).await.lease;
    let next = JobState::Final { state: FinalState::Dead, reason: "refused".to_owned(), reference: None };
    assert_eq!(ledger.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
    fixture.place_events().await;
    fixture.age_events().await;
    assert!(!ledger.forget_events(35 * DAY).await.unwrap(), "the publisher has not passed them");
    let left = fixture.page_after(0).await.events[1].sequence;
    fixture.finish_at_once("young").await;
    fixture.pass_events().await;
    let turn = ledger.event_cursor().await.unwrap().turn;
    let rejected = PublishResults { rejected: vec![left], ..PublishResults::default() };
    ledger.move_event_cursor(turn, 4, &rejected).await.unwrap().unwrap();
    assert!(!ledger.forget_events(50 * DAY).await.unwrap(), "they are not old enough");
    assert!(ledger.forget_events(35 * DAY).await.unwrap());
    assert!(!ledger.forget_events(35 * DAY).await.unwrap());
    let kept: Vec<String> =
        fixture.column("SELECT job_id FROM events ORDER BY sequence").await.into_iter().flatten().collect();
    assert_eq!(kept, ["left", "dead", "young"]);
    assert_eq!(ledger.events_after(0).await.unwrap(), EventsAfter::Deleted { kept_after: 3 });
    assert_eq!(ids(&fixture.page_after(3).await.events), ["young"]);
    let reconciled = ledger.reconcile(DAY, CheckScope::All).await.unwrap();
    assert_eq!(reconciled[0].without_event, 1, "of a payment that has just finished");
    settled(ledger.resolve_job(&id("dead"), &JobResolution::Discard, None, &by()).await).unwrap();
    fixture.place_events().await;
    assert_eq!(fixture.page_after(4).await.events[0].n, 2);
}

async fn an_era_never_returns(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let era: i64 = fixture.one("SELECT era FROM event_order").await.parse().unwrap();
    let next = fixture.database.begin_event_era().await.unwrap();
    assert!(next > era && fixture.database.begin_event_era().await.unwrap() > next);
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
    assert_eq!(fixture.database.begin_attempt(&hold, &request("p2"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    let mut counts = fixture.database.state_counts().await.unwrap();
    counts.sort_by(|a, b| (&a.provider, &a.state).cmp(&(&b.provider, &b.state)));
    let count = |provider: &str, state: &str| StateCount { provider: provider.into(), state: state.into(), jobs: 1 };
    assert_eq!(counts, [count("adyen", "waiting"), count("stripe", "sending"), count("stripe", "waiting")]);
}
