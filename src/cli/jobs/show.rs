//! The `jobs show` and `dlq show` commands: everything that the ledger knows about one payment.
//!
//! They do not show the payload and the request's body. Size and digest are enough to compare them with the expected
//! ones.

use super::super::connect::Services;
use super::super::{CommandError, Console, Exit};
use crate::amount::display_amount;
use crate::config::Config;
use crate::domain::format::count;
use crate::domain::job::JobId;
use crate::ledger::operator::{DatabaseTime, Digest, JobDetails, WaitDetails};

/// Prints one payment; with `state`, only if it is in that state.
///
/// # Errors
/// When the database fails, or there is no such payment.
pub async fn run(
    id: &JobId,
    state: Option<&str>,
    json: bool,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let Some(details) = services.ledger(config).await?.job_details(id).await? else {
        return Err(CommandError::Failed(format!("{id}: the ledger has no such job")));
    };
    if let Some(state) = state.filter(|state| *state != details.line.state) {
        let actual = &details.line.state;
        return Err(CommandError::Failed(format!("{id}: it is `{actual}`, not `{state}`; see `sluicegate jobs show`")));
    }
    if json {
        console.json(&details)?;
        return Ok(Exit::Success);
    }
    console.table(&["field", "value"], &field_rows(&details))?;
    print_section(
        "requests",
        &["number", "began", "ended", "outcome", "status", "counts", "details"],
        attempt_rows(&details),
        console,
    )?;
    print_section("events", &["state", "at", "published"], event_rows(&details), console)?;
    print_section("manual changes", &["at", "from", "to", "who", "program", "because"], audit_rows(&details), console)?;
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

fn field_rows(details: &JobDetails) -> Vec<Vec<String>> {
    let line = &details.line;
    let lease = details.lease_owner.as_ref().map(|owner| format!("{owner}, until {}", time_text(details.lease_until)));
    let request = details.request.as_ref().map(|r| match r.url.as_str() {
        "" => format!("{} (emptied)", r.method),
        url => format!("{} {url} ({}, {})", r.method, r.content_type, digest_text(&r.body)),
    });
    let open = ["waiting", "sending", "unknown"].contains(&line.state.as_str());
    // A final state tells the outcome.
    let undecided = open || line.state == "review";
    let all: [(&str, Option<String>); 23] = [
        ("id", Some(line.id.clone())),
        ("provider", Some(line.provider.clone())),
        ("state", Some(line.state.clone())),
        ("reason", line.reason.clone()),
        ("provider reference", line.provider_reference.clone()),
        ("outcome unknown", (details.maybe_charged && undecided).then(|| "yes: it may have been charged".to_owned())),
        ("amount", Some(display_amount(line.amount, &line.currency))),
        ("account", line.account.clone()),
        ("reference", details.reference.clone()),
        ("idempotency key", Some(details.idempotency_key.clone())),
        ("cost", (details.cost != 1).then(|| details.cost.to_string())),
        ("priority", (details.priority != 0).then(|| details.priority.to_string())),
        ("attempts that count", Some(line.attempts.to_string())),
        ("wakes at", open.then(|| line.wake_at.to_string())),
        ("lease", lease),
        ("not before", details.not_before.map(|at| at.to_string())),
        ("expires at", details.expires_at.map(|at| at.to_string())),
        ("waited", details.waited.as_ref().map(|waited| wait_text(details, waited))),
        ("first sent at", details.first_sent_at.map(|at| at.to_string())),
        ("manually resent at", details.revived_at.map(|at| at.to_string())),
        ("recorded, changed at", Some(format!("{}, {}", line.created_at, line.updated_at))),
        ("payload", details.payload.as_ref().map(digest_text)),
        ("request", request),
    ];
    all.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect()
}

/// `waited for limit per-account from … until …`: until it was sent, or until the end of its delay.
fn wait_text(details: &JobDetails, waited: &WaitDetails) -> String {
    let sent = details.attempts.iter().find(|attempt| attempt.number == waited.request);
    let until = sent.map_or(waited.until, |attempt| attempt.began_at);
    format!("{} from {} until {until}, before request {}", waited.past_reason, waited.since, waited.request)
}

fn attempt_rows(details: &JobDetails) -> Vec<Vec<String>> {
    let cells = details.attempts.iter().map(|a| {
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

fn event_rows(details: &JobDetails) -> Vec<Vec<String>> {
    details.events.iter().map(|e| vec![e.state.clone(), e.at.to_string(), time_text(e.published_at)]).collect()
}

fn audit_rows(details: &JobDetails) -> Vec<Vec<String>> {
    let cells = details.audit.iter().map(|a| {
        let who = match &a.os_user {
            Some(user) => format!("{user} as {}", a.who),
            None => a.who.clone(),
        };
        let effect = match (a.erased, a.cleared_maybe_charged) {
            (true, _) => "erased",
            (_, true) => "confirmed not charged",
            _ => "",
        };
        let because = [effect, a.because.as_deref().unwrap_or_default()];
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
