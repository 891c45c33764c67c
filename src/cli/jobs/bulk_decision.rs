//! Decisions in bulk by commands: a filter or a list of ids, first a preview with its digest, then a confirmed batch.
//!
//! The command only writes the batch. Workers apply it, so it goes on without the terminal, and `sluicegate batches`
//! shows and stops it. A list with a provider may have ids that the ledger does not know. They have no row that a batch
//! could name, and nothing is sent for them, so the command itself cancels them ahead of their messages.

use clap::Args;
use serde::Serialize;

use crate::cli::console::group_thousands;
use crate::cli::jobs::actor;
use crate::cli::jobs::report::DecisionReport;
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::domain::amount::display_amount;
use crate::domain::format::count;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::decision_batches::{BatchDecision, BatchRate, BatchSummary, DEFAULT_RATE, RefusalCount};
use crate::ledger::job_filter_input::RawJobFilter;
use crate::ledger::operator::{Actor, CurrencyTotal, JobResolution, ResolutionRefusal};
use crate::ops::batch::{
    BatchError, BatchPreview, Confirmation, JobList, PreparedBatch, Selection, has_worker, prepare_batch, prepare_list,
};

/// The message of such a job may be in a broker's queue, which cannot be searched.
pub const UNKNOWN_JOB: &str = "if the message of a job that the ledger does not know may still arrive, add \
                               --provider NAME to cancel the payment before that";

/// The rate of a decision about many payments, and its two steps.
#[derive(Debug, Args)]
pub struct BulkArgs {
    /// Payments per second, or N/DURATION.
    #[arg(long, default_value = DEFAULT_RATE, value_name = "RATE", value_parser = parse_rate)]
    pub rate: BatchRate,
    /// Show what would be changed, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// For many payments: the digest that --dry-run prints. To send one payment again: its id once more.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub confirm: Option<String>,
}

impl BulkArgs {
    /// Whether the command only shows the payments, or confirms what was shown.
    pub fn is_two_steps(&self) -> bool {
        self.dry_run || self.confirm.is_some()
    }
}

fn parse_rate(text: &str) -> Result<BatchRate, String> {
    match text.parse::<u32>() {
        Ok(per_second) => BatchRate::parse(&format!("{per_second}/1s")),
        Err(_) => BatchRate::parse(text),
    }
}

/// A decision about many payments, from the command line.
#[derive(Debug)]
pub struct BulkDecision<'a> {
    pub decision: BatchDecision,
    pub args: &'a BulkArgs,
    pub because: Option<&'a str>,
    pub json: bool,
}

impl From<BatchError> for CommandError {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::Ledger(error) => error.into(),
            BatchError::Filter(invalid) => Self::Usage(format!("--filter: {invalid}")),
            BatchError::NoSelection | BatchError::Ids(_) | BatchError::TooMany(_) => Self::Usage(error.to_string()),
            BatchError::Changed
            | BatchError::Empty
            | BatchError::WrongCount(_)
            | BatchError::Running(_)
            | BatchError::NoSuchBatch
            | BatchError::Ended { .. } => Self::Failed(error.to_string()),
        }
    }
}

/// The payments of a decision, from the command line.
#[derive(Debug)]
pub enum BulkSelection {
    Filter(Box<RawJobFilter>),
    List(JobList),
}

impl BulkSelection {
    /// The payments that match a filter, written like the address of the page's list.
    ///
    /// # Errors
    /// When a field is unknown or given twice.
    pub fn from_query(query: &str) -> Result<Self, CommandError> {
        let filter = RawJobFilter::from_query(query).map_err(|why| CommandError::Usage(format!("--filter: {why}")))?;
        Ok(Self::Filter(Box::new(filter)))
    }

    async fn prepare(self, ledger: &Database, decision: BatchDecision) -> Result<PreparedBatch, BatchError> {
        match self {
            Self::Filter(filter) => {
                prepare_batch(ledger, decision, Selection { filter: Some(*filter), ids: None }).await
            }
            Self::List(list) => prepare_list(ledger, decision, list).await,
        }
    }
}

/// Shows what a decision would do, or begins it with the digest of what was shown.
///
/// # Errors
/// When the set has changed since, the reason is missing, or the database fails.
pub async fn decide_in_bulk(
    bulk: BulkDecision<'_>,
    selection: BulkSelection,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    let ledger = cx.ledger().await?;
    let confirm = bulk.args.confirm.as_ref().filter(|_| !bulk.args.dry_run);
    let by = actor(bulk.because);
    if confirm.is_some() && by.reason.is_none() {
        return Err(CommandError::Usage("--because: is missing: write a reason for the audit".to_owned()));
    }
    let provider = match &selection {
        BulkSelection::List(list) => list.provider.clone(),
        BulkSelection::Filter(_) => None,
    };
    let prepared = selection.prepare(&ledger, bulk.decision).await?;
    let Some(digest) = confirm else { return show_preview(&prepared, &bulk, cx.console) };
    let (jobs, unknown) = (Some(prepared.preview.jobs), prepared.unknown.clone());
    let confirmed = Confirmation { digest: digest.clone(), jobs, rate: bulk.args.rate, by: by.clone() };
    let batch = match prepared.begin(&ledger, confirmed).await {
        Err(BatchError::Empty) if !unknown.is_empty() => None,
        begun => Some(begun?),
    };
    if let Some(batch) = &batch {
        announce(batch, &ledger, bulk.json, cx.console).await?;
    }
    let Some(provider) = provider else {
        if let Some(batch) = batch.filter(|_| bulk.json) {
            cx.console.json(&batch)?;
        }
        return Ok(Exit::Success);
    };
    let mut report = DecisionReport::new(&JobResolution::Cancel, bulk.json);
    cancel_ahead(&ledger, Unknown { provider, ids: unknown, by }, &mut report, cx.console).await?;
    if bulk.json {
        cx.console.json(&StartedCancel { batch, ahead: &report })?;
    }
    Ok(report.exit())
}

/// Prints the batch that has begun, and where its progress is shown.
async fn announce(
    batch: &BatchSummary,
    ledger: &Database,
    json: bool,
    console: &mut Console,
) -> Result<(), CommandError> {
    if !json {
        let payments = count(batch.jobs, "payment");
        console.line(&format!("batch {}: {} {payments} at {}", batch.id, batch.decision, batch.rate))?;
    }
    let next = format!("`sluicegate batches show {}` shows its progress", batch.id);
    let message = match has_worker(ledger).await? {
        true => next,
        false => format!("no worker runs: the batch waits until one does; {next}"),
    };
    Ok(console.message(&message)?)
}

/// A confirmed `jobs cancel` with a provider.
#[derive(Serialize)]
struct StartedCancel<'a> {
    /// `null`: the ledger knows none of the payments.
    batch: Option<BatchSummary>,
    /// Payments that were cancelled before their messages came.
    ahead: &'a DecisionReport,
}

/// Ids that the ledger does not know.
struct Unknown {
    provider: ProviderName,
    ids: Vec<JobId>,
    by: Actor,
}

/// Cancels payments before their messages come. A failure of the database ends it; the same command finds the rest.
async fn cancel_ahead(
    ledger: &Database,
    unknown: Unknown,
    report: &mut DecisionReport,
    console: &mut Console,
) -> Result<(), CommandError> {
    let Unknown { provider, ids, by } = unknown;
    for id in &ids {
        if report.record(id, ledger.precancel(id, &provider, &by).await.map_err(Into::into), console)? {
            console
                .message("stopped: the remaining ids are unchanged; fix the cause, then begin with a new preview")?;
            break;
        }
    }
    Ok(())
}

/// A preview as JSON. With a provider it also has the number of ids that the ledger does not know.
#[derive(Serialize)]
struct ShownPreview<'a> {
    #[serde(flatten)]
    preview: &'a BatchPreview,
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<usize>,
}

/// Prints what a decision would do, and how to confirm it.
fn show_preview(
    prepared: &PreparedBatch,
    bulk: &BulkDecision<'_>,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let (preview, unknown) = (&prepared.preview, prepared.unknown.len());
    if bulk.json {
        console.json(&ShownPreview { preview, unknown: (unknown > 0).then_some(unknown) })?;
    } else {
        print_preview(preview, unknown as u64, console)?;
    }
    // Without a provider such ids are not applicable.
    let no_such_job = ResolutionRefusal::NoSuchJob.code();
    let has_unknown = preview.not_applicable.iter().any(|refusal| refusal.refusal == no_such_job);
    if has_unknown && bulk.decision == BatchDecision::Cancel {
        console.message(UNKNOWN_JOB)?;
    }
    let what = if bulk.args.dry_run { "dry run: nothing was changed" } else { "nothing was changed" };
    if preview.jobs == 0 && unknown == 0 {
        console.message(&format!("{what}: the decision would change no payment"))?;
        let is_done = bulk.args.dry_run || preview.not_applicable.is_empty();
        return Ok(if is_done { Exit::Success } else { Exit::Failed });
    }
    let digest = &preview.digest;
    console.message(&format!("{what}; to do it, use `--confirm {digest} --because TEXT` in place of --dry-run"))?;
    Ok(if bulk.args.dry_run { Exit::Success } else { Exit::Failed })
}

fn print_preview(preview: &BatchPreview, unknown: u64, console: &mut Console) -> Result<(), CommandError> {
    let at_most = if preview.at_most { "at most " } else { "" };
    console.line(&format!("{}: {at_most}{}", preview.decision.name(), count(preview.jobs, "payment")))?;
    print_sums(&preview.sums, console)?;
    if unknown > 0 {
        let ids = count(unknown, "id");
        console.line(&format!("{ids} that the ledger does not know: cancelled before their messages come"))?;
    }
    print_refusals("not applicable to", &preview.not_applicable, console)?;
    Ok(console.line(&format!("digest: {}", preview.digest))?)
}

/// Prints number and sum of payments by currency.
pub fn print_sums(sums: &[CurrencyTotal], console: &mut Console) -> Result<(), CommandError> {
    let row = |sum: &CurrencyTotal| {
        vec![sum.currency.clone(), group_thousands(sum.jobs), display_amount(sum.amount, &sum.currency)]
    };
    if !sums.is_empty() {
        console.table(&["currency", "payments", "sum"], &sums.iter().map(row).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Prints refusals by their reasons.
pub fn print_refusals(title: &str, refusals: &[RefusalCount], console: &mut Console) -> Result<(), CommandError> {
    let row =
        |refusal: &RefusalCount| vec![group_thousands(refusal.jobs), refusal.example.clone(), refusal.text.clone()];
    if !refusals.is_empty() {
        console.table(&[title, "such as", "why"], &refusals.iter().map(row).collect::<Vec<_>>())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_a_number_per_second_or_a_rate() {
        for (text, written) in [("50", "50/1s"), ("600/1m", "600/1m"), ("1000", "1000/1s")] {
            assert_eq!(parse_rate(text).unwrap().to_string(), written);
        }
        for text in ["0", "1001", "-5", "50/s/s", "fast"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
