//! The fast path: a new job and its first request are recorded in one commit, without a claim before.

use futures_util::future::join_all;
use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, NewJobAttempt, RequestTiming};

use super::*;

on_every_database!(
    new_job_is_recorded_as_sending,
    known_job_is_left_unchanged,
    one_of_many_concurrent_inserts_wins,
    lost_worker_leaves_an_unknown_attempt,
    stale_insert_cannot_revert_anothers_request,
);

const OTHER_FENCE: i64 = 7_000_000_000;

fn own_hold(job: &Job, fence: i64) -> LeaseToken {
    LeaseToken { id: job.id.clone(), fence }
}

async fn first(fixture: &Fixture, job: &Job, hold: &LeaseToken) -> FencedWrite {
    let request = request(job.id.as_str());
    let (hash, owner) = (hash(1), "worker-a");
    let first = NewJobAttempt {
        job,
        hash,
        lease: hold,
        holder: owner,
        timing: RequestTiming::immediate(A_MINUTE),
        request: &request,
    };
    fixture.database.record_and_begin(first).await.unwrap()
}

fn end(outcome: &'static str) -> AttemptEnd {
    AttemptEnd { number: 1, outcome, status: Some(200), detail: String::new(), counts: true }
}

fn paid(reference: &str) -> JobState {
    JobState::Final {
        state: FinalState::Succeeded,
        reason: "accepted".to_owned(),
        reference: Some(reference.to_owned()),
    }
}

async fn new_job_is_recorded_as_sending(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ours, theirs) = (job("p1"), job("p2"));
    let hold = own_hold(&ours, OTHER_FENCE);
    assert_eq!(first(&fixture, &ours, &hold).await, FencedWrite::Applied);
    // The row has the same columns as that of a job that was claimed first and begun afterwards.
    let claimed = fixture.take(&theirs).await;
    assert_eq!(
        fixture.database.begin_attempt(&claimed.lease, &request("p2"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    let columns = "provider, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, \
         expires_at, payload, state, attempts, last_attempt, maybe_charged, lookups, resend, holder, \
         first_sent_number, frozen_method, frozen_url, frozen_content_type, frozen_account, frozen_fingerprint, reason";
    let alike = format!("SELECT count(*) FROM (SELECT DISTINCT {columns} FROM jobs) AS alike");
    assert_eq!(fixture.one(&alike).await, "1");
    let own = "SELECT idempotency_key || '|' || frozen_key || '|' || fence || '|' || (first_sent_at = created_at) FROM jobs WHERE id = 'p1'";
    assert!(fixture.one(own).await.starts_with("p1|p1|7000000000|"), "{}", fixture.one(own).await);
    assert_eq!(fixture.one("SELECT count(*) FROM attempts WHERE number = 1 AND ended_at IS NULL").await, "2");
    let ledger = fixture.database.clone();
    assert_eq!(ledger.finish_attempt(&hold, &end("accepted"), &paid("ch_1")).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.state("p1").await, "succeeded");
    assert_eq!(fixture.one("SELECT count(*) FROM job_audit").await, "0");
}

async fn known_job_is_left_unchanged(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let keyed = Job { idempotency_key: Some(Identifier::new("key-1").unwrap()), ..job("p1") };
    let claimed = fixture.take(&keyed).await;
    let same_key = Job { idempotency_key: Some(Identifier::new("key-1").unwrap()), ..job("p2") };
    let elsewhere = Job { provider: name("adyen"), ..job("p1") };
    for known in [&keyed, &same_key, &elsewhere] {
        assert_eq!(first(&fixture, known, &own_hold(known, OTHER_FENCE)).await, FencedWrite::Stale);
    }
    let row = "SELECT state || '|' || fence || '|' || last_attempt FROM jobs";
    assert_eq!(fixture.one(row).await, format!("waiting|{}|0", claimed.lease.fence));
    assert_eq!(fixture.one("SELECT count(*) FROM attempts").await, "0");
}

async fn one_of_many_concurrent_inserts_wins(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let jobs: Vec<Job> = (0..40).map(|number| job(&format!("p{}", number % 8))).collect();
    let holds: Vec<LeaseToken> = (0..).zip(&jobs).map(|(number, job)| own_hold(job, OTHER_FENCE + number)).collect();
    let written = join_all(jobs.iter().zip(&holds).map(|(job, hold)| first(&fixture, job, hold))).await;
    let kept: Vec<&LeaseToken> =
        holds.iter().zip(&written).filter(|(_, w)| **w == FencedWrite::Applied).map(|(h, _)| h).collect();
    assert_eq!(kept.len(), 8, "{written:?}");
    for hold in kept {
        let row = format!("SELECT fence FROM jobs WHERE id = '{}' AND state = 'sending'", hold.id);
        assert_eq!(fixture.one(&row).await, hold.fence.to_string());
    }
    assert_eq!(fixture.one("SELECT count(*) FROM attempts").await, "8");
}

async fn lost_worker_leaves_an_unknown_attempt(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (job, ledger) = (job("p1"), fixture.database.clone());
    let hold = own_hold(&job, OTHER_FENCE);
    assert_eq!(first(&fixture, &job, &hold).await, FencedWrite::Applied);
    assert_eq!(ledger.claim(&job, hash(1), "worker-b").await.unwrap(), Claim::NotOpen);
    fixture.expire_lease(&hold).await;
    let heir = fixture.take(&job).await;
    assert_eq!((heir.lease.fence, heir.maybe_charged, heir.attempts), (OTHER_FENCE + 2, true, 1));
    assert_eq!(fixture.one("SELECT outcome FROM attempts").await, "unknown");
    assert_eq!(ledger.finish_attempt(&hold, &end("accepted"), &paid("ch_1")).await.unwrap(), FencedWrite::Stale);
}

/// A worker that does not know whether its first write was committed reverts it by its own fencing token. If it was not
/// committed, another worker may have the job in flight by now. That worker's request stays as it is.
async fn stale_insert_cannot_revert_anothers_request(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (job, ledger) = (job("p1"), fixture.database.clone());
    let theirs = own_hold(&job, OTHER_FENCE);
    assert_eq!(first(&fixture, &job, &theirs).await, FencedWrite::Applied);
    let ours = own_hold(&job, OTHER_FENCE + 5);
    let unsent = AttemptEnd { counts: false, status: None, ..end("not_sent") };
    let waiting =
        JobState::Waiting { wait: SECOND, reason: Wait::with_detail(WaitReason::Retry, "the ledger was away") };
    assert_eq!(ledger.finish_attempt(&ours, &unsent, &waiting).await.unwrap(), FencedWrite::Stale);
    assert_eq!(ledger.transition(&ours, &waiting).await.unwrap(), FencedWrite::Stale);
    assert_eq!(fixture.state("p1").await, "sending");
    assert_eq!(ledger.finish_attempt(&theirs, &end("accepted"), &paid("ch_1")).await.unwrap(), FencedWrite::Applied);
}
