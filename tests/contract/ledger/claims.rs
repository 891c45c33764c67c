//! Recording, claiming, holding and losing a job.

use sluicegate::domain::job::InvalidReason;
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::time::EpochMs;
use sluicegate::ledger::{AttemptEnd, Begun, JobState, Written};

use super::*;

on_every_database!(
    a_new_job_is_in_hand_at_once,
    a_job_waits_for_its_time,
    the_same_again_changes_nothing,
    conflicts_are_named,
    sixteen_claims_give_one_hold,
    sixteen_takeovers_give_one_hold,
    a_passed_on_hold_writes_nothing,
    a_hold_given_up_writes_nothing,
    renewing_keeps_what_is_held,
    a_dropped_caller_leaves_no_open_transaction,
);

async fn a_new_job_is_in_hand_at_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let claimed = fixture.take(&job("p1")).await;
    assert_eq!((claimed.hold.fence, claimed.attempts, claimed.unknown), (1, 0, false));
    assert_eq!((claimed.wait, claimed.expired, claimed.frozen), (Duration::ZERO, false, None));
    assert!(claimed.age < Duration::from_secs(30), "{:?}", claimed.age);
    let row = "SELECT provider || '|' || idempotency_key || '|' || account || '|' || reference || '|' || payload";
    assert_eq!(fixture.one(&format!("{row} FROM jobs")).await, r#"stripe|p1|acct_1|invoice 7|{"token": "tok_1"}"#);
}

async fn a_job_waits_for_its_time(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let now_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let later = Job { not_before: Some(EpochMs(now_ms + 600_000)), ..job("later") };
    let claimed = fixture.take(&later).await;
    assert!(claimed.wait > Duration::from_secs(500) && claimed.wait <= Duration::from_secs(600), "{claimed:?}");
    let wait = Duration::from_secs(900);
    let next = JobState::Waiting { wait, reason: "limit per-second".to_owned() };
    assert_eq!(fixture.ledger().put_down(&claimed.hold, &next).await.unwrap(), Written::Kept);
    let again = fixture.take(&later).await;
    assert!(again.wait > Duration::from_secs(800) && again.wait <= wait, "{again:?}");
    // Given back, it is due when it says itself.
    assert_eq!(fixture.ledger().release(&again.hold).await.unwrap(), Written::Kept);
    assert!(fixture.take(&later).await.wait <= Duration::from_secs(600));
    let expired = Job { expires_at: Some(EpochMs(now_ms - 1_000)), ..job("late") };
    assert!(fixture.take(&expired).await.expired);
}

async fn the_same_again_changes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.ledger(), job("p1"));
    let claimed = fixture.take(&job).await;
    match ledger.claim(&job, hash(1), "worker-b", LEASE).await.unwrap() {
        Claim::InHand { lease_left } => assert!(lease_left <= LEASE && lease_left > LEASE / 2, "{lease_left:?}"),
        other => panic!("{other:?}"),
    }
    let next = JobState::Final { state: FinalState::Cancelled, reason: "by hand".to_owned(), reference: None };
    assert_eq!(ledger.put_down(&claimed.hold, &next).await.unwrap(), Written::Kept);
    assert_eq!(ledger.claim(&job, hash(1), "worker-b", LEASE).await.unwrap(), Claim::Settled);
    assert_eq!(fixture.one("SELECT fence FROM jobs").await, "1");
}

async fn conflicts_are_named(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.ledger();
    let first = Job { idempotency_key: Some(Token::new("key-1").unwrap()), ..job("p1") };
    fixture.take(&first).await;
    fixture.take(&job("p2")).await;
    let elsewhere = |id: &str, key: &str| Job {
        provider: name("adyen"),
        idempotency_key: Some(Token::new(key).unwrap()),
        ..job(id)
    };
    let key = |id: &str, key: &str| Job { provider: name("stripe"), ..elsewhere(id, key) };
    let conflicts = [
        (first.clone(), hash(2), "id:"),
        (elsewhere("p1", "other"), hash(1), "id:"),
        (key("p3", "key-1"), hash(1), "idempotency_key:"),
        // The effective key of a job without one is its id.
        (key("p4", "p2"), hash(1), "idempotency_key:"),
    ];
    for (job, hash, detail) in conflicts {
        match ledger.claim(&job, hash, "worker-b", LEASE).await.unwrap() {
            Claim::Conflict(invalid) => {
                assert_eq!(invalid.reason, InvalidReason::Conflict);
                assert!(invalid.detail.starts_with(detail), "{detail} {invalid}");
            }
            other => panic!("{} {other:?}", job.id),
        }
    }
    assert_eq!(fixture.one("SELECT count(*) FROM jobs").await, "2");
    // Keys are unique per provider, not over all.
    fixture.take(&elsewhere("p5", "key-1")).await;
}

async fn race(fixture: &Fixture, job: &Job) -> Vec<Claim> {
    let claims = (0..16).map(|number| {
        let (ledger, job) = (fixture.ledger(), job.clone());
        tokio::spawn(async move { ledger.claim(&job, hash(1), &format!("worker-{number}"), LEASE).await.unwrap() })
    });
    futures_util::future::join_all(claims).await.into_iter().map(Result::unwrap).collect()
}

async fn sixteen_claims_give_one_hold(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..5 {
        let claims = race(&fixture, &job(&format!("p{number}"))).await;
        let held = claims.iter().filter(|claim| matches!(claim, Claim::Claimed(_))).count();
        let refused = claims.iter().filter(|claim| matches!(claim, Claim::InHand { .. })).count();
        assert_eq!((held, refused), (1, 15), "{claims:?}");
    }
}

async fn sixteen_takeovers_give_one_hold(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let job = job("p1");
    let mut hold = fixture.take(&job).await.hold;
    for _ in 0..3 {
        fixture.expire_lease(&hold).await;
        let claims = race(&fixture, &job).await;
        let holds: Vec<_> = claims
            .into_iter()
            .filter_map(|claim| match claim {
                Claim::Claimed(claimed) => Some(claimed.hold),
                _ => None,
            })
            .collect();
        let [new] = holds.as_slice() else { panic!("{holds:?}") };
        assert_eq!(new.fence, hold.fence + 1);
        hold = new.clone();
    }
}

/// Every write of the face with this hold; all must be told that it is lost.
async fn assert_lost(fixture: &Fixture, hold: &Hold) {
    let ledger = fixture.ledger();
    let columns = "state || '|' || fence || '|' || attempts || '|' || last_attempt || '|' || wake_at || '|' || \
                   coalesce(reason, '') || '|' || coalesce(lease_owner, '') || '|' || coalesce(lease_until, created_at)";
    let picture = format!("SELECT {columns} FROM jobs WHERE id = '{}'", hold.id);
    let before = fixture.one(&picture).await;
    let end = AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
    let done = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
    let waiting = JobState::Waiting { wait: SECOND, reason: "x".to_owned() };
    assert_eq!(ledger.begin_attempt(hold, &request("p1")).await.unwrap(), Begun::Lost);
    for next in [&done, &waiting] {
        assert_eq!(ledger.finish_attempt(hold, &end, next).await.unwrap(), Written::Lost);
        assert_eq!(ledger.put_down(hold, next).await.unwrap(), Written::Lost);
    }
    assert_eq!(ledger.release(hold).await.unwrap(), Written::Lost);
    assert_eq!(ledger.renew(std::slice::from_ref(hold), LEASE).await.unwrap(), std::slice::from_ref(hold));
    assert_eq!(fixture.one(&picture).await, before);
    assert_eq!(fixture.one("SELECT count(*) FROM outcome_events").await, "0");
}

async fn a_passed_on_hold_writes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let job = job("p1");
    let stale = fixture.take(&job).await.hold;
    fixture.expire_lease(&stale).await;
    let new = fixture.take(&job).await.hold;
    assert_lost(&fixture, &stale).await;
    // Nor while the new holder's request is on the wire.
    assert_eq!(fixture.ledger().begin_attempt(&new, &request("p1")).await.unwrap(), Begun::Attempt(1));
    assert_lost(&fixture, &stale).await;
    assert_eq!(fixture.one("SELECT count(*) FROM attempts WHERE ended_at IS NULL").await, "1");
}

async fn a_hold_given_up_writes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let hold = fixture.take(&job("p1")).await.hold;
    assert_eq!(fixture.ledger().release(&hold).await.unwrap(), Written::Kept);
    assert_lost(&fixture, &hold).await;
}

async fn renewing_keeps_what_is_held(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.ledger();
    let mut holds = Vec::new();
    for number in 0..40 {
        holds.push(fixture.take(&job(&format!("p{number}"))).await.hold);
    }
    let strangers = [Hold { fence: 99, ..holds[3].clone() }, Hold { id: Token::new("none").unwrap(), fence: 1 }];
    let asked: Vec<Hold> = holds.iter().chain(&strangers).cloned().collect();
    assert_eq!(ledger.renew(&asked, LEASE * 10).await.unwrap(), strangers);
    assert!(ledger.renew(&[], LEASE).await.unwrap().is_empty());
    match ledger.claim(&job("p3"), hash(1), "worker-b", LEASE).await.unwrap() {
        Claim::InHand { lease_left } => assert!(lease_left > LEASE * 9, "{lease_left:?}"),
        other => panic!("{other:?}"),
    }
}

async fn a_dropped_caller_leaves_no_open_transaction(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..60 {
        let (ledger, settings, id) = (fixture.ledger(), fixture.settings(), format!("p{number}"));
        let rate = "5/1s".parse().unwrap();
        let work = async move {
            settings.set_rate(&name("stripe"), "none", rate).await.unwrap();
            ledger.claim(&job(&id), hash(1), "worker-a", LEASE).await.unwrap();
            ledger.claim(&job(&id), hash(1), "worker-a", LEASE).await.unwrap();
        };
        let task = tokio::spawn(work);
        for _ in 0..number {
            tokio::task::yield_now().await;
        }
        task.abort();
    }
    let claimed = fixture.take(&job("after")).await;
    assert_eq!(fixture.ledger().begin_attempt(&claimed.hold, &request("after")).await.unwrap(), Begun::Attempt(1));
    // Committed for everybody, not inside somebody's open transaction.
    let other =
        if kind == Kind::SqliteMemory { fixture.database.clone() } else { Database::open(&fixture.url, 1).unwrap() };
    let counts = other.ledger().state_counts().await.unwrap();
    assert!(counts.iter().any(|count| count.state == "sending" && count.jobs == 1), "{counts:?}");
}
