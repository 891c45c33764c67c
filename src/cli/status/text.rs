//! The overview as a table for people: one line per provider, and under it why it does not run.
//!
//! Refuses to scroll sideways: the table fits the terminal, and causes are wrapped to it. Where it must fit the height too,
//! those go first that need somebody.

use jiff::Timestamp;

use crate::cli::console::{TableShape, render_table, width, wrap_words};
use crate::domain::explain::format::{count, plural};
use crate::domain::limit::AppliesTo;
use crate::domain::time::format_duration;
use crate::fleet::clears::{ClearTimeOverview, MissingSource};
use crate::fleet::overview::{LimitOverview, ProviderOverview};
use crate::fleet::{Overview, ProviderState};

use super::table::{TableColumn, render_lines};

/// In a pipe, where each column is one thing.
const HEADER: [&str; 11] =
    ["provider", "state", "limit", "used", "rate", "waiting", "in flight", "parked", "review", "dead", "drained in"];
/// What stands before a cause.
const INDENT: &str = "  └ ";
/// A younger count is as good as now.
const COUNT_STALE_AFTER_S: i64 = 5;
/// What nobody could tell.
const UNKNOWN: &str = "-";
/// Share of the height that account and warnings may take.
const TAIL_HEIGHT_DIVISOR: usize = 3;

/// The table, the account and the warnings; with a height, no more lines than that.
pub(super) fn render_overview(overview: &Overview, shape: TableShape, height: Option<usize>) -> String {
    let width = width(shape);
    let said =
        reconciliation_lines(overview).into_iter().chain(overview.warnings.iter().map(|it| format!("warning: {it}")));
    let tail: Vec<String> = said.flat_map(|line| split_lines(&wrap_words("", &line, width))).collect();
    let (head, blocks) = match shape {
        TableShape::Plain => plain_table(overview),
        TableShape::Terminal { .. } => terminal_table(&overview.providers, width),
    };
    let mut page = match height {
        None => [vec![head], blocks].concat().concat(),
        Some(height) => fit_height(overview, (head, blocks), height.saturating_sub(tail_height(&tail, height) + 1)),
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

/// So many lines, of which the last says how many are not there.
fn truncate_lines(mut lines: Vec<String>, at_most: usize) -> Vec<String> {
    let at_most = at_most.max(1);
    if lines.len() > at_most {
        let left_out = lines.len() - (at_most - 1);
        lines.truncate(at_most - 1);
        lines.push(format!("… {}", count(left_out as u64, "more line")));
    }
    lines
}

/// Whoever needs somebody first, then those with the most to do; the rest is counted.
fn fit_height(overview: &Overview, (head, blocks): (Vec<String>, Vec<Vec<String>>), height: usize) -> Vec<String> {
    let lines = |blocks: &[Vec<String>]| blocks.iter().map(Vec::len).sum::<usize>();
    if head.len() + lines(&blocks) <= height {
        return [vec![head], blocks].concat().concat();
    }
    let mut ranked: Vec<(&ProviderOverview, Vec<String>)> = overview.providers.iter().zip(blocks).collect();
    let quiet = |state: ProviderState| {
        matches!(
            state,
            ProviderState::Disabled | ProviderState::Running | ProviderState::Idle | ProviderState::WaitingForLimit
        )
    };
    ranked.sort_by_key(|(of, _)| (quiet(of.state), std::cmp::Reverse(of.waiting)));
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

/// Table head and one block of lines per provider, for pipes.
fn plain_table(overview: &Overview) -> (Vec<String>, Vec<Vec<String>>) {
    let rows: Vec<Vec<String>> = overview.providers.iter().map(cells).collect();
    let table = render_table(&HEADER, &rows, TableShape::Plain);
    let mut lines = table.lines().map(str::to_owned);
    let head: Vec<String> = lines.next().into_iter().collect();
    let with_note = |(line, of): (String, &ProviderOverview)| {
        let note = status_note(of).map(|note| wrap_words(INDENT, &note, None));
        [Some(line), note].into_iter().flatten().collect()
    };
    (head, lines.zip(&overview.providers).map(with_note).collect())
}

/// The same for a terminal: limit and use in one column, and none that says nothing.
fn terminal_table(providers: &[ProviderOverview], width: Option<usize>) -> (Vec<String>, Vec<Vec<String>>) {
    let column = |title, figures, cell: fn(&ProviderOverview) -> String| TableColumn {
        title,
        is_right_aligned: figures,
        cells: providers.iter().map(cell).collect(),
    };
    let counted = |title, count: fn(&ProviderOverview) -> Option<u64>| {
        let some = providers.iter().any(|of| count(of) != Some(0));
        some.then(|| TableColumn {
            title,
            is_right_aligned: true,
            cells: providers.iter().map(|of| count_text(count(of))).collect(),
        })
    };
    let columns = [
        Some(column("provider", false, |of| of.name.clone())),
        Some(column("state", false, |of| of.state.name().replace('_', " "))),
        Some(column("used", true, |of| fullest_limit(&of.limits).map_or_else(|| UNKNOWN.to_owned(), usage_text))),
        Some(column("rate", true, |of| per_second(of.rate_per_s))),
        Some(column("waiting", true, waiting_text)),
        Some(column("in flight", true, |of| count_text(of.in_flight))),
        counted("parked", |of| of.parked),
        counted("review", |of| of.review),
        counted("dead", |of| of.dead),
        Some(column("drain", true, drain_time)),
    ];
    let mut lines = render_lines(columns.into_iter().flatten().collect(), width).into_iter();
    let head: Vec<String> = lines.next().into_iter().collect();
    let with_note = |(line, of): (String, &ProviderOverview)| {
        let note = status_note(of).map(|note| split_lines(&wrap_words(INDENT, &note, width))).unwrap_or_default();
        [vec![line], note].concat()
    };
    (head, lines.zip(providers).map(with_note).collect())
}

fn split_lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

fn cells(of: &ProviderOverview) -> Vec<String> {
    let limit = fullest_limit(&of.limits);
    vec![
        of.name.clone(),
        of.state.name().to_owned(),
        limit.map_or_else(|| UNKNOWN.to_owned(), rate_text),
        limit.and_then(|limit| limit.used).map_or_else(|| UNKNOWN.to_owned(), |used| used.to_string()),
        per_second(of.rate_per_s),
        waiting_text(of),
        count_text(of.in_flight),
        count_text(of.parked),
        count_text(of.review),
        count_text(of.dead),
        drain_time(of),
    ]
}

/// `1,332`; where a source is missing, what the others know: `≥ 1,332`.
fn waiting_text(of: &ProviderOverview) -> String {
    let least = if of.waiting_is_at_least { "≥ " } else { "" };
    format!("{least}{}", group_digits(of.waiting))
}

fn count_text(count: Option<u64>) -> String {
    count.map_or_else(|| UNKNOWN.to_owned(), group_digits)
}

fn per_second(rate: Option<f64>) -> String {
    rate.map_or_else(|| UNKNOWN.to_owned(), |rate| format!("{rate:.1}/s"))
}

/// Why `waiting` is a lower bound.
fn waiting_note(of: &ProviderOverview) -> Option<String> {
    let missing = match (of.queued, of.parked) {
        _ if !of.waiting_is_at_least => return None,
        (None, None) => "the broker and the database are unreachable",
        (None, _) => "the broker is unreachable",
        (_, _) => "the jobs in the database could not be counted",
    };
    Some(format!("at least {} wait; {missing}", group_digits(of.waiting)))
}

/// `2 min 5 s`, why there is no such time, or the least that it takes: `≥ 34 s`.
fn drain_time(of: &ProviderOverview) -> String {
    match &of.clears {
        ClearTimeOverview::ClearsIn { ms } => rounded_duration(*ms),
        ClearTimeOverview::DependsOnAccounts { at_least_ms, .. } => format!("≥ {}", rounded_duration(*at_least_ms)),
        ClearTimeOverview::Never { .. } => "never".to_owned(),
        ClearTimeOverview::NotWhilePaused => "not while paused".to_owned(),
        ClearTimeOverview::NotWhileDisabled => "not while disabled".to_owned(),
        ClearTimeOverview::NotWhileBreakerOpen => "not while the breaker is open".to_owned(),
        ClearTimeOverview::Unknown { .. } => "unknown".to_owned(),
    }
}

/// What the column does not say: why it is not known, whose payments decide, and a guess if there is one.
fn drain_time_note(of: &ProviderOverview) -> Option<String> {
    match &of.clears {
        ClearTimeOverview::DependsOnAccounts { limits, about_ms, .. } => {
            let (limit, counts) = if limits.len() == 1 { ("limit", "counts") } else { ("limits", "count") };
            let about = about_ms
                .map(|ms| format!("drained in about {} at the rate of the last minutes; ", rounded_duration(ms)));
            let about = about.unwrap_or_default();
            Some(format!("{about}{limit} {} {counts} each account or reference on its own", limits.join(", ")))
        }
        ClearTimeOverview::Never { limit: None } => Some("an account rule blocks all that wait".to_owned()),
        // Said of what waits already.
        ClearTimeOverview::Unknown { missing: MissingSource::Queue | MissingSource::Ledger }
            if of.waiting_is_at_least =>
        {
            None
        }
        ClearTimeOverview::Unknown { missing: MissingSource::Queue } => {
            Some("the broker does not say how many wait".to_owned())
        }
        ClearTimeOverview::Unknown { missing: MissingSource::Ledger } => {
            Some("the database does not say how many wait".to_owned())
        }
        // Its state says the rest.
        ClearTimeOverview::ClearsIn { .. }
        | ClearTimeOverview::Never { .. }
        | ClearTimeOverview::NotWhilePaused
        | ClearTimeOverview::NotWhileDisabled
        | ClearTimeOverview::NotWhileBreakerOpen
        | ClearTimeOverview::Unknown { .. } => None,
    }
}

/// Of the limits that every charge meets, the one that is nearest to its end, or else the tightest.
fn fullest_limit(limits: &[LimitOverview]) -> Option<&LimitOverview> {
    let counting = limits.iter().filter(|limit| {
        limit.enabled && !limit.shadow && limit.scope == "provider" && limit.applies_to != AppliesTo::Lookup.name()
    });
    #[allow(clippy::cast_precision_loss, reason = "only compared")]
    let key = |limit: &LimitOverview| {
        let (used, remaining) = (limit.used.unwrap_or(0) as f64, limit.remaining.unwrap_or(0) as f64);
        let left = if used + remaining > 0.0 { remaining / (used + remaining) } else { 1.0 };
        (left, limit.max_requests as f64 / limit.window_ms as f64)
    };
    counting.min_by(|a, b| {
        let (a, b) = (key(a), key(b));
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    })
}

/// `23 of 30/1m`.
fn usage_text(limit: &LimitOverview) -> String {
    let used = limit.used.map_or_else(|| UNKNOWN.to_owned(), |used| used.to_string());
    format!("{used} of {}", rate_text(limit))
}

fn rate_text(limit: &LimitOverview) -> String {
    let window = u64::try_from(limit.window_ms).unwrap_or(0);
    format!("{}/{}", limit.max_requests, format_duration(std::time::Duration::from_millis(window)))
}

/// Why it is in its state, and what is wrong with its row.
fn status_note(of: &ProviderOverview) -> Option<String> {
    let ends = of.ends_in_ms.map(|ms| format!("ends in {}", rounded_duration(ms)));
    let silent = matches!(of.state, ProviderState::Running | ProviderState::Idle);
    let cause = of.cause.clone().filter(|_| !silent);
    let refused = of.refused_by_provider.filter(|refused| *refused > 0);
    let requests = |refused| format!("{} {}", group_digits(refused), plural(refused, "request"));
    let refused = refused.map(|refused| format!("the provider refused {} that we allowed", requests(refused)));
    let good =
        fullest_limit(&of.limits).map(|limit| format!(" ({} {})", limit.name, rate_text(limit))).unwrap_or_default();
    let counts = match of.has_good_row {
        true => format!("the last good one counts{good}"),
        false => "nothing is sent by it".to_owned(),
    };
    let problems = of.problems.iter().map(|problem| format!("bad row, {counts}: {problem}"));
    let parts: Vec<String> = cause
        .into_iter()
        .chain(ends)
        .chain(waiting_note(of))
        .chain(refused)
        .chain(problems)
        .chain(drain_time_note(of))
        .collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// `conservation: adds up (1,234 jobs)`, or what does not.
fn reconciliation_lines(overview: &Overview) -> Vec<String> {
    let faults = overview
        .conservation
        .iter()
        .flat_map(|account| account.faults.iter().map(|fault| format!("conservation: {}: {fault}", account.provider)));
    let faults: Vec<String> = faults.collect();
    if !faults.is_empty() {
        return faults;
    }
    let jobs: u64 = overview.conservation.iter().map(|account| account.recorded).sum();
    let uncounted =
        overview.conservation.is_empty() && overview.warnings.iter().any(|it| it.contains("not be counted"));
    if uncounted {
        return vec!["conservation: not known".to_owned()];
    }
    vec![format!("conservation: adds up ({} {}{})", group_digits(jobs), plural(jobs, "job"), count_age(overview))]
}

/// How old the count is, once it says little of now.
fn count_age(overview: &Overview) -> String {
    let seconds = |at: &str| at.parse::<Timestamp>().map(Timestamp::as_second).ok();
    let counted_at = overview.counted_at.as_deref().and_then(seconds);
    let age_s = counted_at.zip(seconds(&overview.at)).map_or(0, |(counted, now)| now - counted);
    if age_s <= COUNT_STALE_AFTER_S { String::new() } else { format!(", counted {age_s} s ago") }
}

/// `1,234,567`.
fn group_digits(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
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
