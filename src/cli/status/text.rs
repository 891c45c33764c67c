//! The overview as text: one line per provider, and below it the cause of its state.
//!
//! The table fits the terminal's width, and causes are wrapped to it. If it must also fit the height, providers with
//! problems come first.

use jiff::Timestamp;

use crate::cli::console::{TableShape, group_thousands, render_table, width, wrap_words};
use crate::domain::format::{count, plural};
use crate::domain::limit::AppliesTo;
use crate::fleet::pace::{ClearTimeOverview, LimitOverview, MissingSource};
use crate::fleet::{Overview, ProviderOverview, ProviderState};

use super::finish::finish_note;
use super::{TableColumn, render_lines};

/// Titles for a pipe, one per column.
const HEADER: [&str; 11] =
    ["provider", "state", "limit", "used", "rate", "waiting", "in flight", "delayed", "review", "dead", "clears in"];
/// Precedes a cause.
const INDENT: &str = "  └ ";
/// Age in seconds above which a count shows its age.
const COUNT_STALE_AFTER_S: i64 = 5;
/// An unknown value.
const UNKNOWN: &str = "-";
/// Reconciliation and warnings may take one third of the height.
const TAIL_HEIGHT_DIVISOR: usize = 3;

/// The table, the reconciliation and the warnings, in at most `height` lines.
pub(super) fn render_overview(overview: &Overview, shape: TableShape, height: Option<usize>) -> String {
    let width = width(shape);
    let warnings = overview.warnings.iter().map(|warning| format!("warning: {warning}"));
    let notes = pause_of_all_line(overview).into_iter().chain(reconciliation_lines(overview));
    let notes = notes.chain(rejected_line(overview)).chain(warnings);
    let tail: Vec<String> = notes.flat_map(|line| split_lines(&wrap_words("", &line, width))).collect();
    let table = match shape {
        TableShape::Plain => plain_table(overview),
        TableShape::Terminal { .. } => terminal_table(&overview.providers, width),
    };
    let mut page = match height {
        None => table.into_lines(),
        Some(height) => fit_height(overview, table, height.saturating_sub(tail_height(&tail, height) + 1)),
    };
    page.push(String::new());
    page.extend(match height {
        Some(height) => truncate_lines(tail, height / TAIL_HEIGHT_DIVISOR),
        None => tail,
    });
    page.join("\n")
}

fn tail_height(tail: &[String], height: usize) -> usize {
    tail.len().min((height / TAIL_HEIGHT_DIVISOR).max(1))
}

/// At most so many lines; the last one says how many are left out.
fn truncate_lines(mut lines: Vec<String>, at_most: usize) -> Vec<String> {
    let at_most = at_most.max(1);
    if lines.len() > at_most {
        let left_out = lines.len() - (at_most - 1);
        lines.truncate(at_most - 1);
        lines.push(format!("… {}", count(left_out as u64, "more line")));
    }
    lines
}

/// The header of the table, and one block of lines per provider.
struct StatusTable {
    head: Vec<String>,
    blocks: Vec<Vec<String>>,
}

impl StatusTable {
    /// In lines.
    fn height(&self) -> usize {
        self.head.len() + self.blocks.iter().map(Vec::len).sum::<usize>()
    }

    fn into_lines(self) -> Vec<String> {
        [vec![self.head], self.blocks].concat().concat()
    }
}

/// The providers with problems first, then those with the largest backlog; the rest is counted.
fn fit_height(overview: &Overview, table: StatusTable, height: usize) -> Vec<String> {
    if table.height() <= height {
        return table.into_lines();
    }
    let StatusTable { head, blocks } = table;
    let mut ranked: Vec<(&ProviderOverview, Vec<String>)> = overview.providers.iter().zip(blocks).collect();
    let quiet = |state: ProviderState| {
        matches!(
            state,
            ProviderState::Disabled | ProviderState::Running | ProviderState::Idle | ProviderState::WaitingForLimit
        )
    };
    ranked.sort_by_key(|(provider, _)| (quiet(provider.state), std::cmp::Reverse(provider.waiting)));
    let (mut page, mut shown) = (head, 0);
    for (_, block) in &ranked {
        if page.len() + block.len() + 1 > height {
            break;
        }
        page.extend(block.iter().cloned());
        shown += 1;
    }
    page.push(format!("… {} more", ranked.len() - shown));
    page
}

/// The table for pipes.
fn plain_table(overview: &Overview) -> StatusTable {
    let rows: Vec<Vec<String>> = overview.providers.iter().map(cells).collect();
    with_notes(split_lines(&render_table(&HEADER, &rows, TableShape::Plain)), &overview.providers, None)
}

/// The lines of a table, with the note on each provider below its line.
fn with_notes(lines: Vec<String>, providers: &[ProviderOverview], width: Option<usize>) -> StatusTable {
    let mut lines = lines.into_iter();
    let head: Vec<String> = lines.next().into_iter().collect();
    let block = |(line, provider): (String, &ProviderOverview)| {
        let note = status_note(provider).map(|note| split_lines(&wrap_words(INDENT, &note, width))).unwrap_or_default();
        [vec![line], note].concat()
    };
    StatusTable { head, blocks: lines.zip(providers).map(block).collect() }
}

/// The table for a terminal: limit and usage in one column, and no column of zeros.
fn terminal_table(providers: &[ProviderOverview], width: Option<usize>) -> StatusTable {
    let column = |title, figures, cell: fn(&ProviderOverview) -> String| TableColumn {
        title,
        is_right_aligned: figures,
        cells: providers.iter().map(cell).collect(),
    };
    let counted = |title, count: fn(&ProviderOverview) -> Option<u64>| {
        let some = providers.iter().any(|provider| count(provider) != Some(0));
        some.then(|| TableColumn {
            title,
            is_right_aligned: true,
            cells: providers.iter().map(|provider| count_text(count(provider))).collect(),
        })
    };
    let columns = [
        Some(column("provider", false, |provider| provider.name.clone())),
        Some(column("state", false, |provider| provider.state.to_string().replace('_', " "))),
        Some(column("used", true, |provider| {
            fullest_limit(&provider.limits).map_or_else(|| UNKNOWN.to_owned(), usage_text)
        })),
        Some(column("rate", true, |provider| per_second(provider.rate_per_s))),
        Some(column("waiting", true, waiting_text)),
        Some(column("in flight", true, |provider| count_text(provider.in_flight))),
        counted("delayed", |provider| provider.delayed),
        counted("review", |provider| provider.review),
        counted("dead", |provider| provider.dead),
        Some(column("clears in", true, clear_time)),
    ];
    with_notes(render_lines(columns.into_iter().flatten().collect(), width), providers, width)
}

fn split_lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

fn cells(provider: &ProviderOverview) -> Vec<String> {
    let limit = fullest_limit(&provider.limits);
    vec![
        provider.name.clone(),
        provider.state.to_string(),
        limit.map_or_else(|| UNKNOWN.to_owned(), LimitOverview::rate_in_words),
        limit.and_then(|limit| limit.used).map_or_else(|| UNKNOWN.to_owned(), |used| used.to_string()),
        per_second(provider.rate_per_s),
        waiting_text(provider),
        count_text(provider.in_flight),
        count_text(provider.delayed),
        count_text(provider.review),
        count_text(provider.dead),
        clear_time(provider),
    ]
}

/// `1,332`; if a source is missing, the count of the others: `≥ 1,332`.
fn waiting_text(provider: &ProviderOverview) -> String {
    let least = if provider.waiting_is_at_least { "≥ " } else { "" };
    format!("{least}{}", group_thousands(provider.waiting))
}

fn count_text(count: Option<u64>) -> String {
    count.map_or_else(|| UNKNOWN.to_owned(), group_thousands)
}

fn per_second(rate: Option<f64>) -> String {
    rate.map_or_else(|| UNKNOWN.to_owned(), |rate| format!("{rate:.1}/s"))
}

/// Why `waiting` is a lower bound.
fn waiting_note(provider: &ProviderOverview) -> Option<String> {
    let missing = match (provider.queued, provider.delayed) {
        _ if !provider.waiting_is_at_least => return None,
        (None, None) => "the broker and the database are unreachable",
        (None, _) => "the broker is unreachable",
        (_, _) => "the jobs in the database could not be counted",
    };
    Some(format!("at least {} wait; {missing}", group_thousands(provider.waiting)))
}

/// The clear time: `2 min 5 s`, its lower bound `≥ 34 s`, or why there is none.
fn clear_time(provider: &ProviderOverview) -> String {
    clear_time_text(&provider.clears)
}

/// The same of an estimate that is no provider's own.
pub fn clear_time_text(clears: &ClearTimeOverview) -> String {
    match clears {
        ClearTimeOverview::ClearsIn { ms } => rounded_duration(*ms),
        ClearTimeOverview::DependsOnAccounts { at_least_ms, .. } => format!("≥ {}", rounded_duration(*at_least_ms)),
        ClearTimeOverview::Never { .. } => "never".to_owned(),
        ClearTimeOverview::NotBefore { at, .. } => format!("not before {at}"),
        ClearTimeOverview::NotWhileBlocked => "not while blocked".to_owned(),
        ClearTimeOverview::NotWhileThrottled { passed_per_s } => {
            format!("unknown: 429s{}", passed_text(*passed_per_s))
        }
        ClearTimeOverview::NotWhilePaused => "not while paused".to_owned(),
        ClearTimeOverview::NotWhileDisabled => "not while disabled".to_owned(),
        ClearTimeOverview::NotWhileBreakerOpen => "not while the breaker is open".to_owned(),
        ClearTimeOverview::Unknown { .. } => "unknown".to_owned(),
    }
}

/// `; 6.2/s get through`, if that is known.
fn passed_text(passed_per_s: Option<f64>) -> String {
    passed_per_s.map(|per_s| format!("; {per_s}/s get through")).unwrap_or_default()
}

/// The note on the clear time: why it is unknown, which limits decide, and an estimate if there is one.
fn clear_time_note(provider: &ProviderOverview) -> Option<String> {
    match &provider.clears {
        ClearTimeOverview::DependsOnAccounts { limits, about_ms, .. } => {
            let (limit, counts) = if limits.len() == 1 { ("limit", "counts") } else { ("limits", "count") };
            let about = about_ms
                .map(|ms| format!("clears in about {} at the rate of the last minutes; ", rounded_duration(ms)));
            let about = about.unwrap_or_default();
            Some(format!("{about}{limit} {} {counts} each account or reference on its own", limits.join(", ")))
        }
        // The note on the waiting jobs names this cause already.
        ClearTimeOverview::Unknown { missing: MissingSource::Queue | MissingSource::Ledger }
            if provider.waiting_is_at_least =>
        {
            None
        }
        ClearTimeOverview::Unknown { missing: MissingSource::Queue } => {
            Some("the broker does not report how many jobs wait".to_owned())
        }
        ClearTimeOverview::Unknown { missing: MissingSource::Ledger } => {
            Some("the database does not report how many jobs wait".to_owned())
        }
        // The column or the state says it all.
        ClearTimeOverview::ClearsIn { .. }
        | ClearTimeOverview::Never { .. }
        | ClearTimeOverview::NotBefore { .. }
        | ClearTimeOverview::NotWhileBlocked
        | ClearTimeOverview::NotWhileThrottled { .. }
        | ClearTimeOverview::NotWhilePaused
        | ClearTimeOverview::NotWhileDisabled
        | ClearTimeOverview::NotWhileBreakerOpen
        | ClearTimeOverview::Unknown { .. } => None,
    }
}

/// The fullest limit among those that every charge meets, or else the tightest.
fn fullest_limit(limits: &[LimitOverview]) -> Option<&LimitOverview> {
    let counting = limits.iter().filter(|limit| {
        limit.enabled && !limit.shadow && limit.scope == "provider" && limit.applies_to != AppliesTo::Lookup.name()
    });
    #[allow(clippy::cast_precision_loss, reason = "only compared")]
    let key = |limit: &LimitOverview| {
        let (used, remaining) = (limit.used.unwrap_or(0) as f64, limit.remaining.unwrap_or(0) as f64);
        let left = if used + remaining > 0.0 { remaining / (used + remaining) } else { 1.0 };
        // A rate before a number of requests in flight.
        let per_ms = limit.window_ms.map_or(f64::INFINITY, |window_ms| limit.max_requests as f64 / window_ms as f64);
        (left, per_ms)
    };
    counting.min_by(|a, b| {
        let (a, b) = (key(a), key(b));
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    })
}

/// `23 of 30/1m`.
fn usage_text(limit: &LimitOverview) -> String {
    let used = limit.used.map_or_else(|| UNKNOWN.to_owned(), |used| used.to_string());
    format!("{used} of {}", limit.rate_in_words())
}

/// The cause of the provider's state, and the problems of its row.
fn status_note(provider: &ProviderOverview) -> Option<String> {
    // The pause ends then; whether the provider is up again, or its row is right, shows the next request.
    let is_retried = matches!(provider.state, ProviderState::BreakerOpen | ProviderState::Misconfigured);
    let ends = if is_retried { "next try in" } else { "ends in" };
    let ends = provider.ends_in_ms.map(|ms| format!("{ends} {}", rounded_duration(ms)));
    let cause = provider.cause.clone();
    let refused = provider.refused_by_provider.filter(|refused| *refused > 0);
    let requests = |refused| format!("{} {}", group_thousands(refused), plural(refused, "request"));
    // The cause of a throttled provider has the number.
    let refused = refused.filter(|_| provider.state != ProviderState::Throttled);
    let refused =
        refused.map(|refused| format!("the provider refused {} with 429 in the last hour", requests(refused)));
    let good = fullest_limit(&provider.limits)
        .map(|limit| format!(" ({} {})", limit.name, limit.rate_in_words()))
        .unwrap_or_default();
    let counts = match provider.has_valid_row {
        true => format!("its last valid version is in force{good}"),
        false => "nothing is sent".to_owned(),
    };
    let problems = provider.problems.iter().map(|problem| format!("invalid row, {counts}: {problem}"));
    let parts: Vec<String> = cause
        .into_iter()
        .chain(ends)
        .chain(waiting_note(provider))
        .chain(refused)
        .chain(problems)
        .chain(finish_note(provider))
        .chain(clear_time_note(provider))
        .chain(pace_note(provider))
        .collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// The pace, unless one limit says it all.
fn pace_note(provider: &ProviderOverview) -> Option<String> {
    let pace = provider.pace.as_ref().filter(|pace| !pace.is_plain)?;
    Some(format!("pace: {}", pace.text))
}

/// `all providers paused by alice@desk since …`, while such a pause is in force.
fn pause_of_all_line(overview: &Overview) -> Option<String> {
    let pause = overview.pause_of_all.as_ref()?;
    let because = pause.because.as_ref().map(|because| format!(" ({because})")).unwrap_or_default();
    let (by, since, held) = (&pause.by, &pause.since, plural(pause.providers.len() as u64, "provider"));
    let count = pause.providers.len();
    Some(format!(
        "all providers paused by {by} since {since}{because}: `sluicegate provider resume --all` resumes {count} {held}"
    ))
}

/// `12 rejected messages await a decision (acme 10, stripe 2): sluicegate rejected list`, if there are any.
fn rejected_line(overview: &Overview) -> Option<String> {
    let rejected = overview.rejected.as_ref().filter(|rejected| rejected.messages > 0)?;
    let least = if rejected.is_at_least { "≥ " } else { "" };
    let by_provider =
        rejected.providers.iter().map(|(name, messages)| format!("{name} {}", group_thousands(*messages)));
    let by_provider = by_provider.collect::<Vec<_>>().join(", ");
    let (total, verb) = (group_thousands(rejected.messages), if rejected.messages == 1 { "awaits" } else { "await" });
    let messages = plural(rejected.messages, "rejected message");
    Some(format!("{least}{total} {messages} {verb} a decision ({by_provider}): `sluicegate rejected list`"))
}

/// `all 1,234 recorded payments accounted for`, or the discrepancies.
fn reconciliation_lines(overview: &Overview) -> Vec<String> {
    let Some(accounts) = &overview.reconciliation else {
        return vec!["reconciliation: unknown, because there is no recent count of the payments".to_owned()];
    };
    let faults = accounts.iter().flat_map(|account| {
        account.faults.iter().map(|fault| format!("reconciliation: {}: {fault}", account.provider))
    });
    let faults: Vec<String> = faults.collect();
    if !faults.is_empty() {
        return faults;
    }
    let jobs: u64 = accounts.iter().map(|account| account.recorded).sum();
    let all = match jobs {
        0 => "no recorded payments".to_owned(),
        1 => "the one recorded payment is accounted for".to_owned(),
        _ => format!("all {} recorded payments accounted for", group_thousands(jobs)),
    };
    vec![format!("{all}{}", count_age(overview))]
}

/// The age of the counts, waiting and delayed jobs included, if it is above [`COUNT_STALE_AFTER_S`].
fn count_age(overview: &Overview) -> String {
    let seconds = |at: &str| at.parse::<Timestamp>().map(Timestamp::as_second).ok();
    let counted_at = overview.counted_at.as_deref().and_then(seconds);
    let age_s = counted_at.zip(seconds(&overview.at)).map_or(0, |(counted, now)| now - counted);
    if age_s <= COUNT_STALE_AFTER_S { String::new() } else { format!("; the counts shown are {age_s} s old") }
}

/// Two units at most: `1.2 s`, `59 s`, `2 min 5 s`, `3 h 7 min`, `4 d 1 h`.
fn rounded_duration(ms: u64) -> String {
    let seconds = ms / 1_000;
    match seconds {
        0..=9 => format!("{}.{} s", seconds, ms % 1_000 / 100),
        10..=59 => format!("{seconds} s"),
        60..=3_599 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..=86_399 => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
