//! Copies of a job's message: which of them counts, and when a job that waits needs one more.

use sluicegate::ledger::copies::{Arrived, Claimant, ComesBack};
use sluicegate::ledger::operator::{By, Verdict};
use sluicegate::ledger::upkeep::{Overdue, Standing};
use sluicegate::ledger::{AttemptEnd, Begun, JobState, Timing, Written};

use super::*;

on_every_database!(
    a_new_copy_supersedes_the_older_ones,
    an_older_copy_is_good_for_a_job_that_is_due,
    a_copy_that_is_back_in_time_is_enough,
    a_job_due_before_its_copy_waits_in_the_ledger,
    a_redelivered_copy_counts_and_trusts_no_other,
    a_sweepers_copy_never_overtakes_one_in_the_lane,
    what_is_sent_again_is_the_newest_copy,
);

const MINUTE: Duration = Duration::from_secs(60);

fn waits(wait: Duration) -> JobState {
    JobState::Waiting { wait, reason: "waits for limit all".to_owned() }
}

fn copy(copy: i64) -> Arrived {
    Arrived::delivered(copy, false)
}

fn back(copy: i64, unqueued: bool) -> Option<ComesBack> {
    Some(ComesBack { copy, unqueued })
}

impl Fixture {
    pub(super) async fn arrives(&self, id: &str, arrived: Arrived) -> Claim {
        let claimant = Claimant { owner: "worker-a", arrived };
        self.ledger().claim_in_company(&job(id), hash(1), claimant, Timing::at_once(LEASE)).await.unwrap()
    }

    /// A copy comes, and its job must wait.
    async fn delayed(&self, id: &str, arrived: Arrived, wait: Duration) -> Option<ComesBack> {
        let Claim::Claimed(claimed) = self.arrives(id, arrived).await else { panic!("{id}: {arrived:?} is not taken") };
        let (written, back) = self.ledger().delay(&claimed.hold, &waits(wait)).await.unwrap();
        assert_eq!(written, Written::Kept);
        back
    }

    /// The lane's copies of those that no queue has, as a changed limit leaves them.
    async fn woken(&self, id: &str) -> i64 {
        self.sql(&format!("UPDATE jobs SET wake_at = created_at, unqueued = true WHERE id = '{id}'")).await.unwrap();
        let due = self.database.upkeep().take_unqueued(&name("stripe"), SECOND, MINUTE, 10).await.unwrap();
        assert_eq!(due.len(), 1);
        due[0].copy
    }
}

async fn a_new_copy_supersedes_the_older_ones(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), MINUTE).await, back(1, false));
    let standing = async |copy| fixture.database.upkeep().standing(&job("p"), hash(1), copy).await.unwrap();
    assert_eq!((standing(0).await, standing(1).await), (Standing::Superseded, Standing::Open));
    assert_eq!(fixture.arrives("p", copy(0)).await, Claim::Superseded);
    assert_eq!(fixture.delayed("p", copy(1), MINUTE).await, back(2, false));
    assert_eq!(fixture.arrives("p", copy(1)).await, Claim::Superseded);
    // While another delivery has the job, too.
    let Claim::Claimed(claimed) = fixture.arrives("p", copy(2)).await else { panic!("2 counts") };
    assert_eq!(fixture.arrives("p", copy(1)).await, Claim::Superseded);
    assert!(matches!(fixture.arrives("p", copy(2)).await, Claim::InHand { .. }));
    assert_eq!(claimed.copy, 2);
    assert_eq!(fixture.ledger().delay_further(&claimed.hold, MINUTE).await.unwrap(), (Written::Kept, back(3, false)));
}

/// The newer one may be lost, or far behind.
async fn an_older_copy_is_good_for_a_job_that_is_due(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), MINUTE).await, back(1, false));
    assert_eq!(fixture.arrives("p", copy(0)).await, Claim::Superseded);
    fixture.sql("UPDATE jobs SET wake_at = created_at").await.unwrap();
    let Claim::Claimed(_) = fixture.arrives("p", copy(0)).await else { panic!("it is due") };
    assert_eq!(fixture.arrives("p", copy(0)).await, Claim::Superseded, "somebody has it");
}

async fn a_copy_that_is_back_in_time_is_enough(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), 10 * MINUTE).await, back(1, false));
    // However often it is brought back meanwhile.
    for lane in 2..5 {
        assert_eq!(fixture.woken("p").await, lane);
        assert_eq!(fixture.delayed("p", copy(lane), 20 * MINUTE).await, back(lane, false));
    }
    assert_eq!(fixture.arrives("p", copy(3)).await, Claim::Superseded);
    assert_eq!(fixture.delayed("p", copy(1), 10 * MINUTE).await, back(5, false), "it has left its delay queue");
}

async fn a_job_due_before_its_copy_waits_in_the_ledger(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), 60 * MINUTE).await, back(1, false));
    assert_eq!(fixture.woken("p").await, 2);
    assert_eq!(fixture.delayed("p", copy(2), 5 * MINUTE).await, back(2, true));
    let due = fixture.database.upkeep().take_unqueued(&name("stripe"), 6 * MINUTE, MINUTE, 10).await.unwrap();
    assert_eq!(due.iter().map(|job| job.copy).collect::<Vec<_>>(), [3]);
    // Near its time the sweeper would be late: a second copy comes back in time.
    assert_eq!(fixture.delayed("p", copy(3), 20 * SECOND).await, back(4, false));
    assert_eq!(fixture.delayed("p", copy(4), 59 * MINUTE).await, back(4, false), "the first one is still known of");
    // One that may have been charged is never without a queue: a copy that is sooner back takes the place of the first.
    let unknown = JobState::Unknown { wait: 5 * MINUTE, reason: "waits for limit all".to_owned() };
    let Claim::Claimed(claimed) = fixture.arrives("p", copy(4)).await else { panic!("4 counts") };
    assert_eq!(fixture.ledger().begin_attempt(&claimed.hold, &request("p")).await.unwrap(), Begun::Attempt(1));
    let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
    let finished =
        fixture.ledger().finish_and_take(&claimed.hold, &end, &unknown, Timing::at_once(LEASE)).await.unwrap();
    assert_eq!(finished, (Written::Kept, None, back(5, false)));
    let Claim::Claimed(claimed) = fixture.arrives("p", Arrived::COUNTS).await else { panic!("it counts") };
    assert_eq!(fixture.ledger().delay(&claimed.hold, &unknown).await.unwrap().1, back(5, false));
}

async fn a_redelivered_copy_counts_and_trusts_no_other(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    // Its worker died between the commit and the publish of copy 1.
    assert_eq!(fixture.delayed("p", copy(0), 10 * MINUTE).await, back(1, false));
    let again = Arrived::delivered(0, true);
    assert_eq!(fixture.delayed("p", again, 10 * MINUTE).await, back(2, false));
    assert_eq!(fixture.arrives("p", copy(1)).await, Claim::Superseded);
}

async fn a_sweepers_copy_never_overtakes_one_in_the_lane(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let which = Overdue { grace: Duration::ZERO, again_after: MINUTE, again_max: MINUTE, at_most: 10 };
    let overdue = async || {
        fixture.sql("UPDATE jobs SET wake_at = created_at, sweep_after = NULL").await.unwrap();
        let overdue = fixture.database.upkeep().take_overdue(&name("stripe"), &which).await.unwrap();
        overdue.iter().map(|job| job.copy).collect::<Vec<_>>()
    };
    assert_eq!(fixture.delayed("p", copy(0), Duration::ZERO).await, back(1, false));
    fixture.sql("UPDATE jobs SET delayed_until = created_at").await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!((overdue().await, overdue().await), (vec![1], vec![1]));
    // One that a delay queue holds is told apart from the lane's.
    assert_eq!(fixture.delayed("p", copy(1), 10 * MINUTE).await, back(2, false));
    assert_eq!((overdue().await, overdue().await), (vec![3], vec![3]));
    assert_eq!(fixture.delayed("p", copy(3), 10 * MINUTE).await, back(3, false));
}

async fn what_is_sent_again_is_the_newest_copy(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.delayed("p", copy(0), 10 * MINUTE).await, back(1, false));
    let id = Token::new("p").unwrap();
    assert_eq!(fixture.database.upkeep().set_aside(&id, "why").await.unwrap(), Written::Kept);
    let operator = fixture.database.operator();
    let recalled = operator.recall(&id, &Verdict::Resend).await.unwrap().unwrap();
    let by = By { os_user: "ops@here".to_owned(), program: None, because: None };
    operator.decide(&id, &Verdict::Resend, Some(recalled.fence), &by).await.unwrap().unwrap();
    let newest = recalled.copy + 1;
    assert_eq!(fixture.delayed("p", copy(newest), 10 * MINUTE).await, back(newest + 1, false));
    assert_eq!(fixture.arrives("p", copy(newest)).await, Claim::Superseded);
}
