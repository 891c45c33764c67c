//! The circuit breaker of a provider that is down: the lane takes no more jobs and uses none of their attempts. One job
//! at a time probes the provider.

use serde_json::json;
use sluicegate::domain::breaker::{CONSECUTIVE_FAILURES_MAX, PROBES_TO_CLOSE};
use sluicegate::domain::outcome::LookupResult;
use sluicegate::domain::wait_reason::WaitReason;
use sluicegate::fleet::report::{LaneState, LaneStatus, PauseCause};
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, name, row};
use super::script::{Act, accepted, local_fault, not_sent, timeout};

const WORKERS: i64 = 2;
const JOBS: usize = 24;

fn few_workers() -> ProviderRow {
    // Longer than the breaker takes to open: no job has its second attempt before.
    let [backoff_base_ms, backoff_max_ms] = [1_000; 2];
    ProviderRow { workers: WORKERS, max_attempts: 2, backoff_base_ms, backoff_max_ms, ..row("acme") }
}

/// A lane whose provider handles every job in this way.
async fn opened(act: Act) -> Bench {
    let bench = Bench::open(&[few_workers(), row("bolt")]).await;
    bench.script.always("acme", act);
    for number in 0..JOBS {
        bench.pay("acme", &format!("job-{number}")).await;
    }
    bench
}

/// A lane whose breaker is open because its provider failed every job in this way.
async fn down(act: Act) -> Bench {
    let bench = opened(act).await;
    bench.until("the breaker is open", async || state(&bench).await != LaneState::Running).await;
    let leased = "SELECT count(*) FROM jobs WHERE holder IS NOT NULL";
    bench.until("every attempt has its outcome", async || bench.count(leased).await == 0).await;
    bench
}

async fn state(bench: &Bench) -> LaneState {
    status(bench).await.does
}

async fn status(bench: &Bench) -> LaneStatus {
    bench.settings_known().await.lanes.get(&name("acme")).map(|control| control.status()).unwrap_or_default()
}

async fn counted(bench: &Bench) -> i64 {
    bench.count("SELECT coalesce(sum(attempts), 0) FROM jobs").await
}

/// Each job has two attempts, and the outage lasts longer than two attempts would.
#[tokio::test]
async fn provider_outage_uses_no_attempts() {
    let bench = down(Act::Answer(not_sent())).await;
    let stopped = status(&bench).await;
    assert_eq!(stopped.does, LaneState::Stopped);
    assert!(stopped.pause.as_ref().unwrap().words.contains("down: connection refused"), "{stopped:?}");
    let (before, sent) = (counted(&bench).await, bench.script.sent_to("acme").len());
    assert!(
        (i64::from(CONSECUTIVE_FAILURES_MAX)..=i64::from(CONSECUTIVE_FAILURES_MAX) + WORKERS).contains(&before),
        "{before} attempts"
    );
    bench.until_sent("acme", sent + 2).await;
    assert_eq!(counted(&bench).await, before, "probes counted");
    bench.script.always("acme", Act::Answer(accepted()));
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    // Any change of the row ends the breaker's pause.
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    assert_eq!(state(&bench).await, LaneState::Running);
}

#[tokio::test]
async fn timed_out_jobs_are_unknown_but_not_lost() {
    let bench = down(Act::Answer(timeout())).await;
    let sent = bench.script.sent_to("acme").len();
    bench.until_sent("acme", sent + 1).await;
    bench.script.always("acme", Act::Answer(accepted()));
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
}

#[tokio::test]
async fn open_breaker_probes_with_one_job() {
    let bench = down(Act::Answer(not_sent())).await;
    bench.script.always("acme", Act::Hold);
    let sent = bench.script.sent_to("acme").len();
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    bench.until_sent("acme", sent + 1).await;
    assert_eq!(state(&bench).await, LaneState::Probing);
    // While the probe is in flight, other providers' jobs have time to finish.
    for number in 0..10 {
        bench.pay("bolt", &format!("other-{number}")).await;
        bench.until_state(&format!("other-{number}"), "succeeded").await;
    }
    assert_eq!(bench.script.sent_to("acme").len(), sent + 1);
    bench.script.release_all();
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    assert!(JOBS > PROBES_TO_CLOSE as usize);
}

/// Each job has two attempts, and the local fault lasts longer than two attempts would.
#[tokio::test]
async fn local_fault_affects_neither_breaker_nor_attempts() {
    let bench = opened(Act::Answer(local_fault())).await;
    bench.until_sent("acme", 3).await;
    let LaneStatus { does, pause } = status(&bench).await;
    let (pause, wait) = pause.and_then(|pause| Some((pause.clone(), pause.wait?))).unwrap();
    assert_eq!((does, pause.by, wait.reason), (LaneState::Resting, PauseCause::Setup, WaitReason::LocalFault));
    assert!(pause.words.contains("LimitNOFILE"), "{pause:?}");
    let sent_thrice = || (0..JOBS).any(|number| bench.script.sent_for(&format!("job-{number}")).len() >= 3);
    bench.until("a job was tried more often than it has attempts", async || sent_thrice()).await;
    let delayed = "SELECT count(*) FROM jobs WHERE wait_detail LIKE '%file descriptors%'";
    assert!(bench.count(delayed).await > 0);
    bench.script.always("acme", Act::Answer(accepted()));
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    // Only the successful attempts count.
    assert_eq!(counted(&bench).await, i64::try_from(JOBS).unwrap());
}

/// An unsent probe gives no information about a provider that is down, so another job probes.
#[tokio::test]
async fn unsent_probe_passes_to_another_job() {
    let bench = down(Act::Answer(not_sent())).await;
    bench.script.always("acme", Act::Answer(local_fault()));
    let (before, sent) = (counted(&bench).await, bench.script.sent_to("acme").len());
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    bench.until_sent("acme", sent + 2).await;
    assert_ne!(state(&bench).await, LaneState::Stopped);
    assert_eq!(counted(&bench).await, before, "no attempt counts");
    bench.script.always("acme", Act::Answer(accepted()));
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    assert_eq!(state(&bench).await, LaneState::Running);
}

/// Charges fail while look-ups get responses. A response to a look-up does not prove that the provider can charge.
#[tokio::test]
async fn successful_lookups_do_not_close_the_breaker() {
    let lookup = json!({"url": "https://acme.test/charges?id=${job:id}"}).as_object().cloned();
    let forgetful = ProviderRow { workers: 1, idempotency_retention_s: None, lookup, ..row("acme") };
    let bench = Bench::open(&[forgetful]).await;
    let ids: Vec<_> = (0..CONSECUTIVE_FAILURES_MAX).map(|number| format!("job-{number}")).collect();
    for id in &ids {
        bench.script.plan(id, [Act::ChargeAndLose]);
        // However many look-ups came before it opened, enough of them come afterwards.
        bench.script.plan_lookups(id, vec![LookupResult::InProgress { retry_after: None }; PROBES_TO_CLOSE as usize]);
        bench.pay("acme", id).await;
    }
    bench.until("the breaker is open", async || state(&bench).await != LaneState::Running).await;
    let asked = bench.script.asked().len();
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    for id in &ids {
        bench.until_state(id, "succeeded").await;
    }
    assert!(bench.script.asked().len() >= asked + PROBES_TO_CLOSE as usize);
    assert_eq!(state(&bench).await, LaneState::Probing);
    for number in 0..PROBES_TO_CLOSE {
        bench.pay("acme", &format!("charge-{number}")).await;
        bench.until_state(&format!("charge-{number}"), "succeeded").await;
    }
    bench.until("answered charges close the breaker", async || state(&bench).await == LaneState::Running).await;
}
