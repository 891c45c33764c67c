//! Attempts of a job: the frozen request, outcomes that stay unknown, and which first request can be reverted.

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LedgerError};

use super::*;

on_every_database!(
    an_attempt_freezes_its_request,
    fingerprint_updates_until_outcome_is_unknown,
    frozen_request_cannot_be_changed,
    a_lost_workers_attempt_becomes_unknown,
    an_unknown_job_stays_unknown,
    only_an_unsent_first_request_is_reverted,
);

fn end(number: u32, outcome: &'static str, counts: bool) -> AttemptEnd {
    AttemptEnd { number, outcome, status: None, detail: format!("{outcome} detail"), counts }
}

fn waiting() -> JobState {
    JobState::Waiting { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "again") }
}

fn unknown() -> JobState {
    JobState::Unknown { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "no answer in time") }
}

impl Fixture {
    /// Runs one whole attempt of a job without a lease; returns the attempt's number.
    async fn attempt(&self, job: &Job, outcome: &'static str, next: &JobState) -> u32 {
        let hold = self.take(job).await.lease;
        let number = match self.database.begin_attempt(&hold, &request(job.id.as_str()), AT_ONCE).await.unwrap() {
            BeginResult::Attempt(number) => number,
            BeginResult::Stale => panic!("the lease is stale"),
        };
        let end = end(number, outcome, outcome != "throttled");
        assert_eq!(self.database.finish_attempt(&hold, &end, next).await.unwrap(), FencedWrite::Applied);
        number
    }
}

async fn an_attempt_freezes_its_request(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    assert_eq!(fixture.attempt(&job, "throttled", &waiting()).await, 1);
    let claimed = fixture.take(&job).await;
    let (frozen, age) = claimed.frozen_request.unwrap();
    assert_eq!((frozen, claimed.attempts, claimed.maybe_charged), (request("p1"), 0, false));
    assert!(age < Duration::from_secs(30), "{age:?}");
    for different in [
        FrozenRequest { body: "{}".into(), ..request("p1") },
        FrozenRequest { account: None, ..request("p1") },
        FrozenRequest { idempotency_key: "other".into(), ..request("p1") },
    ] {
        let error = ledger.begin_attempt(&claimed.lease, &different, AT_ONCE).await.unwrap_err();
        assert!(matches!(error, LedgerError::StatementFailed(_)), "{error}");
    }
    assert_eq!(fixture.state("p1").await, "waiting");
    assert_eq!(ledger.begin_attempt(&claimed.lease, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(2));
    // Only one attempt can be in flight.
    assert_eq!(ledger.begin_attempt(&claimed.lease, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Stale);
    // An end that names another attempt than the one in flight is stale.
    let wrong = end(1, "accepted", true);
    assert_eq!(ledger.finish_attempt(&claimed.lease, &wrong, &waiting()).await.unwrap(), FencedWrite::Stale);
    let last = AttemptEnd { status: Some(402), ..end(2, "declined", true) };
    let next = JobState::Final { state: FinalState::Declined, reason: "no\0 funds".to_owned(), reference: None };
    assert_eq!(ledger.finish_attempt(&claimed.lease, &last, &next).await.unwrap(), FencedWrite::Applied);
    let rows = "SELECT number || '|' || outcome || '|' || coalesce(CAST(status AS text), '-') || '|' || detail \
                FROM attempts ORDER BY number";
    let rows: Vec<String> = fixture.column(rows).await.into_iter().flatten().collect();
    assert_eq!(rows, ["1|throttled|-|throttled detail", "2|declined|402|declined detail"]);
    let job = "SELECT state || '|' || attempts || '|' || reason FROM jobs";
    assert_eq!(fixture.one(job).await, "declined|1|no funds");
}

/// A request after an unknown outcome is compared with the request that may have been charged. That need not be the
/// job's first request.
async fn fingerprint_updates_until_outcome_is_unknown(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let with = |credential: &str| FrozenRequest { credential_fingerprint: credential.into(), ..request("p1") };
    fixture.attempt(&job("p1"), "throttled", &waiting()).await;
    let by_hand = "UPDATE jobs SET frozen_fingerprint = 'mine' WHERE id = 'p1'";
    let error = fixture.sql(by_hand).await.unwrap_err();
    assert!(error.contains("frozen request of a job never changes"), "{error}");
    let hold = fixture.take(&job("p1")).await.lease;
    assert_eq!(fixture.database.begin_attempt(&hold, &with("second"), AT_ONCE).await.unwrap(), BeginResult::Attempt(2));
    let lost = end(2, "unknown", true);
    assert_eq!(fixture.database.finish_attempt(&hold, &lost, &unknown()).await.unwrap(), FencedWrite::Applied);
    let claimed = fixture.take(&job("p1")).await;
    assert_eq!((claimed.maybe_charged, claimed.frozen_request.unwrap().0), (true, with("second")));
    for other in ["third", &request("p1").credential_fingerprint] {
        let error = fixture.database.begin_attempt(&claimed.lease, &with(other), AT_ONCE).await.unwrap_err();
        assert!(matches!(error, LedgerError::StatementFailed(_)), "{error}");
    }
    let again = fixture.database.begin_attempt(&claimed.lease, &with("second"), AT_ONCE).await.unwrap();
    assert_eq!(again, BeginResult::Attempt(3));
}

async fn frozen_request_cannot_be_changed(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.attempt(&job("p1"), "throttled", &waiting()).await;
    let no_body = if kind == Kind::Postgres { "frozen_body = ''" } else { "frozen_body = x''" };
    for change in ["frozen_url = 'https://evil.example/'", "frozen_account = NULL", no_body] {
        let error = fixture.sql(&format!("UPDATE jobs SET {change} WHERE id = 'p1'")).await.unwrap_err();
        assert!(error.contains("frozen request of a job never changes"), "{change}: {error}");
    }
    let done = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
    fixture.attempt(&job("p1"), "accepted", &done).await;
    // The body of a finished job may be emptied.
    fixture.sql(&format!("UPDATE jobs SET {no_body}, payload = NULL WHERE id = 'p1'")).await.unwrap();
    assert_eq!(fixture.one("SELECT length(frozen_body) FROM jobs").await, "0");
}

async fn a_lost_workers_attempt_becomes_unknown(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let job = job("p1");
    let lost = fixture.take(&job).await.lease;
    assert_eq!(fixture.database.begin_attempt(&lost, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    // While the lease lasts, the request may still be in flight.
    let claim = fixture.database.claim(&job, hash(1), "worker-b").await.unwrap();
    assert_eq!(claim, Claim::NotOpen);
    fixture.expire_lease(&lost).await;
    let claimed = fixture.take(&job).await;
    assert_eq!((claimed.attempts, claimed.maybe_charged, claimed.lease.fence), (1, true, lost.fence + 2));
    assert_eq!(claimed.frozen_request.unwrap().0, request("p1"));
    let attempt = "SELECT outcome || '|' || detail FROM attempts WHERE ended_at IS NOT NULL";
    assert_eq!(fixture.one(attempt).await, "unknown|a worker was lost while the request was in flight");
    assert_eq!(fixture.state("p1").await, "unknown");
    // The lost worker returns with a response. It is too late, so nothing is overwritten.
    let done = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
    let late = fixture.database.finish_attempt(&lost, &end(1, "accepted", true), &done).await.unwrap();
    assert_eq!(late, FencedWrite::Stale);
    assert_eq!(
        fixture.database.begin_attempt(&claimed.lease, &request("p1"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(2)
    );
    // The recorded outcome tells the worker that its write was stale. The write could also have been committed, with
    // only the reply lost.
    let mut outcomes = Vec::new();
    for number in 1..=3 {
        outcomes.push(fixture.database.request_outcome(&job.id, number).await.unwrap());
    }
    assert_eq!(outcomes, [Some("unknown".to_owned()), None, None]);
}

async fn an_unknown_job_stays_unknown(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    fixture.attempt(&job, "unknown", &unknown()).await;
    let claimed = fixture.take(&job).await;
    assert!(claimed.maybe_charged);
    assert_eq!(ledger.transition(&claimed.lease, &waiting()).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.state("p1").await, "unknown");
    // An attempt that is confirmed not sent does not make the earlier outcome known.
    fixture.attempt(&job, "not_sent", &waiting()).await;
    let again = fixture.take(&job).await;
    assert!(again.maybe_charged);
    assert_eq!(fixture.one("SELECT first_sent_number FROM jobs").await, "1");
    for state in [FinalState::Dead, FinalState::Expired, FinalState::Cancelled] {
        let next = JobState::Final { state, reason: "x".to_owned(), reference: None };
        let error = ledger.transition(&again.lease, &next).await.unwrap_err();
        assert!(matches!(error, LedgerError::StatementFailed(_)), "{error}");
    }
    assert_eq!(fixture.one("SELECT count(*) FROM events").await, "0");
    let next = JobState::Final { state: FinalState::Review, reason: "x".to_owned(), reference: None };
    assert_eq!(ledger.transition(&again.lease, &next).await.unwrap(), FencedWrite::Applied);
    // The outcome decides whether the job may have been charged, even if the caller's next state contradicts it.
    let flag =
        |id: &str| format!("SELECT CASE WHEN maybe_charged THEN 'maybe' ELSE 'no' END FROM jobs WHERE id = '{id}'");
    for (id, outcome, next, state, charged) in [
        ("p2", "unknown", waiting(), "unknown", "maybe"),
        ("p3", "in_progress", waiting(), "unknown", "maybe"),
        ("p4", "unknown", next.clone(), "review", "maybe"),
        ("p5", "rejected", next, "review", "no"),
        ("p6", "throttled", waiting(), "waiting", "no"),
    ] {
        fixture.attempt(&super::job(id), outcome, &next).await;
        assert_eq!((fixture.state(id).await.as_str(), fixture.one(&flag(id)).await.as_str()), (state, charged), "{id}");
    }
}

async fn only_an_unsent_first_request_is_reverted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let first_sent = "SELECT coalesce(CAST(first_sent_number AS text), 'never') || '|' || \
                      CASE WHEN first_sent_at IS NULL THEN 'never' ELSE 'sent' END FROM jobs WHERE id = ";
    fixture.attempt(&job("p1"), "not_sent", &waiting()).await;
    assert_eq!(fixture.one(&format!("{first_sent} 'p1'")).await, "never|never");
    let claimed = fixture.take(&job("p1")).await;
    assert_eq!(
        (claimed.attempts, claimed.maybe_charged, claimed.frozen_request),
        (1, false, Some((request("p1"), Duration::ZERO)))
    );
    assert_eq!(fixture.database.release(&claimed.lease).await.unwrap(), FencedWrite::Applied);
    fixture.attempt(&job("p1"), "throttled", &waiting()).await;
    assert_eq!(fixture.one(&format!("{first_sent} 'p1'")).await, "2|sent");
    // The provider may know the idempotency key since the throttled attempt.
    fixture.attempt(&job("p1"), "not_sent", &waiting()).await;
    assert_eq!(fixture.one(&format!("{first_sent} 'p1'")).await, "2|sent");
}
