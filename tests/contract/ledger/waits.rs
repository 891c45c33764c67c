//! Waits of jobs: a wait ends when the limit that refused the job has changed.

use sluicegate::domain::time::EpochMs;
use sluicegate::ledger::upkeep::{WaitCause, WakeFilter};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

on_every_database!(
    limit_change_wakes_jobs_refused_before,
    removed_row_wakes_jobs_by_reported_change,
    woken_unknown_job_stays_unknown,
    concurrent_wakes_wake_each_job_once,
    resume_ends_only_provider_named_waits,
);

const HOUR: Duration = Duration::from_secs(3_600);

fn refused(wait: Duration) -> JobState {
    JobState::Waiting { wait, reason: Wait::for_limit("all") }
}

impl Fixture {
    async fn transition(&self, job: &Job, next: &JobState) {
        let hold = self.take(job).await.lease;
        assert_eq!(self.database.transition(&hold, next).await.unwrap(), FencedWrite::Applied);
    }

    async fn provider_row(&self, row: &str) {
        self.sql(&format!("INSERT INTO providers (name, quota, url) VALUES ({row}, 'https://x.example/')"))
            .await
            .unwrap();
    }

    async fn wake(&self, lane: &str, at_most: u32) -> u32 {
        let which = WakeFilter {
            changed_ago: None,
            cause: WaitCause::Limit,
            propagation_time: Duration::ZERO,
            due_within: 5 * A_MINUTE,
            at_most,
        };
        self.database.wake_waiting(&name(lane), &which).await.unwrap()
    }

    /// The jobs that return to the backlog now, by the backlog's rows.
    async fn due(&self) -> Vec<String> {
        let in_backlog = "SELECT id FROM jobs WHERE backlog AND provider = 'stripe' ORDER BY id";
        let before = self.column(in_backlog).await;
        self.database.return_now(&name("stripe"), 100).await.unwrap();
        let now = self.column(in_backlog).await;
        now.into_iter().filter(|id| !before.contains(id)).flatten().collect()
    }
}

/// Waits until the next instant differs.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

async fn limit_change_wakes_jobs_refused_before(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider_row("'stripe', NULL").await;
    fixture.provider_row("'sibling', 'stripe'").await;
    fixture.provider_row("'other', NULL").await;
    a_moment().await;
    fixture.transition(&job("refused"), &refused(HOUR)).await;
    fixture.transition(&job("soon"), &refused(2 * A_MINUTE)).await;
    let busy = JobState::Waiting { wait: HOUR, reason: WaitReason::ObjectBusy.into() };
    fixture.transition(&job("backs-off"), &busy).await;
    let scheduled = Job { not_before: Some(EpochMs(4_102_444_800_000)), ..job("scheduled") };
    fixture.transition(&scheduled, &refused(HOUR)).await;
    let elsewhere = Job { provider: name("other"), ..job("elsewhere") };
    fixture.transition(&elsewhere, &refused(HOUR)).await;
    fixture.transition(&job("another"), &refused(HOUR)).await;
    fixture.transition(&job("held"), &refused(HOUR)).await;
    // Written by a version of the program that did not know the column.
    fixture.transition(&job("old"), &refused(HOUR)).await;
    fixture.sql("UPDATE jobs SET wait_begun_at = NULL WHERE id = 'old'").await.unwrap();
    assert_eq!(fixture.wake("stripe", 100).await, 0, "nothing was changed since");
    a_moment().await;

    // Rows of a quota share their limits, so a change of either row counts.
    fixture.sql("UPDATE providers SET paused = true WHERE name = 'sibling'").await.unwrap();
    a_moment().await;
    fixture.transition(&job("since"), &refused(HOUR)).await;
    fixture.take(&job("held")).await;
    assert_eq!(fixture.wake("other", 100).await, 0);
    assert_eq!(fixture.wake("stripe", 100).await, 3);
    assert_eq!(fixture.due().await, ["another", "old", "refused"]);
    assert_eq!((fixture.wake("stripe", 100).await, fixture.due().await.len()), (0, 0), "once");
    // Their wait is over; their attempts and reasons stay.
    let rows = "SELECT count(*) FROM jobs WHERE id IN ('another', 'refused') AND state = 'waiting' AND attempts = 0 \
        AND wait_detail IS NULL AND wait_reason = 'limit' AND wait_limit = 'all' AND wake_at = updated_at";
    assert_eq!(fixture.one(rows).await, "2");
    let claimed = fixture.take(&job("refused")).await;
    assert_eq!((claimed.attempts, claimed.lost_holders), (0, 0));
    assert_eq!(fixture.one("SELECT count(*) FROM job_audit").await, "0", "waking a job is no operator's change");
}

/// A stricter row leaves the quota, and the remaining row reports no change of its own. Then the last row leaves, and
/// none reports anything.
async fn removed_row_wakes_jobs_by_reported_change(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider_row("'stripe', NULL").await;
    fixture.provider_row("'sibling', 'stripe'").await;
    a_moment().await;
    fixture.transition(&job("before"), &refused(2 * HOUR)).await;
    fixture.transition(&job("since"), &refused(2 * HOUR)).await;
    let hour = if kind == Kind::Postgres { "interval '1 hour'" } else { "3600000" };
    // Independent of the time that this test's statements take.
    fixture.sql(&format!("UPDATE jobs SET wait_begun_at = wait_begun_at + {hour} WHERE id = 'since'")).await.unwrap();
    a_moment().await;
    fixture.sql("DELETE FROM providers WHERE name = 'sibling'").await.unwrap();
    assert_eq!(fixture.wake("stripe", 100).await, 0);
    let wake = async |changed_ago, propagation_time| {
        let which = WakeFilter {
            changed_ago: Some(changed_ago),
            cause: WaitCause::Limit,
            propagation_time,
            due_within: SECOND,
            at_most: 100,
        };
        let woken = fixture.database.wake_waiting(&name("stripe"), &which).await.unwrap();
        (woken, fixture.due().await)
    };
    assert_eq!(wake(Duration::ZERO, Duration::ZERO).await, (1, vec!["before".to_owned()]));
    fixture.sql("DELETE FROM providers").await.unwrap();
    assert_eq!(wake(3 * HOUR / 2, 2 * HOUR).await, (0, Vec::new()), "no job that waited by then is woken");
    assert_eq!(wake(HOUR / 2, 2 * HOUR).await, (1, vec!["since".to_owned()]), "while the change reached all workers");
}

async fn woken_unknown_job_stays_unknown(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let unknown = JobState::Unknown { wait: HOUR, reason: Wait::for_limit("all") };
    let (ledger, hold) = (fixture.database.clone(), fixture.take(&job("unknown")).await.lease);
    let BeginResult::Attempt(number) = ledger.begin_attempt(&hold, &request("unknown"), AT_ONCE).await.unwrap() else {
        panic!("lost");
    };
    let end = AttemptEnd { number, outcome: "unknown", status: None, detail: "reset".to_owned(), counts: true };
    assert_eq!(ledger.finish_attempt(&hold, &end, &unknown).await.unwrap(), FencedWrite::Applied);
    fixture.transition(&job("unknown"), &unknown).await;
    a_moment().await;
    fixture.provider_row("'stripe', NULL").await;
    assert_eq!((fixture.wake("stripe", 100).await, fixture.due().await), (1, vec!["unknown".to_owned()]));
    assert_eq!(fixture.one("SELECT state || ' ' || wait_reason FROM jobs").await, "unknown limit");
}

/// A resume ends the waits that the provider named, and no others.
async fn resume_ends_only_provider_named_waits(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, reason) in [
        ("limit", Wait::for_limit("all")),
        ("costly", Wait::for_larger_limit("all", 5, 3)),
        ("paused", Wait::with_detail(WaitReason::ProviderPaused, "provider answered 503")),
        ("throttled", WaitReason::Throttled.into()),
        ("busy", WaitReason::ObjectBusy.into()),
    ] {
        fixture.transition(&job(id), &JobState::Waiting { wait: HOUR, reason }).await;
    }
    a_moment().await;
    fixture.provider_row("'stripe', NULL").await;
    let named = WakeFilter {
        changed_ago: None,
        cause: WaitCause::RetryAfter,
        propagation_time: Duration::ZERO,
        due_within: 5 * SECOND,
        at_most: 10,
    };
    assert_eq!(fixture.database.wake_waiting(&name("stripe"), &named).await.unwrap(), 2);
    assert_eq!(fixture.due().await, ["paused", "throttled"]);
    assert_eq!(
        (fixture.wake("stripe", 10).await, fixture.due().await),
        (2, vec!["costly".to_owned(), "limit".to_owned()])
    );
}

async fn concurrent_wakes_wake_each_job_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..20 {
        fixture.transition(&job(&format!("p{number}")), &refused(HOUR)).await;
    }
    a_moment().await;
    fixture.provider_row("'stripe', NULL").await;
    assert_eq!(fixture.wake("stripe", 3).await, 3);
    let wakes = (0..8).map(|_| {
        let upkeep = fixture.database.clone();
        let which = WakeFilter {
            changed_ago: None,
            cause: WaitCause::Limit,
            propagation_time: Duration::ZERO,
            due_within: SECOND,
            at_most: 100,
        };
        tokio::spawn(async move { upkeep.wake_waiting(&name("stripe"), &which).await.unwrap() })
    });
    let woken: u32 = futures_util::future::join_all(wakes).await.into_iter().map(Result::unwrap).sum();
    assert_eq!((woken, fixture.due().await.len()), (17, 20));
}
