//! A lane's backlog: jobs that wait for a dispatcher, and how they come back.

use sluicegate::domain::fair_order::FairClaim;
use sluicegate::domain::job::{FlowClass, FlowKey};
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::time::EpochMs;
use sluicegate::ledger::backlog::{
    BacklogClaim, BacklogClaimRequest, BacklogJob, BacklogRecord, BacklogReturn, BlockedReason, FlowBlock,
};
use sluicegate::ledger::operator::{Actor, JobResolution};
use sluicegate::ledger::rejected::RecordedContent;
use sluicegate::ledger::upkeep::CheckScope;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

mod blocks;
mod fairness;
mod model;
mod order;
mod races;
mod refused;
mod repair;
mod returns;
mod shown;
mod weights;

on_every_database!(
    a_recorded_job_is_claimed_once,
    known_jobs_are_recognised,
    a_claim_returns_the_whole_job,
    a_returned_job_is_first_again,
    a_stale_lease_returns_nothing,
    a_job_that_is_not_due_sleeps,
    a_full_flow_is_left_out,
    a_claim_leaves_less_urgent_classes_out,
    ended_jobs_leave_the_count_right,
    backlog_jobs_are_accounted_for,
    position_counts_the_jobs_before,
);

/// Flows whose count differs from their jobs.
const DIFFERENT: &str = "SELECT count(*) FROM (\
     SELECT provider, class, account FROM (\
         SELECT provider, CASE WHEN state = 'unknown' THEN 0 ELSE 10 - priority END AS class, \
             COALESCE(account, '') AS account, 1 AS jobs FROM jobs WHERE backlog \
         UNION ALL SELECT provider, class, account, 0 - waiting FROM flows) AS both_sides \
     GROUP BY provider, class, account HAVING sum(jobs) <> 0) AS different";

pub(super) fn of(account: &str, id: &str) -> Job {
    Job { account: Some(Identifier::new(account).unwrap()), ..job(id) }
}

const NO_SLOT: Wait = Wait { reason: WaitReason::Egress, detail: None };

pub(super) const RETURNED: BacklogReturn<'static> =
    BacklogReturn { reason: Some(&NO_SLOT), came_from_backlog: true, block: None };

pub(super) fn block(wait: Duration, limit: &str) -> FlowBlock {
    FlowBlock { wait, reason: BlockedReason::Limit, limit: Some(limit.to_owned()) }
}

pub(super) fn ids(jobs: &[BacklogJob]) -> Vec<&str> {
    jobs.iter().map(|job| job.job.id.as_str()).collect()
}

/// A claim of all jobs that can be claimed.
pub(super) fn everything() -> FairClaim<Identifier> {
    FairClaim {
        at_most: 1_000,
        quantum: 1_000,
        flow_max: 1_000,
        except: Vec::new(),
        class_max: FlowClass::LAST,
        cost_below: None,
        order: JobOrder::None,
    }
}

fn claim_of<'a>(lane: &'a ProviderName, bounds: &'a FairClaim<Identifier>) -> BacklogClaimRequest<'a> {
    BacklogClaimRequest { lane, holder: "worker-a", bounds }
}

impl Fixture {
    pub(super) async fn record(&self, job: &Job) {
        let recorded = self.database.record_backlog(job, hash(1), Duration::ZERO).await.unwrap();
        assert!(matches!(recorded, BacklogRecord::Recorded { .. }), "{job:?}: {recorded:?}");
    }

    /// Claims as the only dispatcher.
    pub(super) async fn dispatch(&self, at_most: u32, quantum: u32) -> Vec<BacklogJob> {
        self.dispatch_with(&FairClaim { at_most, quantum, ..everything() }).await
    }

    pub(super) async fn dispatch_with(&self, bounds: &FairClaim<Identifier>) -> Vec<BacklogJob> {
        match self.database.claim_backlog(&claim_of(&name("stripe"), bounds)).await.unwrap() {
            BacklogClaim::Claimed { jobs, .. } => jobs,
            BacklogClaim::Busy => panic!("no other process claims"),
        }
    }

    /// Returns the due jobs of the job's lane, and claims all of them as a dispatcher does.
    pub(super) async fn take_returned(&self, job: &Job) -> Claimed {
        self.database.return_now(&job.provider, 100).await.unwrap();
        match self.database.claim_backlog(&claim_of(&job.provider, &everything())).await.unwrap() {
            BacklogClaim::Claimed { jobs, .. } => {
                let claimed = jobs.into_iter().find(|claimed| claimed.job.id == job.id);
                claimed.unwrap_or_else(|| panic!("{} was not in the backlog", job.id)).claimed
            }
            BacklogClaim::Busy => panic!("no other process claims"),
        }
    }

    pub(super) async fn give_back(&self, job: &BacklogJob, how: &BacklogReturn<'_>) {
        let written = self.database.return_to_backlog(&job.claimed.lease, how).await.unwrap();
        assert_eq!(written, FencedWrite::Applied, "{job:?}");
    }

    /// Whether the job is in the backlog, and the jobs ahead of it.
    pub(super) async fn jobs_ahead(&self, id: &str) -> (bool, u64) {
        let lane = [name("stripe")];
        let position = self.database.queue_position(&job(id).id, &lane).await.unwrap();
        (position.backlog.is_some(), position.jobs_ahead)
    }

    pub(super) async fn counts_agree(&self) {
        assert_eq!(self.one(DIFFERENT).await, "0", "{:?}", self.column("SELECT account || waiting FROM flows").await);
    }
}

async fn a_recorded_job_is_claimed_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.dispatch(5, 5).await, []);
    fixture.record(&job("p1")).await;
    assert_eq!(fixture.one("SELECT COALESCE(holder, 'none') || fence || state FROM jobs").await, "none0waiting");
    fixture.counts_agree().await;
    let jobs = fixture.dispatch(5, 5).await;
    assert_eq!((ids(&jobs), jobs[0].class.number(), jobs[0].claimed.lease.fence), (vec!["p1"], 10, 1));
    assert_eq!(fixture.one("SELECT holder FROM jobs WHERE NOT backlog").await, "worker-a");
    assert_eq!(fixture.dispatch(5, 5).await, []);
    fixture.counts_agree().await;
    // The worker goes on as with any claimed job.
    let began = fixture.database.begin_attempt(&jobs[0].claimed.lease, &request("p1"), AT_ONCE).await.unwrap();
    assert_eq!(began, BeginResult::Attempt(1));
}

async fn known_jobs_are_recognised(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let backlog = fixture.database.clone();
    let first = Job { idempotency_key: Some(Identifier::new("key-1").unwrap()), ..job("p1") };
    fixture.record(&first).await;
    let record = async |job: &Job, byte| backlog.record_backlog(job, hash(byte), Duration::ZERO).await.unwrap();
    assert_eq!(record(&first, 1).await, BacklogRecord::Known);
    assert_eq!(backlog.recorded_content(&job("p2"), hash(1)).await.unwrap(), RecordedContent::Nothing);
    let elsewhere = Job { provider: name("adyen"), ..job("p1") };
    let same_key = Job { idempotency_key: first.idempotency_key.clone(), ..job("p2") };
    for (job, byte, detail) in [(&first, 2, "id:"), (&elsewhere, 1, "id:"), (&same_key, 1, "idempotency_key:")] {
        match record(job, byte).await {
            BacklogRecord::Conflict(invalid) => assert!(invalid.detail.starts_with(detail), "{invalid}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(backlog.recorded_content(job, hash(byte)).await.unwrap(), RecordedContent::Other);
    }
    assert_eq!(backlog.recorded_content(&first, hash(1)).await.unwrap(), RecordedContent::Same);
    let active = fixture.dispatch(1, 1).await.remove(0).claimed.lease;
    assert_eq!(record(&first, 1).await, BacklogRecord::Known);
    let done = JobState::Final { state: FinalState::Declined, reason: "by rule".to_owned(), reference: None };
    assert_eq!(fixture.database.transition(&active, &done).await.unwrap(), FencedWrite::Applied);
    assert_eq!(record(&first, 1).await, BacklogRecord::Known);
    assert_eq!(fixture.one("SELECT count(*) FROM jobs").await, "1");
    fixture.counts_agree().await;
}

async fn a_claim_returns_the_whole_job(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let job = Job {
        idempotency_key: Some(Identifier::new("key-1").unwrap()),
        cost: 7,
        priority: 4,
        expires_at: Some(EpochMs(4_000_000_000_000)),
        ..job("p1")
    };
    fixture.record(&job).await;
    let claimed = fixture.dispatch(1, 1).await.remove(0);
    assert_eq!((&claimed.job, claimed.hash, claimed.class), (&job, hash(1), FlowClass::of_priority(4)));
    assert_eq!((claimed.claimed.attempts, claimed.claimed.maybe_charged, claimed.claimed.lost_holders), (0, false, 0));
    assert!(claimed.claimed.expires_in.is_some(), "{claimed:?}");
    // With an unknown outcome it comes back first, with its history.
    let (ledger, lease) = (fixture.database.clone(), &claimed.claimed.lease);
    assert_eq!(ledger.begin_attempt(lease, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: "no answer".to_owned(), counts: true };
    let unknown = JobState::Unknown { wait: Duration::ZERO, reason: WaitReason::OutcomeUnknown.into() };
    assert_eq!(ledger.finish_attempt(lease, &end, &unknown).await.unwrap(), FencedWrite::Applied);
    let again = fixture.take(&job).await;
    let written = fixture.database.return_to_backlog(&again.lease, &RETURNED).await.unwrap();
    assert_eq!(written, FencedWrite::Applied);
    let urgent = Job { priority: 9, ..super::job("p2") };
    fixture.record(&urgent).await;
    let jobs = fixture.dispatch(2, 1).await;
    assert_eq!((ids(&jobs), jobs[0].class), (vec!["p1", "p2"], FlowClass::UNKNOWN));
    let history = &jobs[0].claimed;
    assert_eq!((history.maybe_charged, history.attempts, history.last_attempt), (true, 1, 1));
    assert!(history.unknown_age.is_some() && history.frozen_request.is_some(), "{history:?}");
    fixture.counts_agree().await;
}

async fn a_returned_job_is_first_again(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["p1", "p2", "p3", "p4"] {
        fixture.record(&job(id)).await;
    }
    let jobs = fixture.dispatch(2, 2).await;
    assert_eq!(ids(&jobs), ["p1", "p2"]);
    let reason = Wait::for_limit("a");
    for job in [&jobs[1], &jobs[0]] {
        fixture.give_back(job, &BacklogReturn { reason: Some(&reason), ..RETURNED }).await;
    }
    fixture.counts_agree().await;
    assert_eq!(fixture.one("SELECT wait_reason || wait_limit FROM jobs WHERE id = 'p1'").await, "limita");
    // The tag has moved back.
    assert_eq!(fixture.one("SELECT tag FROM flows").await, "0");
    let jobs = fixture.dispatch(3, 3).await;
    assert_eq!(ids(&jobs), ["p1", "p2", "p3"]);
    assert_eq!(jobs[0].claimed.lease.fence, 2);
}

async fn a_stale_lease_returns_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record(&job("p1")).await;
    let stale = fixture.dispatch(1, 1).await.remove(0);
    fixture.expire_lease(&stale.claimed.lease).await;
    let current = fixture.take(&job("p1")).await.lease;
    let how = BacklogReturn { block: Some(block(A_MINUTE, "a")), ..RETURNED };
    let written = fixture.database.return_to_backlog(&stale.claimed.lease, &how).await.unwrap();
    assert_eq!(written, FencedWrite::Stale);
    assert_eq!(fixture.one("SELECT waiting || COALESCE(blocked_reason, '-') FROM flows").await, "0-");
    assert_eq!(fixture.one("SELECT fence FROM jobs WHERE holder IS NOT NULL").await, current.fence.to_string());
    // A job with a request in flight cannot be returned.
    assert_eq!(
        fixture.database.begin_attempt(&current, &request("p1"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    assert_eq!(fixture.database.return_to_backlog(&current, &how).await.unwrap(), FencedWrite::Stale);
    fixture.counts_agree().await;
}

async fn a_job_that_is_not_due_sleeps(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let now_ms = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let later = Job { not_before: Some(EpochMs(now_ms + 3_600_000)), ..job("later") };
    fixture.record(&later).await;
    assert_eq!(fixture.dispatch(1, 1).await, []);
    assert_eq!(fixture.one("SELECT count(*) FROM jobs WHERE NOT backlog AND wake_at = not_before").await, "1");
    let recorded = fixture.database.record_backlog(&later, hash(1), Duration::ZERO).await.unwrap();
    assert_eq!(recorded, BacklogRecord::Known, "the ledger alone gives it to a worker");
    fixture.counts_agree().await;
}

async fn a_full_flow_is_left_out(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (account, number) in (0..6).map(|number| ("acct_1", number)).chain([("acct_2", 6), ("acct_3", 7)]) {
        fixture.record(&of(account, &format!("p{number}"))).await;
    }
    let jobs = fixture.dispatch_with(&FairClaim { quantum: 1, flow_max: 2, ..everything() }).await;
    assert_eq!(ids(&jobs), ["p0", "p6", "p7", "p1"]);
    let full = vec![FlowKey::of(&of("acct_1", "any")), FlowKey::of(&job("without-account"))];
    let other_class = vec![FlowKey { class: FlowClass::UNKNOWN, ..full[0].clone() }];
    assert_eq!(fixture.dispatch_with(&FairClaim { except: full, ..everything() }).await, []);
    let bounds = FairClaim { flow_max: 3, except: other_class, ..everything() };
    assert_eq!(ids(&fixture.dispatch_with(&bounds).await), ["p2", "p3", "p4"]);
    fixture.counts_agree().await;
}

async fn a_claim_leaves_less_urgent_classes_out(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, priority) in [("bulk", 0), ("urgent", 9), ("soon", 5)] {
        fixture.record(&Job { priority, ..job(id) }).await;
    }
    let until = |priority| FairClaim { class_max: FlowClass::of_priority(priority), ..everything() };
    assert_eq!(ids(&fixture.dispatch_with(&until(6)).await), ["urgent"]);
    assert_eq!(ids(&fixture.dispatch_with(&until(5)).await), ["soon"]);
    assert_eq!(fixture.dispatch_with(&until(1)).await, []);
    assert_eq!(ids(&fixture.dispatch_with(&until(0)).await), ["bulk"]);
    fixture.counts_agree().await;
}

async fn ended_jobs_leave_the_count_right(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["p1", "p2", "p3", "p4", "p5", "p6"] {
        fixture.record(&job(id)).await;
    }
    fixture.record(&Job { expires_at: Some(EpochMs(1)), ..job("late") }).await;
    let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
    let cancelled = fixture.database.resolve_job(&job("p1").id, &JobResolution::Cancel, None, &by).await;
    cancelled.unwrap();
    fixture.counts_agree().await;
    fixture.sql("UPDATE jobs SET state = 'cancelled' WHERE id IN ('p2', 'p3')").await.unwrap();
    fixture.counts_agree().await;
    fixture.sql("DELETE FROM jobs WHERE id = 'p4'").await.unwrap();
    assert_eq!(fixture.database.expire("too late", 5).await.unwrap(), 1);
    fixture.sql("UPDATE jobs SET state = 'review', reason = 'why' WHERE id = 'p5'").await.unwrap();
    fixture.sql("UPDATE jobs SET backlog = NOT backlog WHERE id = 'p6'").await.unwrap();
    assert_eq!(fixture.one("SELECT count(*) FROM jobs WHERE backlog").await, "0");
    fixture.counts_agree().await;
    // One that is sent again enters the backlog by its return.
    let resent = fixture.database.resolve_job(&job("p5").id, &JobResolution::Resend, None, &by).await;
    resent.unwrap();
    assert_eq!(fixture.dispatch(9, 9).await, []);
    assert_eq!(fixture.take_returned(&job("p5")).await.lost_holders, 0);
    fixture.counts_agree().await;
}

async fn backlog_jobs_are_accounted_for(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record(&job("p1")).await;
    fixture.record(&job("p2")).await;
    fixture.dispatch(1, 1).await;
    for scope in [CheckScope::All, CheckScope::Since(A_MINUTE)] {
        let found = fixture.database.reconcile(Duration::ZERO, scope).await.unwrap().remove(0);
        let counts = (found.backlog, found.active, found.due, found.overdue);
        assert_eq!((counts, found.discrepancies()), ((1, 1, 0, 0), Vec::new()));
    }
}

async fn position_counts_the_jobs_before(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for number in 0..4 {
        fixture.record(&of("acct_1", &format!("a{number}"))).await;
    }
    for number in 0..9 {
        fixture.record(&of("acct_2", &format!("b{number}"))).await;
    }
    fixture.record(&Job { priority: 9, ..of("acct_3", "urgent") }).await;
    // Its own two, two of the other account, and the urgent one.
    assert_eq!(fixture.jobs_ahead("a2").await, (true, 5));
    // No job of the backlog is ahead of one that is out of it.
    fixture.take(&job("queued")).await;
    assert_eq!(fixture.jobs_ahead("queued").await, (false, 0));
    fixture.dispatch(1, 1).await;
    assert!(!fixture.jobs_ahead("urgent").await.0);
    let largest = &fixture.database.waiting_flows(&name("stripe"), 1).await.unwrap();
    assert_eq!((largest.len(), largest[0].account.as_ref().unwrap().as_str(), largest[0].waiting), (1, "acct_2", 9));
}
