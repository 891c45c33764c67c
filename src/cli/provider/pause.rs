//! The subcommands `pause` and `resume` of `provider`, for one provider or for all of them at once.
//!
//! `pause --all` is one action with an id. `resume --all` resumes what it has paused, and says what it leaves paused.

use serde_json::json;

use super::{parse_name, report_if_unusable};
use crate::cli::jobs::actor;
use crate::cli::{CommandError, Console, Exit};
use crate::ledger::database::Database;
use crate::ledger::decision_input;
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

#[derive(Debug, clap::Args)]
pub(super) struct ResumeArgs {
    #[command(flatten)]
    which: PauseArgs,
    /// Release the hold of the lane, too: its charges start again. Compare its payments with the provider's records before.
    #[arg(long, requires = "because", conflicts_with = "all")]
    release_hold: bool,
}

/// Pauses what the arguments name.
pub(super) async fn pause(ledger: &Database, args: &PauseArgs, console: &mut Console) -> Result<Exit, CommandError> {
    let by = actor(args.because.as_deref());
    let Some(name) = &args.name else {
        let result = ledger.pause_all(&by).await?;
        if args.json {
            console.json(&result)?
        } else {
            print_pause(&result, console)?
        }
        return Ok(Exit::Success);
    };
    let changed = change::set_paused(ledger, &parse_name(name)?, true, Some(&by)).await?;
    if args.json {
        console.json(&json!({ "provider": name, "paused": true, "changed": changed }))?;
    } else {
        console.message(&format!("{name} is paused: its payments are recorded and wait; workers follow within 2 s"))?;
    }
    Ok(Exit::Success)
}

/// Resumes what the arguments name.
pub(super) async fn resume(ledger: &Database, args: &ResumeArgs, console: &mut Console) -> Result<Exit, CommandError> {
    let ResumeArgs { which, release_hold } = args;
    let by = actor(which.because.as_deref());
    let Some(name) = &which.name else {
        let result = ledger.resume_all(&by).await?;
        if which.json {
            console.json(&result)?
        } else {
            print_resume(&result, console)?
        }
        return Ok(Exit::Success);
    };
    let provider = parse_name(name)?;
    let held = change::resume(ledger, &provider, *release_hold, &by).await?.as_ref().map(change::still_held_text);
    if which.json {
        console.json(&json!({ "provider": name, "paused": false, "changed": true, "held": held }))?;
    } else {
        let released = if *release_hold { ", its hold is released" } else { "" };
        console.message(&format!(
            "{name} is resumed{released}, and the waits that it named are cleared; workers follow within 2 s"
        ))?;
        held.iter().try_for_each(|text| console.message(text))?;
    }
    // Unlike a pause, a resume has no effect while the row cannot be used.
    report_if_unusable(ledger, &provider, console).await
}

fn print_pause(result: &PauseAllResult, console: &mut Console) -> Result<(), CommandError> {
    let PauseAllResult { id, paused, held, paused_before } = result;
    match (id, paused.is_empty()) {
        (Some(id), false) => console.message(&format!(
            "pause {id} of all providers: paused {}; their payments are recorded and wait, and workers follow within 2 s",
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
