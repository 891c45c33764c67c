//! The command `provider apply`: a provider file, the changes by hand that it keeps, and those that stop it.
//!
//! It writes in one transaction, and declares the queues of all lanes.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::{check_callable, checked_rows, parse_name, report_unusable, unreadable_secrets};
use crate::cli::enqueue::door::{ClosedLanes, declare_lanes};
use crate::cli::input::{self, PROVIDER_FILE_BYTES_MAX};
use crate::cli::jobs::actor;
use crate::cli::row_risks::row_risks;
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::format::count;
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::{AppliedFile, ApplyMode, AuditedChange, FileApplyError, HandChangeBy};
use crate::worker::resend::provider_names;

#[derive(Debug, clap::Args)]
pub struct ApplyArgs {
    /// TOML with `[[provider]]` tables; `-` is stdin.
    file: PathBuf,
    /// Print what would change, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Let the file win over changes by hand.
    #[arg(long)]
    reset: bool,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// 78 when the file is invalid; 1 when it contradicts changes by hand, or a backend fails.
pub async fn run(args: &ApplyArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let ApplyArgs { file, dry_run, reset, because, .. } = args;
    let rows = checked_rows(&input::read_text(file, PROVIDER_FILE_BYTES_MAX).await?, file)?;
    for warning in file_warnings(&rows, cx.config).await {
        cx.console.message(&format!("warning: {warning}"))?;
    }
    let ledger = cx.ledger().await?;
    let paused = unmentioned_pauses(&rows, &ledger).await?;
    let mode = if *reset { ApplyMode::Reset } else { ApplyMode::Compare };
    let by = actor(because.as_deref());
    let applied = ledger.apply_file(&rows, mode, *dry_run, Some(&by)).await.map_err(|error| match error {
        FileApplyError::Conflicts(conflicts) => contradicted(file.display().to_string(), &conflicts),
        FileApplyError::Ledger(error) => error.into(),
    })?;
    print_applied(&applied, args, cx.console)?;
    for name in paused {
        cx.console.message(&format!(
            "{name} stays paused, because the file does not set `paused`: `sluicegate provider resume {name}` resumes it"
        ))?;
    }
    if *dry_run {
        return Ok(Exit::Success);
    }
    declare_all_lanes(cx, &ledger).await?;
    let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    report_unusable(&ledger, |name| names.contains(&name), cx.console).await
}

fn print_applied(applied: &AppliedFile, args: &ApplyArgs, console: &mut Console) -> Result<(), CommandError> {
    let AppliedFile { changes, kept } = applied;
    if args.json {
        let changes: Vec<_> =
            changes.iter().map(|change| json!({ "provider": change.provider, "what": change.description })).collect();
        let kept: Vec<_> = kept.iter().map(hand_change_json).collect();
        console.json(&json!({ "dry_run": args.dry_run, "changes": changes, "kept": kept }))?;
        return Ok(());
    }
    for change in changes {
        console.line(&format!("{}: {}", change.provider, change.description))?;
    }
    match (changes.len(), args.dry_run) {
        (0, _) => console.message("nothing to change")?,
        (_, true) => console.message("dry run: nothing was applied")?,
        (_, false) => console.message("applied; workers follow within 2 s")?,
    }
    for HandChangeBy { change, by } in kept {
        let provider = &change.provider;
        let what = &change.what;
        let stays = change.by_hand.as_ref().map(|value| format!(" {value}")).unwrap_or_default();
        let in_file = change.in_file.as_deref().unwrap_or("otherwise");
        console
            .message(&format!("{provider}: {what} stays{stays}, {}; the file says {in_file}", author(by.as_ref())))?;
    }
    Ok(())
}

/// Who changed a value, when and why.
fn author(by: Option<&AuditedChange>) -> String {
    by.map_or_else(
        || "changed by hand".to_owned(),
        |by| {
            let because = by.because.as_ref().map(|because| format!(" ({because})")).unwrap_or_default();
            format!("changed by {} at {}{because}", by.who, by.at)
        },
    )
}

fn hand_change_json(HandChangeBy { change, by }: &HandChangeBy) -> Value {
    json!({
        "provider": change.provider, "what": change.what, "by_hand": change.by_hand, "in_file": change.in_file,
        "who": by.as_ref().map(|by| &by.who), "at": by.as_ref().map(|by| by.at),
        "because": by.as_ref().and_then(|by| by.because.as_ref()),
    })
}

fn contradicted(file: String, conflicts: &[HandChangeBy]) -> CommandError {
    let title =
        format!("{file}: nothing was applied: it changes what was changed by hand. Take the changes over, or let");
    let title = format!("{title} the file win with --reset:");
    let line = |HandChangeBy { change, by }: &HandChangeBy| {
        let provider = &change.provider;
        let what = &change.what;
        let is = change.by_hand.as_ref().map(|value| format!(" is {value},")).unwrap_or_default();
        let in_file = change.in_file.as_deref().unwrap_or("otherwise");
        format!("  {provider}: {what}{is} {}; the file says {in_file}", author(by.as_ref()))
    };
    let lines = [title].into_iter().chain(conflicts.iter().map(line)).collect();
    CommandError::Problems { exit: Exit::Failed, lines }
}

/// Lanes must exist before a producer publishes to them, even while no worker runs.
async fn declare_all_lanes(cx: &CommandContext<'_>, ledger: &Database) -> Result<(), CommandError> {
    let names = provider_names(ledger).await?;
    let declared = async {
        match cx.queue().await? {
            Some(queue) => Ok::<_, CommandError>(declare_lanes(queue.as_ref(), &names, &names).await?),
            None => Ok(ClosedLanes::new()),
        }
    };
    let undeclared = declared.await.map_err(|error| {
        CommandError::Failed(format!(
            "the rows are applied, but the queues could not be declared: {error}. Fix that and run this again, or start a worker"
        ))
    })?;
    if undeclared.is_empty() {
        return Ok(());
    }
    let problems: Vec<String> = undeclared.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    let others = names.len() - undeclared.len();
    Err(CommandError::Failed(format!(
        "the rows are applied and the queues of {} declared, but not those of {}; fix that and run this again",
        count(others as u64, "provider"),
        problems.join("; ")
    )))
}

/// Paused providers for which the file does not set `paused`.
async fn unmentioned_pauses(rows: &[ProviderRow], ledger: &Database) -> Result<Vec<ProviderName>, CommandError> {
    let mut paused = Vec::new();
    for row in rows.iter().filter(|row| row.pause_unmentioned) {
        let name = parse_name(&row.name)?;
        if ledger.readable_rows(Some(&name)).await?.iter().any(|there| there.paused) {
            paused.push(name);
        }
    }
    Ok(paused)
}

/// Warnings that may not apply where the workers run (the outbound policy, and unreadable secrets), and the risks of the
/// rows.
async fn file_warnings(rows: &[ProviderRow], config: &Config) -> Vec<String> {
    let mut warnings = Vec::new();
    for row in rows {
        let Some(provider) = row.validate(0).ok().filter(|provider| provider.enabled) else { continue };
        let unreachable = check_callable(&provider, config).err();
        let unreachable =
            unreachable.map(|problem| format!("{problem}; a worker with this configuration has no lane for it"));
        let unreadable = unreadable_secrets(&provider, config).await.into_iter();
        let unreadable =
            unreadable.map(|secret| format!("not readable here: {secret}; the workers must be able to read it"));
        let risks = row_risks(&provider).into_iter().map(|risk| format!("{}. {}", risk.what, risk.fix));
        let all = unreachable.into_iter().chain(unreadable).chain(risks);
        warnings.extend(all.map(|warning| format!("provider `{}`: {warning}", row.name)));
    }
    warnings
}
