//! The order in which jobs leave the backlog: classes, shares by weight, and first in first out within a flow.

use futures_util::future::join_all;
use sluicegate::ledger::FencedWrite;

use super::*;

on_every_database!(
    a_flow_is_first_in_first_out,
    batch_keeps_the_order_of_arrival,
    weights_divide_the_lane,
    costs_count_against_a_share,
    a_late_flow_gets_no_past,
    an_unblocked_flow_gets_no_past,
    a_higher_class_is_always_first,
    a_claim_is_filled_from_many_flows,
);

/// How many of the jobs belong to each account.
fn shares(jobs: &[BacklogJob], accounts: [&str; 2]) -> [usize; 2] {
    accounts.map(|account| jobs.iter().filter(|job| job.job.account.as_ref().unwrap().as_str() == account).count())
}

impl Fixture {
    /// Records jobs at the same time: one batch, or a few.
    async fn record_all(&self, account: &str, jobs: std::ops::Range<u32>) {
        let jobs: Vec<Job> = jobs.map(|number| of(account, &format!("{account}-{number:05}"))).collect();
        join_all(jobs.iter().map(|job| self.record(job))).await;
    }

    async fn dispatch_rounds(&self, rounds: u32, at_most: u32, per_flow: u32) -> Vec<BacklogJob> {
        let mut all = Vec::new();
        for _ in 0..rounds {
            all.extend(self.dispatch(at_most, per_flow).await);
        }
        all
    }
}

async fn a_flow_is_first_in_first_out(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["p9", "p1", "p5", "p3"] {
        fixture.record(&job(id)).await;
    }
    assert_eq!(ids(&fixture.dispatch(2, 9).await), ["p9", "p1"]);
    fixture.record(&job("p0")).await;
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["p5", "p3", "p0"]);
}

async fn batch_keeps_the_order_of_arrival(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let jobs: Vec<Job> = (0..100).rev().map(|number| job(&format!("p{number:03}"))).collect();
    let backlog = fixture.database.clone();
    let recorded = jobs.iter().map(|job| backlog.record_backlog(job, hash(1), Duration::from_millis(20)));
    assert!(
        join_all(recorded)
            .await
            .into_iter()
            .all(|recorded| matches!(recorded.unwrap(), BacklogRecord::Recorded { .. }))
    );
    let wanted: Vec<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
    assert_eq!(ids(&fixture.dispatch(100, 100).await), wanted);
}

async fn weights_divide_the_lane(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_all("light", 0..300).await;
    fixture.record_all("heavy", 0..300).await;
    fixture.sql("UPDATE flows SET weight = 3 WHERE account = 'heavy'").await.unwrap();
    let jobs = fixture.dispatch_rounds(20, 10, 2).await;
    let [light, heavy] = shares(&jobs, ["light", "heavy"]);
    assert_eq!(light + heavy, 200);
    // One to three within 5 %.
    assert!((143..=157).contains(&heavy), "{light} to {heavy}");
    fixture.counts_agree().await;
}

async fn costs_count_against_a_share(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..60 {
        fixture.record(&Job { cost: 4, ..of("costly", &format!("c{number}")) }).await;
    }
    fixture.record_all("cheap", 0..200).await;
    let [costly, cheap] = shares(&fixture.dispatch_rounds(50, 2, 1).await, ["costly", "cheap"]);
    assert!((18..=22).contains(&costly) && costly + cheap == 100, "{costly} costly, {cheap} cheap");
}

async fn a_late_flow_gets_no_past(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_all("early", 0..200).await;
    fixture.dispatch_rounds(10, 10, 10).await;
    fixture.record_all("late", 0..100).await;
    let [early, late] = shares(&fixture.dispatch_rounds(20, 2, 1).await, ["early", "late"]);
    // Without the lane's virtual time, the late one would get all forty.
    assert!((15..=30).contains(&late) && early + late == 40, "{early} early, {late} late");
    // One that comes back after a pause starts at the virtual time, too.
    fixture.record_all("third", 0..5).await;
    fixture.dispatch_rounds(10, 3, 1).await;
    fixture.dispatch_rounds(20, 2, 1).await;
    fixture.record_all("third", 5..60).await;
    let [third, _] = shares(&fixture.dispatch_rounds(10, 3, 1).await, ["third", "early"]);
    assert!((8..=13).contains(&third), "{third}");
}

async fn an_unblocked_flow_gets_no_past(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_all("blocked", 0..100).await;
    let first = fixture.dispatch(1, 1).await.remove(0);
    fixture.give_back(&first, &BacklogReturn { block: Some(block(A_MINUTE, "a")), ..RETURNED }).await;
    fixture.record_all("other", 0..200).await;
    assert_eq!(shares(&fixture.dispatch_rounds(10, 10, 10).await, ["blocked", "other"]), [0, 100]);
    assert_eq!(fixture.database.unblock_flows(&name("stripe")).await.unwrap(), 1);
    let [blocked, other] = shares(&fixture.dispatch_rounds(20, 2, 1).await, ["blocked", "other"]);
    assert!((15..=30).contains(&blocked) && blocked + other == 40, "{blocked} and {other}");
}

async fn a_higher_class_is_always_first(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (priority, id) in [(0, "bulk"), (5, "soon"), (9, "urgent"), (0, "bulk-2"), (9, "urgent-2")] {
        fixture.record(&Job { priority, ..job(id) }).await;
    }
    let lease = fixture.take(&job("unknown")).await.lease;
    let unknown = JobState::Unknown { wait: Duration::ZERO, reason: WaitReason::OutcomeUnknown.into() };
    assert_eq!(
        fixture.database.begin_attempt(&lease, &request("unknown"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
    assert_eq!(fixture.database.finish_attempt(&lease, &end, &unknown).await.unwrap(), FencedWrite::Applied);
    let lease = fixture.take(&job("unknown")).await.lease;
    let how = BacklogReturn { came_from_backlog: false, ..RETURNED };
    assert_eq!(fixture.database.return_to_backlog(&lease, &how).await.unwrap(), FencedWrite::Applied);
    assert_eq!(ids(&fixture.dispatch(3, 9).await), ["unknown", "urgent", "urgent-2"]);
    fixture.record(&Job { priority: 8, ..job("new") }).await;
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["new", "soon", "bulk", "bulk-2"]);
}

async fn a_claim_is_filled_from_many_flows(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for account in 0..30 {
        fixture.record_all(&format!("acct-{account:02}"), 0..(account % 3) + 1).await;
    }
    let jobs = fixture.dispatch(40, 2).await;
    assert_eq!(jobs.len(), 40);
    let jobs = fixture.dispatch(40, 2).await;
    assert_eq!(jobs.len(), 20);
    fixture.counts_agree().await;
}
