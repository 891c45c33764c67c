//! Blocked flows: skipped for as long as they are blocked, woken at their instant, and ended by an operator's change.

use sluicegate::domain::job_filter::{JobFilter, ReasonFilter};

use super::*;

on_every_database!(
    a_blocked_flow_is_skipped,
    a_flow_wakes_at_its_instant,
    the_later_block_stays,
    an_account_is_blocked_by_class,
    jobs_of_blocked_accounts_are_counted,
    blocks_are_shown,
    jobs_of_a_blocked_flow_are_found_by_its_reason,
);

impl Fixture {
    /// Records a job, claims it as the only one, and returns it with a block of its flow.
    async fn record_blocked(&self, job: &Job, block: &FlowBlock) {
        self.record(job).await;
        let claimed = self.dispatch(1, 1).await.remove(0);
        assert_eq!(claimed.job.id, job.id);
        self.give_back(&claimed, &BacklogReturn { block: Some(block.clone()), ..RETURNED }).await;
    }

    /// Claims all that can be claimed; and the time until the next block ends.
    async fn dispatch_and_wake(&self, lane: &ProviderName) -> (Vec<BacklogJob>, Option<Duration>) {
        match self.database.claim_backlog(&claim_of(lane, &everything())).await.unwrap() {
            BacklogClaim::Claimed { jobs, next_wake } => (jobs, next_wake),
            BacklogClaim::Busy => panic!("no other process claims"),
        }
    }
}

async fn a_blocked_flow_is_skipped(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_blocked(&of("acct_1", "a1"), &block(A_MINUTE, "per-second")).await;
    for (account, id) in [("acct_1", "a2"), ("acct_2", "b1")] {
        fixture.record(&of(account, id)).await;
    }
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["b1"]);
    // A new job of a blocked flow waits like the others.
    fixture.record(&of("acct_1", "a3")).await;
    let (jobs, left) = fixture.dispatch_and_wake(&name("stripe")).await;
    assert!(jobs.is_empty() && left.is_some_and(|left| left <= A_MINUTE && left > A_MINUTE / 2), "{jobs:?} {left:?}");
    fixture.counts_agree().await;
    assert_eq!(fixture.dispatch_and_wake(&name("adyen")).await, (Vec::new(), None));
    assert_eq!(fixture.database.unblock_flows(&name("adyen")).await.unwrap(), 0);
    assert_eq!(fixture.database.unblock_flows(&name("stripe")).await.unwrap(), 1);
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["a1", "a2", "a3"]);
}

async fn a_flow_wakes_at_its_instant(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let soon = block(Duration::from_millis(40), "per-second");
    fixture.record_blocked(&of("acct_1", "a1"), &soon).await;
    let lane = name("stripe");
    let mut woken = Vec::new();
    for _ in 0..1_000 {
        let (jobs, next_wake) = fixture.dispatch_and_wake(&lane).await;
        if !jobs.is_empty() {
            assert_eq!(next_wake, None);
            woken = jobs;
            break;
        }
        let wait = next_wake.unwrap();
        assert!(wait <= soon.wait, "{wait:?}");
        tokio::time::sleep(wait.max(Duration::from_millis(1))).await;
    }
    assert_eq!(ids(&woken), ["a1"]);
    assert_eq!(fixture.one("SELECT count(*) FROM flows WHERE blocked_reason IS NULL").await, "1");
}

async fn the_later_block_stays(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["a1", "a2", "a3"] {
        fixture.record(&of("acct_1", id)).await;
    }
    let (backlog, lane) = (fixture.database.clone(), name("stripe"));
    let reason = "SELECT blocked_reason || COALESCE(blocked_limit, '') FROM flows";
    let forever = FlowBlock { wait: Duration::MAX, reason: BlockedReason::AccountBlocked, limit: None };
    for (blocks, wanted) in [
        ([block(A_MINUTE, "a"), forever.clone(), block(A_MINUTE, "a")], "account_blocked"),
        ([block(A_MINUTE * 2, "longest"), block(A_MINUTE, "a"), block(A_MINUTE, "b")], "limitlongest"),
    ] {
        for (job, block) in fixture.dispatch(3, 3).await.iter().zip(blocks) {
            fixture.give_back(job, &BacklogReturn { block: Some(block), ..RETURNED }).await;
        }
        assert_eq!(fixture.one(reason).await, wanted);
        assert_eq!(backlog.unblock_flows(&lane).await.unwrap(), 1);
    }
}

/// A limit may count some priorities only, so each class of an account finds out by itself.
async fn an_account_is_blocked_by_class(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (priority, id) in [(9, "a1"), (4, "a2")] {
        fixture.record_blocked(&Job { priority, ..of("acct_1", id) }, &block(A_MINUTE, "a")).await;
    }
    fixture.record(&of("acct_1", "a3")).await;
    fixture.record(&Job { account: None, ..job("none") }).await;
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["none", "a3"]);
    assert_eq!(fixture.database.unblock_flows(&name("stripe")).await.unwrap(), 2);
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["a1", "a2"]);
}

/// The clear time of a lane on which only such jobs wait is never.
async fn jobs_of_blocked_accounts_are_counted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let blocked = FlowBlock { wait: Duration::MAX, reason: BlockedReason::AccountBlocked, limit: None };
    for (account, id, block) in
        [("acct_1", "a1", blocked.clone()), ("acct_2", "b1", blocked), ("acct_3", "c1", block(A_MINUTE, "a"))]
    {
        fixture.record_blocked(&of(account, id), &block).await;
    }
    for (account, id) in [("acct_1", "a2"), ("acct_3", "c2"), ("acct_4", "d1")] {
        fixture.record(&of(account, id)).await;
    }
    for scope in [CheckScope::All, CheckScope::Since(A_MINUTE)] {
        let found = fixture.database.reconcile(Duration::ZERO, scope).await.unwrap().remove(0);
        assert_eq!((found.backlog, found.account_blocked, found.discrepancies()), (6, 3, Vec::new()));
    }
}

async fn blocks_are_shown(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_blocked(&of("acct_1", "a1"), &block(A_MINUTE, "a")).await;
    for (account, id) in [("acct_1", "a2"), ("acct_2", "b1"), ("acct_3", "c1")] {
        fixture.record(&of(account, id)).await;
    }
    let shown = fixture.database.waiting_flows(&name("stripe"), 2).await.unwrap();
    let accounts: Vec<_> = shown.iter().map(|flow| (flow.account.as_ref().unwrap().as_str(), flow.waiting)).collect();
    assert_eq!(accounts, [("acct_1", 2), ("acct_2", 1)]);
    let blocked = shown[0].blocked.as_ref().unwrap();
    assert_eq!((blocked.reason, blocked.limit.as_deref()), (BlockedReason::Limit, Some("a")));
    assert!(blocked.left <= A_MINUTE && blocked.left > A_MINUTE / 2, "{blocked:?}");
    assert_eq!(shown[1].blocked, None);
    // Blocked flows are not before it.
    assert_eq!(fixture.jobs_ahead("b1").await, (true, 0));
}

/// Only the first of them has been claimed and knows of the block; the others were recorded behind it.
async fn jobs_of_a_blocked_flow_are_found_by_its_reason(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let blocked = FlowBlock { wait: Duration::MAX, reason: BlockedReason::AccountBlocked, limit: None };
    fixture.record_blocked(&of("acct_1", "a1"), &blocked).await;
    for (account, id) in [("acct_1", "a2"), ("acct_2", "b1"), ("acct_1", "a3")] {
        fixture.record(&of(account, id)).await;
    }
    let ledger = &fixture.database;
    let provider = Some(name("stripe"));
    let filter =
        |code| JobFilter { reason: Some(ReasonFilter::new(code)), provider: provider.clone(), ..JobFilter::default() };
    for (code, wanted) in [("account_blocked", &["a3", "a2", "a1"][..]), ("limit", &[])] {
        let filter = filter(code);
        let jobs = ledger.list_jobs(&filter, None, 9).await.unwrap().jobs;
        assert_eq!(jobs.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), wanted, "{code}");
        assert!(jobs.iter().all(|job| job.wait_reason.as_deref() == Some(code)), "{jobs:?}");
        assert_eq!(ledger.job_totals(&filter).await.unwrap().jobs, wanted.len() as u64, "{code}");
        assert_eq!(ledger.selected_jobs(&filter).await.unwrap().unwrap().len(), wanted.len(), "{code}");
    }
    // A job's own page says the same as the list.
    let listed = ledger.list_jobs(&JobFilter::default(), None, 9).await.unwrap().jobs;
    for job in listed {
        assert_eq!(fixture.details(&job.id).await.line, job);
    }
}
