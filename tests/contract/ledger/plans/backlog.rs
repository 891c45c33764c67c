//! What a dispatcher, its workers and people make of a lane's backlog, one duty after the other.

use futures_util::future::join_all;
use sluicegate::domain::fair_order::FairClaim;
use sluicegate::domain::job::{FlowClass, FlowKey};
use sluicegate::ledger::FencedWrite;
use sluicegate::ledger::backlog::{
    BacklogClaim, BacklogClaimRequest, BacklogJob, BacklogRecord, BacklogReturn, BlockedReason, FlowBlock,
};
use sluicegate::ledger::upkeep::CheckScope;

use super::super::*;
use super::work::Working;
use super::{Access, Explained};

/// Flows of the lane, of which every other is blocked.
pub const FLOWS: u32 = 2_500;
/// Jobs that wait in each.
const DEPTH: u32 = 4;

/// The duties that must reach a large table by an index.
pub const ON_THE_WAY: [&str; 3] =
    ["the backlog is claimed", "a job returns to the backlog", "an account's flows are read"];

impl Fixture {
    /// A lane `backlogged` with [`FLOWS`] flows and [`DEPTH`] jobs each.
    pub async fn fill_backlog(&self, kind: Kind) {
        let (now, hash, soon) = match kind {
            Kind::Postgres => ("now()", "decode(repeat('01', 32), 'hex')", "now() + interval '1 hour'"),
            _ => {
                let now = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";
                (now, "zeroblob(32)", "CAST(round(unixepoch('subsec') * 1000) AS INTEGER) + 3600000")
            }
        };
        let numbers = |to: u32| {
            format!("WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {to})")
        };
        let jobs = format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, cost, \
                 priority, payload, state, wake_at, backlog, fence, created_at, updated_at) {} \
             SELECT 'b-' || n, 'backlogged', 'b-' || n, n < 0, {hash}, 100, 'EUR', 'acct_' || (n % {FLOWS}), 1, 0, '{{}}', \
                 'waiting', {now}, n > 0, 0, {now}, {now} FROM numbers",
            numbers(FLOWS * DEPTH)
        );
        let flows = format!(
            "INSERT INTO flows (provider, class, account, waiting, blocked_until, blocked_reason, blocked_limit) {} \
             SELECT 'backlogged', 10, 'acct_' || (n % {FLOWS}), {DEPTH}, CASE WHEN n % 2 = 0 THEN {soon} END, \
                 CASE WHEN n % 2 = 0 THEN 'limit' END, CASE WHEN n % 2 = 0 THEN 'day' END FROM numbers",
            numbers(FLOWS)
        );
        self.sql(&jobs).await.unwrap();
        self.sql(&flows).await.unwrap();
    }
}

impl<E: Explained> Working<'_, E> {
    async fn did_in_backlog(&mut self, during: &'static str) -> Vec<Access> {
        let accesses = self.explained.accesses(self.fixture, during).await;
        self.accesses.extend(accesses.iter().cloned());
        accesses
    }

    async fn dispatch(&self, at_most: u32) -> Vec<BacklogJob> {
        self.dispatch_below(at_most, JobOrder::None, None).await
    }

    async fn dispatch_below(&self, at_most: u32, order: JobOrder, cost_below: Option<u32>) -> Vec<BacklogJob> {
        let lane = name("backlogged");
        let except = vec![FlowKey { class: FlowClass::UNKNOWN, account: None }];
        let class_max = FlowClass::LAST;
        let bounds = FairClaim { at_most, quantum: 4, flow_max: 8, except, class_max, cost_below, order };
        let request = BacklogClaimRequest { lane: &lane, holder: "worker-a", bounds: &bounds };
        match self.fixture.database.claim_backlog(&request).await.unwrap() {
            BacklogClaim::Claimed { jobs, .. } => jobs,
            BacklogClaim::Busy => panic!("no other process claims"),
        }
    }

    /// Several of each: from the sixth on PostgreSQL may plan for any arguments.
    pub async fn backlog(&mut self) {
        let (ledger, lane) = (self.fixture.database.clone(), name("backlogged"));
        for round in 0..8 {
            let jobs: Vec<Job> = (0..20)
                .map(|n| Job { provider: lane.clone(), ..job(&format!("{}-backlog-{round}-{n}", self.run)) })
                .collect();
            let recorded = jobs.iter().map(|job| ledger.record_backlog(job, hash(1), Duration::ZERO));
            let recorded = join_all(recorded).await;
            assert!(recorded.into_iter().all(|recorded| matches!(recorded.unwrap(), BacklogRecord::Recorded { .. })));
            self.did_in_backlog("a job enters the backlog").await;
            let known = ledger.record_backlog(&jobs[0], hash(1), Duration::ZERO).await.unwrap();
            assert_eq!(known, BacklogRecord::Known);
            self.did_in_backlog("a job is refused").await;
            let claimed = self.dispatch(40).await;
            assert_eq!(claimed.len(), 40);
            self.did_in_backlog("the backlog is claimed").await;
            let block = FlowBlock { wait: A_MINUTE, reason: BlockedReason::Limit, limit: Some("day".to_owned()) };
            let reason = Wait::for_limit("day");
            let how = BacklogReturn { reason: Some(&reason), came_from_backlog: true, block: Some(block) };
            let returned = claimed[..20].iter().map(|job| ledger.return_to_backlog(&job.claimed.lease, &how));
            assert!(join_all(returned).await.into_iter().all(|written| written.unwrap() == FencedWrite::Applied));
            self.did_in_backlog("a job returns to the backlog").await;
            self.look_at_backlog().await;
            assert_eq!(self.dispatch_below(2, JobOrder::Account, None).await.len(), 2);
            self.did_in_backlog("the backlog is claimed in order").await;
            for order in [JobOrder::None, JobOrder::Account] {
                assert_eq!(self.dispatch_below(2, order, Some(2)).await.len(), 2);
                self.did_in_backlog("the backlog is claimed below a cost").await;
            }
        }
        for _ in 0..8 {
            ledger.unblock_flows(&lane).await.unwrap();
            self.did_in_backlog("a lane's blocks end").await;
        }
    }

    async fn look_at_backlog(&mut self) {
        let (ledger, lane) = (self.fixture.database.clone(), name("backlogged"));
        let position = ledger.queue_position(&job("b-2000").id, std::slice::from_ref(&lane)).await.unwrap();
        assert!(position.backlog.is_some());
        self.did_in_backlog("a place in the backlog is read").await;
        assert!(ledger.lanes_with_flows().await.unwrap().contains(&lane));
        assert_eq!(ledger.waiting_flows(&lane, 3).await.unwrap().len(), 3);
        assert_eq!(ledger.largest_flows(&lane, 3).await.unwrap().largest.len(), 3);
        ledger.remove_idle_flows(&lane, 10).await.unwrap();
        self.did_in_backlog("flows are looked at").await;
        let account = Identifier::new("acct_1").unwrap();
        assert_eq!(ledger.account_flows(&lane, &account).await.unwrap().len(), 1);
        self.did_in_backlog("an account's flows are read").await;
        assert_eq!(ledger.repair_flows(&lane, 10).await.unwrap().corrected, 0);
        self.did_in_backlog("flows are compared with their jobs").await;
        let scope = CheckScope::Since(A_MINUTE);
        self.fixture.database.reconcile(A_MINUTE, scope).await.unwrap();
        self.did_in_backlog("account of the last minutes").await;
    }
}

/// Records a few more jobs, of a hundred accounts, and claims one.
pub async fn claim_reads_one_job<E: Explained>(working: &mut Working<'_, E>, recorded: u32) {
    let (ledger, lane) = (working.fixture.database.clone(), name("backlogged"));
    let jobs: Vec<Job> = (recorded..recorded + 10)
        .map(|n| Job {
            provider: lane.clone(),
            account: Some(Identifier::new(format!("merchant-{:03}", n % 100)).unwrap()),
            ..job(&format!("young-ledger-{n:07}"))
        })
        .collect();
    let recorded = join_all(jobs.iter().map(|job| ledger.record_backlog(job, hash(1), Duration::ZERO))).await;
    assert!(recorded.into_iter().all(|recorded| matches!(recorded.unwrap(), BacklogRecord::Recorded { .. })));
    working.did_in_backlog("a job enters the backlog").await;
    assert_eq!(working.dispatch(1).await.len(), 1);
    let accesses = working.did_in_backlog("the backlog is claimed").await;
    let of_jobs: Vec<&Access> = accesses.iter().filter(|access| access.table == "jobs").collect();
    let rows: u64 = of_jobs.iter().filter_map(|access| access.rows).sum();
    // Found by the flow, and written by the id.
    assert_eq!(rows, 2, "{} jobs: {of_jobs:#?}", jobs.len());
}

/// A claim reads the jobs that it claims and the flows in front, however many flows are blocked.
pub async fn claim_reads_no_blocked_flow<E: Explained>(working: &mut Working<'_, E>, flows_read_max: u64) {
    for _ in 0..8 {
        assert_eq!(working.dispatch(40).await.len(), 40);
        let accesses = working.did_in_backlog("the backlog is claimed").await;
        let rows = |table: &str| -> u64 {
            accesses.iter().filter(|access| access.table == table).filter_map(|access| access.rows).sum()
        };
        // Found by the flow, and written by the id.
        assert!((80..=120).contains(&rows("jobs")), "{accesses:#?}");
        // The candidates, locked, written, and the next that wakes. While nothing is known of the table, candidates are
        // sorted.
        assert!((40..=flows_read_max).contains(&rows("flows")), "{accesses:#?}");
    }
}
