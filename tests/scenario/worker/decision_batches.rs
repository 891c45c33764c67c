//! Decision batches beside running workers: each payment is sent again once, over restarts, lost workers and with
//! several workers, and a stop leaves the rest as it is.

use std::time::Duration;

use sluicegate::domain::job::{Identifier, Job, JobId};
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::sum::SentSum;
use sluicegate::ledger::decision_batches::{BatchDecision, BatchRate, BatchSummary, TurnAt, TurnResult};
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LeaseToken, RequestTiming};
use sluicegate::ops::batch::{Confirmation, Selection, prepare_batch, stop_batch};
use sluicegate::provider::FrozenRequest;
use sluicegate::queue::message::{CardNumbers, decode, encode};

use super::bench::{Bench, name, row};

/// Payments in review, as an attempt without an answer leaves them.
async fn in_review(bench: &Bench, ids: &[String]) {
    let ledger = &bench.database;
    for id in ids {
        let job = Job {
            id: Identifier::new(id.as_str()).unwrap(),
            provider: name("acme"),
            amount: 1_299,
            currency: "EUR".into(),
            account: None,
            reference: None,
            idempotency_key: None,
            cost: 1,
            priority: 0,
            not_before: None,
            expires_at: None,
            payload: None,
        };
        let hash = decode(&encode(&job), &job.provider, CardNumbers::Refuse).unwrap().hash;
        ledger.record_backlog(&job, hash, Duration::ZERO).await.unwrap();
        let above = LeaseToken { id: job.id.clone(), fence: 0 };
        let claim = ledger.claim_for_repair(&above, "worker-0", None).await.unwrap();
        let claimed = claim.unwrap().claimed;
        let request = FrozenRequest {
            method: "POST".into(),
            url: "https://acme.test/charges".into(),
            idempotency_key: id.as_str().into(),
            content_type: "application/json".into(),
            body: id.clone().into(),
            account: None,
            sum: SentSum { units: 1_299, decimals: 2 },
            credential_fingerprint: "0123456789abcdef".into(),
        };
        let began =
            ledger.begin_attempt(&claimed.lease, &request, RequestTiming::immediate(Duration::ZERO)).await.unwrap();
        let BeginResult::Attempt(number) = began else { panic!("{began:?}") };
        let end = AttemptEnd { number, outcome: "unknown", status: None, detail: "no answer".to_owned(), counts: true };
        let next = JobState::Final { state: FinalState::Review, reason: "no answer".to_owned(), reference: None };
        assert_eq!(ledger.finish_attempt(&claimed.lease, &end, &next).await.unwrap(), FencedWrite::Applied);
    }
}

fn numbered(count: u32) -> Vec<String> {
    (0..count).map(|number| format!("p{number}")).collect()
}

fn alice() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some("ticket 4711".to_owned()) }
}

async fn begin(bench: &Bench, decision: BatchDecision, ids: &[String], rate: &str) -> BatchSummary {
    let selection = Selection { filter: None, ids: Some(ids.to_vec()) };
    let prepared = prepare_batch(&bench.database, decision, selection).await.unwrap();
    let confirmed = Confirmation {
        digest: prepared.preview.digest.clone(),
        jobs: Some(prepared.preview.jobs),
        rate: BatchRate::parse(rate).unwrap(),
        by: alice(),
    };
    prepared.begin(&bench.database, confirmed).await.unwrap()
}

async fn shown(bench: &Bench, id: &str) -> BatchSummary {
    bench.database.batch(id).await.unwrap().unwrap()
}

async fn until_finished(bench: &Bench, id: &str) -> BatchSummary {
    bench.until("the batch is finished", async || shown(bench, id).await.state == "finished").await;
    shown(bench, id).await
}

async fn assert_sent_once(bench: &Bench, ids: &[String]) {
    for id in ids {
        bench.until_state(id, "succeeded").await;
        assert_eq!(bench.script.sent_for(id).len(), 1, "{id}");
    }
}

/// The worker stops in the middle, and another one goes on.
#[tokio::test]
async fn batch_goes_on_after_a_restart() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    let ids = numbered(30);
    in_review(&bench, &ids).await;
    let batch = begin(&bench, BatchDecision::Resend, &ids, "50/1s").await;
    bench.run();
    bench.until("some are sent again", async || shown(&bench, &batch.id).await.applied >= 3).await;
    bench.stop().await;
    let stopped = shown(&bench, &batch.id).await;
    assert_eq!((stopped.state.as_str(), stopped.worker), ("running", None));
    bench.run();
    let ended = until_finished(&bench, &batch.id).await;
    assert_eq!((ended.applied, ended.refused.len()), (30, 0));
    assert_sent_once(&bench, &ids).await;
}

/// The worker is lost after its commit: another one goes on, and the payment is not decided again.
#[tokio::test]
async fn payment_of_a_lost_worker_is_sent_once() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    let ids = numbered(2);
    in_review(&bench, &ids).await;
    let batch = begin(&bench, BatchDecision::Resend, &ids, "1000/1s").await;
    let leased = bench.database.lease_batches("lost").await.unwrap().remove(0);
    let turn = bench.database.next_turns(&leased.id, 1).await.unwrap().remove(0);
    let at = TurnAt { batch: &leased, turn: &turn, worker: "lost" };
    assert_eq!(bench.database.apply_turn(&at, turn.member.seen_fence).await.unwrap(), TurnResult::Applied);
    assert_eq!((bench.job("p0").await.unwrap().state.as_str(), bench.queued("acme")), ("waiting", 0));
    bench.sql("UPDATE decision_batches SET leased_until = created_at").await;
    bench.run();
    assert_eq!(until_finished(&bench, &batch.id).await.applied, 2);
    assert_sent_once(&bench, &ids).await;
}

#[tokio::test]
async fn two_workers_apply_two_batches_once() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    bench.keep_limiter();
    let ids = numbered(40);
    in_review(&bench, &ids).await;
    let halves = ids.split_at(20);
    let batches = [
        begin(&bench, BatchDecision::Resend, halves.0, "500/1s").await,
        begin(&bench, BatchDecision::Resend, halves.1, "500/1s").await,
    ];
    let mut other = bench.beside();
    bench.run();
    other.run();
    for batch in &batches {
        assert_eq!(until_finished(&bench, &batch.id).await.applied, 20);
    }
    assert_sent_once(&bench, &ids).await;
    other.stop().await;
}

/// The next payment's turn is an hour away.
#[tokio::test]
async fn stopped_batch_leaves_the_rest() {
    let bench = Bench::open(&[row("acme")]).await;
    let ids = numbered(2);
    in_review(&bench, &ids).await;
    let batch = begin(&bench, BatchDecision::Declined, &ids, "1/1h").await;
    bench.until("the first is declined", async || shown(&bench, &batch.id).await.applied == 1).await;
    let declined = async || bench.events_of("p0").await.iter().any(|event| event.body["state"] == "declined");
    bench.until("its event is published", declined).await;
    let stopped = stop_batch(&bench.database, &batch.id, &alice()).await.unwrap();
    assert_eq!((stopped.state.as_str(), stopped.remaining), ("stopped", 1));
    assert_eq!(bench.job("p1").await.unwrap().state, "review");
    let audit = bench.database.job_details(&JobId::new("p0").unwrap()).await.unwrap().unwrap().audit.remove(0);
    let because = format!("ticket 4711 (batch {} of database file)", batch.id);
    assert_eq!((audit.os_user.as_deref(), audit.because), (Some("alice@desk"), Some(because)));
}
