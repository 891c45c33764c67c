//! Decisions in bulk by commands: `--filter` or `--file`, first a preview with its digest, then a confirmed batch.
//!
//! The command only writes the batch. Workers apply it, so it goes on without the terminal, and `sluicegate batches`
//! shows and stops it.

use clap::Args;

use crate::amount::display_amount;
use crate::cli::approvals::{gate, print_awaited};
use crate::cli::console::group_thousands;
use crate::cli::jobs::bulk::{IdEntry, IdSource};
use crate::cli::jobs::{IdArgs, actor};
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::domain::format::count;
use crate::ledger::decision_batches::{BatchDecision, BatchRate, DEFAULT_RATE, RefusalCount};
use crate::ledger::job_filter_input::RawJobFilter;
use crate::ledger::operator::CurrencyTotal;
use crate::ops::batch::{BatchError, BatchPreview, Confirmation, Selection, has_worker, prepare_batch};

/// The rate of a decision about many payments, and its two steps.
#[derive(Debug, Args)]
pub struct BulkArgs {
    /// Payments per second, or N/DURATION.
    #[arg(long, default_value = DEFAULT_RATE, value_name = "RATE", value_parser = parse_rate)]
    pub rate: BatchRate,
    /// Show what would be changed, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// With --filter or --file: the digest that --dry-run prints. To send one payment again: its id once more.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub confirm: Option<String>,
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

/// The selection that a filter names.
pub fn filter_selection(query: &str) -> Result<Selection, CommandError> {
    let filter = RawJobFilter::from_query(query).map_err(|why| CommandError::Usage(format!("--filter: {why}")))?;
    Ok(Selection { filter: Some(filter), ids: None })
}

/// The selection of a command: its filter, or all ids of its file or argument. An invalid line rejects the whole file.
///
/// # Errors
/// When the filter is invalid, or the file cannot be read.
pub async fn selection(ids: &IdArgs) -> Result<Selection, CommandError> {
    if let Some(query) = &ids.filter {
        return filter_selection(query);
    }
    let (mut source, mut all) = (IdSource::from_args(ids).await?, Vec::new());
    while let Some(IdEntry { line, id }) = source.next().await? {
        let id = id.map_err(|why| {
            let line = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            CommandError::Failed(format!("{line}{why}: nothing was changed"))
        })?;
        all.push(id.to_string());
    }
    Ok(Selection { filter: None, ids: Some(all) })
}

/// Shows what a decision would do, or begins it with the digest of what was shown.
///
/// # Errors
/// When the set has changed since, the reason is missing, or the database fails.
pub async fn decide_in_bulk(
    bulk: BulkDecision<'_>,
    selection: Selection,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    let BulkDecision { decision, args, because, json } = bulk;
    let ledger = cx.ledger().await?;
    let confirm = args.confirm.as_ref().filter(|_| !args.dry_run);
    let by = actor(because);
    if confirm.is_some() && by.reason.is_none() {
        return Err(CommandError::Usage("--because: is missing: write a reason for the audit".to_owned()));
    }
    let prepared = prepare_batch(&ledger, decision, selection).await?;
    let Some(digest) = confirm else {
        print_preview(&prepared.preview, json, cx.console)?;
        let digest = &prepared.preview.digest;
        let what = if args.dry_run { "dry run: nothing was changed" } else { "nothing was changed" };
        cx.console
            .message(&format!("{what}; to do it, use `--confirm {digest} --because TEXT` in place of --dry-run"))?;
        return Ok(if args.dry_run { Exit::Success } else { Exit::Failed });
    };
    let jobs = Some(prepared.preview.jobs);
    let gate = gate(&ledger, cx.config, by.clone());
    let confirmed = Confirmation { digest: digest.clone(), jobs, rate: args.rate, by };
    if let Some(awaited) = gate.batch(&prepared, &confirmed).await? {
        return print_awaited(&awaited, json, cx.console);
    }
    let batch = prepared.begin(&ledger, confirmed).await?;
    if json {
        cx.console.json(&batch)?;
    } else {
        let payments = count(batch.jobs, "payment");
        cx.console.line(&format!("batch {}: {} {payments} at {}", batch.id, batch.decision, batch.rate))?;
    }
    let next = format!("`sluicegate batches show {}` shows its progress", batch.id);
    cx.console.message(&match has_worker(&ledger).await? {
        true => next,
        false => format!("no worker runs: the batch waits until one does; {next}"),
    })?;
    Ok(Exit::Success)
}

fn print_preview(preview: &BatchPreview, json: bool, console: &mut Console) -> Result<(), CommandError> {
    if json {
        return Ok(console.json(preview)?);
    }
    let at_most = if preview.at_most { "at most " } else { "" };
    console.line(&format!("{}: {at_most}{}", preview.decision.name(), count(preview.jobs, "payment")))?;
    print_sums(&preview.sums, console)?;
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
