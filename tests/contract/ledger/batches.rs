//! Group commit: concurrent ledger writes share a commit, and each gets the result that it would get alone.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use sluicegate::domain::job::Job;
use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LeaseToken, LedgerError};

use super::*;

fn jobs(count: usize) -> Vec<Job> {
    (0..count).map(|n| job(&format!("pay_{n:03}"))).collect()
}

async fn claim_all(fixture: &Fixture, jobs: &[Job]) -> Vec<Claim> {
    let ledger = fixture.database.clone();
    let claims = jobs.iter().map(|job| ledger.claim(job, hash(1), "worker-a"));
    join_all(claims).await.into_iter().map(Result::unwrap).collect()
}

async fn hold_all(fixture: &Fixture, jobs: &[Job]) -> Vec<LeaseToken> {
    let held = |claim| match claim {
        Claim::Claimed(claimed) => claimed.lease,
        other => panic!("{other:?}"),
    };
    claim_all(fixture, jobs).await.into_iter().map(held).collect()
}

fn succeeded(reference: &str) -> JobState {
    JobState::Final {
        state: FinalState::Succeeded,
        reason: "accepted".to_owned(),
        reference: Some(reference.to_owned()),
    }
}

fn accepted() -> AttemptEnd {
    AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: String::new(), counts: true }
}

async fn begin_all(fixture: &Fixture, holds: &[LeaseToken]) {
    let ledger = fixture.database.clone();
    let begin = async |hold: &LeaseToken| ledger.begin_attempt(hold, &request(hold.id.as_str()), AT_ONCE).await;
    let results = join_all(holds.iter().map(begin)).await;
    assert!(results.iter().all(|result| matches!(result, Ok(BeginResult::Attempt(1)))), "{results:?}");
}

async fn count(fixture: &Fixture, rows: &str) -> String {
    fixture.one(&format!("SELECT count(*) FROM {rows}")).await
}

/// All writes of 300 jobs, from the claim to the final state: more than one batch holds.
async fn batched_writes_all_commit(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let jobs = jobs(300);
    let holds = hold_all(&fixture, &jobs).await;
    begin_all(&fixture, &holds).await;
    assert_eq!(count(&fixture, "attempts WHERE ended_at IS NULL").await, "300");
    let ledger = fixture.database.clone();
    let finish = async |hold: &LeaseToken| {
        ledger.finish_attempt(hold, &accepted(), &succeeded(&format!("ch_{}", hold.id))).await.unwrap()
    };
    let written = join_all(holds.iter().map(finish)).await;
    assert!(written.iter().all(|written| *written == FencedWrite::Applied));
    for rows in [
        "jobs WHERE state = 'succeeded' AND attempts = 1 AND provider_reference = 'ch_' || id AND frozen_key = id",
        "attempts WHERE outcome = 'accepted' AND status = 200 AND ended_at IS NOT NULL AND number = 1",
        "events JOIN jobs ON jobs.id = job_id AND jobs.provider_reference = events.provider_reference",
    ] {
        assert_eq!(count(&fixture, rows).await, "300", "{rows}");
    }
}

/// Three concurrent deliveries of each job: one claims the job, the others find it leased. No other job changes.
async fn one_of_many_deliveries_claims_the_job(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let jobs: Vec<Job> = (0..60).map(|n| job(&format!("pay_{}", n % 20))).collect();
    let claims = claim_all(&fixture, &jobs).await;
    let taken: BTreeSet<_> = claims
        .iter()
        .filter_map(|claim| match claim {
            Claim::Claimed(claimed) => Some(claimed.lease.id.as_str().to_owned()),
            _ => None,
        })
        .collect();
    let leased = claims.iter().filter(|claim| **claim == Claim::NotOpen).count();
    assert_eq!((taken.len(), leased), (20, 40));
    assert_eq!(count(&fixture, "jobs WHERE fence = 1").await, "20");
}

/// Concurrent claims of new, returning, finished and conflicting jobs.
async fn each_batched_claim_gets_its_own_result(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let all = jobs(40);
    let ledger = fixture.database.clone();
    for hold in hold_all(&fixture, &all[..20]).await {
        let next = if hold.id.as_str() < "pay_010" {
            JobState::Final { state: FinalState::Dead, reason: "given up".to_owned(), reference: None }
        } else {
            JobState::Waiting { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "again") }
        };
        assert_eq!(ledger.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
    }
    let mut asked = all.clone();
    let mut same_key = job("another");
    same_key.idempotency_key = Some(Identifier::new("pay_015").unwrap());
    asked.push(same_key);
    let mut elsewhere = job("pay_016");
    elsewhere.provider = name("adyen");
    asked.push(elsewhere);
    let words: Vec<&str> = claim_all(&fixture, &asked)
        .await
        .iter()
        .map(|claim| match claim {
            Claim::Claimed(claimed) if claimed.lease.fence == 1 => "new",
            Claim::Claimed(_) => "again",
            Claim::NotOpen => "settled",
            Claim::Conflict(_) => "conflict",
        })
        .collect();
    let expected = [("settled", 10), ("again", 10), ("new", 20), ("conflict", 2)];
    let expected: Vec<&str> = expected.iter().flat_map(|(word, count)| vec![*word; *count]).collect();
    assert_eq!(words, expected);
}

/// Two payments of one batch name the same charge: one succeeds, the other goes to manual review. The rest of the batch
/// succeeds.
async fn batched_payments_cannot_share_a_charge(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let holds = hold_all(&fixture, &jobs(10)).await;
    begin_all(&fixture, &holds).await;
    let ledger = fixture.database.clone();
    let reference = |hold: &LeaseToken| match hold.id.as_str() {
        "pay_003" | "pay_007" => "ch_twice".to_owned(),
        id => format!("ch_{id}"),
    };
    let finish =
        async |hold: &LeaseToken| ledger.finish_attempt(hold, &accepted(), &succeeded(&reference(hold))).await.unwrap();
    let written = join_all(holds.iter().map(finish)).await;
    assert!(written.iter().all(|written| *written == FencedWrite::Applied));
    let states = BTreeSet::from([fixture.state("pay_003").await, fixture.state("pay_007").await]);
    assert_eq!(states, BTreeSet::from(["review".to_owned(), "succeeded".to_owned()]));
    assert_eq!(count(&fixture, "jobs WHERE state = 'succeeded'").await, "9");
    assert_eq!(count(&fixture, "events").await, "10");
}

/// Writes whose leases were taken over write nothing. The other writes of their batch are applied.
async fn stale_leases_in_a_batch_write_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let holds = hold_all(&fixture, &jobs(12)).await;
    for hold in &holds[..4] {
        fixture.sql(&format!("UPDATE jobs SET fence = fence + 1 WHERE id = '{}'", hold.id)).await.unwrap();
    }
    let ledger = fixture.database.clone();
    let begin =
        async |hold: &LeaseToken| ledger.begin_attempt(hold, &request(hold.id.as_str()), AT_ONCE).await.unwrap();
    let results = join_all(holds.iter().map(begin)).await;
    assert_eq!(results[..4], [BeginResult::Stale; 4]);
    assert_eq!(results[4..], [BeginResult::Attempt(1); 8]);
    let rest = JobState::Waiting { wait: Duration::from_secs(5), reason: WaitReason::Throttled.into() };
    let throttled = AttemptEnd { outcome: "throttled", status: Some(429), counts: false, ..accepted() };
    let written = join_all(holds.iter().map(|hold| ledger.finish_attempt(hold, &throttled, &rest))).await;
    let kept = written.iter().map(|written| matches!(written, Ok(FencedWrite::Applied)));
    assert_eq!(kept.collect::<Vec<_>>(), [[false; 4].as_slice(), [true; 8].as_slice()].concat());
    assert_eq!(
        count(
            &fixture,
            "jobs WHERE state = 'waiting' AND wait_reason = 'throttled' AND wait_detail IS NULL AND attempts = 0"
        )
        .await,
        "8"
    );
    assert_eq!(count(&fixture, "attempts").await, "8");
}

/// Two concurrent writes on each job: one has a stale lease, the other the valid one. Each gets its own result.
async fn stale_and_valid_lease_get_separate_results(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let good = hold_all(&fixture, &jobs(10)).await;
    let ledger = fixture.database.clone();
    let both = good.iter().flat_map(|hold| [LeaseToken { fence: hold.fence - 1, ..hold.clone() }, hold.clone()]);
    let both: Vec<LeaseToken> = both.collect();
    let transition = async |(n, hold): (usize, &LeaseToken)| {
        let reason = Wait::with_detail(WaitReason::Retry, if n % 2 == 0 { "stale" } else { "good" });
        ledger.transition(hold, &JobState::Waiting { wait: SECOND, reason }).await.unwrap()
    };
    let written = join_all(both.iter().enumerate().map(transition)).await;
    assert_eq!(written, [FencedWrite::Stale, FencedWrite::Applied].repeat(10));
    assert_eq!(count(&fixture, "jobs WHERE wait_detail = 'good'").await, "10");
}

/// Every third write breaks a constraint of the table: nothing was sent whose outcome could be unknown. Only that write
/// fails. The batch that it rolled back is written all the same.
async fn failed_write_does_not_fail_its_batch(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let holds = hold_all(&fixture, &jobs(30)).await;
    let ledger = fixture.database.clone();
    let transition = async |(n, hold): (usize, &LeaseToken)| {
        let reason = format!("reason of {}", hold.id);
        let next = match n % 3 {
            0 => JobState::Waiting { wait: SECOND, reason: Wait::with_detail(WaitReason::Retry, reason) },
            1 => JobState::Unknown { wait: SECOND, reason: Wait::with_detail(WaitReason::Retry, reason) },
            _ => JobState::Final { state: FinalState::Expired, reason, reference: None },
        };
        ledger.transition(hold, &next).await
    };
    let written = join_all(holds.iter().enumerate().map(transition)).await;
    for (n, written) in written.iter().enumerate() {
        match n % 3 {
            1 => assert!(matches!(written, Err(LedgerError::StatementFailed(_))), "{written:?}"),
            _ => assert!(matches!(written, Ok(FencedWrite::Applied)), "{written:?}"),
        }
    }
    for rows in [
        "jobs WHERE state = 'waiting' AND wait_detail = 'reason of ' || id AND holder IS NULL",
        "jobs WHERE state = 'waiting' AND wait_reason IS NULL AND holder IS NOT NULL",
        "jobs WHERE state = 'expired' AND reason = 'reason of ' || id AND holder IS NULL",
        "events",
    ] {
        assert_eq!(count(&fixture, rows).await, "10", "{rows}");
    }
}

on_every_database!(
    batched_writes_all_commit,
    one_of_many_deliveries_claims_the_job,
    each_batched_claim_gets_its_own_result,
    batched_payments_cannot_share_a_charge,
    stale_leases_in_a_batch_write_nothing,
    stale_and_valid_lease_get_separate_results,
    failed_write_does_not_fail_its_batch,
);

/// An open transaction locks a row, as an operator in `psql` may do. Neither the other writes of its batch nor later
/// writes wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_does_not_block_its_batch() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let holds = hold_all(&fixture, &jobs(30)).await;
    let mut person = fixture.postgres.as_ref().unwrap().begin().await.unwrap();
    sqlx::query("SELECT 1 FROM jobs WHERE id = 'pay_011' FOR UPDATE").execute(&mut *person).await.unwrap();
    let ledger = fixture.database.clone();
    let begin =
        async |hold: &LeaseToken| ledger.begin_attempt(hold, &request(hold.id.as_str()), AT_ONCE).await.unwrap();
    let mut held = std::pin::pin!(begin(&holds[11]));
    let others = holds.iter().filter(|hold| hold.id != holds[11].id);
    let others = join_all(others.map(begin));
    // The write on the locked row joins the batch, too.
    let results = tokio::select! {
        biased;
        result = &mut held => panic!("started while its row was locked: {result:?}"),
        results = others => results,
    };
    assert_eq!(results, [BeginResult::Attempt(1); 29]);
    person.rollback().await.unwrap();
    assert_eq!(held.await, BeginResult::Attempt(1));
}

/// A write that is dropped while it waits for its batch is written as a whole or not at all. The other writes get their
/// results.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_write_does_not_affect_its_batch() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let ledger = fixture.database.clone();
    let all = jobs(50);
    let (dropped, kept) = all.split_at(25);
    let claims: Vec<_> = dropped.iter().map(|job| ledger.claim(job, hash(1), "worker-a")).collect();
    let mut dropped = join_all(claims);
    assert!(futures_util::poll!(&mut dropped).is_pending());
    drop(dropped);
    let claims = claim_all(&fixture, kept).await;
    assert!(claims.iter().all(|claim| matches!(claim, Claim::Claimed(_))));
    // If a dropped claim's batch was committed before, its job is recorded and leased.
    let claims = claim_all(&fixture, &all[..25]).await;
    assert!(claims.iter().all(|claim| matches!(claim, Claim::NotOpen | Claim::Claimed(_))));
    assert_eq!(count(&fixture, "jobs WHERE state = 'waiting' AND fence = 1").await, "50");
}
