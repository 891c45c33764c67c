//! The commands `jobs assign` and `jobs comment`: notes on one payment, which `jobs show` prints.

use serde_json::json;

use super::{actor, parse_id};
use crate::cli::{CommandContext, CommandError, Exit};
use crate::domain::job::JobId;
use crate::ledger::job_notes::{Assignee, Comment, NewNote};
use crate::ledger::operator::{ResolutionError, ResolutionRefusal};

/// To whom the review of a payment is assigned.
#[derive(Debug, clap::Args)]
pub struct AssignArgs {
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: JobId,
    #[command(flatten)]
    whom: WhomArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct WhomArgs {
    /// A person or a team.
    #[arg(long, value_name = "NAME", value_parser = Assignee::new, allow_hyphen_values = true)]
    to: Option<Assignee>,
    /// Assign it to no one any more.
    #[arg(long)]
    none: bool,
}

#[derive(Debug, clap::Args)]
pub struct CommentArgs {
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: JobId,
    /// The comment, which is kept for ever: name a ticket and no person.
    #[arg(long, value_name = "TEXT", value_parser = Comment::new, allow_hyphen_values = true)]
    text: Comment,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `jobs assign`.
pub async fn assign(args: &AssignArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let to = args.whom.to.as_ref();
    add(&args.id, &NewNote::Assigned(to.cloned()), cx).await?;
    if args.json {
        cx.console.json(&json!({ "id": args.id.as_str(), "assigned_to": to.map(Assignee::as_str) }))?;
    } else {
        let whom = to.map_or("no one", Assignee::as_str);
        cx.console.message(&format!("{}: assigned to {whom}", args.id))?;
    }
    Ok(Exit::Success)
}

/// Runs `jobs comment`.
pub async fn comment(args: &CommentArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    add(&args.id, &NewNote::Comment(args.text.clone()), cx).await?;
    if args.json {
        cx.console.json(&json!({ "id": args.id.as_str(), "comment": args.text.as_str() }))?;
    } else {
        cx.console.message(&format!("{}: comment added", args.id))?;
    }
    Ok(Exit::Success)
}

/// # Errors
/// When the note is refused, or the database fails.
async fn add(id: &JobId, note: &NewNote, cx: &CommandContext<'_>) -> Result<(), CommandError> {
    let added = cx.ledger().await?.add_note(id, note, &actor(None)).await;
    added.map_err(|error| match error {
        ResolutionError::Refused(refusal @ ResolutionRefusal::NoSuchJob) => {
            CommandError::Failed(format!("{id}: {refusal}"))
        }
        ResolutionError::Refused(refusal) => {
            CommandError::Failed(format!("{id}: {refusal}; see `sluicegate jobs show`"))
        }
        ResolutionError::Ledger(error) => error.into(),
    })
}
