//! The decision about a stored action: another person approves or refuses it, or its requester withdraws it.
//!
//! An approval executes the action under both names. The change and the approval are one transaction of the database, so
//! a crash between them cannot be, and of two approvers one executes it. A message of a payment that is sent again is
//! published after it; the sweeper publishes one that is missing.

use super::view::describe;
use super::{ApprovalError, Caller, called};
use crate::domain::job::JobId;
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::approvals::{Approval, ApprovalDecision, ApprovalGrant, ApprovalState, Party, StoredAction};
use crate::ledger::database::Database;
use crate::ledger::decision_batches::{BatchDecision, BatchRate};
use crate::ledger::operator::{Actor, JobResolution, ResolutionRefusal};
use crate::ops::batch::{BatchError, Confirmation, JobList, prepare_list};
use crate::ops::change::{SettingsChangeError, set_paused};
use crate::ops::limit_change::{WantedLimit, set_limit};
use crate::ops::until::Until;
use crate::queue::Queue;
use crate::queue::message::CardNumbers;
use crate::worker::resend::{ResendError, Resender, provider_names};

/// How often a resume restarts because settings changed meanwhile.
const TRIES_MAX: u32 = 10;

/// How approved payments are sent again.
pub struct Sender<'a> {
    pub queue: &'a dyn Queue,
    pub card_numbers: CardNumbers,
}

/// Whether the execution publishes a message.
pub fn needs_queue(action: &StoredAction) -> bool {
    matches!(action, StoredAction::Job { decision, .. } if decision.resolution().needs_resend())
}

/// One request as it is now.
///
/// # Errors
/// When there is no such request, or the database fails.
pub async fn find_approval(ledger: &Database, id: &str) -> Result<Approval, ApprovalError> {
    ledger.approval(id).await?.ok_or(ApprovalError::Unknown)
}

/// Why this caller may not approve or refuse the request.
///
/// # Errors
/// The reason.
pub fn check_second_person(approval: &Approval, caller: &Caller) -> Result<(), ApprovalError> {
    let (action, identity) = (approval.action.gated_action(), &caller.identity);
    let needed = action.needed_role();
    if !identity.names_a_person() {
        return Err(ApprovalError::NoPerson { action, who: called(identity) });
    }
    if is_requester(approval, caller) {
        return Err(ApprovalError::SamePerson(approval.requested_by.name.clone()));
    }
    if identity.role < needed {
        return Err(ApprovalError::RoleTooLow { action, who: called(identity), needed, role: identity.role });
    }
    Ok(())
}

/// Whether the caller may be the person who requested it. In doubt it is.
pub fn is_requester(approval: &Approval, caller: &Caller) -> bool {
    approval.requested_by.identity().is_none_or(|requester| requester.may_be_same_person(&caller.identity))
}

/// Executes a stored action once, if it is pending and another person approves it.
///
/// # Errors
/// Why it was not executed. What changed since the request refuses it for good; an outage leaves it pending.
pub async fn approve(
    ledger: &Database,
    sender: Option<Sender<'_>>,
    id: &str,
    caller: &Caller,
) -> Result<Approval, ApprovalError> {
    let approval = find_pending(ledger, id).await?;
    check_second_person(&approval, caller)?;
    let decision = decision(ApprovalState::Approved, caller);
    let approved =
        Approved { ledger, sender, approval: &approval, decision: &decision, actor: actor(&approval, caller) };
    let executed = approved.execute().await;
    let now = find_approval(ledger, id).await?;
    if now.state != ApprovalState::Pending {
        // Another approver may have been faster, so that nothing was left to change.
        let is_ours = executed.is_ok() && now.decided_by.as_ref() == Some(&Party::from(&caller.identity));
        return if is_ours { Ok(now) } else { Err(ApprovalError::Decided { id: now.id, state: now.state }) };
    }
    match executed {
        // There was nothing to change, so no transaction has written the approval.
        Ok(()) => decide(ledger, &approval, &decision).await,
        Err(error) if is_final(&error) => {
            let why = error.to_string();
            let refusal = ApprovalDecision { state: ApprovalState::Refused, because: Some(why.clone()), ..decision };
            decide(ledger, &approval, &refusal).await?;
            Err(ApprovalError::Refused { id: now.id, why })
        }
        Err(error) => Err(error),
    }
}

/// Refuses a request, as a second person.
///
/// # Errors
/// When the reason is missing, the caller may not, or the request is not pending.
pub async fn refuse(ledger: &Database, id: &str, caller: &Caller) -> Result<Approval, ApprovalError> {
    let approval = find_pending(ledger, id).await?;
    check_second_person(&approval, caller)?;
    if caller.actor.reason.is_none() {
        return Err(ApprovalError::NoReason);
    }
    decide(ledger, &approval, &decision(ApprovalState::Refused, caller)).await
}

/// Withdraws a request, as the person who made it.
///
/// # Errors
/// When the caller is another person, or the request is not pending.
pub async fn withdraw(ledger: &Database, id: &str, caller: &Caller) -> Result<Approval, ApprovalError> {
    let approval = find_pending(ledger, id).await?;
    if !caller.identity.names_a_person() || !is_requester(&approval, caller) {
        return Err(ApprovalError::NotRequester(approval.requested_by.name));
    }
    decide(ledger, &approval, &decision(ApprovalState::Withdrawn, caller)).await
}

async fn find_pending(ledger: &Database, id: &str) -> Result<Approval, ApprovalError> {
    let approval = find_approval(ledger, id).await?;
    match approval.state {
        ApprovalState::Pending => Ok(approval),
        state => Err(ApprovalError::Decided { id: approval.id, state }),
    }
}

fn decision(state: ApprovalState, caller: &Caller) -> ApprovalDecision {
    ApprovalDecision { state, by: caller.identity.clone(), because: caller.actor.reason.clone() }
}

async fn decide(
    ledger: &Database,
    approval: &Approval,
    decision: &ApprovalDecision,
) -> Result<Approval, ApprovalError> {
    let decided = ledger.decide_approval(&approval.id, decision).await?;
    let now = find_approval(ledger, &approval.id).await?;
    match decided {
        true => {
            tracing::info!(approval = now.id, state = now.state.name(), by = decision.by.name, "approval decided");
            Ok(now)
        }
        false => Err(ApprovalError::Decided { id: now.id, state: now.state }),
    }
}

/// Both people, for the audit.
fn actor(approval: &Approval, caller: &Caller) -> Actor {
    let because = approval.because.as_ref().map(|because| format!("{because} ")).unwrap_or_default();
    Actor {
        os_user: format!("{}, approved by {}", approval.requested_as, caller.author()),
        program: caller.actor.program,
        reason: Some(format!("{because}(approval {})", approval.id)),
    }
}

/// Whether the same execution would fail again, because something has changed since the request.
fn is_final(error: &ApprovalError) -> bool {
    match error {
        ApprovalError::NothingToResume => true,
        ApprovalError::Resend(error) => match error {
            ResendError::Refused(refusal) => *refusal != ResolutionRefusal::AttemptInProgress,
            ResendError::NoProvider(_) | ResendError::Unreadable(_) => true,
            ResendError::Unpublished(_) | ResendError::Ledger(_) => false,
        },
        ApprovalError::Batch(error) => !matches!(error, BatchError::Ledger(_)),
        ApprovalError::Settings(error) => !matches!(error, SettingsChangeError::Ledger(_)),
        _ => false,
    }
}

/// One approved action before its execution.
struct Approved<'a> {
    ledger: &'a Database,
    sender: Option<Sender<'a>>,
    approval: &'a Approval,
    decision: &'a ApprovalDecision,
    actor: Actor,
}

impl Approved<'_> {
    /// A handle whose change is written together with the approval.
    fn granted(&self, settings_version: Option<i64>) -> Database {
        let (id, decision) = (self.approval.id.clone(), self.decision.clone());
        self.ledger.approved_by(ApprovalGrant { id, decision, settings_version })
    }

    async fn execute(&self) -> Result<(), ApprovalError> {
        let (granted, by) = (self.granted(None), &self.actor);
        match &self.approval.action {
            StoredAction::Job { job, decision, reference, seen_fence, .. } => {
                let resolution = match decision {
                    BatchDecision::Succeeded => JobResolution::Succeeded { reference: reference.clone() },
                    decision => decision.resolution(),
                };
                self.decide_job(&stored_id(job)?, resolution, *seen_fence).await
            }
            StoredAction::Precancel { job, provider } => {
                Ok(granted.precancel(&stored_id(job)?, &stored_provider(provider)?, by).await?)
            }
            StoredAction::Batch { decision, digest, rate } => {
                let rate = BatchRate::parse(rate).map_err(|why| LedgerError::Corrupt(format!("rate {why}")))?;
                self.begin_batch(*decision, digest, rate).await
            }
            StoredAction::Limit { provider, limit, from, to, until_ms } => {
                let rate = Rate::parse_limit(to).map_err(|why| LedgerError::Corrupt(format!("rate: {why}")))?;
                let until = until_ms.map_or(Until::NoEnd, |ms| Until::Instant(EpochMs(ms)));
                let provider = &stored_provider(provider)?;
                let wanted = WantedLimit { provider, limit, rate: Some(rate), until, expects: Some(from) };
                Ok(set_limit(&granted, &wanted, false, Some(by)).await.map(drop)?)
            }
            StoredAction::Pause { provider } => {
                Ok(set_paused(&granted, &stored_provider(provider)?, true, Some(by)).await.map(drop)?)
            }
            StoredAction::Resume { provider, version } => self.resume(&stored_provider(provider)?, *version).await,
            StoredAction::PauseAll => Ok(granted.pause_all(by).await.map(drop)?),
            StoredAction::ResumeAll { pause, providers } => self.resume_all(*pause, providers).await,
        }
    }

    async fn decide_job(
        &self,
        id: &JobId,
        resolution: JobResolution,
        seen_fence: Option<i64>,
    ) -> Result<(), ApprovalError> {
        let ledger = &self.granted(None);
        let Some(Sender { queue, card_numbers }) = self.sender.as_ref().filter(|_| resolution.needs_resend()) else {
            return Ok(ledger.resolve_job(id, &resolution, seen_fence, &self.actor).await?);
        };
        let providers = provider_names(ledger).await?;
        queue.ping().await?;
        let actor = self.actor.clone();
        let resender =
            Resender { ledger, queue: *queue, providers: &providers, card_numbers: *card_numbers, resolution, actor };
        match resender.send_as_seen(id, seen_fence).await {
            Err(ResendError::Unpublished(error)) => {
                tracing::warn!(job = id.as_str(), %error, "its message was not published; the sweeper will publish it");
                Ok(())
            }
            sent => Ok(sent?),
        }
    }

    async fn begin_batch(&self, decision: BatchDecision, digest: &str, rate: BatchRate) -> Result<(), ApprovalError> {
        let members = self.ledger.approval_members(&self.approval.id).await?;
        let ids = members.iter().map(|id| stored_id(id)).collect::<Result<Vec<_>, _>>()?;
        let prepared = prepare_list(self.ledger, decision, JobList { ids, provider: None }).await?;
        let (digest, jobs, by) = (digest.to_owned(), Some(self.approval.jobs), self.actor.clone());
        Ok(prepared.begin(&self.granted(None), Confirmation { digest, jobs, rate, by }).await.map(drop)?)
    }

    /// Resumes a provider whose row has not changed since the request: its pause may be another one now.
    async fn resume(&self, provider: &ProviderName, seen_version: i64) -> Result<(), ApprovalError> {
        for _ in 0..TRIES_MAX {
            let version = self.ledger.settings_version().await?;
            if self.ledger.provider_version(provider).await? != Some(seen_version) {
                return Err(SettingsChangeError::ProviderChanged(provider.to_string()).into());
            }
            let granted = self.granted(Some(version));
            if granted.set_paused_as(provider, false, Some(&self.actor)).await? {
                return Ok(());
            }
            if find_approval(self.ledger, &self.approval.id).await?.state != ApprovalState::Pending {
                break;
            }
        }
        Err(LedgerError::Unavailable("settings change faster than a provider can be resumed".to_owned()).into())
    }

    async fn resume_all(&self, seen: i64, providers: &[String]) -> Result<(), ApprovalError> {
        let version = self.ledger.settings_version().await?;
        let pause = self.ledger.pause_of_all().await?.ok_or(ApprovalError::NothingToResume)?;
        if pause.id != seen || pause.providers != providers {
            return Err(SettingsChangeError::ProviderChanged("the pause of all providers".to_owned()).into());
        }
        Ok(self.granted(Some(version)).resume_all(&self.actor).await.map(drop)?)
    }
}

fn stored_id(text: &str) -> Result<JobId, LedgerError> {
    JobId::new(text).map_err(|why| LedgerError::Corrupt(format!("stored id: {why}")))
}

fn stored_provider(text: &str) -> Result<ProviderName, LedgerError> {
    ProviderName::new(text).map_err(|why| LedgerError::Corrupt(format!("stored provider: {why}")))
}

/// What an approval has done, in words; `None`: it is not approved.
pub fn result_words(approval: &Approval) -> Option<String> {
    (approval.state == ApprovalState::Approved).then(|| match &approval.batch {
        Some(batch) => format!("batch {batch}"),
        None => format!("done: {}", describe(approval)),
    })
}
