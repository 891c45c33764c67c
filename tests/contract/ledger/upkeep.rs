//! Upkeep of the ledger: duties, expiry, and the reconciliation of all jobs.

use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::time::EpochMs;
use sluicegate::ledger::upkeep::{CheckScope, ProviderReconciliation, ScrubScope};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

mod finished_jobs;
mod retention;

on_every_database!(
    duty_runs_on_one_sweeper,
    waiting_jobs_expire_and_nothing_else,
    every_job_is_accounted_for,
    unaccounted_jobs_are_found,
);

const MINUTE: Duration = Duration::from_secs(60);

impl Fixture {
    /// Records a waiting job that no worker has leased.
    async fn waiting(&self, job: &Job, wait: Duration) {
        let claimed = self.take(job).await;
        let next = JobState::Waiting { wait, reason: Wait::with_detail(WaitReason::Retry, "waits") };
        assert_eq!(self.database.transition(&claimed.lease, &next).await.unwrap(), FencedWrite::Applied);
    }

    /// Moves an instant of a job into the past, or into the future if negative.
    async fn move_back(&self, id: &str, column: &str, by_s: i64) {
        let moved = match self.postgres {
            Some(_) => format!("{column} - {by_s} * interval '1 second'"),
            None => format!("{column} - {by_s} * 1000"),
        };
        self.sql(&format!("UPDATE jobs SET {column} = {moved} WHERE id = '{id}'")).await.unwrap();
    }

    async fn finish(&self, id: &str, state: FinalState) {
        let hold = self.take(&job(id)).await.lease;
        assert_eq!(self.database.begin_attempt(&hold, &request(id), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
        let end = AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
        let next = JobState::Final { state, reason: "accepted".to_owned(), reference: None };
        assert_eq!(self.database.finish_attempt(&hold, &end, &next).await.unwrap(), FencedWrite::Applied);
    }

    async fn account(&self, checked: CheckScope) -> ProviderReconciliation {
        let accounts = self.database.reconcile(2 * MINUTE, checked).await.unwrap();
        accounts.into_iter().find(|account| account.provider == "stripe").unwrap()
    }
}

async fn duty_runs_on_one_sweeper(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let turns = (0..16).map(|_| {
        let upkeep = fixture.database.clone();
        tokio::spawn(async move { upkeep.lease_duty("sweep", MINUTE).await.unwrap() })
    });
    let turns: Vec<bool> = futures_util::future::join_all(turns).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(turns.iter().filter(|turn| **turn).count(), 1);
    assert!(fixture.database.lease_duty("account", Duration::ZERO).await.unwrap(), "another duty is free");
    assert!(fixture.database.lease_duty("account", MINUTE).await.unwrap(), "its lease is over");
    assert!(!fixture.database.lease_duty("account", MINUTE).await.unwrap());
}

async fn waiting_jobs_expire_and_nothing_else(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let now_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let expiring = |id: &str, in_ms| Job { expires_at: Some(EpochMs(now_ms + in_ms)), ..job(id) };
    for id in ["late-1", "late-2", "late-3"] {
        fixture.waiting(&expiring(id, -1_000), 60 * MINUTE).await;
    }
    fixture.waiting(&expiring("in-time", 600_000), 60 * MINUTE).await;
    fixture.waiting(&job("never"), 60 * MINUTE).await;
    let held = fixture.take(&expiring("held", -1_000)).await.lease;
    let sending = fixture.take(&expiring("sending", -1_000)).await.lease;
    assert_eq!(
        fixture.database.begin_attempt(&sending, &request("sending"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    fixture.expire_lease(&sending).await;
    let unknown = fixture.take(&expiring("unknown", -1_000)).await.lease;
    assert_eq!(
        fixture.database.begin_attempt(&unknown, &request("unknown"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
    let next = JobState::Unknown { wait: 60 * MINUTE, reason: Wait::with_detail(WaitReason::Retry, "no answer") };
    assert_eq!(fixture.database.finish_attempt(&unknown, &end, &next).await.unwrap(), FencedWrite::Applied);

    assert_eq!(fixture.database.expire("too late", 2).await.unwrap(), 2);
    let expiries = (0..8).map(|_| {
        let upkeep = fixture.database.clone();
        tokio::spawn(async move { upkeep.expire("too late", 100).await.unwrap() })
    });
    let expired: u32 = futures_util::future::join_all(expiries).await.into_iter().map(Result::unwrap).sum();
    assert_eq!(expired, 1);
    let rest = "SELECT id FROM jobs WHERE state <> 'expired' ORDER BY id";
    let rest: Vec<String> = fixture.column(rest).await.into_iter().flatten().collect();
    assert_eq!(rest, ["held", "in-time", "never", "sending", "unknown"]);
    let events = fixture.ordered_events().await;
    let events: Vec<_> = events.iter().map(|event| (event.state, event.reason.as_deref())).collect();
    assert_eq!(events, [(FinalState::Expired, Some("too late")); 3]);
    // A job whose worker is lost expires, too.
    fixture.expire_lease(&held).await;
    assert_eq!(fixture.database.expire("too late", 100).await.unwrap(), 1);
    assert_eq!(fixture.state("held").await, "expired");
}

async fn every_job_is_accounted_for(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.database.reconcile(MINUTE, CheckScope::All).await.unwrap(), []);
    fixture.waiting(&Job { cost: 3, ..job("parked") }, MINUTE).await;
    for (id, overdue_s) in [("due", 10), ("astray", 500)] {
        fixture.waiting(&job(id), Duration::ZERO).await;
        fixture.move_back(id, "wake_at", overdue_s).await;
    }
    fixture.move_back("due", "created_at", 7_200).await;
    fixture.without_constraints("UPDATE jobs SET expires_at = created_at WHERE id = 'due'").await.unwrap();
    fixture.take(&Job { cost: 5, ..job("held") }).await;
    let sending = fixture.take(&Job { cost: 7, ..job("sending") }).await.lease;
    assert_eq!(
        fixture.database.begin_attempt(&sending, &request("sending"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    fixture.finish("paid", FinalState::Succeeded).await;
    fixture.finish("asked", FinalState::Review).await;
    fixture.waiting(&Job { provider: name("adyen"), ..job("elsewhere") }, MINUTE).await;
    for checked in [CheckScope::Since(MINUTE), CheckScope::All] {
        let account = fixture.account(checked).await;
        let states = [("review", 1), ("sending", 1), ("succeeded", 1), ("waiting", 4)];
        let expected = ProviderReconciliation {
            provider: "stripe".to_owned(),
            recorded: 7,
            states: states.map(|(state, jobs)| (state.to_owned(), jobs)).into(),
            active: 2,
            in_flight: 1,
            delayed: 1,
            delayed_for: account.delayed_for,
            due: 2,
            // Without the request in flight.
            waiting_cost: 3 + 1 + 1 + 5,
            overdue: 1,
            past_deadline: 1,
            oldest_open: account.oldest_open,
            ..ProviderReconciliation::default()
        };
        let hours = account.oldest_open.unwrap().as_secs() / 3_600;
        assert_eq!(hours, 2, "recorded then: `due`");
        assert!(account.delayed_for.is_some_and(|left| left <= MINUTE && left > MINUTE / 2), "{account:?}");
        assert_eq!(account, expected);
        assert_eq!(account.discrepancies(), Vec::<String>::new());
    }
    assert_eq!(fixture.database.reconcile(MINUTE, CheckScope::All).await.unwrap().len(), 2);
    // The job of a lost worker is due, and overdue once that is long ago. Its outcome is unknown since its first request.
    assert_eq!(fixture.account(CheckScope::All).await.oldest_unknown, None, "its request is in flight");
    fixture.expire_lease(&sending).await;
    fixture.move_back("sending", "first_sent_at", 5_000).await;
    let unknown_s = fixture.account(CheckScope::All).await.oldest_unknown.unwrap().as_secs();
    assert!((5_000..5_000 + 600).contains(&unknown_s), "{unknown_s}");
    fixture.move_back("sending", "response_by", 1_000).await;
    fixture.move_back("sending", "wake_at", 2_000).await;
    let account = fixture.account(CheckScope::All).await;
    assert_eq!((account.active, account.in_flight, account.due, account.overdue), (1, 0, 3, 2));
}

async fn unaccounted_jobs_are_found(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["good", "no-event", "no-attempt", "old"] {
        fixture.finish(id, FinalState::Succeeded).await;
    }
    fixture.finish("no-review", FinalState::Review).await;
    fixture.sql("DELETE FROM events WHERE job_id IN ('no-event', 'no-review', 'old')").await.unwrap();
    fixture.sql("UPDATE attempts SET outcome = 'declined' WHERE job_id = 'no-attempt'").await.unwrap();
    fixture.move_back("old", "updated_at", 7_200).await;
    let lately = fixture.account(CheckScope::Since(60 * MINUTE)).await;
    assert_eq!((lately.without_event, lately.without_accepted_attempt), (2, 1));
    let mut counted = fixture.account(CheckScope::CountsOnly).await;
    assert_eq!((counted.without_event, counted.without_accepted_attempt, counted.faults.len()), (0, 0, 0));
    counted.take_checks_of(&lately);
    assert_eq!((counted.without_event, counted.without_accepted_attempt, counted.faults.len()), (2, 1, 2));
    let all = fixture.account(CheckScope::All).await;
    assert_eq!((all.without_event, all.without_accepted_attempt), (3, 1));
    assert_eq!(all.discrepancies().len(), 2);
    // An event of another state does not count for this one.
    fixture.sql("UPDATE events SET state = 'declined' WHERE job_id = 'good'").await.unwrap();
    assert_eq!(fixture.account(CheckScope::All).await.without_event, 4);
    // A success that an operator or a look-up found has a reason that says so.
    fixture.sql("UPDATE jobs SET reason = 'found by look-up' WHERE id = 'no-attempt'").await.unwrap();
    assert_eq!(fixture.account(CheckScope::All).await.without_accepted_attempt, 0);
}
