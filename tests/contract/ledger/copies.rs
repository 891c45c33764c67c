//! Message copies of a job: which copy counts, and when a waiting job needs one more copy.

use sluicegate::ledger::copies::{Claimant, DeliveredCopy, ReturnPlan};
use sluicegate::ledger::operator::{Actor, JobResolution};
use sluicegate::ledger::upkeep::{MessageState, OverduePolicy};
use sluicegate::ledger::{AttemptEnd, BatchOptions, BeginResult, FencedWrite, JobState};

use super::*;

on_every_database!(
    a_new_copy_supersedes_the_older_ones,
    older_copy_is_accepted_for_due_job,
    timely_copy_needs_no_second,
    job_due_before_its_copy_stays_unqueued,
    redelivered_copy_supersedes_unpublished_ones,
    redelivered_copy_keeps_an_older_delayed_one,
    sweeper_copy_never_supersedes_a_queued_copy,
    resent_job_gets_the_newest_copy,
);

const MINUTE: Duration = Duration::from_secs(60);

fn waits(wait: Duration) -> JobState {
    JobState::Waiting { wait, reason: Wait::for_limit("all") }
}

fn copy(copy: i64) -> DeliveredCopy {
    DeliveredCopy::delivered(copy, false)
}

fn back(copy: i64, unqueued: bool) -> Option<ReturnPlan> {
    Some(ReturnPlan { copy, unqueued })
}

impl Fixture {
    pub(super) async fn arrives(&self, id: &str, arrived: DeliveredCopy) -> Claim {
        let claimant = Claimant { owner: "worker-a", delivered: arrived };
        self.database.claim_batched(&job(id), hash(1), claimant, BatchOptions::immediate(LEASE)).await.unwrap()
    }

    /// Delivers a copy of a job that must wait; returns the plan of its return.
    async fn delayed(&self, id: &str, arrived: DeliveredCopy, wait: Duration) -> Option<ReturnPlan> {
        let Claim::Claimed(claimed) = self.arrives(id, arrived).await else { panic!("{id}: no claim by {arrived:?}") };
        let (written, back) = self.database.transition_with_copy(&claimed.lease, &waits(wait)).await.unwrap();
        assert_eq!(written, FencedWrite::Applied);
        back
    }

    /// Number of the copy that the sweeper publishes for a job without a message in any queue. A changed limit leaves
    /// jobs so.
    async fn woken(&self, id: &str) -> i64 {
        self.sql(&format!("UPDATE jobs SET wake_at = created_at, unqueued = true WHERE id = '{id}'")).await.unwrap();
        let due = self.database.take_unqueued(&name("stripe"), SECOND, MINUTE, 10).await.unwrap();
        assert_eq!(due.len(), 1);
        due[0].copy
    }
}

async fn a_new_copy_supersedes_the_older_ones(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), MINUTE).await, back(1, false));
    let standing = async |copy| fixture.database.message_state(&job("p"), hash(1), copy).await.unwrap();
    assert_eq!((standing(0).await, standing(1).await), (MessageState::Superseded, MessageState::Open));
    assert_eq!(fixture.arrives("p", copy(0)).await, Claim::Superseded);
    assert_eq!(fixture.delayed("p", copy(1), MINUTE).await, back(2, false));
    assert_eq!(fixture.arrives("p", copy(1)).await, Claim::Superseded);
    // This holds while another delivery has the lease, too.
    let Claim::Claimed(claimed) = fixture.arrives("p", copy(2)).await else { panic!("copy 2 is not claimed") };
    assert_eq!(fixture.arrives("p", copy(1)).await, Claim::Superseded);
    assert!(matches!(fixture.arrives("p", copy(2)).await, Claim::LeasedElsewhere { .. }));
    assert_eq!(claimed.copy, 2);
    assert_eq!(
        fixture.database.release_waiting_with_copy(&claimed.lease, MINUTE).await.unwrap(),
        (FencedWrite::Applied, back(3, false))
    );
}

/// The newer copy may be lost, or far behind in the queue.
async fn older_copy_is_accepted_for_due_job(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), MINUTE).await, back(1, false));
    assert_eq!(fixture.arrives("p", copy(0)).await, Claim::Superseded);
    fixture.sql("UPDATE jobs SET wake_at = created_at").await.unwrap();
    let Claim::Claimed(_) = fixture.arrives("p", copy(0)).await else { panic!("the due job is not claimed") };
    assert_eq!(fixture.arrives("p", copy(0)).await, Claim::Superseded, "another delivery has the lease");
}

async fn timely_copy_needs_no_second(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), 10 * MINUTE).await, back(1, false));
    // The first copy counts however often the job is republished meanwhile.
    for lane in 2..5 {
        assert_eq!(fixture.woken("p").await, lane);
        assert_eq!(fixture.delayed("p", copy(lane), 20 * MINUTE).await, back(lane, false));
    }
    assert_eq!(fixture.arrives("p", copy(3)).await, Claim::Superseded);
    assert_eq!(fixture.delayed("p", copy(1), 10 * MINUTE).await, back(5, false), "copy 1 has left its delay queue");
}

async fn job_due_before_its_copy_stays_unqueued(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), 60 * MINUTE).await, back(1, false));
    assert_eq!(fixture.woken("p").await, 2);
    assert_eq!(fixture.delayed("p", copy(2), 5 * MINUTE).await, back(2, true));
    let due = fixture.database.take_unqueued(&name("stripe"), 6 * MINUTE, MINUTE, 10).await.unwrap();
    assert_eq!(due.iter().map(|job| job.copy).collect::<Vec<_>>(), [3]);
    // Near the due time the sweeper would be late, so a second copy returns in time.
    assert_eq!(fixture.delayed("p", copy(3), 20 * SECOND).await, back(4, false));
    assert_eq!(fixture.delayed("p", copy(4), 59 * MINUTE).await, back(4, false), "copy 1 is still known");
    // A job that may have been charged always has a message in a queue. A copy that returns sooner replaces the first
    // one.
    let unknown = JobState::Unknown { wait: 5 * MINUTE, reason: Wait::for_limit("all") };
    let Claim::Claimed(claimed) = fixture.arrives("p", copy(4)).await else { panic!("copy 4 is not claimed") };
    assert_eq!(fixture.database.begin_attempt(&claimed.lease, &request("p")).await.unwrap(), BeginResult::Attempt(1));
    let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
    let finished = fixture
        .database
        .finish_attempt_batched(&claimed.lease, &end, &unknown, BatchOptions::immediate(LEASE))
        .await
        .unwrap();
    assert_eq!(finished, (FencedWrite::Applied, None, back(5, false)));
    let Claim::Claimed(claimed) = fixture.arrives("p", DeliveredCopy::ALWAYS_CURRENT).await else {
        panic!("the current copy is not claimed")
    };
    assert_eq!(fixture.database.transition_with_copy(&claimed.lease, &unknown).await.unwrap().1, back(5, false));
}

async fn redelivered_copy_supersedes_unpublished_ones(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    // The worker died between the commit and the publish of copy 1.
    assert_eq!(fixture.delayed("p", copy(0), 10 * MINUTE).await, back(1, false));
    let again = DeliveredCopy::delivered(0, true);
    assert_eq!(fixture.delayed("p", again, 10 * MINUTE).await, back(2, false));
    assert_eq!(fixture.arrives("p", copy(1)).await, Claim::Superseded);
}

/// A lane that pauses returns its messages, and each comes back redelivered. The copy that a delay queue holds was
/// published before.
async fn redelivered_copy_keeps_an_older_delayed_one(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), 10 * MINUTE).await, back(1, false));
    for lane in 2..5 {
        assert_eq!(fixture.woken("p").await, lane);
        assert_eq!(fixture.delayed("p", DeliveredCopy::delivered(lane, true), 20 * MINUTE).await, back(lane, false));
    }
    let came_back = DeliveredCopy::delivered(1, true);
    assert_eq!(fixture.delayed("p", came_back, 10 * MINUTE).await, back(5, false), "copy 1 has left its delay queue");
}

async fn sweeper_copy_never_supersedes_a_queued_copy(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let which =
        OverduePolicy { grace: Duration::ZERO, republish_after: MINUTE, republish_interval_max: MINUTE, at_most: 10 };
    let overdue = async || {
        fixture.sql("UPDATE jobs SET wake_at = created_at, sweep_after = NULL").await.unwrap();
        let overdue = fixture.database.take_overdue(&name("stripe"), &which).await.unwrap();
        overdue.iter().map(|job| job.copy).collect::<Vec<_>>()
    };
    assert_eq!(fixture.delayed("p", copy(0), Duration::ZERO).await, back(1, false));
    fixture.sql("UPDATE jobs SET delayed_until = created_at").await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!((overdue().await, overdue().await), (vec![1], vec![1]));
    // A copy in a delay queue is distinguished from the copy in the lane's queue.
    assert_eq!(fixture.delayed("p", copy(1), 10 * MINUTE).await, back(2, false));
    assert_eq!((overdue().await, overdue().await), (vec![3], vec![3]));
    assert_eq!(fixture.delayed("p", copy(3), 10 * MINUTE).await, back(3, false));
}

async fn resent_job_gets_the_newest_copy(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), 10 * MINUTE).await, back(1, false));
    let id = Identifier::new("p").unwrap();
    assert_eq!(fixture.database.move_to_review(&id, "why").await.unwrap(), FencedWrite::Applied);
    let operator = fixture.database.clone();
    let recalled = operator.reload_job(&id, &JobResolution::Resend).await.unwrap();
    let by = Actor { os_user: "ops@here".to_owned(), program: None, reason: None };
    operator.resolve_job(&id, &JobResolution::Resend, Some(recalled.fence), &by).await.unwrap();
    let newest = recalled.copy + 1;
    assert_eq!(fixture.delayed("p", copy(newest), 10 * MINUTE).await, back(newest + 1, false));
    assert_eq!(fixture.arrives("p", copy(newest)).await, Claim::Superseded);
}
