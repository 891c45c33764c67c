//! A provider that is down: the lane takes no more, no job loses an attempt by it, one job at a time finds out.

use serde_json::json;
use sluicegate::domain::breaker::{CONSECUTIVE_FAILURES_MAX, PROBES_TO_CLOSE};
use sluicegate::domain::lookup::LookupResult;
use sluicegate::fleet::report::PauseCause;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::worker::lane_control::LaneStatus;

use super::bench::{Bench, name, row};
use super::script::{Act, accepted, local_fault, not_sent, timeout};

const WORKERS: i64 = 2;
const JOBS: usize = 24;

fn few_workers() -> ProviderRow {
    ProviderRow { workers: WORKERS, max_attempts: 2, ..row("acme") }
}

/// A lane whose provider does so with every job.
async fn opened(act: Act) -> Bench {
    let bench = Bench::open(&[few_workers(), row("bolt")]).await;
    bench.script.always("acme", act);
    for number in 0..JOBS {
        bench.pay("acme", &format!("job-{number}")).await;
    }
    bench
}

/// A lane whose provider fails every job in this way, by now known to be down.
async fn down(act: Act) -> Bench {
    let bench = opened(act).await;
    bench.until("the breaker is open", async || state(&bench).await != LaneStatus::Running).await;
    let leased = "SELECT count(*) FROM jobs WHERE lease_until IS NOT NULL";
    bench.until("every attempt has its outcome", async || bench.count(leased).await == 0).await;
    bench
}

async fn state(bench: &Bench) -> LaneStatus {
    bench.settings_known().await.lanes.get(&name("acme")).map_or(LaneStatus::Running, |pauses| pauses.state())
}

async fn counted(bench: &Bench) -> i64 {
    bench.count("SELECT coalesce(sum(attempts), 0) FROM jobs").await
}

/// Two attempts are all that a job has here, and the provider is away for longer than that.
#[tokio::test]
async fn provider_outage_uses_no_attempts() {
    let bench = down(Act::Answer(not_sent())).await;
    let LaneStatus::Stopped(pause) = state(&bench).await else { panic!("{:?}", state(&bench).await) };
    assert!(pause.reason.contains("down: connection refused"), "{}", pause.reason);
    let (before, sent) = (counted(&bench).await, bench.script.sent_to("acme").len());
    assert!(
        (i64::from(CONSECUTIVE_FAILURES_MAX)..=i64::from(CONSECUTIVE_FAILURES_MAX) + WORKERS).contains(&before),
        "{before} attempts"
    );
    bench.until_sent("acme", sent + 2).await;
    assert_eq!(counted(&bench).await, before, "probes counted");
    bench.script.always("acme", Act::Answer(accepted()));
    bench.settings().set_paused(&name("acme"), true).await.unwrap();
    // Whatever changes the row ends the rest.
    bench.settings().set_paused(&name("acme"), false).await.unwrap();
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    assert_eq!(state(&bench).await, LaneStatus::Running);
}

#[tokio::test]
async fn timed_out_jobs_are_unknown_but_not_lost() {
    let bench = down(Act::Answer(timeout())).await;
    let sent = bench.script.sent_to("acme").len();
    bench.until_sent("acme", sent + 1).await;
    bench.script.always("acme", Act::Answer(accepted()));
    bench.settings().set_paused(&name("acme"), true).await.unwrap();
    bench.settings().set_paused(&name("acme"), false).await.unwrap();
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
}

#[tokio::test]
async fn open_breaker_probes_with_one_job() {
    let bench = down(Act::Answer(not_sent())).await;
    bench.script.always("acme", Act::Hold);
    let sent = bench.script.sent_to("acme").len();
    bench.settings().set_paused(&name("acme"), true).await.unwrap();
    bench.settings().set_paused(&name("acme"), false).await.unwrap();
    bench.until_sent("acme", sent + 1).await;
    assert!(matches!(state(&bench).await, LaneStatus::Probing { .. }), "{:?}", state(&bench).await);
    // While it is on the wire, others have all the time that they need.
    for number in 0..10 {
        bench.pay("bolt", &format!("other-{number}")).await;
        bench.until_state(&format!("other-{number}"), "succeeded").await;
    }
    assert_eq!(bench.script.sent_to("acme").len(), sent + 1);
    bench.script.let_go();
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    assert!(JOBS > PROBES_TO_CLOSE as usize);
}

/// Two attempts are all that a job has here, and this process cannot send for longer than that.
#[tokio::test]
async fn local_fault_affects_neither_breaker_nor_attempts() {
    let bench = opened(Act::Answer(local_fault())).await;
    bench.until_sent("acme", 3).await;
    let LaneStatus::IntakePaused(pause) = state(&bench).await else { panic!("{:?}", state(&bench).await) };
    assert!(pause.cause == PauseCause::Setup && pause.reason.contains("LimitNOFILE"), "{pause:?}");
    let sent_thrice = || (0..JOBS).any(|number| bench.script.sent_for(&format!("job-{number}")).len() >= 3);
    bench.until("one was tried more often than it has attempts", async || sent_thrice()).await;
    let told = "SELECT count(*) FROM jobs WHERE reason LIKE '%file descriptors%'";
    assert!(bench.count(told).await > 0);
    bench.script.always("acme", Act::Answer(accepted()));
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    // The one that succeeded.
    assert_eq!(counted(&bench).await, i64::try_from(JOBS).unwrap());
}

/// Of a provider that is down nothing is learnt by a request that could not be sent: another job finds out.
#[tokio::test]
async fn unsent_probe_passes_to_another_job() {
    let bench = down(Act::Answer(not_sent())).await;
    bench.script.always("acme", Act::Answer(local_fault()));
    let (before, sent) = (counted(&bench).await, bench.script.sent_to("acme").len());
    bench.settings().set_paused(&name("acme"), true).await.unwrap();
    bench.settings().set_paused(&name("acme"), false).await.unwrap();
    bench.until_sent("acme", sent + 2).await;
    assert!(!matches!(state(&bench).await, LaneStatus::Stopped(_)), "{:?}", state(&bench).await);
    assert_eq!(counted(&bench).await, before, "no attempt counts");
    bench.script.always("acme", Act::Answer(accepted()));
    for number in 0..JOBS {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    assert_eq!(state(&bench).await, LaneStatus::Running);
}

/// Charges fail while look-ups are answered: that the provider can be asked says nothing of whether it can charge.
#[tokio::test]
async fn successful_lookups_do_not_close_the_breaker() {
    let lookup = json!({"url": "https://acme.test/charges?id=${job:id}"}).as_object().cloned();
    let forgetful = ProviderRow { workers: 1, idempotency_retention_s: None, lookup, ..row("acme") };
    let bench = Bench::open(&[forgetful]).await;
    let ids: Vec<_> = (0..CONSECUTIVE_FAILURES_MAX).map(|number| format!("job-{number}")).collect();
    for id in &ids {
        bench.script.plan(id, [Act::ChargeAndLose]);
        // Whatever was asked before it opened, enough is asked afterwards.
        bench.script.plan_lookups(id, vec![LookupResult::InProgress; PROBES_TO_CLOSE as usize]);
        bench.pay("acme", id).await;
    }
    bench.until("the breaker is open", async || state(&bench).await != LaneStatus::Running).await;
    let asked = bench.script.asked().len();
    bench.settings().set_paused(&name("acme"), true).await.unwrap();
    bench.settings().set_paused(&name("acme"), false).await.unwrap();
    for id in &ids {
        bench.until_state(id, "succeeded").await;
    }
    assert!(bench.script.asked().len() >= asked + PROBES_TO_CLOSE as usize);
    assert!(matches!(state(&bench).await, LaneStatus::Probing { .. }), "{:?}", state(&bench).await);
    for number in 0..PROBES_TO_CLOSE {
        bench.pay("acme", &format!("charge-{number}")).await;
        bench.until_state(&format!("charge-{number}"), "succeeded").await;
    }
    bench.until("answered charges close it", async || state(&bench).await == LaneStatus::Running).await;
}
