//! Approvals on both databases: a stored action is executed once, and only while it is pending: under races and crashes too.

use std::time::Duration;

use futures_util::future::join_all;
use sluicegate::config::approvals::ApprovalsConfig;
use sluicegate::domain::approval::{ApprovalRule, ApprovalRules, GatedAction, Threshold};
use sluicegate::domain::person::{Identity, IdentityPath, Role};
use sluicegate::ledger::approvals::{Approval, ApprovalDecision, ApprovalGrant, ApprovalState};
use sluicegate::ledger::decision_batches::{BatchDecision, BatchRate};
use sluicegate::ops::approval::decide::{approve, find_approval};
use sluicegate::ops::approval::{ApprovalError, ApprovalGate, Caller};
use sluicegate::ops::batch::{Confirmation, Selection, prepare_batch};
use sluicegate::ops::limit_change::{WantedLimit, set_limit};
use sluicegate::ops::until::Until;

use super::*;

on_every_database!(
    of_many_approvers_one_executes,
    of_many_requests_one_is_stored,
    change_and_approval_are_one_transaction,
    only_another_person_with_the_role_approves,
    request_ends_after_its_time,
    changed_actions_are_refused_for_good,
    unseen_payment_is_cancelled_once,
    old_requests_are_forgotten,
);

const DAY: Duration = Duration::from_secs(86_400);

fn policy() -> ApprovalsConfig {
    let rules = GatedAction::ALL.map(|action| ApprovalRule { action, threshold: Threshold::Always });
    ApprovalsConfig { rules: ApprovalRules(rules.to_vec()), expire_after: DAY }
}

fn caller(name: &str, role: Role) -> Caller {
    let actor =
        Actor { os_user: format!("{name}@page ({role}, user)"), program: None, reason: Some("ticket".to_owned()) };
    Caller { identity: Identity { name: name.to_owned(), role, path: IdentityPath::User }, actor }
}

fn decision(state: ApprovalState) -> ApprovalDecision {
    ApprovalDecision { state, by: caller("bob", Role::Operator).identity, because: None }
}

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asked {
    Job,
    Batch,
    Limit,
    Pause,
    Resume,
    PauseAll,
}

impl Fixture {
    /// Payments `a` and `b` in review, and provider `acme` with a limit.
    async fn to_decide(kind: Kind) -> Self {
        let fixture = Self::migrated(kind).await;
        for sql in [
            "INSERT INTO providers (name, url) VALUES ('bolt', 'https://x.example/')",
            "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('bolt', 'all', 100, 1000)",
        ] {
            fixture.sql(sql).await.unwrap();
        }
        for text in ["a", "b"] {
            fixture.attempted(text, "not_sent", &finished(FinalState::Review)).await;
        }
        fixture
    }

    async fn ask(&self, asked: Asked) -> String {
        self.try_ask(asked).await.unwrap()
    }

    async fn try_ask(&self, asked: Asked) -> Result<String, ApprovalError> {
        let (ledger, policy) = (&self.database, &policy());
        let gate = ApprovalGate { ledger, policy, caller: caller("alice", Role::Admin) };
        let bolt = name("bolt");
        let awaited = match asked {
            Asked::Job => gate.job(&id("a"), &JobResolution::Declined).await,
            Asked::Batch => {
                let ids = Some(vec!["a".to_owned(), "b".to_owned()]);
                let prepared = prepare_batch(ledger, BatchDecision::Declined, Selection { filter: None, ids }).await?;
                let (digest, rate) = (prepared.preview.digest.clone(), BatchRate::parse("1000/1s").unwrap());
                gate.batch(&prepared, &Confirmation { digest, jobs: None, rate, by: by() }).await
            }
            Asked::Limit => {
                let rate = Some("50/1s".parse().unwrap());
                let wanted = WantedLimit { provider: &bolt, limit: "all", rate, until: Until::NoEnd, expects: None };
                let change = set_limit(ledger, &wanted, true, None).await?;
                gate.limit(&wanted, &change).await
            }
            Asked::Pause => gate.pause(&bolt, true).await,
            Asked::Resume => gate.pause(&bolt, false).await,
            Asked::PauseAll => gate.pause_all().await,
        };
        Ok(awaited?.expect("gated").id)
    }

    async fn approve_as(&self, user: &str, approval: &str) -> Result<Approval, ApprovalError> {
        approve(&self.database, None, approval, &caller(user, Role::Admin)).await
    }

    /// Rows of the audits and of batches that name both people.
    async fn executions(&self) -> i64 {
        let both = "os_user LIKE 'alice@page (admin, user), approved by %@page (admin, user)'";
        let created = both.replace("os_user", "created_by");
        let sql = format!(
            "SELECT (SELECT count(*) FROM job_audit WHERE {both}) + (SELECT count(*) FROM settings_audit WHERE {both}) \
                 + (SELECT count(*) FROM decision_batches WHERE {created})"
        );
        self.number(&sql).await
    }

    async fn number(&self, sql: &str) -> i64 {
        let sql = AssertSqlSafe(sql.to_owned());
        match &self.postgres {
            Some(pool) => sqlx::query_scalar(sql).fetch_one(pool).await.unwrap(),
            None => sqlx::query_scalar(sql).fetch_one(&self.database.sqlite_pool().unwrap()).await.unwrap(),
        }
    }

    async fn state_of_approval(&self, id: &str) -> ApprovalState {
        find_approval(&self.database, id).await.unwrap().state
    }
}

async fn of_many_approvers_one_executes(kind: Kind) {
    for (asked, executions) in [
        (Asked::Job, 1),
        (Asked::Batch, 1),
        (Asked::Limit, 1),
        (Asked::Pause, 1),
        // Its row in the audit is that of the resume.
        (Asked::Resume, 1),
        (Asked::PauseAll, 1),
    ] {
        let fixture = Fixture::to_decide(kind).await;
        let approval = fixture.ask(asked).await;
        let users = ["bob", "carol", "dave", "erin"];
        let approved = join_all(users.map(|user| fixture.approve_as(user, &approval))).await;
        let done = approved.iter().filter(|approved| approved.is_ok()).count();
        assert_eq!(done, 1, "{asked:?}: {approved:?}");
        for error in approved.iter().filter_map(|approved| approved.as_ref().err()) {
            let expected = matches!(error, ApprovalError::Decided { state: ApprovalState::Approved, .. });
            assert!(expected, "{asked:?}: {error}");
        }
        assert_eq!(fixture.executions().await, executions, "{asked:?}");
        let approval = find_approval(&fixture.database, &approval).await.unwrap();
        assert_eq!(approval.batch.is_some(), asked == Asked::Batch);
        assert!(users.contains(&approval.decided_by.unwrap().name.as_str()));
    }
}

async fn of_many_requests_one_is_stored(kind: Kind) {
    let fixture = Fixture::to_decide(kind).await;
    let asked = join_all((0..4).map(|_| fixture.try_ask(Asked::Job))).await;
    let stored: Vec<&String> = asked.iter().filter_map(|asked| asked.as_ref().ok()).collect();
    assert_eq!(stored.len(), 1, "{asked:?}");
    for error in asked.iter().filter_map(|asked| asked.as_ref().err()) {
        assert!(matches!(error, ApprovalError::Awaited(id) if id == stored[0]), "{error}");
    }
    assert_eq!(fixture.database.pending_approvals().await.unwrap(), 1);
}

/// Neither half is written without the other, so a crash cannot be between them.
async fn change_and_approval_are_one_transaction(kind: Kind) {
    let fixture = Fixture::to_decide(kind).await;
    let (ledger, bolt) = (&fixture.database, name("bolt"));
    let approval = fixture.ask(Asked::Pause).await;
    let grant = |id: &str, settings_version| {
        let (id, decision) = (id.to_owned(), decision(ApprovalState::Approved));
        ledger.approved_by(ApprovalGrant { id, decision, settings_version })
    };
    let version = ledger.settings_version().await.unwrap();
    // The change cannot be made: the approval stays pending.
    assert!(!grant(&approval, None).set_paused_as(&name("none"), true, Some(&by())).await.unwrap());
    assert!(!grant(&approval, Some(version - 1)).set_paused_as(&bolt, true, Some(&by())).await.unwrap());
    assert_eq!(fixture.state_of_approval(&approval).await, ApprovalState::Pending);
    // The approval cannot be written: the change is not made.
    let refused = fixture.ask(Asked::PauseAll).await;
    assert!(ledger.decide_approval(&refused, &decision(ApprovalState::Refused)).await.unwrap());
    for id in [refused.as_str(), "unknown"] {
        assert!(!grant(id, None).set_paused_as(&bolt, true, Some(&by())).await.unwrap());
        assert!(grant(id, None).pause_all(&by()).await.is_err());
        let declined = grant(id, None).resolve_job(&super::id("a"), &JobResolution::Declined, None, &by()).await;
        assert_eq!(settled(declined), Err(ResolutionRefusal::Changed));
    }
    assert_eq!((fixture.executions().await, ledger.settings_version().await.unwrap()), (0, version));
    assert_eq!(fixture.details("a").await.line.state, "review");
    // Both can.
    assert!(grant(&approval, Some(version)).set_paused_as(&bolt, true, Some(&by())).await.unwrap());
    assert_eq!(fixture.state_of_approval(&approval).await, ApprovalState::Approved);
    assert!(!grant(&approval, None).set_paused_as(&bolt, false, Some(&by())).await.unwrap(), "once");
}

async fn only_another_person_with_the_role_approves(kind: Kind) {
    let fixture = Fixture::to_decide(kind).await;
    let (job, limit) = (fixture.ask(Asked::Job).await, fixture.ask(Asked::Limit).await);
    let named = |name: &str, path| {
        let mut caller = caller(name, Role::Admin);
        caller.identity.path = path;
        caller
    };
    for (caller, words) in [
        (named("alice", IdentityPath::User), "a second person decides"),
        (named("Alice@corp.example", IdentityPath::Proxy), "a second person decides"),
        (named("alice@desk", IdentityPath::Os), "a second person decides"),
        (named("root (sudo alice)@desk", IdentityPath::Os), "a second person decides"),
        (named("token", IdentityPath::Token), "names no person"),
        (named("", IdentityPath::Open), "names no person"),
        (caller("eve", Role::Viewer), "needs role `operator`, and eve has role `viewer`"),
    ] {
        let refused = approve(&fixture.database, None, &job, &caller).await.unwrap_err().to_string();
        assert!(refused.contains(words), "{caller:?}: {refused}");
    }
    let refused = approve(&fixture.database, None, &limit, &caller("bob", Role::Operator)).await.unwrap_err();
    assert!(matches!(refused, ApprovalError::RoleTooLow { needed: Role::Admin, .. }), "{refused}");
    assert_eq!((fixture.executions().await, fixture.database.pending_approvals().await.unwrap()), (0, 2));
    let done = approve(&fixture.database, None, &job, &caller("bob", Role::Operator)).await.unwrap();
    assert_eq!(done.state, ApprovalState::Approved);
    assert_eq!(fixture.details("a").await.line.state, "declined");
}

async fn request_ends_after_its_time(kind: Kind) {
    let fixture = Fixture::to_decide(kind).await;
    let approval = fixture.ask(Asked::Job).await;
    fixture.sql("UPDATE pending_approvals SET expires_at = requested_at").await.unwrap();
    let late = fixture.approve_as("bob", &approval).await.unwrap_err();
    assert!(matches!(late, ApprovalError::Decided { state: ApprovalState::Expired, .. }), "{late}");
    // Its time ends between the look and the change.
    let grant =
        ApprovalGrant { id: approval.clone(), decision: decision(ApprovalState::Approved), settings_version: None };
    let granted = fixture.database.approved_by(grant);
    let declined = granted.resolve_job(&id("a"), &JobResolution::Declined, None, &by()).await;
    assert_eq!(settled(declined), Err(ResolutionRefusal::Changed));
    assert_eq!((fixture.executions().await, fixture.details("a").await.line.state.as_str()), (0, "review"));
    assert_eq!(fixture.database.expire_approvals().await.unwrap(), 1);
    assert_eq!(fixture.database.expire_approvals().await.unwrap(), 0);
}

async fn changed_actions_are_refused_for_good(kind: Kind) {
    for (asked, sql, words) in [
        (Asked::Job, None, "the job is `succeeded`"),
        (Asked::Batch, None, "the selected payments have changed"),
        (
            Asked::Limit,
            Some("UPDATE provider_limits SET max_requests = 99"),
            "limit `all` has changed since the request",
        ),
        (Asked::Resume, Some("UPDATE providers SET timeout_ms = 9000"), "bolt has changed since the request"),
        (Asked::Pause, Some("DELETE FROM providers"), "there is no provider `bolt`"),
    ] {
        let fixture = Fixture::to_decide(kind).await;
        let approval = fixture.ask(asked).await;
        match sql {
            Some(sql) => fixture.sql(sql).await.unwrap(),
            None => fixture.decide("a", &JobResolution::Succeeded { reference: None }).await.unwrap(),
        }
        let refused = fixture.approve_as("bob", &approval).await.unwrap_err();
        assert!(matches!(&refused, ApprovalError::Refused { .. }), "{asked:?}: {refused}");
        assert!(refused.to_string().contains(words), "{asked:?}: {refused}");
        let now = find_approval(&fixture.database, &approval).await.unwrap();
        assert_eq!((now.state, fixture.executions().await), (ApprovalState::Refused, 0), "{asked:?}");
        assert!(now.decided_because.unwrap().contains(words));
    }
}

async fn unseen_payment_is_cancelled_once(kind: Kind) {
    let fixture = Fixture::to_decide(kind).await;
    let (ledger, policy) = (&fixture.database, &policy());
    let gate = ApprovalGate { ledger, policy, caller: caller("alice", Role::Operator) };
    let approval = gate.precancel(&id("unseen"), &name("bolt")).await.unwrap().unwrap().id;
    let found = find_approval(ledger, &approval).await.unwrap();
    assert_eq!((found.jobs, found.sums.len()), (1, 0), "its amount is unknown");
    let approved = join_all(["bob", "carol"].map(|user| fixture.approve_as(user, &approval))).await;
    assert_eq!(approved.iter().filter(|approved| approved.is_ok()).count(), 1, "{approved:?}");
    assert_eq!(fixture.details("unseen").await.line.state, "cancelled");
}

async fn old_requests_are_forgotten(kind: Kind) {
    let fixture = Fixture::to_decide(kind).await;
    let ledger = &fixture.database;
    let (job, pause) = (fixture.ask(Asked::Job).await, fixture.ask(Asked::Pause).await);
    fixture.approve_as("bob", &job).await.unwrap();
    assert_eq!(ledger.forget_approvals(Duration::ZERO, 9).await.unwrap(), 0, "their time is not over");
    fixture.sql("UPDATE pending_approvals SET expires_at = requested_at").await.unwrap();
    assert_eq!(ledger.forget_approvals(DAY, 9).await.unwrap(), 0);
    assert_eq!(ledger.forget_approvals(Duration::ZERO, 9).await.unwrap(), 1, "a pending one is first expired");
    ledger.expire_approvals().await.unwrap();
    assert_eq!(ledger.forget_approvals(Duration::ZERO, 9).await.unwrap(), 1);
    assert!(
        ledger.approval(&pause).await.unwrap().is_none()
            && ledger.list_approvals(None, None, 9).await.unwrap().approvals.is_empty()
    );
}
