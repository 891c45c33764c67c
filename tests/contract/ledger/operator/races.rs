//! A person and a worker, or two people, at the same job at once: one of them wins, and the other is told.

use sluicegate::ledger::upkeep::{Checked, Standing};
use sluicegate::ledger::{First, Timing};

use super::*;

on_every_database!(
    a_worker_loses_a_job_that_is_cancelled_in_its_hands,
    a_late_worker_writes_nothing_over_a_verdict,
    a_cancellation_and_a_request_never_both_happen,
    of_many_verdicts_one_counts,
    a_payment_is_cancelled_before_its_message_comes,
);

async fn assert_lost(fixture: &Fixture, hold: &Hold, number: u32) {
    let ledger = fixture.ledger();
    let before = fixture.picture(hold.id.as_str()).await;
    let end = AttemptEnd { number, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
    let waiting = JobState::Waiting { wait: SECOND, reason: "x".to_owned() };
    assert_eq!(ledger.begin_attempt(hold, &request(hold.id.as_str())).await.unwrap(), Begun::Lost);
    for next in [&settled(FinalState::Succeeded), &waiting] {
        assert_eq!(ledger.finish_attempt(hold, &end, next).await.unwrap(), Written::Lost);
        assert_eq!(ledger.put_down(hold, next).await.unwrap(), Written::Lost);
    }
    assert_eq!(ledger.release(hold).await.unwrap(), Written::Lost);
    assert_eq!(ledger.renew(std::slice::from_ref(hold), LEASE).await.unwrap(), std::slice::from_ref(hold));
    assert_eq!(fixture.picture(hold.id.as_str()).await, before);
}

async fn a_worker_loses_a_job_that_is_cancelled_in_its_hands(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let hold = fixture.take(&job("p1")).await.hold;
    fixture.decide("p1", &Verdict::Cancel).await.unwrap();
    assert_lost(&fixture, &hold, 1).await;
    assert_eq!(fixture.one("SELECT count(*) FROM attempts").await, "0");
    // Its message comes round again, and is done with.
    assert_eq!(fixture.ledger().claim(&job("p1"), hash(1), "worker-b", LEASE).await.unwrap(), Claim::Settled);
}

async fn a_payment_is_cancelled_before_its_message_comes(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (operator, ledger, upkeep) = (fixture.operator(), fixture.ledger(), fixture.database.upkeep());
    let provider = job("p1").provider;
    let ahead = async |text: &str| operator.cancel_ahead(&id(text), &provider, &by()).await.unwrap();
    assert_eq!(ahead("p1").await, Ok(()));
    let story = fixture.story("p1").await;
    assert_eq!((story.line.state.as_str(), story.line.currency.as_str()), ("cancelled", "XXX"));
    let reason = "cancelled by a person before its message came: asked the provider";
    assert_eq!(story.line.reason.as_deref(), Some(reason));
    assert_eq!((story.events.len(), story.events[0].state.as_str()), (1, "cancelled"));
    assert_eq!((story.audit.len(), story.audit[0].os_user.as_deref()), (1, Some("alice@desk")));
    // Whatever the message says, it is done with, also when the broker gave it up.
    assert_eq!(ledger.claim(&job("p1"), hash(7), "worker-a", LEASE).await.unwrap(), Claim::Settled);
    let keyed = Job { idempotency_key: Some(Token::new("k1").unwrap()), ..job("p1") };
    assert_eq!(ledger.claim(&keyed, hash(8), "worker-a", LEASE).await.unwrap(), Claim::Settled);
    let (ours, frozen, hold) = (job("p1"), request("p1"), Hold { id: id("p1"), fence: 7_000_000_000 });
    let first = First {
        job: &ours,
        hash: hash(7),
        hold: &hold,
        owner: "worker-a",
        timing: Timing::at_once(LEASE),
        request: &frozen,
    };
    assert_eq!(ledger.record_and_begin(first).await.unwrap(), Written::Lost);
    assert_eq!(upkeep.standing(&job("p1"), hash(7), 0).await.unwrap(), Standing::Settled);
    let elsewhere = Job { provider: ProviderName::new("elsewhere").unwrap(), ..job("p1") };
    assert!(matches!(ledger.claim(&elsewhere, hash(7), "worker-a", LEASE).await.unwrap(), Claim::Conflict(_)));
    assert_eq!(fixture.one("SELECT count(*) FROM attempts").await, "0");

    // One that is there already is cancelled like any other, at its own provider.
    let wanted = Refusal::WrongState { state: "cancelled".to_owned(), wanted: "waiting", done: "cancelled" };
    assert_eq!(ahead("p1").await, Err(wanted));
    let hold = fixture.take(&job("p2")).await.hold;
    let other = ProviderName::new("elsewhere").unwrap();
    let refused = operator.cancel_ahead(&id("p2"), &other, &by()).await.unwrap();
    assert_eq!(refused, Err(Refusal::OtherProvider { provider: provider.to_string() }));
    assert_eq!(ahead("p2").await, Ok(()));
    assert_lost(&fixture, &hold, 1).await;
    assert_eq!(fixture.story("p2").await.line.currency, job("p2").currency);
    let keyed = Job { idempotency_key: Some(Token::new("p4").unwrap()), ..job("p3") };
    fixture.take(&keyed).await;
    assert_eq!(ahead("p4").await, Err(Refusal::KeyTaken));
    let accounts = upkeep.conservation(LEASE, Checked::All).await.unwrap();
    assert!(accounts.iter().all(|account| account.faults().is_empty()), "{accounts:?}");
}

async fn a_late_worker_writes_nothing_over_a_verdict(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (text, verdict) in [
        ("settled", Verdict::Succeeded { reference: None }),
        ("declined", Verdict::Declined),
        ("again", Verdict::Resend),
    ] {
        // It wrote its outcome and never heard that it was kept.
        let hold = fixture.attempted(text, "unknown", &settled(FinalState::Review)).await;
        fixture.decide(text, &verdict).await.unwrap();
        assert_lost(&fixture, &hold, 1).await;
        assert_eq!(fixture.state(text).await, verdict.to());
    }
    let hold = fixture.attempted("replayed", "not_sent", &settled(FinalState::Dead)).await;
    fixture.decide("replayed", &Verdict::Replay).await.unwrap();
    assert_lost(&fixture, &hold, 1).await;
    // Nor over the worker that took it up afterwards.
    let new = fixture.take(&job("replayed")).await.hold;
    assert!(new.fence > hold.fence + 1);
    assert_lost(&fixture, &hold, 1).await;
}

async fn a_cancellation_and_a_request_never_both_happen(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for round in 0..30 {
        let text = format!("p{round}");
        let hold = fixture.take(&job(&text)).await.hold;
        let (ledger, operator) = (fixture.ledger(), fixture.operator());
        let (cancelled, first) = (id(&text), round % 2 == 0);
        let begin = tokio::spawn(async move { ledger.begin_attempt(&hold, &request("x")).await.unwrap() });
        if first {
            tokio::task::yield_now().await;
        }
        let cancel =
            tokio::spawn(async move { operator.decide(&cancelled, &Verdict::Cancel, None, &by()).await.unwrap() });
        let (begun, cancelled) = (begin.await.unwrap(), cancel.await.unwrap());
        let attempts = fixture.one(&format!("SELECT count(*) FROM attempts WHERE job_id = '{text}'")).await;
        match (begun, cancelled) {
            (Begun::Lost, Ok(())) => assert_eq!((fixture.state(&text).await.as_str(), &*attempts), ("cancelled", "0")),
            (Begun::Attempt(1), Err(_)) => {
                assert_eq!((fixture.state(&text).await.as_str(), &*attempts), ("sending", "1"));
            }
            both => panic!("{both:?}"),
        }
    }
}

async fn of_many_verdicts_one_counts(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.bring("review-unknown").await;
    let deciding = (0..16).map(|number| {
        let operator = fixture.operator();
        let verdict = [Verdict::Succeeded { reference: None }, Verdict::Declined, Verdict::Resend][number % 3].clone();
        tokio::spawn(async move { operator.decide(&id("review-unknown"), &verdict, None, &by()).await.unwrap() })
    });
    let decided: Vec<_> = futures_util::future::join_all(deciding).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(decided.iter().filter(|result| result.is_ok()).count(), 1, "{decided:?}");
    let story = fixture.story("review-unknown").await;
    assert_eq!(story.audit.len(), 1);
    let told = usize::from(story.line.state != "waiting");
    assert_eq!(story.events.len(), 1 + told, "review, and what it became");
}
