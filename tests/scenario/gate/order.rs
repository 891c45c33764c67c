//! Who is asked for first, and whom nobody overtakes: limits on one kind of call, costly jobs, and urgent ones.

use std::time::Duration;

use sluicegate::domain::decision::CallKind;
use sluicegate::domain::job::Token;
use sluicegate::domain::limit::{AppliesTo, Scope};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::limiter::gate::{Ask, Concerns, Gate, GateRefusal, Grant, RefusedBy};
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
    let GateRefusal { exact, by, concerns, .. } = refusal;
    assert_eq!((exact, by, concerns), (true, RefusedBy::Limit("charges".into()), Concerns::Charges));
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

/// Who is asked about is told its exact place, whatever goes before it, and what the line waits for.
#[tokio::test(start_paused = true)]
async fn a_job_in_line_is_told_how_many_go_before_it() {
    let five = spec(&[("all", 5, 1_000)]);
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), five);
    use_one(&gate, ask(5, hour())).await;
    let wait = |id: &str, priority: u8, cost: u32| {
        let (gate, job) = (gate.clone(), Token::new(id).unwrap());
        tokio::spawn(async move { gate.permit_for(Some(job), Ask { priority, ..ask(cost, hour()) }).await })
    };
    let mut waiting = Vec::new();
    for (id, priority, cost) in [("first", 0, 1), ("second", 0, 3), ("third", 0, 1), ("urgent", 9, 2)] {
        waiting.push(wait(id, priority, cost));
        sleep(Duration::from_millis(1)).await;
    }
    // The urgent one has been asked for, too.
    sleep(Duration::from_millis(20)).await;
    let place = async |id: &str| gate.place_of(Token::new(id).unwrap()).await;
    for (id, before, cost_before) in [("urgent", 0, 0), ("first", 1, 2), ("second", 2, 3), ("third", 3, 6)] {
        let told = place(id).await.unwrap();
        assert_eq!((told.before, told.cost_before, told.of_its_own), (before, cost_before, false), "{id}");
        let (by, until, exact) = told.refused.unwrap();
        assert_eq!((by, exact), (RefusedBy::Limit("all".into()), true), "{id}");
        assert!(until > Instant::now() && until < Instant::now() + Duration::from_millis(1_100), "{id}");
    }
    assert_eq!(place("nobody").await, None);
    // Whoever has gone leaves the line to the others.
    waiting.remove(1).abort();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(place("third").await.map(|told| told.before), Some(2));
    let urgent = waiting.pop().unwrap().await.unwrap();
    assert!(matches!(urgent, Grant::Granted(_)), "{urgent:?}");
    assert_eq!(place("urgent").await, None);
}
