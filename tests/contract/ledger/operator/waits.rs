//! The last wait of a job and its reason, as the job's details show them, also after the request was sent.

use super::*;

on_every_database!(last_wait_is_shown_from_its_start);

const PER_ACCOUNT: &str = "per-account";

async fn last_wait_is_shown_from_its_start(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, of) = (fixture.database.clone(), "late");
    let waited = async || fixture.details(of).await.waited;
    let delay = async |limit: &str| {
        let hold = fixture.take(&job(of)).await.lease;
        let next = JobState::Waiting { wait: Duration::from_secs(60), reason: Wait::for_limit(limit) };
        assert_eq!(ledger.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
        let details = fixture.details(of).await;
        assert_eq!(details.waited.as_ref().map(|last| last.until), Some(details.line.wake_at));
        details.waited.unwrap()
    };
    drop(fixture.take(&job("prompt")).await);
    assert_eq!(fixture.details("prompt").await.waited, None);

    let elsewhere = delay("per-second").await;
    assert_eq!((elsewhere.reason.as_str(), elsewhere.request), ("waits for limit per-second", 1));
    let first = delay(PER_ACCOUNT).await;
    assert_eq!((first.wait_reason.as_str(), first.wait_limit.as_deref()), ("limit", Some(PER_ACCOUNT)));
    assert_eq!((first.reason.as_str(), first.request), ("waits for limit per-account", 1));
    assert!(first.since >= elsewhere.since && first.until > first.since);
    // Delayed again for the same reason before the same request: one wait.
    let again = delay(PER_ACCOUNT).await;
    assert_eq!((again.since, again.request), (first.since, 1));
    assert!(again.until >= first.until);

    // Sent, throttled, and delayed by its limit before the second request: another wait.
    let throttled = JobState::Waiting { wait: Duration::ZERO, reason: WaitReason::Throttled.into() };
    fixture.attempted(of, "throttled", &throttled).await;
    let back_off = waited().await.unwrap();
    assert_eq!((back_off.wait_reason.as_str(), back_off.wait_limit, back_off.request), ("throttled", None, 2));
    let second = delay(PER_ACCOUNT).await;
    assert!(second.request == 2 && second.since >= again.since, "{second:?}");
    fixture.attempted(of, "accepted", &finished(FinalState::Succeeded)).await;
    assert_eq!(waited().await, Some(second));
    let json = serde_json::to_value(fixture.details(of).await).unwrap();
    assert_eq!((&json["waited"]["wait_limit"], &json["waited"]["request"]), (&PER_ACCOUNT.into(), &2.into()));
    // It waits for nothing any more.
    assert_eq!((&json["wait_reason"], &json["wait_limit"]), (&serde_json::Value::Null, &serde_json::Value::Null));
}
