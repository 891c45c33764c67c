//! Actions that wait for a second person: the stored action, who requested it, and what became of it.
//!
//! A gated action is stored as data instead of executed. An approval is written in the transaction of the action's own
//! change, see [`super::database::Database::approved_by`]. So two approvers cannot execute it twice, nor a crash half.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use utoipa::ToSchema;

use super::decision_batches::BatchDecision;
use super::operator::{CurrencyTotal, DatabaseTime, JobResolution};
use crate::domain::approval::GatedAction;
use crate::domain::names::named_enum;
use crate::domain::person::{Identity, IdentityPath, Role};

/// An action with all that its execution needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum StoredAction {
    /// A decision about one payment.
    Job {
        job: String,
        provider: String,
        decision: BatchDecision,
        reference: Option<String>,
        /// Its fencing token at the request; `None`: workers may change it meanwhile.
        seen_fence: Option<i64>,
    },
    /// The cancellation of a payment whose message has not come.
    Precancel {
        job: String,
        provider: String,
    },
    /// The start of a decision about many payments, whose ids are stored beside it.
    Batch {
        decision: BatchDecision,
        digest: String,
        rate: String,
    },
    /// A limit's new rate, and what it was at the request.
    Limit {
        provider: String,
        limit: String,
        from: LimitBefore,
        to: String,
        until_ms: Option<i64>,
    },
    Pause {
        provider: String,
    },
    /// With the version of the provider's row at the request.
    Resume {
        provider: String,
        version: i64,
    },
    PauseAll,
    /// With the pause that was in force at the request, and the providers that it held.
    ResumeAll {
        pause: i64,
        providers: Vec<String>,
    },
}

/// A limit before its change, in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitBefore {
    pub rate: String,
    /// The planned return.
    pub returns: Option<String>,
}

impl StoredAction {
    /// The action as the rules name it.
    pub fn gated_action(&self) -> GatedAction {
        match self {
            Self::Job { decision, .. } | Self::Batch { decision, .. } => gated_decision(*decision),
            Self::Precancel { .. } => GatedAction::Cancel,
            Self::Limit { .. } => GatedAction::Limit,
            Self::Pause { .. } | Self::PauseAll => GatedAction::Pause,
            Self::Resume { .. } | Self::ResumeAll { .. } => GatedAction::Resume,
        }
    }

    /// The digest by which the same action is requested once at a time.
    pub fn digest(&self) -> String {
        let text = serde_json::to_string(self).unwrap_or_default();
        hex::encode(Sha256::digest(text))
    }
}

/// The action of a decision as the rules name it.
pub fn gated_decision(decision: BatchDecision) -> GatedAction {
    match decision {
        BatchDecision::Succeeded => GatedAction::Succeeded,
        BatchDecision::Declined => GatedAction::Declined,
        BatchDecision::Resend => GatedAction::Resend,
        BatchDecision::Cancel => GatedAction::Cancel,
        BatchDecision::Replay => GatedAction::Replay,
        BatchDecision::Discard => GatedAction::Discard,
    }
}

/// The kind of a resolution, without its reference.
pub fn decision_of(resolution: &JobResolution) -> BatchDecision {
    match resolution {
        JobResolution::Succeeded { .. } => BatchDecision::Succeeded,
        JobResolution::Declined => BatchDecision::Declined,
        JobResolution::Resend => BatchDecision::Resend,
        JobResolution::Cancel => BatchDecision::Cancel,
        JobResolution::Replay => BatchDecision::Replay,
        JobResolution::Discard => BatchDecision::Discard,
    }
}

named_enum! {
    /// What became of a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "lowercase")]
    pub enum ApprovalState {
        Pending = "pending",
        Approved = "approved",
        Refused = "refused",
        /// By the person who requested it.
        Withdrawn = "withdrawn",
        /// Not decided in time.
        Expired = "expired",
    }
    pub fn name(self);
}

impl ApprovalState {
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

/// A person with the role that it had at that time, and how it was identified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Party {
    pub name: String,
    /// `viewer`, `operator` or `admin`.
    pub role: String,
    /// `user`, `proxy`, or `os` for a command.
    pub path: String,
}

impl Party {
    /// `None`: the stored role or path is unknown.
    pub fn identity(&self) -> Option<Identity> {
        let (role, path) = (Role::from_name(&self.role)?, IdentityPath::from_name(&self.path)?);
        Some(Identity { name: self.name.clone(), role, path })
    }
}

impl From<&Identity> for Party {
    fn from(identity: &Identity) -> Self {
        let (role, path) = (identity.role.name().to_owned(), identity.path.name().to_owned());
        Self { name: identity.name.clone(), role, path }
    }
}

/// A request that is to be stored.
#[derive(Clone, Debug)]
pub struct NewApproval {
    /// 32 hexadecimal digits, larger than those of all requests before.
    pub id: String,
    pub action: StoredAction,
    /// Ids of the payments of a batch.
    pub members: Option<Vec<String>>,
    pub jobs: u64,
    /// Empty: unknown, or none.
    pub sums: Vec<CurrencyTotal>,
    pub expire_after: Duration,
    pub by: Identity,
    /// The requester as the audit names it.
    pub author: String,
    pub because: Option<String>,
}

/// Whether a request was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApprovalRequest {
    Stored {
        expires_at: DatabaseTime,
    },
    /// The same action waits already.
    Pending(String),
}

/// A stored request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Approval {
    pub id: String,
    pub state: ApprovalState,
    pub action: StoredAction,
    pub jobs: u64,
    pub sums: Vec<CurrencyTotal>,
    pub requested_by: Party,
    pub requested_as: String,
    pub requested_at: DatabaseTime,
    pub expires_at: DatabaseTime,
    pub because: Option<String>,
    pub decided_by: Option<Party>,
    pub decided_at: Option<DatabaseTime>,
    pub decided_because: Option<String>,
    /// The batch that the approval began.
    pub batch: Option<String>,
}

/// A page of requests, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalPage {
    pub approvals: Vec<Approval>,
    /// The next page begins after this id; `None` on the last.
    pub next: Option<String>,
}

/// The decision about a request, and who makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalDecision {
    pub state: ApprovalState,
    pub by: Identity,
    pub because: Option<String>,
}

/// The right to make one approved change.
#[derive(Clone, Debug)]
pub struct ApprovalGrant {
    pub id: String,
    pub decision: ApprovalDecision,
    /// The settings must have this version still.
    pub settings_version: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn action_survives_its_json() {
        let from = LimitBefore { rate: "100/1s".to_owned(), returns: None };
        let [provider, limit, to] = ["acme", "all", "200/1s"].map(str::to_owned);
        for (action, gated) in [
            (StoredAction::Precancel { job: "p".to_owned(), provider: provider.clone() }, GatedAction::Cancel),
            (StoredAction::Pause { provider: provider.clone() }, GatedAction::Pause),
            (StoredAction::PauseAll, GatedAction::Pause),
            (StoredAction::ResumeAll { pause: 7, providers: vec![provider.clone()] }, GatedAction::Resume),
            (StoredAction::Limit { provider, limit, from, to, until_ms: None }, GatedAction::Limit),
        ] {
            let text = serde_json::to_string(&action).unwrap();
            assert_eq!(serde_json::from_str::<StoredAction>(&text).unwrap(), action);
            assert_eq!((action.gated_action(), action.digest().len()), (gated, 64));
        }
        for decision in BatchDecision::ALL {
            assert_eq!(gated_decision(decision).name(), decision.name());
            assert_eq!(decision_of(&decision.resolution()), decision);
        }
        for state in ApprovalState::ALL {
            assert_eq!(ApprovalState::from_name(state.name()), Some(state));
        }
    }
}
