//! Pending approvals on a large ledger: a request, its decision within the change, lists, and the deletion of old ones.

use std::time::Duration;

use sluicegate::domain::person::{Identity, IdentityPath, Role};
use sluicegate::ledger::approvals::{ApprovalDecision, ApprovalRequest, ApprovalState, NewApproval, StoredAction};

use super::super::*;
use super::Explained;
use super::work::Working;

impl<E: Explained> Working<'_, E> {
    pub async fn approvals(&mut self, round: u32) {
        let ledger = self.fixture.database.clone();
        let by = |name: &str| Identity { name: name.to_owned(), role: Role::Operator, path: IdentityPath::User };
        let id = format!("{:032x}", u32::from(self.run.as_bytes()[0]) * 1_000 + round);
        let new = NewApproval {
            id: id.clone(),
            action: StoredAction::Pause { provider: format!("{}-{round}", self.run) },
            members: None,
            jobs: 0,
            sums: Vec::new(),
            expire_after: Duration::from_secs(60),
            by: by("alice"),
            author: "alice@page (operator, user)".to_owned(),
            because: None,
        };
        let stored = ledger.request_approval(&new).await.unwrap();
        assert!(matches!(stored, ApprovalRequest::Stored { .. }), "{stored:?}");
        assert_eq!(ledger.request_approval(&new).await.unwrap(), ApprovalRequest::Pending(id.clone()));
        assert!(ledger.pending_approvals().await.unwrap() > 0);
        assert!(ledger.approval(&id).await.unwrap().is_some());
        assert!(!ledger.list_approvals(Some(ApprovalState::Pending), None, 10).await.unwrap().approvals.is_empty());
        assert!(ledger.approval_members(&id).await.unwrap().is_empty());
        ledger.provider_version(&name("lane-1")).await.unwrap();
        let refused = ApprovalDecision { state: ApprovalState::Refused, by: by("bob"), because: None };
        assert!(ledger.decide_approval(&id, &refused).await.unwrap());
        ledger.expire_approvals().await.unwrap();
        ledger.forget_approvals(Duration::from_secs(60), 10).await.unwrap();
        self.did("an approval is requested and decided").await;
    }
}
