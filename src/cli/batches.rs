//! The `batches` command: decisions about many payments, their progress and their reports, and the stop of one.
//!
//! `jobs resolve`, `jobs cancel` and `dlq` begin batches with `--filter` or `--file`, and the page does too. It works on
//! the database, so it also shows and stops a batch while no worker runs.

use clap::Subcommand;

use crate::cli::jobs::actor;
use crate::cli::jobs::bulk_decision::{print_refusals, print_sums};
use crate::cli::{CommandContext, CommandError, Exit};
use crate::ledger::decision_batches::{BatchPage, BatchSummary};
use crate::ledger::operator::LIST_MAX;
use crate::ops::batch::{find_batch, has_worker, stop_batch};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List decisions about many payments, newest first.
    List {
        /// Begin after this id; the end of a full page names it.
        #[arg(long, value_name = "ID", allow_hyphen_values = true)]
        after: Option<String>,
        /// Batches per page.
        #[arg(long, default_value = "50", value_parser = clap::value_parser!(u32).range(1..=i64::from(LIST_MAX)))]
        limit: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one batch: its progress, and the payments that were refused by their reasons.
    Show {
        #[arg(allow_hyphen_values = true)]
        id: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Stop a running batch; what was applied stays applied.
    Stop {
        #[arg(allow_hyphen_values = true)]
        id: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// When the database fails, there is no such batch, or it has ended.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let ledger = cx.ledger().await?;
    match &args.action {
        Action::List { after, limit, json } => list(ledger.list_batches(after.as_deref(), *limit).await?, *json, cx),
        Action::Show { id, json } => {
            let batch = find_batch(&ledger, id).await?;
            if batch.state == "running" && !has_worker(&ledger).await? {
                cx.console.message("no worker runs: the batch waits until one does")?;
            }
            show(batch, *json, cx)
        }
        Action::Stop { id, json } => show(stop_batch(&ledger, id, &actor(None)).await?, *json, cx),
    }
}

fn list(page: BatchPage, json: bool, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    if json {
        cx.console.json(&page)?;
        return Ok(Exit::Success);
    }
    let BatchPage { batches, next } = page;
    if batches.is_empty() {
        cx.console.message("no batches")?;
        return Ok(Exit::Success);
    }
    let row = |batch: &BatchSummary| {
        vec![
            batch.id.clone(),
            batch.decision.clone(),
            batch.state.clone(),
            format!("{} of {}", batch.jobs - batch.remaining, batch.jobs),
            batch.created_at.to_string(),
            author(&batch.person, Some(&batch.database_user)),
        ]
    };
    let rows: Vec<Vec<String>> = batches.iter().map(row).collect();
    cx.console.table(&["id", "decision", "state", "done", "started", "by"], &rows)?;
    if let Some(next) = next {
        cx.console.next_page("--after", &next)?;
    }
    Ok(Exit::Success)
}

/// `alice@desk (sluicegate_operator)`: the person as the program says, and the database's user.
fn author(person: &str, database_user: Option<&str>) -> String {
    database_user.map_or_else(|| person.to_owned(), |user| format!("{person} ({user})"))
}

fn show(batch: BatchSummary, json: bool, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    if json {
        cx.console.json(&batch)?;
        return Ok(Exit::Success);
    }
    let refused: u64 = batch.refused.iter().map(|refusal| refusal.jobs).sum();
    let all = [
        ("batch", Some(batch.id)),
        ("decision", Some(batch.decision)),
        ("state", Some(batch.state)),
        ("payments", Some(batch.jobs.to_string())),
        ("applied", Some(batch.applied.to_string())),
        ("refused", Some(refused.to_string())),
        ("remaining", Some(batch.remaining.to_string())),
        ("rate", Some(batch.rate)),
        ("started", Some(batch.created_at.to_string())),
        ("ended", batch.finished_at.map(|at| at.to_string())),
        ("by", Some(author(&batch.person, Some(&batch.database_user)))),
        ("because", Some(batch.because)),
        ("stopped by", batch.stopped_by.map(|person| author(&person, batch.stopped_database_user.as_deref()))),
        ("worker", batch.worker),
    ];
    let rows: Vec<Vec<String>> =
        all.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect();
    cx.console.table(&["field", "value"], &rows)?;
    print_sums(&batch.sums, cx.console)?;
    print_refusals("refused", &batch.refused, cx.console)?;
    Ok(Exit::Success)
}
