//! Who is asked for first, and whom nobody overtakes: limits on one kind of call, costly jobs, and urgent ones.

use std::time::Duration;

use sluicegate::domain::decision::CallKind;
use sluicegate::domain::limit::{AppliesTo, Scope};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::limiter::gate::{Ask, Gate, GateRefusal, Grant, RefusedBy};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::altered::{Altered, Steered, account, hour, steered, use_one};
use super::{ask, spec};

/// Five charges a second, and more of everything than anybody needs.
fn five_charges() -> QuotaSpec {
    let charges =
        LimitSpec { applies_to: AppliesTo::Charge, ..LimitSpec::sliding_log("charges", 5, Duration::from_secs(1)) };
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    QuotaSpec { limits: vec![all, charges], ..spec(&[]) }
}

/// Jobs that come without end, one for each slot that comes free.
fn stream(gate: &Gate, job: &Ask) -> JoinSet<()> {
    let mut stream = JoinSet::new();
    let (gate, job) = (gate.clone(), job.clone());
    stream.spawn(async move {
        let mut jobs = JoinSet::new();
        loop {
            let (gate, job) = (gate.clone(), job.clone());
            jobs.spawn(async move { use_one(&gate, Ask { wait_until: hour(), ..job }).await });
            sleep(Duration::from_millis(200)).await;
        }
    });
    stream
}

#[tokio::test(start_paused = true)]
async fn a_costly_job_is_not_starved_behind_a_limit_on_its_kind() {
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), five_charges());
    let _stream = stream(&gate, &ask(1, hour()));
    sleep(Duration::from_secs(3)).await;
    let costly = timeout(Duration::from_secs(10), gate.permit(ask(5, hour()))).await;
    assert!(matches!(costly, Ok(Grant::Granted(_))), "{costly:?}");
}

#[tokio::test(start_paused = true)]
async fn a_limit_on_charges_holds_all_charges_and_no_lookup() {
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), five_charges());
    use_one(&gate, ask(5, hour())).await;
    let asking = gate.clone();
    let waiting = tokio::spawn(async move { asking.permit(ask(1, hour())).await });
    sleep(Duration::from_millis(100)).await;
    let standing = gate.view().borrow().standing.clone();
    assert_eq!(standing.map(|(by, _)| by), Some(RefusedBy::Limit("charges".into())));
    let Grant::Refused(refusal) = gate.permit(ask(1, Instant::now())).await else { panic!("granted") };
    let GateRefusal { exact, by, of_its_own, .. } = refusal;
    assert_eq!((exact, by, of_its_own), (true, RefusedBy::Limit("charges".into()), false));
    let lookup = Ask { kind: CallKind::Lookup, ..ask(1, Instant::now() + Duration::from_millis(10)) };
    assert!(matches!(gate.permit(lookup).await, Grant::Granted(_)));
    assert!(matches!(waiting.await.unwrap(), Grant::Granted(_)));
}

#[tokio::test(start_paused = true)]
async fn an_accounts_costly_job_is_not_starved_by_later_ones_of_the_account() {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 5, Duration::from_secs(1)) };
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    let spec = QuotaSpec { limits: vec![all, own], ..spec(&[]) };
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), spec);
    let _stream = stream(&gate, &account("alice", ask(1, hour())));
    sleep(Duration::from_secs(3)).await;
    let costly = timeout(Duration::from_secs(20), gate.permit(account("alice", ask(5, hour())))).await;
    assert!(matches!(costly, Ok(Grant::Granted(_))), "{costly:?}");
}

/// For a limit on everything and for one on a kind of call.
#[tokio::test(start_paused = true)]
async fn an_urgent_job_takes_the_free_slot_that_is_too_small_for_the_first_in_line() {
    let on = |applies_to| LimitSpec { applies_to, ..LimitSpec::sliding_log("ten", 10, Duration::from_secs(10)) };
    for applies_to in [AppliesTo::All, AppliesTo::Charge] {
        let spec = QuotaSpec { limits: vec![on(applies_to)], ..spec(&[]) };
        let limiter = Altered::slow(Duration::from_millis(1));
        let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), spec);
        use_one(&gate, ask(8, hour())).await;
        let asking = gate.clone();
        let costly = tokio::spawn(async move { asking.permit(ask(5, hour())).await });
        sleep(Duration::from_millis(500)).await;
        let before = limiter.calls();
        // One that is no more urgent waits its turn, without a call.
        let patient = timeout(Duration::from_millis(200), gate.permit(ask(1, hour()))).await;
        assert!(patient.is_err(), "overtaken: {patient:?}");
        assert_eq!(limiter.calls(), before);
        let urgent = Ask { priority: 9, ..ask(1, hour()) };
        let urgent = timeout(Duration::from_millis(200), gate.permit(urgent)).await;
        assert!(matches!(urgent, Ok(Grant::Granted(_))), "{applies_to:?}: {urgent:?}");
        assert!(!costly.is_finished());
    }
}
