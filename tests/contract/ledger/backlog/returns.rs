//! Returns into the backlog: due jobs that sleep, and jobs of lost workers, each once and counted in its flow.

use futures_util::future::join_all;
use sluicegate::domain::disposition::Resend;
use sluicegate::ledger::LookupEnd;
use sluicegate::ledger::backlog::{LostJob, RepairedFlows};
use sluicegate::ledger::fleet::Beat;

use super::*;
use crate::support::claiming::ReturnedJobs;

on_every_database!(
    due_sleepers_return_longest_due_first,
    jobs_that_are_not_due_stay,
    jobs_of_living_workers_stay,
    only_what_was_found_is_taken_away,
    worker_finds_what_it_has_without_knowing,
    lost_workers_jobs_return,
    a_job_in_flight_without_a_lease_returns,
    a_request_left_in_flight_becomes_unknown,
    a_lookup_left_in_flight_is_closed,
    concurrent_returns_return_each_job_once,
    each_job_returns_into_its_flow,
    a_returned_job_is_as_it_was_recorded,
    unreadable_rows_stay,
    lanes_with_returns_are_named,
);

const LATER: Duration = Duration::from_secs(600);

fn waits(wait: Duration) -> JobState {
    JobState::Waiting { wait, reason: WaitReason::Retry.into() }
}

impl Fixture {
    /// Records a job that sleeps for so long.
    async fn sleeper(&self, job: &Job, wait: Duration) {
        let lease = self.take(job).await.lease;
        assert_eq!(self.database.transition(&lease, &waits(wait)).await.unwrap(), FencedWrite::Applied);
    }

    /// A job whose outcome is unknown, due at once.
    async fn unknown_sleeper(&self, job: &Job) {
        let lease = self.in_flight(job).await;
        let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
        let next = JobState::Unknown { wait: Duration::ZERO, reason: WaitReason::OutcomeUnknown.into() };
        assert_eq!(self.database.finish_attempt(&lease, &end, &next).await.unwrap(), FencedWrite::Applied);
    }

    async fn in_flight(&self, job: &Job) -> LeaseToken {
        let lease = self.take(job).await.lease;
        let began = self.database.begin_attempt(&lease, &request(job.id.as_str()), AT_ONCE).await.unwrap();
        assert_eq!(began, BeginResult::Attempt(1));
        lease
    }

    /// Sets an instant of a job so many seconds before now.
    async fn set_ago(&self, id: &str, column: &str, ago_s: i64) {
        let at = match self.postgres {
            Some(_) => format!("now() - {ago_s} * interval '1 second'"),
            None => format!("CAST(round(unixepoch('subsec') * 1000) AS INTEGER) - {ago_s} * 1000"),
        };
        self.without_constraints(&format!("UPDATE jobs SET {column} = {at} WHERE id = '{id}'")).await.unwrap();
    }

    async fn return_at_most(&self, at_most: u32) -> ReturnedJobs {
        self.database.return_now(&name("stripe"), at_most).await.unwrap()
    }

    /// How many jobs return now, and how many of them are those of lost workers.
    async fn returns(&self) -> (usize, usize) {
        let returned = self.return_at_most(100).await;
        (returned.flows.len(), returned.lost)
    }

    async fn in_backlog(&self) -> Vec<String> {
        self.texts("SELECT id FROM jobs WHERE backlog ORDER BY id").await
    }

    /// The flows count what is there, so a repair finds nothing to do.
    async fn flows_are_right(&self) {
        self.counts_agree().await;
        let repaired = self.database.repair_flows(&name("stripe"), 100).await.unwrap();
        assert_eq!(repaired, RepairedFlows::default());
    }
}

async fn due_sleepers_return_longest_due_first(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, ago_s) in [("a", 61), ("b", 500), ("c", 59), ("d", 300)] {
        fixture.sleeper(&job(id), Duration::ZERO).await;
        fixture.set_ago(id, "wake_at", ago_s).await;
    }
    let elsewhere = Job { provider: name("adyen"), ..job("elsewhere") };
    fixture.sleeper(&elsewhere, Duration::ZERO).await;
    let returned = fixture.return_at_most(2).await;
    assert_eq!(returned, ReturnedJobs { flows: vec![FlowKey::of(&job("b")); 2], lost: 0 });
    assert_eq!(fixture.in_backlog().await, ["b", "d"]);
    assert_eq!(fixture.one("SELECT waiting FROM flows WHERE provider = 'stripe'").await, "2");
    assert_eq!(fixture.returns().await, (2, 0));
    assert_eq!(fixture.in_backlog().await, ["a", "b", "c", "d"]);
    fixture.flows_are_right().await;
    assert_eq!(fixture.returns().await, (0, 0), "each once");
    // No worker had them, so none was lost, and the reason of the last wait is still there.
    let claimed = fixture.dispatch(9, 9).await;
    assert_eq!(claimed.len(), 4);
    assert!(claimed.iter().all(|job| (job.claimed.lease.fence, job.claimed.lost_holders) == (2, 0)), "{claimed:?}");
    assert_eq!(fixture.texts("SELECT DISTINCT wait_reason FROM jobs").await, ["retry"]);
    fixture.flows_are_right().await;
}

async fn jobs_that_are_not_due_stay(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let now_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    fixture.sleeper(&job("later"), LATER).await;
    let scheduled = Job { not_before: Some(EpochMs(now_ms + 600_000)), ..job("scheduled") };
    let recorded = fixture.database.record_backlog(&scheduled, hash(1), Duration::ZERO).await.unwrap();
    assert!(matches!(recorded, BacklogRecord::Recorded { wait } if wait > LATER / 2), "{recorded:?}");
    // Its instant has passed, and its own `not_before` has not.
    let early = Job { not_before: Some(EpochMs(now_ms + 600_000)), ..job("early") };
    fixture.sleeper(&early, Duration::ZERO).await;
    fixture.set_ago("early", "wake_at", 9_999).await;
    let done = JobState::Final { state: FinalState::Declined, reason: "no".to_owned(), reference: None };
    let lease = fixture.take(&job("done")).await.lease;
    assert_eq!(fixture.database.transition(&lease, &done).await.unwrap(), FencedWrite::Applied);
    fixture.set_ago("done", "wake_at", 9_999).await;
    assert_eq!(fixture.returns().await, (0, 0));
    assert_eq!(fixture.in_backlog().await, Vec::<String>::new());
    fixture.set_ago("later", "wake_at", 1).await;
    assert_eq!(fixture.returns().await, (1, 0));
    assert_eq!(fixture.in_backlog().await, ["later"]);
    fixture.flows_are_right().await;
}

async fn jobs_of_living_workers_stay(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("held")).await;
    fixture.in_flight(&job("sent")).await;
    for id in ["held", "sent"] {
        fixture.set_ago(id, "wake_at", 9_999).await;
    }
    let ledger = &fixture.database;
    let beat = ledger.write_beat("worker-a", 1).await.unwrap().remove(0);
    assert_eq!(fixture.returns().await, (0, 0));
    // It has moved on since another one saw it, so it is not lost.
    ledger.write_beat(&beat.worker, beat.number + 1).await.unwrap();
    assert!(!ledger.remove_silent_worker(&beat).await.unwrap());
    assert_eq!(fixture.returns().await, (0, 0));
    let beat = Beat { number: beat.number + 1, ..beat };
    assert!(ledger.remove_silent_worker(&beat).await.unwrap() && !ledger.remove_silent_worker(&beat).await.unwrap());
    assert_eq!(fixture.returns().await, (2, 2));
    assert_eq!(fixture.in_backlog().await, ["held", "sent"]);
    fixture.flows_are_right().await;
}

/// A job that has moved on since it was found lost stays with its worker.
async fn only_what_was_found_is_taken_away(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    let lane = name("stripe");
    let unsent = fixture.take(&job("p1")).await.lease;
    fixture.expire_lease(&unsent).await;
    let found = ledger.lost_jobs(&lane, None, 9).await.unwrap();
    let as_found = LostJob { id: job("p1").id, fence: unsent.fence, number: 0, wire_time: None, is_own: false };
    assert_eq!(found, [as_found]);
    // Its worker was only slow, and sends it.
    assert_eq!(ledger.begin_attempt(&unsent, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    assert_eq!(ledger.take_away(&found, None).await.unwrap(), []);
    let sent = ledger.lost_jobs(&lane, None, 9).await.unwrap();
    assert_eq!((sent[0].number, sent[0].wire_time), (1, Some(AT_ONCE.response_within)));
    let other = [LostJob { number: 2, ..sent[0].clone() }];
    assert_eq!(ledger.take_away(&other, None).await.unwrap(), []);
    assert_eq!(ledger.take_away(&sent, None).await.unwrap().len(), 1);
    assert_eq!(ledger.take_away(&sent, None).await.unwrap(), [], "each once");
    assert_eq!(fixture.state("p1").await, "unknown");
    fixture.flows_are_right().await;
}

/// A process that never learned the end of a write has a job without knowing.
async fn worker_finds_what_it_has_without_knowing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    let lane = name("stripe");
    let lease = fixture.take(&job("p1")).await.lease;
    assert_eq!(ledger.lost_jobs(&lane, Some("worker-b"), 9).await.unwrap(), []);
    let own = ledger.lost_jobs(&lane, Some("worker-a"), 9).await.unwrap();
    assert_eq!((own.len(), own[0].is_own, own[0].fence), (1, true, lease.fence));
    assert_eq!(ledger.take_away(&own, Some("worker-b")).await.unwrap(), []);
    assert_eq!(ledger.take_away(&own, Some("worker-a")).await.unwrap().len(), 1);
    assert_eq!(fixture.in_backlog().await, ["p1"]);
    fixture.flows_are_right().await;
}

async fn lost_workers_jobs_return(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record(&job("p1")).await;
    let mut lost = fixture.dispatch(1, 1).await.remove(0);
    for holders in 1..=3 {
        fixture.expire_lease(&lost.claimed.lease).await;
        assert_eq!(fixture.returns().await, (1, 1));
        fixture.flows_are_right().await;
        let heir = fixture.dispatch(1, 1).await.remove(0);
        assert_eq!(heir.claimed.lost_holders, holders);
        assert_eq!(heir.claimed.lease.fence, lost.claimed.lease.fence + 2, "the return raises it, and the claim");
        assert_eq!((heir.claimed.maybe_charged, heir.claimed.attempts), (false, 0));
        let stale = &lost.claimed.lease;
        assert_eq!(fixture.database.begin_attempt(stale, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Stale);
        assert_eq!(fixture.database.transition(stale, &waits(A_MINUTE)).await.unwrap(), FencedWrite::Stale);
        assert_eq!(fixture.database.return_to_backlog(stale, &RETURNED).await.unwrap(), FencedWrite::Stale);
        assert_eq!(fixture.database.release(stale).await.unwrap(), FencedWrite::Stale);
        lost = heir;
    }
    // The token is void from the return on, and not from the next claim.
    fixture.expire_lease(&lost.claimed.lease).await;
    fixture.returns().await;
    let stale = &lost.claimed.lease;
    assert_eq!(fixture.database.transition(stale, &waits(A_MINUTE)).await.unwrap(), FencedWrite::Stale);
    // A worker that gives it back was not lost.
    let last = fixture.dispatch(1, 1).await.remove(0);
    fixture.give_back(&last, &RETURNED).await;
    assert_eq!(fixture.dispatch(1, 1).await[0].claimed.lost_holders, 0);
}

/// A person may have cleared its lease.
async fn a_job_in_flight_without_a_lease_returns(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let lost = fixture.in_flight(&job("p1")).await;
    fixture.without_constraints("UPDATE jobs SET holder = NULL, response_by = NULL").await.unwrap();
    assert_eq!(fixture.returns().await, (1, 1));
    let heir = fixture.dispatch(1, 1).await.remove(0).claimed;
    assert_eq!((heir.maybe_charged, heir.lease.fence), (true, lost.fence + 2));
    assert_eq!(fixture.returns().await, (0, 0));
}

async fn a_request_left_in_flight_becomes_unknown(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    fixture.unknown_sleeper(&job("p1")).await;
    let asking = fixture.take(&job("p1")).await.lease;
    assert_eq!(ledger.begin_lookup(&asking, A_MINUTE).await.unwrap(), BeginResult::Attempt(2));
    let not_found =
        LookupEnd { number: 2, outcome: "not_found", status: Some(404), detail: String::new(), grants_resend: true };
    let next = JobState::Unknown { wait: Duration::ZERO, reason: WaitReason::Retry.into() };
    assert_eq!(ledger.finish_lookup(&asking, &not_found, &next).await.unwrap().0, FencedWrite::Applied);
    let granted = fixture.take_returned(&job("p1")).await;
    assert_eq!(granted.resend, Resend::Granted);
    assert_eq!(ledger.begin_attempt(&granted.lease, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(3));
    fixture.expire_lease(&granted.lease).await;
    assert_eq!(fixture.returns().await, (1, 1));
    let row = "SELECT state || ' ' || wait_reason || ' ' || attempts || ' ' || resend || ' ' || lost_holders || ' ' || \
               COALESCE(wait_detail, wait_limit, reason, '-') FROM jobs WHERE maybe_charged AND wait_since IS NULL";
    assert_eq!(fixture.one(row).await, "unknown worker_lost 2 used 0 -");
    let attempt = "SELECT outcome || '|' || detail FROM attempts WHERE number = 3 AND ended_at IS NOT NULL";
    assert_eq!(fixture.one(attempt).await, "unknown|a worker was lost while the request was in flight");
    fixture.flows_are_right().await;
    let heir = fixture.dispatch(1, 1).await.remove(0);
    assert_eq!((heir.class, heir.claimed.resend, heir.claimed.attempts), (FlowClass::UNKNOWN, Resend::Used, 2));
    assert!(heir.claimed.maybe_charged && heir.claimed.unknown_age.is_some(), "{heir:?}");
    let late = AttemptEnd { number: 3, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
    let paid = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
    assert_eq!(ledger.finish_attempt(&granted.lease, &late, &paid).await.unwrap(), FencedWrite::Stale);
}

async fn a_lookup_left_in_flight_is_closed(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.unknown_sleeper(&job("p1")).await;
    let lost = fixture.take_returned(&job("p1")).await.lease;
    assert_eq!(fixture.database.begin_lookup(&lost, A_MINUTE).await.unwrap(), BeginResult::Attempt(2));
    fixture.expire_lease(&lost).await;
    assert_eq!(fixture.returns().await, (1, 1));
    assert_eq!(fixture.one("SELECT state || ' ' || wait_reason FROM jobs").await, "unknown outcome_unknown");
    let attempts = "SELECT kind || ' ' || outcome FROM attempts ORDER BY number";
    assert_eq!(fixture.texts(attempts).await, ["charge unknown", "lookup unknown"]);
    let heir = fixture.dispatch(1, 1).await.remove(0).claimed;
    assert_eq!((heir.attempts, heir.lookups), (1, 1));
    assert_eq!(fixture.database.begin_lookup(&heir.lease, A_MINUTE).await.unwrap(), BeginResult::Attempt(3));
    fixture.flows_are_right().await;
}

async fn concurrent_returns_return_each_job_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..40 {
        let job = of(&format!("acct_{}", number % 3), &format!("p{number}"));
        match number % 3 {
            0 => fixture.sleeper(&job, Duration::ZERO).await,
            1 => drop(fixture.take(&job).await),
            _ => drop(fixture.in_flight(&job).await),
        }
    }
    fixture.sql("UPDATE jobs SET holder = 'lost' WHERE holder IS NOT NULL").await.unwrap();
    let returns = (0..8).map(|_| {
        let ledger = fixture.database.clone();
        tokio::spawn(async move { ledger.return_now(&name("stripe"), 100).await.unwrap() })
    });
    let returned: usize = join_all(returns).await.into_iter().map(|task| task.unwrap().flows.len()).sum();
    assert_eq!(returned, 40);
    fixture.flows_are_right().await;
    assert_eq!(fixture.one("SELECT sum(waiting) FROM flows").await, "40");
    // Only the return of a lost worker's job raises its token.
    let once = "fence = CASE WHEN state = 'waiting' AND lost_holders = 0 THEN 1 ELSE 2 END";
    assert_eq!(fixture.one(&format!("SELECT count(*) FROM jobs WHERE {once}")).await, "40");
    assert_eq!(fixture.one("SELECT count(*) FROM attempts WHERE ended_at IS NULL").await, "0");
    assert_eq!(fixture.dispatch(100, 9).await.len(), 40);
}

async fn each_job_returns_into_its_flow(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let urgent = Job { priority: 9, ..of("acct_2", "urgent") };
    let nobodys = Job { account: None, ..job("nobodys") };
    for job in [&job("bulk"), &urgent, &nobodys] {
        fixture.sleeper(job, Duration::ZERO).await;
    }
    fixture.unknown_sleeper(&Job { priority: 9, ..job("unknown") }).await;
    let lost = fixture.in_flight(&of("acct_2", "lost")).await;
    fixture.expire_lease(&lost).await;
    let mut returned = fixture.return_at_most(9).await;
    returned.flows.sort_by_key(|flow| (flow.class.number(), flow.account.clone()));
    let unknown = |account: &str| FlowKey { class: FlowClass::UNKNOWN, ..FlowKey::of(&of(account, "any")) };
    let flows = vec![
        unknown("acct_1"),
        unknown("acct_2"),
        FlowKey::of(&urgent),
        FlowKey::of(&nobodys),
        FlowKey::of(&job("bulk")),
    ];
    assert_eq!(returned, ReturnedJobs { flows, lost: 1 });
    let flows = "SELECT class || ' ' || account || ' ' || waiting FROM flows WHERE waiting > 0 ORDER BY class, account";
    assert_eq!(fixture.texts(flows).await, ["0 acct_1 1", "0 acct_2 1", "1 acct_2 1", "10  1", "10 acct_1 1"]);
    fixture.flows_are_right().await;
    assert_eq!(ids(&fixture.dispatch(3, 1).await), ["unknown", "lost", "urgent"]);
}

async fn a_returned_job_is_as_it_was_recorded(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let full = Job {
        idempotency_key: Some(Identifier::new("key-1").unwrap()),
        cost: 1_000,
        priority: 9,
        not_before: Some(EpochMs(-62_135_596_800_000)),
        expires_at: Some(EpochMs(4_102_444_800_123)),
        reference: Some("é \" \\ '".into()),
        payload: Some("{ \"b\" : 1.0e2, \"a\":\"\\u0041\" }".into()),
        ..job("full")
    };
    let bare = Job { account: None, reference: None, payload: None, ..job("bare") };
    for job in [&full, &bare] {
        fixture.sleeper(job, Duration::ZERO).await;
    }
    assert_eq!(fixture.returns().await, (2, 0));
    let claimed: Vec<_> = fixture.dispatch(9, 9).await.into_iter().map(|job| (job.job, job.hash)).collect();
    assert_eq!(claimed, [(full, hash(1)), (bare, hash(1))]);
}

async fn unreadable_rows_stay(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["good", "negative", "lookups"] {
        fixture.sleeper(&job(id), Duration::ZERO).await;
        fixture.set_ago(id, "wake_at", 100).await;
    }
    let lost = fixture.in_flight(&job("early")).await;
    fixture.expire_lease(&lost).await;
    fixture.without_rules().await;
    if kind == Kind::Postgres {
        fixture.sql("ALTER TABLE jobs DROP CONSTRAINT lookups_is_0_or_more").await.unwrap();
    }
    let [early, ..] = crate::ledger::timestamps::beyond(kind);
    for (id, set) in [
        ("negative", "attempts = -1".to_owned()),
        ("lookups", "lookups = -1".to_owned()),
        ("early", format!("created_at = {early}")),
    ] {
        fixture.without_constraints(&format!("UPDATE jobs SET {set} WHERE id = '{id}'")).await.unwrap();
    }
    assert_eq!(fixture.returns().await, (1, 0));
    assert_eq!(fixture.in_backlog().await, ["good"]);
    assert_eq!(fixture.state("early").await, "sending");
    let found = fixture.database.reconcile(Duration::ZERO, CheckScope::All).await.unwrap().remove(0);
    assert_eq!((found.backlog, found.due, found.unreadable), (1, 3, 2), "{found:?}");
    assert!(found.discrepancies()[0].contains("whose row cannot be read"), "{found:?}");
    fixture.counts_agree().await;
}

async fn lanes_with_returns_are_named(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let named = async || {
        let lanes = fixture.database.lanes_with_returns().await.unwrap();
        lanes.into_iter().map(|lane| lane.as_str().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(named().await, Vec::<String>::new());
    let on = |lane: &str| Job { provider: name(lane), ..job(lane) };
    fixture.record(&on("backlogged")).await;
    fixture.sleeper(&on("later"), LATER).await;
    fixture.take(&on("held")).await;
    fixture.in_flight(&on("sending")).await;
    let lease = fixture.take(&on("done")).await.lease;
    let done = JobState::Final { state: FinalState::Declined, reason: "no".to_owned(), reference: None };
    assert_eq!(fixture.database.transition(&lease, &done).await.unwrap(), FencedWrite::Applied);
    assert_eq!(named().await, Vec::<String>::new());
    fixture.sleeper(&on("due"), Duration::ZERO).await;
    fixture.unknown_sleeper(&on("asking")).await;
    assert_eq!(named().await, ["asking", "due"]);
    fixture.database.remove_worker("worker-a").await.unwrap();
    assert_eq!(named().await, ["asking", "due", "held", "sending"]);
    for lane in ["asking", "due", "held", "sending"] {
        let returned = fixture.database.return_now(&name(lane), 9).await.unwrap();
        assert_eq!(returned.flows.len(), 1, "{lane}");
    }
    assert_eq!(named().await, Vec::<String>::new());
}

/// A row that a person has locked in `psql` holds up its own job alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_does_not_keep_the_others() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    for id in ["p1", "p2", "p3"] {
        fixture.sleeper(&job(id), Duration::ZERO).await;
    }
    let pool = fixture.postgres.clone().unwrap();
    let mut person = pool.begin().await.unwrap();
    sqlx::query("SELECT FROM jobs WHERE id = 'p2' FOR UPDATE").execute(&mut *person).await.unwrap();
    let ledger = fixture.database.clone();
    let returning = tokio::spawn(async move { ledger.return_now(&name("stripe"), 9).await.unwrap() });
    while fixture.in_backlog().await != ["p1", "p3"] {
        assert!(!returning.is_finished(), "the others are not in the backlog");
        tokio::task::yield_now().await;
    }
    person.rollback().await.unwrap();
    assert_eq!(returning.await.unwrap().flows.len(), 3);
    fixture.flows_are_right().await;
}
