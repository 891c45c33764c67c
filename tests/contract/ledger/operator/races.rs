//! Races of operators and workers on the same job: one write wins, and every other one is rejected.

use sluicegate::ledger::rejected::RecordedContent;
use sluicegate::ledger::upkeep::CheckScope;
use sluicegate::ledger::{NewJobAttempt, RequestTiming};

use super::*;

on_every_database!(
    cancelling_an_active_job_revokes_its_lease,
    late_worker_cannot_overwrite_a_resolution,
    a_cancellation_and_a_request_never_both_happen,
    one_of_many_resolutions_wins,
    job_is_cancelled_before_its_message_arrives,
);

async fn assert_lost(fixture: &Fixture, hold: &LeaseToken, number: u32) {
    let ledger = fixture.database.clone();
    let before = fixture.picture(hold.id.as_str()).await;
    let end = AttemptEnd { number, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
    let waiting = JobState::Waiting { wait: SECOND, reason: Wait::with_detail(WaitReason::Retry, "x") };
    assert_eq!(ledger.begin_attempt(hold, &request(hold.id.as_str()), AT_ONCE).await.unwrap(), BeginResult::Stale);
    for next in [&finished(FinalState::Succeeded), &waiting] {
        assert_eq!(ledger.finish_attempt(hold, &end, next).await.unwrap(), FencedWrite::Stale);
        assert_eq!(ledger.transition(hold, next).await.unwrap(), FencedWrite::Stale);
    }
    assert_eq!(ledger.release(hold).await.unwrap(), FencedWrite::Stale);
    assert_eq!(fixture.picture(hold.id.as_str()).await, before);
}

async fn cancelling_an_active_job_revokes_its_lease(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let hold = fixture.take(&job("p1")).await.lease;
    fixture.decide("p1", &JobResolution::Cancel).await.unwrap();
    assert_lost(&fixture, &hold, 1).await;
    assert_eq!(fixture.one("SELECT count(*) FROM attempts").await, "0");
    // Its message is delivered again, and the job is finished.
    assert_eq!(fixture.database.claim(&job("p1"), hash(1), "worker-b").await.unwrap(), Claim::NotOpen);
}

async fn job_is_cancelled_before_its_message_arrives(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let provider = job("p1").provider;
    let ahead = async |text: &str| settled(ledger.precancel(&id(text), &provider, &by()).await);
    assert_eq!(ahead("p1").await, Ok(()));
    let details = fixture.details("p1").await;
    assert_eq!((details.line.state.as_str(), details.line.currency.as_str()), ("cancelled", "XXX"));
    let reason = "cancelled by an operator before its message came: asked the provider";
    assert_eq!(details.line.reason.as_deref(), Some(reason));
    assert_eq!((details.events.len(), details.events[0].state.as_str()), (1, "cancelled"));
    assert_eq!((details.audit.len(), details.audit[0].os_user.as_deref()), (1, Some("alice@desk")));
    // The id's message is finished whatever it contains, also after the broker dead-lettered it.
    assert_eq!(ledger.claim(&job("p1"), hash(7), "worker-a").await.unwrap(), Claim::NotOpen);
    let keyed = Job { idempotency_key: Some(Identifier::new("k1").unwrap()), ..job("p1") };
    assert_eq!(ledger.claim(&keyed, hash(8), "worker-a").await.unwrap(), Claim::NotOpen);
    let (ours, frozen, hold) = (job("p1"), request("p1"), LeaseToken { id: id("p1"), fence: 7_000_000_000 });
    let first = NewJobAttempt {
        job: &ours,
        hash: hash(7),
        lease: &hold,
        holder: "worker-a",
        timing: RequestTiming::immediate(A_MINUTE),
        request: &frozen,
    };
    assert_eq!(ledger.record_and_begin(first).await.unwrap(), FencedWrite::Stale);
    assert_eq!(ledger.recorded_content(&job("p1"), hash(7)).await.unwrap(), RecordedContent::Same);
    let elsewhere = Job { provider: ProviderName::new("elsewhere").unwrap(), ..job("p1") };
    assert!(matches!(ledger.claim(&elsewhere, hash(7), "worker-a").await.unwrap(), Claim::Conflict(_)));
    assert_eq!(fixture.one("SELECT count(*) FROM attempts").await, "0");

    // A job that is already recorded is cancelled like any other, at its own provider.
    let wanted = ResolutionRefusal::WrongState { state: "cancelled".to_owned(), wanted: "waiting", done: "cancelled" };
    assert_eq!(ahead("p1").await, Err(wanted));
    let hold = fixture.take(&job("p2")).await.lease;
    let other = ProviderName::new("elsewhere").unwrap();
    let refused = settled(ledger.precancel(&id("p2"), &other, &by()).await);
    assert_eq!(refused, Err(ResolutionRefusal::OtherProvider { provider: provider.to_string() }));
    assert_eq!(ahead("p2").await, Ok(()));
    assert_lost(&fixture, &hold, 1).await;
    assert_eq!(fixture.details("p2").await.line.currency, *job("p2").currency);
    let keyed = Job { idempotency_key: Some(Identifier::new("p4").unwrap()), ..job("p3") };
    fixture.take(&keyed).await;
    assert_eq!(ahead("p4").await, Err(ResolutionRefusal::KeyTaken));
    let accounts = ledger.reconcile(A_MINUTE, CheckScope::All).await.unwrap();
    assert!(accounts.iter().all(|account| account.discrepancies().is_empty()), "{accounts:?}");
}

async fn late_worker_cannot_overwrite_a_resolution(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (text, verdict) in [
        ("settled", JobResolution::Succeeded(Charge::default())),
        ("declined", JobResolution::Declined),
        ("again", JobResolution::Resend),
    ] {
        // The worker wrote its outcome, and never received the confirmation.
        let hold = fixture.attempted(text, "unknown", &finished(FinalState::Review)).await;
        fixture.decide(text, &verdict).await.unwrap();
        assert_lost(&fixture, &hold, 1).await;
        assert_eq!(fixture.state(text).await, verdict.resulting_state());
    }
    let hold = fixture.attempted("replayed", "not_sent", &finished(FinalState::Dead)).await;
    fixture.decide("replayed", &JobResolution::Replay).await.unwrap();
    assert_lost(&fixture, &hold, 1).await;
    // Nor can it overwrite the worker that claimed the job afterwards.
    let new = fixture.take(&job("replayed")).await.lease;
    assert!(new.fence > hold.fence + 1);
    assert_lost(&fixture, &hold, 1).await;
}

async fn a_cancellation_and_a_request_never_both_happen(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for round in 0..30 {
        let text = format!("p{round}");
        let hold = fixture.take(&job(&text)).await.lease;
        let (ledger, deciding) = (fixture.database.clone(), fixture.database.clone());
        let (cancelled, first) = (id(&text), round % 2 == 0);
        let begin = tokio::spawn(async move { ledger.begin_attempt(&hold, &request("x"), AT_ONCE).await.unwrap() });
        if first {
            tokio::task::yield_now().await;
        }
        let cancel = tokio::spawn(async move {
            settled(deciding.resolve_job(&cancelled, &JobResolution::Cancel, None, &by()).await)
        });
        let (begin_result, cancelled) = (begin.await.unwrap(), cancel.await.unwrap());
        let attempts = fixture.one(&format!("SELECT count(*) FROM attempts WHERE job_id = '{text}'")).await;
        match (begin_result, cancelled) {
            (BeginResult::Stale, Ok(())) => {
                assert_eq!((fixture.state(&text).await.as_str(), &*attempts), ("cancelled", "0"))
            }
            (BeginResult::Attempt(1), Err(_)) => {
                assert_eq!((fixture.state(&text).await.as_str(), &*attempts), ("sending", "1"));
            }
            both => panic!("{both:?}"),
        }
    }
}

async fn one_of_many_resolutions_wins(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.bring("review-unknown").await;
    let deciding = (0..16).map(|number| {
        let operator = fixture.database.clone();
        let verdict = [JobResolution::Succeeded(Charge::default()), JobResolution::Declined, JobResolution::Resend]
            [number % 3]
            .clone();
        tokio::spawn(async move { settled(operator.resolve_job(&id("review-unknown"), &verdict, None, &by()).await) })
    });
    let decided: Vec<_> = futures_util::future::join_all(deciding).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(decided.iter().filter(|result| result.is_ok()).count(), 1, "{decided:?}");
    let details = fixture.details("review-unknown").await;
    assert_eq!(details.audit.len(), 1);
    let further = usize::from(details.line.state != "waiting");
    assert_eq!(details.events.len(), 1 + further, "review, and what it became");
}
