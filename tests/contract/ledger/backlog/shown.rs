//! What operators see of a backlog: the largest flows with their shares, an account's flows, and a job's place in its flow.

use sluicegate::ledger::backlog::BacklogPosition;
use sluicegate::ledger::backlog::LaneFlows;

use super::*;

on_every_database!(position_is_that_in_the_flow, costs_before_a_job_are_counted, largest_flows_come_first,);

async fn position_is_that_in_the_flow(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..5 {
        fixture.record(&of("acct_1", &format!("a{number}"))).await;
    }
    fixture.record(&of("acct_2", "b0")).await;
    fixture.record(&Job { priority: 9, ..of("acct_1", "urgent") }).await;
    let place = async |id: &str| {
        let lane = [name("stripe")];
        fixture.database.queue_position(&job(id).id, &lane).await.unwrap().backlog
    };
    let of_flow = |place: &BacklogPosition| {
        [place.before_in_flow, place.active_of_flow, place.flow.waiting, place.others_of_account]
    };
    let a3 = place("a3").await.unwrap();
    // The urgent one of its account is before it.
    assert_eq!((of_flow(&a3), a3.flow.class.priority()), ([3, 0, 5, 1], Some(0)));
    assert_eq!(a3.flow.account.as_ref().map(Identifier::as_str), Some("acct_1"));
    assert_eq!(of_flow(&place("urgent").await.unwrap()), [0, 0, 1, 0]);
    // Those that a worker holds wait no longer in the backlog, and are still before it.
    assert_eq!(ids(&fixture.dispatch(2, 9).await), ["urgent", "a0"]);
    assert_eq!(of_flow(&place("a3").await.unwrap()), [2, 1, 4, 1]);
    assert_eq!(of_flow(&place("b0").await.unwrap()), [0, 0, 1, 0]);
    assert_eq!(place("a0").await, None);
    assert_eq!(place("unheard-of").await, None);
}

/// The cost of each job of its own flow is read. Those of other flows count as the last requests did, or as its own flow.
async fn costs_before_a_job_are_counted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let costly = |account: &str, id: &str, cost: u16| Job { cost, ..of(account, id) };
    let place = async |id: &str| {
        let lane = [name("stripe")];
        let position = fixture.database.queue_position(&job(id).id, &lane).await.unwrap();
        let of_account = position.backlog.unwrap().account_cost_ahead;
        (position.jobs_ahead, position.cost_ahead, of_account)
    };
    for (number, cost) in [7, 8, 9].into_iter().enumerate() {
        fixture.record(&costly("acct_1", &format!("a{number}"), cost)).await;
    }
    for number in 0..4 {
        fixture.record(&costly("acct_2", &format!("b{number}"), 10)).await;
    }
    // It starts after 15 units of cost. Nothing was sent, so two of the other flow are before it, of cost 7.5 as its own.
    assert_eq!(place("a2").await, (4, 30, 15));
    assert_eq!(place("a0").await, (0, 0, 0));
    for id in ["sent-0", "sent-1"] {
        fixture.record(&costly("acct_3", id, 10)).await;
    }
    fixture.sql("UPDATE jobs SET state = 'cancelled' WHERE id LIKE 'sent-%'").await.unwrap();
    let attempt = "INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, counted) \
                   SELECT id, 1, provider, created_at, created_at, 'declined', true FROM jobs WHERE id LIKE 'sent-%'";
    fixture.sql(attempt).await.unwrap();
    assert_eq!(place("a2").await, (4, 35, 15), "two of cost 10 start before 15 units");
    // The urgent one of its account is before it, too; its cost is not read.
    fixture.record(&Job { priority: 9, ..costly("acct_1", "urgent", 3) }).await;
    assert_eq!(place("a2").await, (5, 45, 25));
    // A worker holds two now: their costs are read.
    assert_eq!(ids(&fixture.dispatch(2, 9).await), ["urgent", "a0"]);
    assert_eq!(place("a2").await.2, 8 + 3 + 7);
}

/// The flows of a lane and the sums over all of them, compared with a count of the jobs themselves.
async fn largest_flows_come_first(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let lane = name("stripe");
    assert_eq!(fixture.database.largest_flows(&lane, 20).await.unwrap(), LaneFlows::default());
    fixture.record(&Job { account: None, ..job("none") }).await;
    for (account, jobs) in [("small", 1), ("flood", 7), ("middle", 3)] {
        for number in 0..jobs {
            fixture.record(&of(account, &format!("{account}-{number}"))).await;
        }
    }
    fixture.record(&Job { priority: 9, ..of("flood", "urgent") }).await;
    fixture.record(&Job { provider: name("other"), ..of("flood", "elsewhere") }).await;
    fixture.sql("UPDATE flows SET weight = 3 WHERE account = 'middle'").await.unwrap();
    let claimed = fixture.dispatch_with(&FairClaim { at_most: 1, flow_max: 1, ..everything() }).await;
    assert_eq!(ids(&claimed), ["urgent"]);
    let flood = fixture.dispatch(20, 1).await.into_iter().find(|job| job.job.id.as_str() == "flood-0").unwrap();
    let how = BacklogReturn { block: Some(block(A_MINUTE, "per-account")), ..RETURNED };
    fixture.give_back(&flood, &how).await;
    let shown = fixture.database.largest_flows(&lane, 20).await.unwrap();
    // Everything but the flood was claimed.
    assert_eq!((shown.flows, shown.waiting, shown.largest.len()), (1, 1, 1), "{shown:?}");
    assert_eq!(shown.largest[0].share(), None, "it is blocked");
    let ends = shown.largest[0].blocked_until.unwrap().0;
    let now = fixture.database.queue_position(&job("flood-0").id, &[]).await.unwrap().now.0;
    assert!((now..=now + i64::try_from(A_MINUTE.as_millis()).unwrap()).contains(&ends), "{ends}, now {now}");

    for number in 0..4 {
        fixture.record(&of("middle", &format!("again-{number}"))).await;
    }
    fixture.record(&of("small", "again")).await;
    fixture.record(&Job { account: None, ..job("none-again") }).await;
    let shown = fixture.database.largest_flows(&lane, 2).await.unwrap();
    let truth = "SELECT count(*) FROM jobs WHERE backlog AND provider = 'stripe'";
    assert_eq!((shown.flows, shown.waiting.to_string()), (4, fixture.one(truth).await), "{shown:?}");
    let accounts: Vec<_> =
        shown.largest.iter().map(|flow| flow.status.account.as_ref().map(Identifier::as_str)).collect();
    assert_eq!(accounts, [Some("middle"), None]);
    // Of three flows that are not blocked, one has weight 3.
    assert_eq!(shown.largest.iter().map(|flow| flow.share()).collect::<Vec<_>>(), [Some(0.6), Some(0.2)]);
    let of_account = async |account: &str| {
        let account = Identifier::new(account).unwrap();
        let flows = fixture.database.account_flows(&lane, &account).await.unwrap();
        flows.iter().map(|flow| (flow.class.number(), flow.waiting, flow.block().is_some())).collect::<Vec<_>>()
    };
    fixture.record(&Job { priority: 5, ..of("flood", "other-class") }).await;
    assert_eq!(of_account("flood").await, [(5, 1, false), (10, 1, true)]);
    assert_eq!(of_account("unheard-of").await, []);
}
