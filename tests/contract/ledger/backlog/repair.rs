//! The upkeep of flows: lost rows are recreated, wrong counts corrected, and idle rows removed.

use std::collections::BTreeSet;

use sluicegate::ledger::backlog::RepairedFlows;

use super::*;

on_every_database!(
    a_lost_flow_is_recreated,
    a_wrong_count_is_corrected,
    flow_at_its_class_time_is_removed,
    rules_of_flows_are_checks,
    idle_lanes_are_left_out,
);

/// A sweep and the dispatchers of idle lanes ask for the lanes with something to do, once for all.
async fn idle_lanes_are_left_out(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    assert_eq!(
        (ledger.lanes_with_flows().await.unwrap(), ledger.lanes_with_open_jobs().await.unwrap()),
        Default::default()
    );
    for lane in ["adyen", "mollie", "paypal", "stripe"] {
        let job = Job { provider: name(lane), ..job(lane) };
        if lane == "mollie" {
            // A job that is recorded with its first request has no flow.
            fixture.take(&job).await;
            fixture.sql("DELETE FROM flows WHERE provider = 'mollie'").await.unwrap();
        } else {
            fixture.record(&job).await;
        }
    }
    let lanes = |names: &[&str]| names.iter().map(|lane| name(lane)).collect::<BTreeSet<_>>();
    assert_eq!(ledger.lanes_with_flows().await.unwrap(), lanes(&["adyen", "paypal", "stripe"]));
    assert_eq!(ledger.lanes_with_open_jobs().await.unwrap(), lanes(&["adyen", "mollie", "paypal", "stripe"]));
    fixture.record(&Job { provider: name("stripe"), ..job("second") }).await;
    for (most, counted) in [(1, 1), (2, 2), (3, 2)] {
        assert_eq!(ledger.count_open_jobs(&name("stripe"), most).await.unwrap(), counted, "at most {most}");
    }
    // Their jobs have ended, but the rows of their flows are still there.
    fixture.sql("UPDATE jobs SET state = 'expired', backlog = FALSE WHERE id = 'paypal'").await.unwrap();
    assert_eq!(ledger.lanes_with_open_jobs().await.unwrap(), lanes(&["adyen", "mollie", "stripe"]));
    fixture.sql("DELETE FROM flows WHERE provider = 'adyen'").await.unwrap();
    assert!(!ledger.lanes_with_flows().await.unwrap().contains(&name("adyen")));
}

async fn repaired(fixture: &Fixture, at_most: u32) -> (u32, u32) {
    let RepairedFlows { recreated, corrected } = fixture.database.repair_flows(&name("stripe"), at_most).await.unwrap();
    (recreated, corrected)
}

async fn a_lost_flow_is_recreated(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for account in ["acct_1", "acct_2", "acct_3"] {
        fixture.record(&of(account, account)).await;
        fixture.record(&of(account, &format!("{account}-2"))).await;
    }
    fixture.dispatch(1, 1).await;
    assert_eq!(repaired(&fixture, 9).await, (0, 0));
    fixture.sql("DELETE FROM flows").await.unwrap();
    assert_eq!(fixture.dispatch(9, 9).await, []);
    assert_eq!(repaired(&fixture, 2).await, (2, 0));
    assert_eq!(repaired(&fixture, 9).await, (1, 0));
    fixture.counts_agree().await;
    assert_eq!(fixture.dispatch(9, 9).await.len(), 5);
}

async fn a_wrong_count_is_corrected(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["p1", "p2", "p3"] {
        fixture.record(&job(id)).await;
    }
    for wrong in [0, 1, 9] {
        fixture.sql(&format!("UPDATE flows SET waiting = {wrong}")).await.unwrap();
        assert_eq!(repaired(&fixture, 9).await, (0, 1), "{wrong}");
        fixture.counts_agree().await;
    }
    // A count that is too high ends nothing: the claim finds what there is.
    fixture.sql("UPDATE flows SET waiting = 9").await.unwrap();
    assert_eq!(fixture.dispatch(9, 9).await.len(), 3);
    assert_eq!(fixture.dispatch(9, 9).await, []);
    assert_eq!(repaired(&fixture, 9).await, (0, 1));
    assert_eq!(fixture.one("SELECT waiting FROM flows").await, "0");
}

/// During a rolling deployment, an older program claims a job that is in the backlog.
#[tokio::test]
async fn older_program_claims_from_the_backlog() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    fixture.record(&job("p1")).await;
    let claim = "UPDATE jobs SET fence = fence + 1, holder = 'older', \
        updated_at = now() WHERE id = 'p1'";
    fixture.sql(claim).await.unwrap();
    assert_eq!(fixture.one("SELECT count(*) FROM jobs WHERE backlog").await, "0");
    assert_eq!(fixture.dispatch(9, 9).await, []);
    assert_eq!(repaired(&fixture, 9).await, (0, 1));
    fixture.counts_agree().await;
}

async fn flow_at_its_class_time_is_removed(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let remove = async || fixture.database.remove_idle_flows(&name("stripe"), 9).await.unwrap();
    fixture.record(&of("acct_1", "a1")).await;
    for number in 0..5 {
        fixture.record(&of("acct_2", &format!("b{number}"))).await;
    }
    assert_eq!(remove().await, 0);
    assert_eq!(fixture.dispatch(2, 1).await.len(), 2);
    // The virtual time is behind its tag: it has had more than its share.
    assert_eq!(remove().await, 0);
    for _ in 0..2 {
        fixture.dispatch(1, 1).await;
    }
    assert_eq!(remove().await, 1);
    assert_eq!(fixture.one("SELECT account FROM flows").await, "acct_2");
    // Once the class is quiet, all rows of idle flows go.
    assert_eq!(fixture.dispatch(9, 9).await.len(), 2);
    assert_eq!(remove().await, 1);
    fixture.record(&of("acct_1", "a2")).await;
    assert_eq!(fixture.dispatch(9, 9).await.len(), 1);
}

async fn rules_of_flows_are_checks(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record(&job("p1")).await;
    for bad in [
        "provider = 'Stripe'",
        "class = 11",
        "class = -1",
        "account = 'a b'",
        "tag = -1",
        "weight = 0",
        "weight = 1001",
        "waiting = -1",
        "blocked_reason = 'limit'",
        "blocked_limit = 'a'",
        "blocked_until = blocked_until, blocked_reason = 'weather'",
    ] {
        let error = fixture.sql(&format!("UPDATE flows SET {bad}")).await.expect_err(bad);
        assert!(error.contains("constraint"), "{bad}: {error}");
    }
    // A lease takes a job out of the backlog on PostgreSQL, where an older program may run beside this one.
    let lease = "UPDATE jobs SET holder = 'w'";
    if kind == Kind::Postgres {
        fixture.sql(lease).await.unwrap();
        assert_eq!(fixture.one("SELECT count(*) FROM jobs WHERE backlog").await, "0");
    } else {
        let error = fixture.sql(lease).await.expect_err(lease);
        assert!(error.contains("backlog_has_no_holder"), "{error}");
    }
    assert!(fixture.sql("UPDATE jobs SET seq = seq + 1").await.is_err());
}
