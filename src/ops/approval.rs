//! The gate before each action that may need two people: it lets the action pass, or stores it for a second person.
//!
//! API and commands ask it before they change anything. A caller that names no person, such as the holder of a token,
//! cannot request: the same person could then approve. See `docs/decisions/0050-two-people.md`.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::batch::{BatchError, Confirmation, PreparedBatch};
use super::change::SettingsChangeError;
use super::limit_change::{RateChange, WantedLimit};
use crate::config::approvals::ApprovalsConfig;
use crate::domain::approval::{ActionSize, Gate, GatedAction};
use crate::domain::job::JobId;
use crate::domain::person::{Identity, IdentityPath, Role};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::approvals::{
    ApprovalRequest, ApprovalState, NewApproval, StoredAction, decision_of, gated_decision,
};
use crate::ledger::database::Database;
use crate::ledger::operator::{
    Actor, CurrencyTotal, DatabaseTime, JobResolution, ReloadedJob, ResolutionError, ResolutionRefusal,
};
use crate::queue::QueueError;
use crate::worker::resend::ResendError;

pub mod decide;
pub mod view;

/// A caller: who it is, and as the audit names it.
#[derive(Clone, Debug)]
pub struct Caller {
    pub identity: Identity,
    pub actor: Actor,
}

impl Caller {
    /// The caller of a command: the operating system's user, with all rights of the database's user.
    pub fn of_command(actor: Actor) -> Self {
        let identity = Identity { name: actor.os_user.clone(), role: Role::Admin, path: IdentityPath::Os };
        Self { identity, actor }
    }

    /// The caller with role and path, for the audit.
    pub fn author(&self) -> String {
        let Identity { role, path, .. } = &self.identity;
        match path {
            IdentityPath::Os => format!("{} ({role}, {path})", self.actor.os_user),
            // The server names both where people are configured.
            _ => self.actor.os_user.clone(),
        }
    }
}

/// A stored action that waits for a second person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwaitedApproval {
    pub id: String,
    pub expires_at: DatabaseTime,
}

impl std::fmt::Display for AwaitedApproval {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "awaits a second person: approval {}", self.id)
    }
}

/// Why an action was not stored, or an approval not decided.
#[derive(Debug, thiserror::Error)]
pub enum ApprovalError {
    #[error(
        "`{action}` needs two people, and {} names no person: use a name of ops.users, or the proxy that names you",
        .who
    )]
    NoPerson { action: GatedAction, who: String },
    #[error("the same action awaits a second person already: approval {0}")]
    Awaited(String),
    #[error("no pause of all providers is in force")]
    NothingToResume,
    #[error("there is no approval with this id")]
    Unknown,
    #[error("approval {id} is {} already", .state.name())]
    Decided { id: String, state: ApprovalState },
    #[error("{0} requested it, and a second person decides; the requester can withdraw it")]
    SamePerson(String),
    #[error("only {0}, who requested it, can withdraw it")]
    NotRequester(String),
    #[error("`{action}` needs role `{needed}`, and {who} has role `{role}`")]
    RoleTooLow { action: GatedAction, who: String, needed: Role, role: Role },
    #[error("`because`: is missing: write why it is refused")]
    NoReason,
    /// The action could not be executed any more, and the request is refused.
    #[error("approval {id} is refused: {why}")]
    Refused { id: String, why: String },
    #[error(transparent)]
    Resend(#[from] ResendError),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    Settings(#[from] SettingsChangeError),
    #[error("nothing was changed: {0}")]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl From<ResolutionError> for ApprovalError {
    fn from(error: ResolutionError) -> Self {
        ResendError::from(error).into()
    }
}

/// The gate of one caller.
pub struct ApprovalGate<'a> {
    pub ledger: &'a Database,
    pub policy: &'a ApprovalsConfig,
    pub caller: Caller,
}

/// An action and its size, as far as it is known.
struct SizedAction {
    action: StoredAction,
    members: Option<Vec<String>>,
    payments: u64,
    /// `None`: some amount is unknown.
    sums: Option<Vec<CurrencyTotal>>,
}

impl SizedAction {
    /// An action that is not about payments.
    fn without_payments(action: StoredAction) -> Self {
        Self { action, members: None, payments: 0, sums: Some(Vec::new()) }
    }

    fn size(&self) -> ActionSize {
        let by_currency = |sums: &Vec<CurrencyTotal>| {
            sums.iter().map(|sum| (sum.currency.clone(), sum.amount)).collect::<BTreeMap<_, _>>()
        };
        ActionSize { payments: self.payments, sums: self.sums.as_ref().map(by_currency) }
    }
}

impl ApprovalGate<'_> {
    /// Whether the action can need a second person, whatever its size.
    pub fn concerns(&self, action: GatedAction) -> bool {
        self.policy.rules.concern(action)
    }

    /// Before a decision about one payment. `None`: it passes.
    ///
    /// # Errors
    /// Why the decision would be refused, or why it was not stored.
    pub async fn job(&self, id: &JobId, resolution: &JobResolution) -> Result<Option<AwaitedApproval>, ApprovalError> {
        if !self.concerns(gated_decision(decision_of(resolution))) {
            return Ok(None);
        }
        let reloaded = self.ledger.reload_job(id, resolution).await?;
        self.pass_or_store(job_action(reloaded, resolution)).await
    }

    /// Before a cancellation that may come before the payment's message. `None`: it passes.
    ///
    /// # Errors
    /// Those of [`Self::job`].
    pub async fn precancel(
        &self,
        id: &JobId,
        provider: &ProviderName,
    ) -> Result<Option<AwaitedApproval>, ApprovalError> {
        if !self.concerns(GatedAction::Cancel) {
            return Ok(None);
        }
        let sized = match self.ledger.reload_job(id, &JobResolution::Cancel).await {
            Ok(found) if found.job.provider == *provider => job_action(found, &JobResolution::Cancel),
            Ok(found) => {
                let provider = found.job.provider.to_string();
                return Err(ResendError::from(ResolutionRefusal::OtherProvider { provider }).into());
            }
            Err(ResolutionError::Refused(ResolutionRefusal::NoSuchJob)) => SizedAction {
                action: StoredAction::Precancel { job: id.to_string(), provider: provider.to_string() },
                members: None,
                payments: 1,
                sums: None,
            },
            Err(error) => return Err(error.into()),
        };
        self.pass_or_store(sized).await
    }

    /// Before a confirmed decision about many payments. `None`: it passes.
    ///
    /// # Errors
    /// What the confirmation lacks, or why it was not stored.
    pub async fn batch(
        &self,
        prepared: &PreparedBatch,
        confirmed: &Confirmation,
    ) -> Result<Option<AwaitedApproval>, ApprovalError> {
        let preview = &prepared.preview;
        if !self.concerns(gated_decision(preview.decision)) {
            return Ok(None);
        }
        prepared.check_confirmation(confirmed)?;
        let (digest, rate) = (preview.digest.clone(), confirmed.rate.to_string());
        self.pass_or_store(SizedAction {
            action: StoredAction::Batch { decision: preview.decision, digest, rate },
            members: Some(prepared.ids()),
            payments: preview.jobs,
            sums: Some(preview.sums.clone()),
        })
        .await
    }

    /// Before a change of a limit, as a dry run shows it. `None`: it passes.
    ///
    /// # Errors
    /// Why it was not stored.
    pub async fn limit(
        &self,
        wanted: &WantedLimit<'_>,
        change: &RateChange,
    ) -> Result<Option<AwaitedApproval>, ApprovalError> {
        if !self.concerns(GatedAction::Limit) || !change.is_change() {
            return Ok(None);
        }
        let action = StoredAction::Limit {
            provider: wanted.provider.to_string(),
            limit: wanted.limit.to_owned(),
            from: change.before(),
            to: change.rate_after.to_string(),
            until_ms: change.returns_after.map(|returns| returns.until.0),
        };
        self.pass_or_store(SizedAction::without_payments(action)).await
    }

    /// Before a pause or a resume of one provider. `None`: it passes.
    ///
    /// # Errors
    /// When there is no such provider, or why it was not stored.
    pub async fn pause(&self, provider: &ProviderName, paused: bool) -> Result<Option<AwaitedApproval>, ApprovalError> {
        if !self.concerns(if paused { GatedAction::Pause } else { GatedAction::Resume }) {
            return Ok(None);
        }
        let found = self.ledger.provider_version(provider).await?;
        let version = found.ok_or_else(|| SettingsChangeError::NoProvider(provider.to_string()))?;
        let provider = provider.to_string();
        self.pass_or_store(SizedAction::without_payments(match paused {
            true => StoredAction::Pause { provider },
            false => StoredAction::Resume { provider, version },
        }))
        .await
    }

    /// Before a pause of all providers. `None`: it passes.
    ///
    /// # Errors
    /// Why it was not stored.
    pub async fn pause_all(&self) -> Result<Option<AwaitedApproval>, ApprovalError> {
        match self.concerns(GatedAction::Pause) {
            true => self.pass_or_store(SizedAction::without_payments(StoredAction::PauseAll)).await,
            false => Ok(None),
        }
    }

    /// Before the resume of all providers that a pause of all holds. `None`: it passes.
    ///
    /// # Errors
    /// When no such pause is in force, or why it was not stored.
    pub async fn resume_all(&self) -> Result<Option<AwaitedApproval>, ApprovalError> {
        if !self.concerns(GatedAction::Resume) {
            return Ok(None);
        }
        let pause = self.ledger.pause_of_all().await?.ok_or(ApprovalError::NothingToResume)?;
        let action = StoredAction::ResumeAll { pause: pause.id, providers: pause.providers };
        self.pass_or_store(SizedAction::without_payments(action)).await
    }

    async fn pass_or_store(&self, sized: SizedAction) -> Result<Option<AwaitedApproval>, ApprovalError> {
        let action = sized.action.gated_action();
        if self.policy.rules.gate(action, &sized.size()) == Gate::Open {
            return Ok(None);
        }
        let Caller { identity, actor } = &self.caller;
        if !identity.names_a_person() {
            return Err(ApprovalError::NoPerson { action, who: called(identity) });
        }
        let new = NewApproval {
            id: Uuid::now_v7().simple().to_string(),
            action: sized.action,
            members: sized.members,
            jobs: sized.payments,
            sums: sized.sums.unwrap_or_default(),
            expire_after: self.policy.expire_after,
            by: identity.clone(),
            author: self.caller.author(),
            because: actor.reason.clone(),
        };
        match self.ledger.request_approval(&new).await? {
            ApprovalRequest::Stored { expires_at } => {
                tracing::info!(approval = new.id, %action, by = new.author, "an action awaits a second person");
                Ok(Some(AwaitedApproval { id: new.id, expires_at }))
            }
            ApprovalRequest::Pending(id) => Err(ApprovalError::Awaited(id)),
        }
    }
}

/// A caller in a sentence.
fn called(identity: &Identity) -> String {
    match identity.path {
        IdentityPath::Token => "the token".to_owned(),
        _ if identity.name.is_empty() => "this caller".to_owned(),
        _ => identity.name.clone(),
    }
}

fn job_action(found: ReloadedJob, resolution: &JobResolution) -> SizedAction {
    let (decision, job) = (decision_of(resolution), found.job);
    let reference = match resolution {
        JobResolution::Succeeded { reference } => reference.clone(),
        _ => None,
    };
    let action = StoredAction::Job {
        job: job.id.to_string(),
        provider: job.provider.to_string(),
        decision,
        reference,
        seen_fence: (!decision.is_about_open_jobs()).then_some(found.fence),
    };
    let sum = CurrencyTotal { currency: job.currency, jobs: 1, amount: job.amount };
    SizedAction { action, members: None, payments: 1, sums: Some(vec![sum]) }
}
