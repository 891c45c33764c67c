//! `jobs show` and `dlq show`: everything that the ledger knows of one payment.
//!
//! Refuses to show the payload and the request's body: size and digest tell whether they are what somebody expects.

use super::super::connect::Services;
use super::super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::explain::format::{count, past_reason};
use crate::domain::job::JobId;
use crate::ledger::operator::{DatabaseTime, Digest, JobDetails, WaitDetails};

/// Prints one payment; with `state`, only if it is in that one.
///
/// # Errors
/// When the database fails, or there is no such payment.
pub async fn run(
    id: &JobId,
    state: Option<&str>,
    json: bool,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let Some(story) = engines.operator(config).await?.show(id).await? else {
        return Err(CommandError::Failed(format!("{id}: the ledger has no such job")));
    };
    if let Some(state) = state.filter(|state| *state != story.line.state) {
        let is = &story.line.state;
        return Err(CommandError::Failed(format!("{id}: it is `{is}`, not `{state}`; see `sluicegate jobs show`")));
    }
    if json {
        console.json(&story)?;
        return Ok(Exit::Success);
    }
    console.table(&["field", "value"], &field_rows(&story))?;
    print_section(
        "requests",
        &["number", "began", "ended", "outcome", "status", "counts", "detail"],
        attempt_rows(&story),
        console,
    )?;
    print_section("events", &["state", "at", "published"], event_rows(&story), console)?;
    print_section("changed by hand", &["at", "from", "to", "who", "program", "because"], audit_rows(&story), console)?;
    Ok(Exit::Success)
}

fn print_section(
    title: &str,
    header: &[&str],
    rows: Vec<Vec<String>>,
    console: &mut Console,
) -> Result<(), CommandError> {
    if rows.is_empty() {
        return Ok(());
    }
    console.line("")?;
    console.line(title)?;
    Ok(console.table(header, &rows)?)
}

fn field_rows(story: &JobDetails) -> Vec<Vec<String>> {
    let line = &story.line;
    let lease = story.lease_owner.as_ref().map(|owner| format!("{owner}, until {}", time_text(story.lease_until)));
    let request = story.request.as_ref().map(|r| match r.url.as_str() {
        "" => format!("{} (emptied)", r.method),
        url => format!("{} {url} ({}, {})", r.method, r.content_type, digest_text(&r.body)),
    });
    let open = ["waiting", "sending", "unknown"].contains(&line.state.as_str());
    // A final state says what came of it.
    let undecided = open || line.state == "review";
    let all: [(&str, Option<String>); 23] = [
        ("id", Some(line.id.clone())),
        ("provider", Some(line.provider.clone())),
        ("state", Some(line.state.clone())),
        ("reason", line.reason.clone()),
        ("provider reference", line.provider_reference.clone()),
        ("maybe charged", (story.maybe_charged && undecided).then(|| "yes: an outcome is unknown".to_owned())),
        ("amount", Some(format!("{} {} (minor units)", line.amount, line.currency))),
        ("account", line.account.clone()),
        ("reference", story.reference.clone()),
        ("idempotency key", Some(story.idempotency_key.clone())),
        ("cost", (story.cost != 1).then(|| story.cost.to_string())),
        ("priority", (story.priority != 0).then(|| story.priority.to_string())),
        ("attempts that count", Some(line.attempts.to_string())),
        ("wakes at", open.then(|| line.wake_at.to_string())),
        ("in hand of", lease),
        ("not before", story.not_before.map(|at| at.to_string())),
        ("expires at", story.expires_at.map(|at| at.to_string())),
        ("waited", story.waited.as_ref().map(|waited| wait_text(story, waited))),
        ("first sent at", story.first_sent_at.map(|at| at.to_string())),
        ("sent again by hand at", story.revived_at.map(|at| at.to_string())),
        ("recorded, changed at", Some(format!("{}, {}", line.created_at, line.updated_at))),
        ("payload", story.payload.as_ref().map(digest_text)),
        ("request", request),
    ];
    all.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect()
}

/// `waited for limit per-account from … until …`: until it was sent, or else as long as it was put down.
fn wait_text(story: &JobDetails, waited: &WaitDetails) -> String {
    let sent = story.attempts.iter().find(|attempt| attempt.number == waited.request);
    let until = sent.map_or(waited.until, |attempt| attempt.began_at);
    format!("{} from {} until {until}, before request {}", past_reason(&waited.reason), waited.since, waited.request)
}

fn attempt_rows(story: &JobDetails) -> Vec<Vec<String>> {
    let cells = story.attempts.iter().map(|a| {
        let counts = a.counted.map(|counted| if counted { "yes" } else { "no" });
        vec![
            a.number.to_string(),
            a.began_at.to_string(),
            time_text(a.ended_at),
            a.outcome.clone().unwrap_or_else(|| "none yet".to_owned()),
            a.status.map(|status| status.to_string()).unwrap_or_default(),
            counts.unwrap_or_default().to_owned(),
            a.detail.clone().unwrap_or_default(),
        ]
    });
    cells.collect()
}

fn event_rows(story: &JobDetails) -> Vec<Vec<String>> {
    story.events.iter().map(|e| vec![e.state.clone(), e.at.to_string(), time_text(e.published_at)]).collect()
}

fn audit_rows(story: &JobDetails) -> Vec<Vec<String>> {
    let cells = story.audit.iter().map(|a| {
        let who = match &a.os_user {
            Some(user) => format!("{user} as {}", a.who),
            None => a.who.clone(),
        };
        let said = match (a.erased, a.cleared_maybe_charged) {
            (true, _) => "erased",
            (_, true) => "surely not charged",
            _ => "",
        };
        let because = [said, a.because.as_deref().unwrap_or_default()];
        vec![
            a.at.to_string(),
            a.old_state.clone(),
            a.new_state.clone().unwrap_or_else(|| "deleted".to_owned()),
            who,
            a.program.clone().unwrap_or_default(),
            because.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join("; "),
        ]
    });
    cells.collect()
}

fn time_text(at: Option<DatabaseTime>) -> String {
    at.map(|at| at.to_string()).unwrap_or_default()
}

fn digest_text(digest: &Digest) -> String {
    format!("{}, sha256 {}", count(digest.bytes, "byte"), digest.sha256)
}
