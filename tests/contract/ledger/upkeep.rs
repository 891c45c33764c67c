//! Upkeep of the ledger: overdue and unqueued jobs, expiry, manual review, and the reconciliation of all jobs.

use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::time::EpochMs;
use sluicegate::ledger::upkeep::{
    CheckScope, JobToRepublish, MessageState, OverduePolicy, ProviderReconciliation, ScrubScope,
};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

mod finished_jobs;
mod lookups;
mod messages;
mod retention;

on_every_database!(
    duty_runs_on_one_sweeper,
    longest_overdue_jobs_are_returned_first,
    overdue_job_goes_to_one_sweeper,
    intervals_double_until_the_longest,
    new_wait_resets_the_sweep_interval,
    leased_jobs_are_not_overdue,
    recorded_job_round_trips,
    unqueued_job_is_returned_when_due,
    waiting_jobs_expire_and_nothing_else,
    open_job_can_be_set_aside_for_review,
    message_status_follows_the_ledger,
    every_job_is_accounted_for,
    unaccounted_jobs_are_found,
);

const MINUTE: Duration = Duration::from_secs(60);

fn after(grace: Duration) -> OverduePolicy {
    OverduePolicy {
        grace,
        republish_after: grace,
        republish_interval_max: Duration::from_secs(6 * 3_600),
        at_most: 100,
    }
}

fn ids(jobs: &[JobToRepublish]) -> Vec<String> {
    let mut ids: Vec<String> = jobs.iter().map(|job| job.job.id.to_string()).collect();
    ids.sort();
    ids
}

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

    async fn overdue(&self, which: OverduePolicy) -> Vec<String> {
        ids(&self.database.take_overdue(&name("stripe"), &which).await.unwrap())
    }

    async fn finish(&self, id: &str, state: FinalState) {
        let hold = self.take(&job(id)).await.lease;
        assert_eq!(self.database.begin_attempt(&hold, &request(id)).await.unwrap(), BeginResult::Attempt(1));
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

async fn longest_overdue_jobs_are_returned_first(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, overdue_s) in [("a", 61), ("b", 500), ("c", 59), ("d", 300), ("e", -60)] {
        fixture.waiting(&job(id), Duration::ZERO).await;
        fixture.move_back(id, "wake_at", overdue_s).await;
    }
    fixture.waiting(&Job { provider: name("adyen"), ..job("other-lane") }, Duration::ZERO).await;
    fixture.move_back("other-lane", "wake_at", 9_999).await;
    // The job is due by `wake_at`, but not by its own `not_before`.
    let now_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    fixture.waiting(&Job { not_before: Some(EpochMs(now_ms + 600_000)), ..job("early") }, Duration::ZERO).await;
    fixture.move_back("early", "wake_at", 9_999).await;
    assert_eq!(fixture.overdue(OverduePolicy { at_most: 2, ..after(MINUTE) }).await, ["b", "d"]);
    assert_eq!(fixture.overdue(after(MINUTE)).await, ["a"]);
    assert_eq!(fixture.overdue(after(MINUTE)).await, Vec::<String>::new(), "each once per interval");
    assert_eq!(fixture.one("SELECT sum(sweeps) FROM jobs").await, "3");
}

async fn overdue_job_goes_to_one_sweeper(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..40 {
        fixture.waiting(&job(&format!("p{number}")), Duration::ZERO).await;
    }
    fixture.sql("UPDATE jobs SET wake_at = created_at").await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    let which =
        OverduePolicy { grace: Duration::ZERO, republish_after: MINUTE, republish_interval_max: MINUTE, at_most: 7 };
    let sweeps = (0..16).map(|_| {
        let upkeep = fixture.database.clone();
        tokio::spawn(async move { upkeep.take_overdue(&name("stripe"), &which).await.unwrap() })
    });
    let given: Vec<JobToRepublish> =
        futures_util::future::join_all(sweeps).await.into_iter().flat_map(Result::unwrap).collect();
    let mut distinct = ids(&given);
    distinct.dedup();
    assert_eq!((given.len(), distinct.len()), (40, 40));
    assert!(given.iter().all(|job| job.sweeps == 1));
}

async fn intervals_double_until_the_longest(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let interval = |id: &'static str| {
        let ms = if kind == Kind::Postgres {
            "extract(epoch FROM sweep_after - now())"
        } else {
            "(sweep_after - CAST(round(unixepoch('subsec') * 1000) AS INTEGER)) / 1000.0"
        };
        let select = format!("SELECT {ms} FROM jobs WHERE id = '{id}'");
        let fixture = &fixture;
        async move { fixture.one(&select).await.parse::<f64>().unwrap() }
    };
    // Overdue for this long → next sweep after this long.
    for (id, overdue_s, again_s) in [("short", 70, 600.0), ("middle", 1_000, 1_000.0), ("long", 99_999, 21_600.0)] {
        fixture.waiting(&job(id), Duration::ZERO).await;
        fixture.move_back(id, "wake_at", overdue_s).await;
        let which = OverduePolicy { republish_after: Duration::from_secs(600), ..after(MINUTE) };
        assert_eq!(fixture.overdue(which).await, [id]);
        let got = interval(id).await;
        assert!((got - again_s).abs() < 30.0, "{id}: {got} s");
        // The job is not swept again before that interval ends, whatever the policy is by then.
        assert_eq!(fixture.overdue(after(Duration::ZERO)).await, Vec::<String>::new());
        fixture.move_back(id, "sweep_after", 99_999).await;
        assert_eq!(fixture.overdue(after(Duration::ZERO)).await, [id]);
    }
}

async fn new_wait_resets_the_sweep_interval(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["parked", "claimed", "same"] {
        fixture.waiting(&job(id), Duration::ZERO).await;
        fixture.move_back(id, "wake_at", 5_000).await;
    }
    assert_eq!(fixture.overdue(after(MINUTE)).await, ["claimed", "parked", "same"]);
    fixture.move_back("parked", "wake_at", -4_000).await;
    let hold = fixture.take(&job("claimed")).await.lease;
    fixture.expire_lease(&hold).await;
    fixture.move_back("claimed", "lease_until", 1_000).await;
    assert_eq!(fixture.overdue(after(MINUTE)).await, ["claimed", "parked"]);
}

async fn leased_jobs_are_not_overdue(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let held = fixture.take(&job("held")).await.lease;
    let sending = fixture.take(&job("sending")).await.lease;
    assert_eq!(fixture.database.begin_attempt(&sending, &request("sending")).await.unwrap(), BeginResult::Attempt(1));
    fixture.finish("done", FinalState::Succeeded).await;
    for id in ["held", "sending", "done"] {
        fixture.move_back(id, "wake_at", 9_999).await;
    }
    assert_eq!(fixture.overdue(after(MINUTE)).await, Vec::<String>::new());
    // The lease ended just now: the message of its worker returns by itself within the grace.
    fixture.sql("UPDATE jobs SET lease_until = updated_at WHERE lease_until IS NOT NULL").await.unwrap();
    assert_eq!(fixture.overdue(after(MINUTE)).await, Vec::<String>::new());
    for id in ["held", "sending"] {
        fixture.move_back(id, "lease_until", 100).await;
    }
    assert_eq!(fixture.overdue(after(MINUTE)).await, ["held", "sending"]);
    // The copy's claim makes the job unknown, not the sweeper.
    assert_eq!(fixture.state("sending").await, "sending");
    assert!(fixture.take(&job("sending")).await.maybe_charged);
    assert_eq!(fixture.database.release(&held).await.unwrap(), FencedWrite::Applied);
}

async fn recorded_job_round_trips(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let full = Job {
        idempotency_key: Some(Identifier::new("key-1").unwrap()),
        cost: 1_000,
        priority: 9,
        not_before: Some(EpochMs(-62_135_596_800_000)),
        expires_at: Some(EpochMs(4_102_444_800_123)),
        reference: Some("é \" \\ '".to_owned()),
        payload: Some("{ \"b\" : 1.0e2, \"a\":\"\\u0041\" }".to_owned()),
        ..job("full")
    };
    let bare = Job { account: None, reference: None, payload: None, ..job("bare") };
    for job in [&full, &bare] {
        fixture.waiting(job, Duration::ZERO).await;
        fixture.move_back(job.id.as_str(), "wake_at", 600).await;
    }
    // No delay queue holds a copy any more, so the sweeper publishes the newest number again.
    fixture.sql("UPDATE jobs SET delayed_copy = NULL, delayed_until = NULL").await.unwrap();
    let mut given = fixture.database.take_overdue(&name("stripe"), &after(MINUTE)).await.unwrap();
    given.sort_by(|a, b| a.job.id.cmp(&b.job.id));
    let recorded = |job: Job| JobToRepublish { job, hash: hash(1), sweeps: 1, copy: 1 };
    assert_eq!(given, [recorded(bare), recorded(full)]);
}

async fn unqueued_job_is_returned_when_due(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (upkeep, lane) = (fixture.database.clone(), name("stripe"));
    let due = async |ahead| ids(&upkeep.take_unqueued(&lane, ahead, 10 * MINUTE, 10).await.unwrap());
    let wait = JobState::Waiting { wait: 60 * MINUTE, reason: WaitReason::NotBefore.into() };
    for id in ["kept", "queued", "taken-up"] {
        let hold = fixture.take(&job(id)).await.lease;
        // A leased job cannot be left without a queue.
        assert_eq!(upkeep.keep_unqueued(&hold).await.unwrap(), FencedWrite::Stale);
        assert_eq!(fixture.database.transition(&hold, &wait).await.unwrap(), FencedWrite::Applied);
        match id {
            "kept" => assert_eq!(upkeep.keep_unqueued(&hold).await.unwrap(), FencedWrite::Applied),
            "taken-up" => {
                let again = fixture.take(&job(id)).await.lease;
                assert_eq!(upkeep.keep_unqueued(&hold).await.unwrap(), FencedWrite::Stale);
                assert_eq!(fixture.database.transition(&again, &wait).await.unwrap(), FencedWrite::Applied);
            }
            _ => {}
        }
    }
    assert_eq!(due(59 * MINUTE).await, Vec::<String>::new());
    assert_eq!(due(61 * MINUTE).await, ["kept"]);
    assert_eq!(due(61 * MINUTE).await, Vec::<String>::new(), "one copy");
    // From now on it is like any other job, and not overdue before its interval ends.
    fixture.move_back("kept", "created_at", 0).await;
    assert_eq!(fixture.overdue(after(Duration::ZERO)).await, Vec::<String>::new());
    fixture.sql("UPDATE jobs SET wake_at = created_at WHERE id = 'kept'").await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(fixture.overdue(after(Duration::ZERO)).await, ["kept"]);
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
    assert_eq!(fixture.database.begin_attempt(&sending, &request("sending")).await.unwrap(), BeginResult::Attempt(1));
    fixture.expire_lease(&sending).await;
    let unknown = fixture.take(&expiring("unknown", -1_000)).await.lease;
    assert_eq!(fixture.database.begin_attempt(&unknown, &request("unknown")).await.unwrap(), BeginResult::Attempt(1));
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
    let events = fixture.database.lease_events(100, MINUTE).await.unwrap();
    let events: Vec<_> = events.iter().map(|event| (event.state, event.reason.as_deref())).collect();
    assert_eq!(events, [(FinalState::Expired, Some("too late")); 3]);
    // A job whose worker is lost expires, too.
    fixture.expire_lease(&held).await;
    assert_eq!(fixture.database.expire("too late", 100).await.unwrap(), 1);
    assert_eq!(fixture.state("held").await, "expired");
}

async fn open_job_can_be_set_aside_for_review(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let set_aside =
        async |id: &str| fixture.database.move_to_review(&Identifier::new(id).unwrap(), "why").await.unwrap();
    fixture.waiting(&job("waiting"), MINUTE).await;
    assert_eq!(set_aside("waiting").await, FencedWrite::Applied);
    assert_eq!(set_aside("waiting").await, FencedWrite::Stale, "once");
    let hold = fixture.take(&job("sending")).await.lease;
    assert_eq!(fixture.database.begin_attempt(&hold, &request("sending")).await.unwrap(), BeginResult::Attempt(1));
    assert_eq!(set_aside("sending").await, FencedWrite::Stale, "it is leased");
    fixture.expire_lease(&hold).await;
    assert_eq!(set_aside("sending").await, FencedWrite::Applied);
    let picture = "SELECT id || '|' || state || '|' || reason || '|' || attempts || '|' || \
                   CASE WHEN maybe_charged THEN 'maybe' ELSE 'not' END FROM jobs ORDER BY id";
    let picture: Vec<String> = fixture.column(picture).await.into_iter().flatten().collect();
    assert_eq!(picture, ["sending|review|why|1|maybe", "waiting|review|why|0|not"]);
    assert_eq!(fixture.one("SELECT outcome FROM attempts").await, "unknown");
    let events = fixture.database.lease_events(100, MINUTE).await.unwrap();
    assert_eq!(events.iter().map(|event| event.state).collect::<Vec<_>>(), [FinalState::Review; 2]);
    // Its former worker writes nothing.
    let next = JobState::Waiting { wait: SECOND, reason: Wait::with_detail(WaitReason::Retry, "x") };
    assert_eq!(fixture.database.transition(&hold, &next).await.unwrap(), FencedWrite::Stale);
    assert_eq!(set_aside("nobody").await, FencedWrite::Stale);
}

async fn message_status_follows_the_ledger(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.waiting(&job("open"), MINUTE).await;
    fixture.finish("done", FinalState::Declined).await;
    let other_lane = Job { provider: name("adyen"), ..job("open") };
    for (job, hash, standing) in [
        (job("new"), hash(1), MessageState::NotRecorded),
        (job("open"), hash(1), MessageState::Open),
        (job("open"), hash(2), MessageState::Conflict),
        (other_lane, hash(1), MessageState::Conflict),
        (job("done"), hash(1), MessageState::Finished),
        (job("done"), hash(2), MessageState::Conflict),
    ] {
        assert_eq!(fixture.database.message_state(&job, hash, 1).await.unwrap(), standing, "{} {hash:?}", job.id);
    }
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
    assert_eq!(fixture.database.begin_attempt(&sending, &request("sending")).await.unwrap(), BeginResult::Attempt(1));
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
            messages_min: account.messages_min,
            messages_max: 2,
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
    fixture.move_back("sending", "lease_until", 1_000).await;
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
    fixture.sql("DELETE FROM outcome_events WHERE job_id IN ('no-event', 'no-review', 'old')").await.unwrap();
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
    fixture.sql("UPDATE outcome_events SET state = 'declined' WHERE job_id = 'good'").await.unwrap();
    assert_eq!(fixture.account(CheckScope::All).await.without_event, 4);
    // A success that an operator or a look-up found has a reason that says so.
    fixture.sql("UPDATE jobs SET reason = 'found by look-up' WHERE id = 'no-attempt'").await.unwrap();
    assert_eq!(fixture.account(CheckScope::All).await.without_accepted_attempt, 0);
}
