//! `jobs show` and `dlq show`: everything that the ledger knows of one payment.
//!
//! Refuses to show the payload and the request's body: size and digest tell whether they are what somebody expects.

use super::super::connect::Engines;
use super::super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::explain::words::{count, in_the_past};
use crate::domain::job::JobId;
use crate::ledger::operator::{At, Digest, JobStory, WaitLine};

/// Prints one payment; with `state`, only if it is in that one.
///
/// # Errors
/// When the database fails, or there is no such payment.
pub async fn run(
    id: &JobId,
    state: Option<&str>,
    json: bool,
    config: &Config,
    engines: &dyn Engines,
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
        return Ok(Exit::Fine);
    }
    console.table(&["field", "value"], &fields(&story))?;
    section(
        "requests",
        &["number", "began", "ended", "outcome", "status", "counts", "detail"],
        attempts(&story),
        console,
    )?;
    section("events", &["state", "at", "published"], events(&story), console)?;
    section("changed by hand", &["at", "from", "to", "who", "program", "because"], audit(&story), console)?;
    Ok(Exit::Fine)
}

fn section(title: &str, header: &[&str], rows: Vec<Vec<String>>, console: &mut Console) -> Result<(), CommandError> {
    if rows.is_empty() {
        return Ok(());
    }
    console.line("")?;
    console.line(title)?;
    Ok(console.table(header, &rows)?)
}

fn fields(story: &JobStory) -> Vec<Vec<String>> {
    let line = &story.line;
    let lease = story.lease_owner.as_ref().map(|owner| format!("{owner}, until {}", text(story.lease_until)));
    let request = story.request.as_ref().map(|r| match r.url.as_str() {
        "" => format!("{} (emptied)", r.method),
        url => format!("{} {url} ({}, {})", r.method, r.content_type, digest(&r.body)),
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
        ("waited", story.waited.as_ref().map(|waited| waits(story, waited))),
        ("first sent at", story.first_sent_at.map(|at| at.to_string())),
        ("sent again by hand at", story.revived_at.map(|at| at.to_string())),
        ("recorded, changed at", Some(format!("{}, {}", line.created_at, line.updated_at))),
        ("payload", story.payload.as_ref().map(digest)),
        ("request", request),
    ];
    all.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect()
}

/// `waited for limit per-account from … until …`: until it was sent, or else as long as it was put down.
fn waits(story: &JobStory, waited: &WaitLine) -> String {
    let sent = story.attempts.iter().find(|attempt| attempt.number == waited.request);
    let until = sent.map_or(waited.until, |attempt| attempt.began_at);
    format!("{} from {} until {until}, before request {}", in_the_past(&waited.reason), waited.since, waited.request)
}

fn attempts(story: &JobStory) -> Vec<Vec<String>> {
    let cells = story.attempts.iter().map(|a| {
        let counts = a.counted.map(|counted| if counted { "yes" } else { "no" });
        vec![
            a.number.to_string(),
            a.began_at.to_string(),
            text(a.ended_at),
            a.outcome.clone().unwrap_or_else(|| "none yet".to_owned()),
            a.status.map(|status| status.to_string()).unwrap_or_default(),
            counts.unwrap_or_default().to_owned(),
            a.detail.clone().unwrap_or_default(),
        ]
    });
    cells.collect()
}

fn events(story: &JobStory) -> Vec<Vec<String>> {
    story.events.iter().map(|e| vec![e.state.clone(), e.at.to_string(), text(e.published_at)]).collect()
}

fn audit(story: &JobStory) -> Vec<Vec<String>> {
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

fn text(at: Option<At>) -> String {
    at.map(|at| at.to_string()).unwrap_or_default()
}

fn digest(digest: &Digest) -> String {
    format!("{}, sha256 {}", count(digest.bytes, "byte"), digest.sha256)
}
