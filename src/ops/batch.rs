//! Decisions in bulk for commands and API: a selection is checked, shown with its digest, and started as a batch.
//!
//! A preview changes nothing. A confirmation repeats the selection and names the digest of its preview. If the same
//! selection has another digest now, nothing is written. Workers apply the batch, see `worker::decision_batches`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::job::JobId;
use crate::domain::job_filter::JobFilter;
use crate::domain::provider::ProviderName;
use crate::fleet::workers::visible_workers;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::decision_batches::{
    BatchDecision, BatchMember, BatchRate, BatchStart, BatchSummary, IDS_MAX, NewBatch, RefusalCount,
    digest_with_unknown, set_digest,
};
use crate::ledger::job_filter_input::{InvalidFilter, RawJobFilter};
use crate::ledger::operator::{Actor, CurrencyTotal, ResolutionRefusal};
use crate::worker::resend::{ResendError, provider_names};

/// The payments of a decision: those that a filter matches, or those of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// Filters as in the list of payments. Without `state`, the state that the decision needs.
    pub filter: Option<RawJobFilter>,
    /// At most 10,000 ids.
    pub ids: Option<Vec<String>>,
}

/// What a decision would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct BatchPreview {
    pub decision: BatchDecision,
    /// Payments that it would change.
    pub jobs: u64,
    /// Their number and sum by currency.
    pub sums: Vec<CurrencyTotal>,
    /// Selected payments that it would not change.
    pub not_applicable: Vec<RefusalCount>,
    /// Names decision, payments and their versions; a confirmation repeats it.
    pub digest: String,
    /// A payment may still be refused at its turn, for a reason that only shows then.
    pub at_most: bool,
}

/// A list of payments.
#[derive(Clone, Debug)]
pub struct JobList {
    /// An id that is repeated counts once.
    pub ids: Vec<JobId>,
    /// Payments of another provider are not applicable, and ids that the ledger does not know are kept apart.
    pub provider: Option<ProviderName>,
}

/// A checked selection.
#[derive(Clone, Debug)]
pub struct PreparedBatch {
    pub preview: BatchPreview,
    members: Vec<BatchMember>,
    /// Ids of a list with a provider that the ledger does not know. The digest names them too; the batch leaves them out.
    pub unknown: Vec<JobId>,
}

/// What an operator confirms.
#[derive(Clone, Debug)]
pub struct Confirmation {
    pub digest: String,
    /// Required for a resend.
    pub jobs: Option<u64>,
    pub rate: BatchRate,
    pub by: Actor,
}

/// Why a selection or a batch was refused. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    #[error("`selection`: give either `filter` or `ids`")]
    NoSelection,
    #[error("`ids`: {0}")]
    Ids(String),
    #[error(transparent)]
    Filter(#[from] InvalidFilter),
    #[error(
        "the filter searches more than {0} payments: narrow it by `provider`, by `account`, or by a shorter time of \
         `created_from` and `created_to`"
    )]
    TooMany(u32),
    #[error("the selected payments have changed since the preview: look at a new preview, and confirm its digest")]
    Changed,
    #[error("the decision would change none of the selected payments")]
    Empty,
    #[error("`confirm_jobs` must be the number of payments that are sent again, {0}")]
    WrongCount(u64),
    #[error("batch {0} makes this decision about the same payments already")]
    Running(String),
    #[error("there is no batch with this id")]
    NoSuchBatch,
    #[error("batch {id} is {state} already")]
    Ended { id: String, state: String },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl Selection {
    /// The selected payments, whether the decision applies to them or not.
    pub async fn ids(self, ledger: &Database, decision: BatchDecision) -> Result<Vec<JobId>, BatchError> {
        match self {
            Self { filter: Some(raw), ids: None } => {
                let mut filter: JobFilter = raw.validate()?;
                if filter.states.is_empty() {
                    filter.states.push(decision.resolution().required_state());
                }
                let mut ids =
                    ledger.selected_jobs(&filter).await?.ok_or_else(|| BatchError::TooMany(ledger.selection_max()))?;
                // A search begins with the newest, and a batch with the oldest.
                ids.reverse();
                Ok(ids)
            }
            Self { filter: None, ids: Some(texts) } => parse_ids(texts),
            _ => Err(BatchError::NoSelection),
        }
    }
}

/// Parses a list of ids.
fn parse_ids(texts: Vec<String>) -> Result<Vec<JobId>, BatchError> {
    if !(1..=IDS_MAX).contains(&texts.len()) {
        return Err(BatchError::Ids(format!("give 1 to {IDS_MAX} ids, got {}", texts.len())));
    }
    // An invalid id is not quoted: it may hold anything.
    let parse = |(index, text)| JobId::new(text).map_err(|why| BatchError::Ids(format!("number {}: {why}", index + 1)));
    texts.into_iter().enumerate().map(parse).collect()
}

/// The ids without repetitions, in their order.
pub fn distinct(mut ids: Vec<JobId>) -> Vec<JobId> {
    let mut known = HashSet::new();
    ids.retain(|id| known.insert(id.clone()));
    ids
}

/// Checks a selection. Changes nothing.
///
/// # Errors
/// When the selection is invalid or too large, or the database fails.
pub async fn prepare_batch(
    ledger: &Database,
    decision: BatchDecision,
    selection: Selection,
) -> Result<PreparedBatch, BatchError> {
    let ids = selection.ids(ledger, decision).await?;
    prepare_list(ledger, decision, JobList { ids, provider: None }).await
}

/// Checks a list of payments. Changes nothing.
///
/// # Errors
/// When the database fails.
pub async fn prepare_list(
    ledger: &Database,
    decision: BatchDecision,
    list: JobList,
) -> Result<PreparedBatch, BatchError> {
    let JobList { ids, provider } = list;
    let ids = distinct(ids);
    let needs_lane = decision.resolution().needs_resend();
    let providers = if needs_lane { provider_names(ledger).await? } else { Vec::new() };
    let has_lane: HashSet<&str> = providers.iter().map(ProviderName::as_str).collect();
    let checked = ledger.check_jobs(decision, &ids).await?;
    let mut found: HashMap<JobId, _> = checked.into_iter().map(|job| (job.member.id.clone(), job)).collect();
    let (mut members, mut unknown) = (Vec::new(), Vec::new());
    let (mut sums, mut refused) = (BTreeMap::new(), Refused::default());
    for id in ids {
        let Some(job) = found.remove(&id) else {
            match provider {
                Some(_) => unknown.push(id),
                None => refused.add(&id, &ResolutionRefusal::NoSuchJob.into()),
            }
            continue;
        };
        if provider.as_ref().is_some_and(|name| name.as_str() != job.provider) {
            refused.add(&id, &ResolutionRefusal::OtherProvider { provider: job.provider }.into());
        } else if let Some(refusal) = job.refusal {
            refused.add(&id, &refusal.into());
        } else if needs_lane && !has_lane.contains(job.provider.as_str()) {
            refused.add(&id, &missing_lane(job.provider)?);
        } else {
            let sum = sums.entry(job.currency.clone()).or_insert_with(|| empty_sum(job.currency));
            sum.jobs += 1;
            sum.amount = sum.amount.saturating_add(job.amount);
            members.push(job.member);
        }
    }
    let preview = BatchPreview {
        decision,
        jobs: members.len() as u64,
        sums: sums.into_values().collect(),
        not_applicable: refused.counts(),
        digest: match &provider {
            Some(provider) if !unknown.is_empty() => {
                digest_with_unknown(&set_digest(decision, &members), provider, &unknown)
            }
            _ => set_digest(decision, &members),
        },
        at_most: decision.may_be_refused_later(),
    };
    Ok(PreparedBatch { preview, members, unknown })
}

fn missing_lane(provider: String) -> Result<ResendError, LedgerError> {
    let name = ProviderName::new(provider);
    name.map(ResendError::NoProvider).map_err(|why| LedgerError::Corrupt(why.to_string()))
}

fn empty_sum(currency: String) -> CurrencyTotal {
    CurrencyTotal { currency, jobs: 0, amount: 0 }
}

/// Refusals by their codes.
#[derive(Default)]
struct Refused(BTreeMap<&'static str, RefusalCount>);

impl Refused {
    fn add(&mut self, id: &JobId, refusal: &ResendError) {
        let code = refusal.code();
        let count = self.0.entry(code).or_insert_with(|| RefusalCount {
            refusal: code.to_owned(),
            text: refusal.to_string(),
            jobs: 0,
            example: id.to_string(),
        });
        count.jobs += 1;
    }

    /// Most frequent first.
    fn counts(self) -> Vec<RefusalCount> {
        let mut counts: Vec<RefusalCount> = self.0.into_values().collect();
        counts.sort_by_key(|count| Reverse(count.jobs));
        counts
    }
}

impl PreparedBatch {
    /// Begins the batch if the selection is the one that was confirmed.
    ///
    /// # Errors
    /// When the selection has changed since its preview, or the same batch runs. Nothing was written then.
    pub async fn begin(self, ledger: &Database, confirmed: Confirmation) -> Result<BatchSummary, BatchError> {
        let BatchPreview { decision, jobs, sums, digest, .. } = self.preview;
        if digest != confirmed.digest {
            return Err(BatchError::Changed);
        }
        if self.members.is_empty() {
            return Err(BatchError::Empty);
        }
        let is_required = decision == BatchDecision::Resend;
        if confirmed.jobs.map_or(is_required, |given| given != jobs) {
            return Err(BatchError::WrongCount(jobs));
        }
        let id = Uuid::now_v7().simple().to_string();
        let Confirmation { rate, by, .. } = confirmed;
        let batch = NewBatch { id: id.clone(), decision, members: self.members, sums, rate, by };
        match ledger.begin_batch(&batch).await? {
            BatchStart::Started => find_batch(ledger, &id).await,
            BatchStart::Changed => Err(BatchError::Changed),
            BatchStart::Running(id) => Err(BatchError::Running(id)),
        }
    }
}

/// One batch as it is now.
///
/// # Errors
/// When there is no such batch, or the database fails.
pub async fn find_batch(ledger: &Database, id: &str) -> Result<BatchSummary, BatchError> {
    ledger.batch(id).await?.ok_or(BatchError::NoSuchBatch)
}

/// Stops a running batch. What was applied stays applied.
///
/// # Errors
/// When there is no such batch, or it has ended.
pub async fn stop_batch(ledger: &Database, id: &str, by: &Actor) -> Result<BatchSummary, BatchError> {
    let stopped = ledger.stop_batch(id, &by.os_user).await?;
    let batch = find_batch(ledger, id).await?;
    match stopped {
        true => Ok(batch),
        false => Err(BatchError::Ended { id: batch.id, state: batch.state }),
    }
}

/// Whether some worker reports, so that batches are applied.
pub async fn has_worker(ledger: &Database) -> Result<bool, LedgerError> {
    let workers = visible_workers(ledger.worker_reports().await?, Duration::ZERO, None);
    Ok(workers.iter().any(|worker| worker.is_live()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_bounded_and_count_once() {
        let parse = |ids: Vec<&str>| parse_ids(ids.into_iter().map(str::to_owned).collect());
        let ids = distinct(parse(vec!["b", "a", "b"]).unwrap());
        assert_eq!(ids.iter().map(JobId::as_str).collect::<Vec<_>>(), ["b", "a"]);
        assert!(parse(vec![]).unwrap_err().to_string().contains("1 to 10000 ids, got 0"));
        let why = parse(vec!["a", "not an id"]).unwrap_err().to_string();
        assert!(why.starts_with("`ids`: number 2: ") && !why.contains("not an id"), "{why}");
        assert!(parse(vec!["a"; IDS_MAX + 1]).unwrap_err().to_string().contains("got 10001"));
    }
}
