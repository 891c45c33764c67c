//! The subcommands `pause` and `resume` of `provider`, for one provider or for all of them at once.
//!
//! `pause --all` is one action with an id. `resume --all` resumes what it has paused, and says what it leaves paused.

use serde_json::json;

use super::{parse_name, report_if_unusable};
use crate::cli::jobs::actor;
use crate::cli::{CommandError, Console, Exit};
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::operator::Actor;
use crate::ledger::pause_of_all::{PauseAllResult, ResumeAllResult};
use crate::ops::change;

#[derive(Debug, clap::Args)]
pub(super) struct PauseArgs {
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    name: Option<String>,
    /// Every provider: `pause` pauses those that are not paused, `resume` resumes what the last `pause --all` has paused.
    #[arg(long)]
    all: bool,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Pauses or resumes what the arguments name.
pub(super) async fn run(
    ledger: &Database,
    args: &PauseArgs,
    paused: bool,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let by = actor(args.because.as_deref());
    match (&args.name, paused) {
        (Some(name), _) => {
            set_paused(ledger, name, SetPaused { paused, json: args.json, by }, console).await?;
            // A pause is obeyed whatever is wrong with the row.
            if !paused {
                return report_if_unusable(ledger, &parse_name(name)?, console).await;
            }
        }
        (None, true) => {
            let result = ledger.pause_all(&by).await?;
            if args.json { console.json(&result)? } else { print_pause(&result, console)? }
        }
        (None, false) => {
            let result = ledger.resume_all(&by).await?;
            if args.json { console.json(&result)? } else { print_resume(&result, console)? }
        }
    }
    Ok(Exit::Success)
}

struct SetPaused {
    paused: bool,
    json: bool,
    by: Actor,
}

async fn set_paused(
    ledger: &Database,
    name: &str,
    SetPaused { paused, json, by }: SetPaused,
    console: &mut Console,
) -> Result<(), CommandError> {
    let changed = change::set_paused(ledger, &parse_name(name)?, paused, Some(&by)).await?;
    if json {
        console.json(&json!({ "provider": name, "paused": paused, "changed": changed }))?;
        return Ok(());
    }
    let state = match paused {
        true => "is paused: its queue keeps collecting",
        false => "is resumed, and the waits that it named are cleared",
    };
    console.message(&format!("{name} {state}; workers follow within 2 s"))?;
    Ok(())
}

fn print_pause(result: &PauseAllResult, console: &mut Console) -> Result<(), CommandError> {
    let PauseAllResult { id, paused, held, paused_before } = result;
    match (id, paused.is_empty()) {
        (Some(id), false) => console.message(&format!(
            "pause {id} of all providers: paused {}; their queues keep collecting, and workers follow within 2 s",
            paused.join(", ")
        ))?,
        (Some(id), true) => console.message(&format!("pause {id} of all providers is in force already"))?,
        (None, _) => console.message("nothing to pause: no provider sends requests")?,
    }
    if !held.is_empty() {
        console.message(&format!("already paused by it: {}", held.join(", ")))?;
    }
    if !paused_before.is_empty() {
        let names = paused_before.join(", ");
        console.message(&format!("paused before: {names}; `sluicegate provider resume --all` leaves them paused"))?;
    }
    Ok(())
}

fn print_resume(result: &ResumeAllResult, console: &mut Console) -> Result<(), CommandError> {
    let ResumeAllResult { id, resumed, resumed_before, still_paused } = result;
    match (id, resumed.is_empty()) {
        (Some(id), false) => {
            let names = resumed.join(", ");
            console
                .message(&format!("pause {id} of all providers is over: resumed {names}; workers follow within 2 s"))?;
        }
        (Some(id), true) => console.message(&format!("pause {id} of all providers is over; it held no provider"))?,
        (None, _) => console.message("nothing is resumed: no pause of all providers is in force")?,
    }
    if !resumed_before.is_empty() {
        console.message(&format!("resumed before: {}", resumed_before.join(", ")))?;
    }
    if !still_paused.is_empty() {
        let names = still_paused.join(", ");
        console.message(&format!(
            "still paused, by another pause: {names}; `sluicegate provider resume NAME` resumes one"
        ))?;
    }
    Ok(())
}
