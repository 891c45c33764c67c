//! Recording and claiming jobs: duplicates, conflicts, concurrent claims, and stale, released and renewed leases.

use sluicegate::domain::job::InvalidReason;
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::time::EpochMs;
use sluicegate::ledger::backlog::BacklogRecord;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

on_every_database!(
    new_job_is_claimed_at_once,
    a_job_waits_for_its_time,
    duplicate_delivery_changes_nothing,
    conflicts_are_named,
    sixteen_claims_yield_one_lease,
    sixteen_takeovers_yield_one_lease,
    stale_lease_writes_nothing,
    released_lease_writes_nothing,
    a_dropped_caller_leaves_no_open_transaction,
);

async fn new_job_is_claimed_at_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let claimed = fixture.take(&job("p1")).await;
    assert_eq!((claimed.lease.fence, claimed.attempts, claimed.maybe_charged), (1, 0, false));
    assert_eq!(
        (claimed.lost_holders, claimed.expires_in, claimed.last_attempt, claimed.frozen_request),
        (0, None, 0, None)
    );
    assert!(claimed.age < Duration::from_secs(30), "{:?}", claimed.age);
    let row = "SELECT provider || '|' || idempotency_key || '|' || account || '|' || reference || '|' || payload";
    assert_eq!(fixture.one(&format!("{row} FROM jobs")).await, r#"stripe|p1|acct_1|invoice 7|{"token": "tok_1"}"#);
}

async fn a_job_waits_for_its_time(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let now_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let later = Job { not_before: Some(EpochMs(now_ms + 600_000)), ..job("later") };
    match fixture.database.record_backlog(&later, hash(1), Duration::ZERO).await.unwrap() {
        BacklogRecord::Recorded { wait } => {
            assert!(wait > Duration::from_secs(500) && wait <= Duration::from_secs(600), "{wait:?}");
        }
        other => panic!("{other:?}"),
    }
    let asleep = "SELECT count(*) FROM jobs WHERE NOT backlog AND holder IS NULL AND wake_at = not_before";
    assert_eq!(fixture.one(asleep).await, "1");
    let expired = Job { expires_at: Some(EpochMs(now_ms - 1_000)), ..job("late") };
    assert_eq!(fixture.take(&expired).await.expires_in, Some(Duration::ZERO));
    let expiring = Job { expires_at: Some(EpochMs(now_ms + 3_600_000)), ..job("in-time") };
    let left = fixture.take(&expiring).await.expires_in.unwrap();
    assert!(left > Duration::from_secs(3_500) && left <= Duration::from_secs(3_600), "{left:?}");
    // The age of a scheduled job counts from its scheduled time.
    let scheduled = Job { not_before: Some(EpochMs(now_ms + 3_600_000)), ..job("scheduled") };
    assert_eq!(fixture.take(&scheduled).await.age, Duration::ZERO);
}

async fn duplicate_delivery_changes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    let claimed = fixture.take(&job).await;
    let record = async || ledger.record_backlog(&job, hash(1), Duration::ZERO).await.unwrap();
    assert_eq!(record().await, BacklogRecord::Known);
    assert_eq!(ledger.claim(&job, hash(1), "worker-b").await.unwrap(), Claim::NotOpen);
    let next = JobState::Final { state: FinalState::Cancelled, reason: "by hand".to_owned(), reference: None };
    assert_eq!(ledger.transition(&claimed.lease, &next).await.unwrap(), FencedWrite::Applied);
    assert_eq!(record().await, BacklogRecord::Known);
    assert_eq!(ledger.claim(&job, hash(1), "worker-b").await.unwrap(), Claim::NotOpen);
    assert_eq!(fixture.one("SELECT fence FROM jobs").await, "1");
}

async fn conflicts_are_named(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let first = Job { idempotency_key: Some(Identifier::new("key-1").unwrap()), ..job("p1") };
    fixture.take(&first).await;
    fixture.take(&job("p2")).await;
    let elsewhere = |id: &str, key: &str| Job {
        provider: name("adyen"),
        idempotency_key: Some(Identifier::new(key).unwrap()),
        ..job(id)
    };
    let key = |id: &str, key: &str| Job { provider: name("stripe"), ..elsewhere(id, key) };
    let conflicts = [
        (first.clone(), hash(2), "id:"),
        (elsewhere("p1", "other"), hash(1), "id:"),
        (key("p3", "key-1"), hash(1), "idempotency_key:"),
        // A job without an idempotency key uses its id as the key.
        (key("p4", "p2"), hash(1), "idempotency_key:"),
    ];
    for (job, hash, detail) in conflicts {
        match ledger.claim(&job, hash, "worker-b").await.unwrap() {
            Claim::Conflict(invalid) => {
                assert_eq!(invalid.reason, InvalidReason::Conflict);
                assert!(invalid.detail.starts_with(detail), "{detail} {invalid}");
            }
            other => panic!("{} {other:?}", job.id),
        }
    }
    assert_eq!(fixture.one("SELECT count(*) FROM jobs").await, "2");
    // Keys are unique per provider only.
    fixture.take(&elsewhere("p5", "key-1")).await;
}

async fn race(fixture: &Fixture, job: &Job) -> Vec<Claim> {
    let claims = (0..16).map(|number| {
        let (ledger, job) = (fixture.database.clone(), job.clone());
        tokio::spawn(async move { ledger.claim(&job, hash(1), &format!("worker-{number}")).await.unwrap() })
    });
    futures_util::future::join_all(claims).await.into_iter().map(Result::unwrap).collect()
}

async fn sixteen_claims_yield_one_lease(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..5 {
        let claims = race(&fixture, &job(&format!("p{number}"))).await;
        let held = claims.iter().filter(|claim| matches!(claim, Claim::Claimed(_))).count();
        let refused = claims.iter().filter(|claim| **claim == Claim::NotOpen).count();
        assert_eq!((held, refused), (1, 15), "{claims:?}");
    }
}

async fn sixteen_takeovers_yield_one_lease(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let job = job("p1");
    let mut hold = fixture.take(&job).await.lease;
    for _ in 0..3 {
        fixture.expire_lease(&hold).await;
        let claims = race(&fixture, &job).await;
        let holds: Vec<_> = claims
            .into_iter()
            .filter_map(|claim| match claim {
                Claim::Claimed(claimed) => Some(claimed.lease),
                _ => None,
            })
            .collect();
        let [new] = holds.as_slice() else { panic!("{holds:?}") };
        // The return raises it, and so does the claim.
        assert_eq!(new.fence, hold.fence + 2);
        hold = new.clone();
    }
}

/// Tries every write of [`Ledger`] with this lease; each must be stale.
async fn assert_lost(fixture: &Fixture, hold: &LeaseToken) {
    let ledger = fixture.database.clone();
    let columns = "state || '|' || fence || '|' || attempts || '|' || last_attempt || '|' || wake_at || '|' || \
                   coalesce(reason, '') || '|' || coalesce(holder, '') || '|' || coalesce(response_by, created_at)";
    let picture = format!("SELECT {columns} FROM jobs WHERE id = '{}'", hold.id);
    let before = fixture.one(&picture).await;
    let end = AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
    let done = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
    let waiting = JobState::Waiting { wait: SECOND, reason: Wait::with_detail(WaitReason::Retry, "x") };
    assert_eq!(ledger.begin_attempt(hold, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Stale);
    for next in [&done, &waiting] {
        assert_eq!(ledger.finish_attempt(hold, &end, next).await.unwrap(), FencedWrite::Stale);
        assert_eq!(ledger.transition(hold, next).await.unwrap(), FencedWrite::Stale);
    }
    assert_eq!(ledger.release(hold).await.unwrap(), FencedWrite::Stale);
    assert_eq!(fixture.one(&picture).await, before);
    assert_eq!(fixture.one("SELECT count(*) FROM events").await, "0");
}

async fn stale_lease_writes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let job = job("p1");
    let stale = fixture.take(&job).await.lease;
    fixture.expire_lease(&stale).await;
    let new = fixture.take(&job).await.lease;
    assert_lost(&fixture, &stale).await;
    // The same holds while the new worker's request is in flight.
    assert_eq!(fixture.database.begin_attempt(&new, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    assert_lost(&fixture, &stale).await;
    assert_eq!(fixture.one("SELECT count(*) FROM attempts WHERE ended_at IS NULL").await, "1");
}

async fn released_lease_writes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let hold = fixture.take(&job("p1")).await.lease;
    assert_eq!(fixture.database.release(&hold).await.unwrap(), FencedWrite::Applied);
    assert_lost(&fixture, &hold).await;
}

async fn a_dropped_caller_leaves_no_open_transaction(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..60 {
        let (ledger, id) = (fixture.database.clone(), format!("p{number}"));
        let rate = "5/1s".parse().unwrap();
        let work = async move {
            ledger.set_rate(&name("stripe"), "none", rate).await.unwrap();
            ledger.claim(&job(&id), hash(1), "worker-a").await.unwrap();
            ledger.claim(&job(&id), hash(1), "worker-a").await.unwrap();
        };
        let task = tokio::spawn(work);
        for _ in 0..number {
            tokio::task::yield_now().await;
        }
        task.abort();
    }
    let claimed = fixture.take(&job("after")).await;
    assert_eq!(
        fixture.database.begin_attempt(&claimed.lease, &request("after"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    // The write is committed, not left in an open transaction: another connection sees it.
    let other =
        if kind == Kind::SqliteMemory { fixture.database.clone() } else { Database::open(&fixture.url, 1).unwrap() };
    let counts = other.state_counts().await.unwrap();
    assert!(counts.iter().any(|count| count.state == "sending" && count.jobs == 1), "{counts:?}");
}
