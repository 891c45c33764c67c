//! A stored action as API and commands show it: what would be done, by whose request, and what the caller may do about it.

use jiff::Timestamp;
use serde::Serialize;
use utoipa::ToSchema;

use super::Caller;
use super::decide::{check_second_person, is_requester, result_words};
use crate::domain::format::count;
use crate::ledger::approvals::{Approval, ApprovalState, Party, StoredAction};
use crate::ledger::decision_batches::BatchDecision;
use crate::ledger::operator::{CurrencyTotal, DatabaseTime};

/// One request as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ApprovalView {
    pub id: String,
    pub state: ApprovalState,
    /// As `approvals.require` names it.
    pub action: String,
    /// What would be done, in words.
    pub text: String,
    /// Of a decision about many payments.
    pub batch: Option<ApprovalBatch>,
    /// The payment of a decision about one.
    pub job: Option<String>,
    pub provider: Option<String>,
    pub limit: Option<ApprovalLimit>,
    /// Payments that it would change; 0 for limits and pauses.
    pub payments: u64,
    /// Their number and sum by currency. Empty: unknown, or there are none.
    pub sums: Vec<CurrencyTotal>,
    pub because: Option<String>,
    /// The role that an approval needs at least.
    pub needed_role: String,
    pub requested_by: Party,
    pub requested_at: DatabaseTime,
    pub expires_at: DatabaseTime,
    /// `null`: it is pending or expired.
    pub decided_by: Option<Party>,
    pub decided_at: Option<DatabaseTime>,
    pub decided_because: Option<String>,
    /// What the approval has done, in words.
    pub result: Option<String>,
    /// The batch that the approval began.
    pub result_batch: Option<String>,
    pub you: ApprovalRights,
}

/// The set of a decision about many payments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ApprovalBatch {
    /// That of the preview.
    pub digest: String,
    pub rate: String,
}

/// A limit and its change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ApprovalLimit {
    pub name: String,
    pub from: String,
    pub to: String,
    /// `null`: it stays.
    pub until: Option<String>,
}

/// What the caller may do about a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ApprovalRights {
    /// Whether the caller may approve or refuse it now.
    pub may_decide: bool,
    /// Whether it is the caller's own request.
    pub may_withdraw: bool,
    /// Why the caller may not decide a pending request.
    pub why_not: Option<String>,
}

/// A page of requests, newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ApprovalViewPage {
    pub approvals: Vec<ApprovalView>,
    /// The next page begins after this id; `null` on the last.
    pub next: Option<String>,
}

impl ApprovalView {
    pub fn new(approval: Approval, caller: &Caller) -> Self {
        let pending = approval.state == ApprovalState::Pending;
        let why_not = check_second_person(&approval, caller).err().filter(|_| pending).map(|why| why.to_string());
        let is_own = caller.identity.names_a_person() && is_requester(&approval, caller);
        let you = ApprovalRights { may_decide: pending && why_not.is_none(), may_withdraw: pending && is_own, why_not };
        let action = approval.action.gated_action();
        let (text, result) = (describe(&approval), result_words(&approval));
        let (mut batch, mut job, mut limit, mut provider) = (None, None, None, None);
        match approval.action {
            StoredAction::Job { job: id, provider: of, .. } | StoredAction::Precancel { job: id, provider: of } => {
                (job, provider) = (Some(id), Some(of));
            }
            StoredAction::Batch { digest, rate, .. } => batch = Some(ApprovalBatch { digest, rate }),
            StoredAction::Limit { provider: of, limit: name, from, to, until_ms } => {
                limit = Some(ApprovalLimit { name, from: from.rate, to, until: until_ms.map(instant) });
                provider = Some(of);
            }
            StoredAction::Pause { provider: of } | StoredAction::Resume { provider: of, .. } => provider = Some(of),
            StoredAction::PauseAll | StoredAction::ResumeAll { .. } => {}
        }
        Self {
            id: approval.id,
            state: approval.state,
            action: action.name().to_owned(),
            text,
            batch,
            job,
            provider,
            limit,
            payments: approval.jobs,
            sums: approval.sums,
            because: approval.because,
            needed_role: action.needed_role().name().to_owned(),
            requested_by: approval.requested_by,
            requested_at: approval.requested_at,
            expires_at: approval.expires_at,
            decided_by: approval.decided_by,
            decided_at: approval.decided_at,
            decided_because: approval.decided_because,
            result,
            result_batch: approval.batch,
            you,
        }
    }
}

fn instant(ms: i64) -> String {
    Timestamp::from_millisecond(ms).map_or_else(|_| format!("{ms} ms"), |at| at.to_string())
}

/// What a stored action would do, in words.
pub fn describe(approval: &Approval) -> String {
    match &approval.action {
        StoredAction::Job { job, provider, decision, reference, .. } => {
            let reference = reference.as_ref().map(|text| format!(", reference {text}")).unwrap_or_default();
            format!("{}{reference}", decision_words(*decision, &format!("payment {job} of {provider}")))
        }
        StoredAction::Precancel { job, provider } => {
            format!("cancel payment {job} of {provider} before its message comes")
        }
        StoredAction::Batch { decision, rate, .. } => {
            format!("{} at {rate}", decision_words(*decision, &count(approval.jobs, "payment")))
        }
        StoredAction::Limit { provider, limit, from, to, until_ms } => {
            let until = until_ms.map(|ms| format!(" until {}", instant(ms))).unwrap_or_default();
            format!("change limit {limit} of {provider} from {} to {to}{until}", from.rate)
        }
        StoredAction::Pause { provider } => format!("pause {provider}"),
        StoredAction::Resume { provider, .. } => format!("resume {provider}"),
        StoredAction::PauseAll => "pause all providers".to_owned(),
        StoredAction::ResumeAll { providers, .. } => {
            format!("resume what the pause of all has paused: {}", providers.join(", "))
        }
    }
}

fn decision_words(decision: BatchDecision, what: &str) -> String {
    match decision {
        BatchDecision::Succeeded | BatchDecision::Declined => format!("resolve {what} as {}", decision.name()),
        BatchDecision::Resend => format!("send {what} again"),
        BatchDecision::Cancel | BatchDecision::Replay | BatchDecision::Discard => {
            format!("{} {what}", decision.name())
        }
    }
}
