//! The commands that show payments: `jobs list` and `dlq list` page by page, `jobs show` and `dlq show` one payment.
//!
//! Each page is bounded. If there are more payments, a message has the command for the next page. Payload and request
//! body are not shown. Size and digest are enough to compare them with the expected ones.

use clap::builder::{PossibleValuesParser, TypedValueParser as _};

use crate::cli::console::TableShape;
use crate::cli::jobs::filter::{FilterArgs, parse_format};
use crate::cli::jobs::{filter, parse_id};
use crate::cli::provider::unknown_provider;
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::config::QueueUrl;
use crate::domain::amount::display_amount;
use crate::domain::format::count;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::{
    DatabaseTime, Digest, EventSummary, JobDetails, JobFilter, JobPage, JobSummary, STATES, WaitDetails,
};
use crate::ops::export::ExportFormat;
use crate::ops::unix_ms;

/// Filters and the page; without a filter all payments are listed.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// One state, or several, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(STATES).map(known_state))]
    pub state: Vec<&'static str>,
    #[command(flatten)]
    pub page: PageArgs,
}

/// The filter, the page and its format.
#[derive(Debug, clap::Args)]
pub struct PageArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Payments per page, 1 to 1000.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// The page after this id.
    #[arg(long, value_name = "ID", value_parser = parse_id, allow_hyphen_values = true)]
    after: Option<JobId>,
    /// Print the number of payments and their sum in each currency instead.
    #[arg(long, conflicts_with = "after")]
    totals: bool,
    /// Write all payments that match to stdout, as `csv` or `jsonl` (one JSON object per line).
    #[arg(long, value_name = "FORMAT", value_parser = parse_format, allow_hyphen_values = true,
          conflicts_with_all = ["after", "totals", "json"])]
    export: Option<ExportFormat>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn known_state(name: String) -> &'static str {
    STATES.into_iter().find(|state| *state == name).unwrap_or_default()
}

/// Prints one page, or what is asked for instead.
pub async fn print_page(
    states: &[&'static str],
    page: &PageArgs,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    let filter = page.filter.validate(states)?;
    if let Some(format) = page.export {
        return filter::export(filter, format, cx).await;
    }
    if page.totals {
        return filter::print_totals(&filter, page.json, cx).await;
    }
    let listed = list_full_page(&filter, page, cx).await?;
    if listed.jobs.is_empty() && listed.unreadable.is_empty() {
        check_provider_exists(filter.provider.as_ref(), cx).await?;
    }
    for row in &listed.unreadable {
        cx.console.message(&format!("warning: {row}"))?;
    }
    if page.json {
        cx.console.json(&listed)?;
        return Ok(Exit::Success);
    }
    let JobPage { jobs, unreadable, next, .. } = listed;
    if jobs.is_empty() && unreadable.is_empty() {
        cx.console.message(if page.after.is_some() { "no more payments" } else { "no such payments" })?;
        return Ok(Exit::Success);
    }
    let header = ["id", "provider", "state", "amount", "attempts", "wake at", "reason"];
    let (now, shape) = (DatabaseTime(unix_ms()), cx.console.shape());
    if !jobs.is_empty() {
        cx.console.table(&header, &jobs.iter().map(|job| job_cells(job, now, shape)).collect::<Vec<_>>())?;
    }
    if let Some(next) = next {
        cx.console.next_page("--after", &next)?;
    }
    Ok(Exit::Success)
}

/// Reads until the page is full or all payments were searched. Each statement searches a bounded number of payments.
async fn list_full_page(filter: &JobFilter, page: &PageArgs, cx: &CommandContext<'_>) -> Result<JobPage, CommandError> {
    let ledger = cx.ledger().await?;
    let mut listed = ledger.list_jobs(filter, page.after.as_ref(), page.limit).await?;
    while let Some(next) = listed.next.clone().filter(|_| listed.searched_back_to.is_some()) {
        let rows = u32::try_from(listed.jobs.len() + listed.unreadable.len()).unwrap_or(u32::MAX);
        let after = JobId::new(next).map_err(|why| CommandError::Failed(format!("an id {why}")))?;
        let more = ledger.list_jobs(filter, Some(&after), page.limit.saturating_sub(rows)).await?;
        listed.jobs.extend(more.jobs);
        listed.unreadable.extend(more.unreadable);
        (listed.next, listed.searched_back_to) = (more.next, more.searched_back_to);
    }
    Ok(listed)
}

/// Checks that a provider without payments exists, so that a typo in its name is reported.
///
/// # Errors
/// When the provider does not exist, or the database fails.
pub async fn check_provider_exists(
    provider: Option<&ProviderName>,
    cx: &CommandContext<'_>,
) -> Result<(), CommandError> {
    let Some(name) = provider else { return Ok(()) };
    match cx.ledger().await?.raw_rows(Some(name)).await?.is_empty() {
        true => Err(unknown_provider(name.as_str())),
        false => Ok(()),
    }
}

fn job_cells(job: &JobSummary, now: DatabaseTime, shape: TableShape) -> Vec<String> {
    // The wake-up time matters only for an open job that is delayed.
    let is_delayed = ["waiting", "sending", "unknown"].contains(&job.state.as_str()) && job.wake_at > now;
    let wake_at = match shape {
        TableShape::Plain => job.wake_at.to_string(),
        TableShape::Terminal { .. } => short_time(job.wake_at),
    };
    vec![
        job.id.clone(),
        job.provider.clone(),
        job.state.clone(),
        amount_text(job),
        job.attempts.to_string(),
        if is_delayed { wake_at } else { String::new() },
        job.reason.clone().unwrap_or_default(),
    ]
}

/// UTC, short enough for a column.
fn short_time(at: DatabaseTime) -> String {
    match jiff::Timestamp::from_millisecond(at.0) {
        Ok(at) => at.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
        Err(_) => at.to_string(),
    }
}

#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: JobId,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Prints one payment; with `state`, only if it is in that state.
///
/// # Errors
/// When the database fails, or there is no such payment.
pub async fn show(args: &ShowArgs, state: Option<&str>, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let id = &args.id;
    let Some(details) = cx.ledger().await?.job_details(id).await? else {
        return Err(CommandError::Failed(format!("{id}: the ledger has no such job")));
    };
    let details = details.seen_with(matches!(cx.config.queue.url, QueueUrl::Amqp(_)));
    if let Some(state) = state.filter(|state| *state != details.line.state) {
        let actual = &details.line.state;
        return Err(CommandError::Failed(format!("{id}: it is `{actual}`, not `{state}`; see `sluicegate jobs show`")));
    }
    if args.json {
        cx.console.json(&details)?;
        return Ok(Exit::Success);
    }
    cx.console.table(&["field", "value"], &field_rows(&details))?;
    print_section(
        "requests",
        &["number", "began", "ended", "outcome", "status", "counts", "details"],
        attempt_rows(&details),
        cx.console,
    )?;
    print_section("events", &["state", "at", "published"], event_rows(&details), cx.console)?;
    print_section(
        "manual changes",
        &["at", "from", "to", "who", "program", "because"],
        audit_rows(&details),
        cx.console,
    )?;
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

/// `EUR 12.99`, or `EUR 12.99, charged EUR 5.00`.
fn amount_text(job: &JobSummary) -> String {
    let charged = job.charged_amount.map(|charged| format!(", charged {}", display_amount(charged, &job.currency)));
    format!("{}{}", display_amount(job.amount, &job.currency), charged.unwrap_or_default())
}

fn field_rows(details: &JobDetails) -> Vec<Vec<String>> {
    let line = &details.line;
    let response_by = details.response_by.map(|_| format!(", response by {}", time_text(details.response_by)));
    let holder = details.holder.as_ref().map(|worker| format!("{worker}{}", response_by.unwrap_or_default()));
    let request = details.request.as_ref().map(|r| match r.url.as_str() {
        "" => format!("{} (emptied)", r.method),
        url => format!("{} {url} ({}, {})", r.method, r.content_type, digest_text(&r.body)),
    });
    let open = ["waiting", "sending", "unknown"].contains(&line.state.as_str());
    // A final state tells the outcome.
    let undecided = open || line.state == "review";
    let all: [(&str, Option<String>); 24] = [
        ("id", Some(line.id.clone())),
        ("provider", Some(line.provider.clone())),
        ("state", Some(line.state.clone())),
        ("reason", line.reason.clone()),
        ("provider reference", line.provider_reference.clone()),
        ("outcome unknown", (details.maybe_charged && undecided).then(|| "yes: it may have been charged".to_owned())),
        ("amount", Some(display_amount(line.amount, &line.currency))),
        ("charged amount", line.charged_amount.map(|charged| display_amount(charged, &line.currency))),
        ("account", line.account.clone()),
        ("reference", line.reference.clone()),
        ("idempotency key", Some(details.idempotency_key.clone())),
        ("cost", (details.cost != 1).then(|| details.cost.to_string())),
        ("priority", (details.priority != 0).then(|| details.priority.to_string())),
        ("attempts that count", Some(line.attempts.to_string())),
        ("wakes at", open.then(|| line.wake_at.to_string())),
        ("active in", holder),
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
        let counts = a.counted.map(yes_or_no);
        vec![
            a.number.to_string(),
            a.began_at.to_string(),
            time_text(a.ended_at),
            a.outcome.clone().unwrap_or_else(|| "none yet".to_owned()),
            a.status.map(|status| status.to_string()).unwrap_or_default(),
            counts.unwrap_or_default(),
            a.detail.clone().unwrap_or_default(),
        ]
    });
    cells.collect()
}

fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

fn event_rows(details: &JobDetails) -> Vec<Vec<String>> {
    let published = |e: &EventSummary| e.published.map_or_else(|| "no broker".to_owned(), yes_or_no);
    details.events.iter().map(|e| vec![e.state.clone(), e.at.to_string(), published(e)]).collect()
}

fn audit_rows(details: &JobDetails) -> Vec<Vec<String>> {
    let cells = details.audit.iter().map(|a| {
        // The user whom a command named, with the database's user.
        let who = a.os_user.as_ref().map_or_else(|| a.who.clone(), |user| format!("{user} as {}", a.who));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_job_shows_no_wake_time() {
        let at = DatabaseTime(1_795_000_000_123);
        let job = JobSummary {
            id: "p1".to_owned(),
            provider: "acme".to_owned(),
            state: "waiting".to_owned(),
            amount: 1,
            currency: "EUR".to_owned(),
            account: None,
            reference: None,
            attempts: 0,
            wake_at: at,
            reason: None,
            wait_reason: None,
            wait_limit: None,
            provider_reference: None,
            charged_amount: None,
            created_at: at,
            updated_at: at,
        };
        let wakes = |job: &JobSummary, now: i64, shape| job_cells(job, DatabaseTime(now), shape)[5].clone();
        let terminal = TableShape::Terminal { width: None };
        assert_eq!(wakes(&job, at.0, TableShape::Plain), "");
        assert_eq!(wakes(&job, at.0 - 1, TableShape::Plain), "2026-11-18T11:06:40.123Z");
        assert_eq!(wakes(&job, at.0 - 1, terminal), "2026-11-18 11:06:40Z");
        let dead = JobSummary { state: "dead".to_owned(), ..job };
        assert_eq!(wakes(&dead, at.0 - 1, terminal), "");
    }
}
