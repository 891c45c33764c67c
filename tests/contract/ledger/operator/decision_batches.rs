//! Decision batches on both databases: a set that changed begins nothing, each payment is decided once whatever
//! crashes, and a stop holds at once.

use futures_util::future::join_all;
use sluicegate::ledger::decision_batches::{
    BatchDecision, BatchMember, BatchRate, BatchStart, BatchTurn, CheckedJob, LeasedBatch, NewBatch, OutcomeFilter,
    TurnAt, TurnResult,
};
use sluicegate::ledger::operator::CurrencyTotal;

use super::*;

on_every_database!(
    changed_payment_begins_no_batch,
    crash_neither_skips_nor_repeats_a_payment,
    two_workers_decide_each_payment_once,
    worker_without_the_lease_changes_nothing,
    stop_holds_from_its_commit_on,
    author_is_the_databases_user_whatever_the_statement_says,
    changed_payment_is_refused_at_its_turn,
    checks_name_every_refusal,
    filter_selects_only_its_payments,
    ten_thousand_payments_are_one_batch,
    old_batches_are_forgotten,
);

const A: &str = "worker-a";
const B: &str = "worker-b";

fn new_batch(number: u32, decision: BatchDecision, members: Vec<BatchMember>) -> NewBatch {
    NewBatch {
        id: format!("{number:032x}"),
        decision,
        members,
        sums: vec![CurrencyTotal { currency: "EUR".to_owned(), jobs: 1, amount: 1_299 }],
        rate: BatchRate::parse("1000/1s").unwrap(),
        by: by(),
    }
}

impl Fixture {
    /// New payments in review, dead or waiting: as many as there are ids.
    async fn payments(&self, ids: &[&str], state: &str) {
        for text in ids {
            match state {
                "waiting" => {
                    let hold = self.take(&job(text)).await.lease;
                    assert_eq!(self.database.release(&hold).await.unwrap(), FencedWrite::Applied);
                }
                state => {
                    let state = FinalState::from_name(state).unwrap();
                    self.attempted(text, "not_sent", &finished(state)).await;
                }
            }
        }
    }

    async fn checked(&self, decision: BatchDecision, ids: &[&str]) -> Vec<CheckedJob> {
        let ids: Vec<JobId> = ids.iter().map(|text| id(text)).collect();
        self.database.check_jobs(decision, &ids).await.unwrap()
    }

    async fn members(&self, decision: BatchDecision, ids: &[&str]) -> Vec<BatchMember> {
        self.checked(decision, ids).await.into_iter().map(|job| job.member).collect()
    }

    async fn started(&self, number: u32, decision: BatchDecision, ids: &[&str]) -> NewBatch {
        let batch = new_batch(number, decision, self.members(decision, ids).await);
        assert_eq!(self.database.begin_batch(&batch).await.unwrap(), BatchStart::Started);
        batch
    }

    async fn leased(&self, worker: &str) -> LeasedBatch {
        self.database.lease_batches(worker).await.unwrap().remove(0)
    }

    async fn next_turn(&self, batch: &LeasedBatch) -> BatchTurn {
        self.database.next_turns(&batch.id, 1).await.unwrap().remove(0)
    }

    async fn apply_turn_by(&self, batch: &LeasedBatch, turn: &BatchTurn, worker: &str) -> TurnResult {
        self.database.apply_turn(&TurnAt { batch, turn, worker }, turn.member.seen_fence).await.unwrap()
    }

    /// Ends the lease of every batch, as if its worker had been silent for long.
    async fn expire_batch_leases(&self) {
        self.sql("UPDATE decision_batches SET leased_until = created_at").await.unwrap();
    }

    /// Decisions in the audit of a payment.
    async fn decisions(&self, text: &str) -> String {
        self.one(&format!("SELECT count(*) FROM job_audit WHERE job_id = '{text}'")).await
    }

    async fn batch_rows(&self) -> String {
        self.one(
            "SELECT (SELECT count(*) FROM decision_batches) || ' ' || (SELECT count(*) FROM decision_batch_jobs) || ' ' || \
                 (SELECT count(*) FROM decision_batch_refusals)",
        )
        .await
    }
}

async fn changed_payment_begins_no_batch(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.payments(&["a", "b"], "review").await;
    let seen = fixture.members(BatchDecision::Declined, &["a", "b"]).await;
    fixture.decide("b", &JobResolution::Resend).await.unwrap();
    let batch = new_batch(1, BatchDecision::Declined, seen);
    assert_eq!(fixture.database.begin_batch(&batch).await.unwrap(), BatchStart::Changed);
    // Back in review, but of another attempt.
    fixture.attempted("b", "not_sent", &finished(FinalState::Review)).await;
    assert_eq!(fixture.database.begin_batch(&batch).await.unwrap(), BatchStart::Changed);
    assert_eq!(fixture.batch_rows().await, "0 0 0");
    let batch = fixture.started(2, BatchDecision::Declined, &["a", "b"]).await;
    let twice = NewBatch { id: format!("{:032x}", 3), ..batch.clone() };
    assert_eq!(fixture.database.begin_batch(&twice).await.unwrap(), BatchStart::Running(batch.id));
    assert_eq!(fixture.batch_rows().await, "1 2 0");
}

/// A crash before, within or after the change: the next worker goes on where the last commit was.
async fn crash_neither_skips_nor_repeats_a_payment(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (number, (decision, state)) in (1..).zip([
        (BatchDecision::Resend, "review"),
        (BatchDecision::Succeeded, "review"),
        (BatchDecision::Declined, "review"),
        (BatchDecision::Replay, "dead"),
        (BatchDecision::Discard, "dead"),
        (BatchDecision::Cancel, "waiting"),
    ]) {
        let ids = ["a", "b", "c"].map(|text| format!("{text}-{}", decision.name()));
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        fixture.payments(&ids, state).await;
        fixture.started(number, decision, &ids).await;
        // Lost before the change.
        let lost = fixture.leased(A).await;
        let turn = fixture.next_turn(&lost).await;
        fixture.expire_batch_leases().await;
        // Lost after the change, before it could read on.
        let batch = fixture.leased(B).await;
        assert_eq!(fixture.next_turn(&batch).await, turn);
        assert_eq!(fixture.apply_turn_by(&batch, &turn, B).await, TurnResult::Applied);
        let changed = fixture.picture(turn.member.id.as_str()).await;
        fixture.expire_batch_leases().await;
        let batch = fixture.leased(A).await;
        // A response that was lost, and a worker that comes back.
        for worker in [A, B] {
            let again = fixture.apply_turn_by(&batch, &turn, worker).await;
            assert!(again != TurnResult::Applied, "{worker} {again:?}");
        }
        assert_eq!(fixture.picture(turn.member.id.as_str()).await, changed);
        while let Some(turn) = fixture.database.next_turns(&batch.id, 1).await.unwrap().pop() {
            assert_eq!(fixture.apply_turn_by(&batch, &turn, A).await, TurnResult::Applied);
        }
        for text in &ids {
            assert_eq!(fixture.state(text).await, decision.resolution().resulting_state());
            assert_eq!(fixture.decisions(text).await, "1", "{text}");
        }
        let ended = fixture.database.batch(&batch.id).await.unwrap().unwrap();
        assert_eq!((ended.state.as_str(), ended.applied, ended.remaining), ("finished", 3, 0));
        let reason = format!("asked the provider (batch {} of {})", batch.id, batch.database_user);
        let audit = fixture.details(ids[0]).await.audit.remove(0);
        assert_eq!((audit.os_user.as_deref(), audit.because), (Some("alice@desk"), Some(reason)));
    }
}

/// Both believe that they have the lease.
async fn two_workers_decide_each_payment_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ids: Vec<String> = (0..40).map(|number| format!("p-{number}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    fixture.payments(&ids, "review").await;
    fixture.started(1, BatchDecision::Resend, &ids).await;
    let batch = fixture.leased(A).await;
    let turns = fixture.database.next_turns(&batch.id, 100).await.unwrap();
    let work = turns.iter().flat_map(|turn| {
        let (fixture, batch) = (&fixture, &batch);
        [A, B, A].map(|worker| async move {
            if turn.number % 7 == 0 {
                let stolen = format!("UPDATE decision_batches SET worker = '{worker}'");
                fixture.sql(&stolen).await.unwrap();
            }
            fixture.apply_turn_by(batch, turn, worker).await
        })
    });
    let results = join_all(work).await;
    let applied = results.iter().filter(|result| **result == TurnResult::Applied).count();
    let counts = "SELECT count(*) || ' ' || count(DISTINCT job_id) FROM job_audit";
    assert_eq!(fixture.one(counts).await, format!("{applied} {applied}"));
    let resent = "SELECT count(*) FROM jobs WHERE state = 'waiting'";
    assert_eq!(fixture.one(resent).await, applied.to_string());
    let now = fixture.database.batch(&batch.id).await.unwrap().unwrap();
    assert_eq!((now.applied, now.refused.len()), (applied as u64, 0));
    assert!(applied > 0);
}

async fn worker_without_the_lease_changes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.payments(&["a", "b"], "review").await;
    fixture.started(1, BatchDecision::Succeeded, &["a", "b"]).await;
    let batch = fixture.leased(A).await;
    let turn = fixture.next_turn(&batch).await;
    assert_eq!(fixture.database.lease_batches(B).await.unwrap(), [], "the lease is another worker's");
    let before = fixture.picture("a").await;
    assert_eq!(fixture.apply_turn_by(&batch, &turn, B).await, TurnResult::Lost);
    assert_eq!(fixture.picture("a").await, before);
    fixture.database.release_batches(A).await.unwrap();
    fixture.started(2, BatchDecision::Declined, &["a", "b"]).await;
    // The rate holds over a change of workers.
    fixture.sql("UPDATE decision_batches SET rate = '1/1h'").await.unwrap();
    let mut both = fixture.database.lease_batches(B).await.unwrap();
    both.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!((both.len(), both[0].wait), (2, Duration::ZERO));
    assert_eq!(fixture.apply_turn_by(&both[0], &turn, B).await, TurnResult::Applied);
    fixture.expire_batch_leases().await;
    let again = fixture.database.lease_batches(A).await.unwrap();
    let first = again.iter().find(|leased| leased.id == both[0].id).unwrap();
    assert!(first.wait > Duration::from_secs(3_000), "{:?}", first.wait);
}

async fn stop_holds_from_its_commit_on(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.payments(&["a", "b"], "dead").await;
    let started = fixture.started(1, BatchDecision::Replay, &["a", "b"]).await;
    let batch = fixture.leased(A).await;
    let turns = fixture.database.next_turns(&batch.id, 9).await.unwrap();
    assert_eq!(fixture.apply_turn_by(&batch, &turns[0], A).await, TurnResult::Applied);
    assert!(fixture.database.stop_batch(&started.id, "bob@desk").await.unwrap());
    assert!(!fixture.database.stop_batch(&started.id, "eve@desk").await.unwrap());
    let before = fixture.picture("b").await;
    assert_eq!(fixture.apply_turn_by(&batch, &turns[1], A).await, TurnResult::Lost);
    assert_eq!(fixture.picture("b").await, before);
    assert_eq!(fixture.database.lease_batches(A).await.unwrap(), []);
    let stopped = fixture.database.batch(&started.id).await.unwrap().unwrap();
    assert_eq!((stopped.state.as_str(), stopped.applied, stopped.remaining), ("stopped", 1, 1));
    assert_eq!((stopped.stopped_by.as_deref(), stopped.finished_at.is_some()), (Some("bob@desk"), true));
    let pending = fixture.database.batch_jobs(&started.id, Some(OutcomeFilter::Pending), 0, 9).await.unwrap();
    assert_eq!(pending.jobs.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["b"]);
    // The same set can be decided again.
    fixture.started(2, BatchDecision::Replay, &["b"]).await;
}

/// The person is what the program says; the database adds its own user to it, also to a stop.
async fn author_is_the_databases_user_whatever_the_statement_says(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.payments(&["a", "b"], "review").await;
    let user = if kind == Kind::Postgres { "postgres" } else { "database file" };
    let started = fixture.started(1, BatchDecision::Resend, &["a"]).await;
    let forged = format!(
        "INSERT INTO decision_batches (id, decision, jobs, rate, digest, sums, created_at, person, database_user, \
             stopped_database_user, because, next_at) \
         SELECT '{:032x}', decision, jobs, rate, '{:064x}', sums, created_at, 'bob@desk', 'bob', 'bob', because, next_at \
         FROM decision_batches WHERE id = '{}'",
        2, 2, started.id
    );
    fixture.sql(&forged).await.unwrap();
    for id in [started.id, format!("{:032x}", 2)] {
        assert_eq!(fixture.database.batch(&id).await.unwrap().unwrap().database_user, user);
        assert!(fixture.database.stop_batch(&id, "eve@desk").await.unwrap());
        let stopped = fixture.database.batch(&id).await.unwrap().unwrap();
        assert_eq!(
            (stopped.stopped_by.as_deref(), stopped.stopped_database_user.as_deref()),
            (Some("eve@desk"), Some(user))
        );
    }
}

async fn changed_payment_is_refused_at_its_turn(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.payments(&["a", "b", "c"], "review").await;
    let started = fixture.started(1, BatchDecision::Resend, &["a", "b", "c"]).await;
    fixture.decide("a", &JobResolution::Declined).await.unwrap();
    // In review again, after a resend by another operator.
    fixture.decide("b", &JobResolution::Resend).await.unwrap();
    fixture.attempted("b", "not_sent", &finished(FinalState::Review)).await;
    let batch = fixture.leased(A).await;
    let mut results = Vec::new();
    for turn in fixture.database.next_turns(&batch.id, 9).await.unwrap() {
        results.push(fixture.apply_turn_by(&batch, &turn, A).await);
    }
    assert_eq!(results, [TurnResult::Refused("wrong_state"), TurnResult::Refused("changed"), TurnResult::Applied]);
    assert_eq!((fixture.state("a").await.as_str(), fixture.state("b").await.as_str()), ("declined", "review"));
    let ended = fixture.database.batch(&started.id).await.unwrap().unwrap();
    let refused: Vec<_> = ended.refused.iter().map(|refusal| (refusal.refusal.as_str(), refusal.jobs)).collect();
    assert_eq!((ended.state.as_str(), refused), ("finished", vec![("changed", 1), ("wrong_state", 1)]));
    let jobs = fixture.database.batch_jobs(&started.id, Some(OutcomeFilter::Refused), 0, 1).await.unwrap();
    assert_eq!(
        (jobs.jobs[0].id.as_str(), jobs.jobs[0].refusal.as_deref(), jobs.next),
        ("a", Some("wrong_state"), Some(1))
    );
}

async fn checks_name_every_refusal(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for situation in ["review-unknown", "review-rejected", "succeeded", "sending", "waiting-in-hand"] {
        fixture.bring(situation).await;
    }
    fixture
        .sql("UPDATE jobs SET provider_reference = 'ch_1' WHERE id IN ('succeeded', 'review-unknown')")
        .await
        .unwrap();
    let ids = ["review-unknown", "review-rejected", "succeeded", "sending", "waiting-in-hand", "nobody"];
    let codes = async |decision| {
        let checked = fixture.checked(decision, &ids).await;
        let code = |job: &CheckedJob| {
            format!("{} {}", job.member.id, job.refusal.as_ref().map_or("-", ResolutionRefusal::code))
        };
        let mut codes: Vec<String> = checked.iter().map(code).collect();
        codes.sort_unstable();
        codes.join(", ")
    };
    assert_eq!(
        codes(BatchDecision::Succeeded).await,
        "review-rejected -, review-unknown reference_taken, sending wrong_state, succeeded wrong_state, \
         waiting-in-hand wrong_state"
    );
    assert_eq!(
        codes(BatchDecision::Cancel).await,
        "review-rejected wrong_state, review-unknown wrong_state, sending wrong_state, succeeded wrong_state, \
         waiting-in-hand -"
    );
    fixture.sql("UPDATE jobs SET scrubbed_at = updated_at WHERE id = 'review-rejected'").await.unwrap();
    assert!(codes(BatchDecision::Resend).await.contains("review-rejected request_emptied, review-unknown -"));
}

async fn filter_selects_only_its_payments(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.payments(&["a", "b"], "review").await;
    fixture.payments(&["c"], "dead").await;
    let selected = async |filter: JobFilter| {
        let mut ids: Vec<String> =
            fixture.database.selected_jobs(&filter).await.unwrap().unwrap().iter().map(ToString::to_string).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(selected(JobFilter::of_state("review")).await, ["a", "b"]);
    assert_eq!(selected(JobFilter::default()).await, ["a", "b", "c"]);
    let b = JobFilter { search: Some("b".to_owned()), ..JobFilter::of_state("review") };
    assert_eq!(selected(b).await, ["b"]);
    let rich = JobFilter { currency: Some("USD".to_owned()), ..JobFilter::default() };
    assert_eq!(selected(rich).await, [""; 0]);
}

async fn ten_thousand_payments_are_one_batch(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let bytes = if kind == Kind::Postgres {
        format!("'\\x{}'::bytea", "01".repeat(32))
    } else {
        format!("x'{}'", "01".repeat(32))
    };
    let now = if kind == Kind::Postgres { "now()" } else { "1795000000000" };
    fixture
        .sql(&format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, priority, \
                 state, wake_at, fence, created_at, updated_at) \
             WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 10000) \
             SELECT 'm-' || n, 'stripe', 'm-' || n, n < 0, {bytes}, 100, 'EUR', 1, 0, 'dead', {now}, n, {now}, {now} FROM numbers"
        ))
        .await
        .unwrap();
    let selected = fixture.database.selected_jobs(&JobFilter::of_state("dead")).await.unwrap().unwrap();
    let checked = fixture.database.check_jobs(BatchDecision::Discard, &selected).await.unwrap();
    assert_eq!((selected.len(), checked.iter().filter(|job| job.refusal.is_none()).count()), (10_000, 10_000));
    let batch = new_batch(1, BatchDecision::Discard, checked.into_iter().map(|job| job.member).collect());
    assert_eq!(fixture.database.begin_batch(&batch).await.unwrap(), BatchStart::Started);
    let now = fixture.database.batch(&batch.id).await.unwrap().unwrap();
    assert_eq!((now.jobs, now.remaining, now.sums), (10_000, 10_000, batch.sums.clone()));
    let leased = fixture.leased(A).await;
    for turn in fixture.database.next_turns(&leased.id, 20).await.unwrap() {
        assert_eq!(fixture.apply_turn_by(&leased, &turn, A).await, TurnResult::Applied);
    }
    assert_eq!(fixture.database.batch(&batch.id).await.unwrap().unwrap().remaining, 9_980);
}

async fn old_batches_are_forgotten(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.payments(&["a", "b", "c"], "dead").await;
    let old = fixture.started(1, BatchDecision::Discard, &["a", "b"]).await;
    let batch = fixture.leased(A).await;
    fixture.decide("a", &JobResolution::Replay).await.unwrap();
    for turn in fixture.database.next_turns(&batch.id, 9).await.unwrap() {
        fixture.apply_turn_by(&batch, &turn, A).await;
    }
    let running = fixture.started(2, BatchDecision::Discard, &["c"]).await;
    assert_eq!(fixture.database.forget_batches(60 * SECOND, 9).await.unwrap(), 0);
    assert_eq!(fixture.batch_rows().await, "2 3 1");
    // One row at a time, and the batch itself last.
    assert_eq!(fixture.database.forget_batches(Duration::ZERO, 1).await.unwrap(), 1);
    assert!(fixture.database.batch(&old.id).await.unwrap().is_some());
    assert_eq!(fixture.database.forget_batches(Duration::ZERO, 9).await.unwrap(), 1);
    assert_eq!(fixture.batch_rows().await, "1 1 0");
    let page = fixture.database.list_batches(None, 9).await.unwrap();
    assert_eq!(page.batches.iter().map(|batch| &batch.id).collect::<Vec<_>>(), [&running.id]);
    assert_eq!(fixture.decisions("b").await, "1", "the audit stays");
}
