//! The overview as a table for people: one line per provider, and under it why it does not run.
//!
//! Refuses to scroll sideways: the table fits the terminal, and causes are wrapped to it.

use comfy_table::Table;
use jiff::Timestamp;

use crate::cli::console::{Shape, render_table};
use crate::domain::time::format_duration;
use crate::fleet::overview::{LimitOverview, ProviderOverview};
use crate::fleet::{Overview, State};

const HEADER: [&str; 11] =
    ["provider", "state", "limit", "used", "rate", "waiting", "in flight", "parked", "review", "dead", "drained in"];
/// Columns that a narrow terminal does without, the first first; `--json` has them all.
const SPARED: [&str; 5] = ["parked", "used", "in flight", "rate", "limit"];
/// Blanks between two cells.
const PADDING: usize = 3;
/// What stands before a cause.
const INDENT: &str = "  └ ";
/// A younger count is as good as now.
const COUNTED_OLD_S: i64 = 5;
/// What nobody could tell.
const UNKNOWN: &str = "-";

/// The table, the account and the warnings.
pub(super) fn overview(overview: &Overview, shape: Shape) -> String {
    let rows: Vec<Vec<String>> = overview.providers.iter().map(cells).collect();
    let notes: Vec<Option<String>> = overview.providers.iter().map(note).collect();
    let width = width(shape);
    let (header, rows) = spared(rows, width);
    let mut page = with_notes(&render_table(&header, &rows, shape), &notes, shape, width);
    page.push('\n');
    let said = conservation(overview).into_iter().chain(overview.warnings.iter().map(|it| format!("warning: {it}")));
    for line in said {
        page.push('\n');
        page.push_str(&wrapped("", &line, width));
    }
    page
}

/// The columns that fit, and their rows.
fn spared(mut rows: Vec<Vec<String>>, width: Option<usize>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut header = HEADER.to_vec();
    let Some(width) = width else { return (header, rows) };
    for spared in SPARED {
        let widest = |(at, title): (usize, &&str)| {
            let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count());
            cells.chain([title.chars().count()]).max().unwrap_or(0) + PADDING
        };
        if header.iter().enumerate().map(widest).sum::<usize>() <= width {
            break;
        }
        if let Some(at) = header.iter().position(|title| *title == spared) {
            header.remove(at);
            rows.iter_mut().for_each(|row| drop(row.remove(at)));
        }
    }
    (header, rows)
}

fn width(shape: Shape) -> Option<usize> {
    match shape {
        Shape::Plain => None,
        Shape::Terminal { width: Some(width) } => Some(usize::from(width)),
        Shape::Terminal { width: None } => Table::new().width().map(usize::from),
    }
}

fn cells(of: &ProviderOverview) -> Vec<String> {
    let limit = fullest(&of.limits);
    vec![
        of.name.clone(),
        of.state.name().to_owned(),
        limit.map_or_else(|| UNKNOWN.to_owned(), rate),
        limit.and_then(|limit| limit.used).map_or_else(|| UNKNOWN.to_owned(), |used| used.to_string()),
        format!("{:.1}/s", of.rate_per_s),
        grouped(of.waiting),
        of.in_flight.to_string(),
        grouped(of.parked),
        grouped(of.review),
        grouped(of.dead),
        drained(of),
    ]
}

/// `2 min 5 s`; where limits on accounts decide, the least that it takes: `≥ 34 s`.
fn drained(of: &ProviderOverview) -> String {
    let least = if of.drain_depends_on.is_empty() || of.waiting == 0 { "" } else { "≥ " };
    of.drained_in_ms.map_or_else(|| UNKNOWN.to_owned(), |ms| format!("{least}{}", in_words(ms)))
}

/// Why nobody can say how long a backlog takes, and a guess if there is one.
fn drain_depends(of: &ProviderOverview) -> Option<String> {
    let on = &of.drain_depends_on;
    if on.is_empty() || of.waiting == 0 || of.drained_in_ms.is_none() {
        return None;
    }
    let (limit, counts) = if on.len() == 1 { ("limit", "counts") } else { ("limits", "count") };
    let about =
        of.drained_about_ms.map(|ms| format!("drained in about {} at the rate of the last minutes; ", in_words(ms)));
    let about = about.unwrap_or_default();
    Some(format!("{about}{limit} {} {counts} each account or reference on its own", on.join(", ")))
}

/// The limit on the whole provider that is nearest to its end, or else the tightest.
fn fullest(limits: &[LimitOverview]) -> Option<&LimitOverview> {
    let counting = limits.iter().filter(|limit| limit.enabled && !limit.shadow && limit.scope == "provider");
    #[allow(clippy::cast_precision_loss, reason = "only compared")]
    let key = |limit: &LimitOverview| {
        let (used, free) = (limit.used.unwrap_or(0) as f64, limit.free.unwrap_or(0) as f64);
        let left = if used + free > 0.0 { free / (used + free) } else { 1.0 };
        (left, limit.max_requests as f64 / limit.window_ms as f64)
    };
    counting.min_by(|a, b| {
        let (a, b) = (key(a), key(b));
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    })
}

fn rate(limit: &LimitOverview) -> String {
    let window = u64::try_from(limit.window_ms).unwrap_or(0);
    format!("{}/{}", limit.max_requests, format_duration(std::time::Duration::from_millis(window)))
}

/// Why it is in its state, and what is wrong with its row.
fn note(of: &ProviderOverview) -> Option<String> {
    let ends = of.ends_in_ms.map(|ms| format!("ends in {}", in_words(ms)));
    let silent = matches!(of.state, State::Running | State::Idle);
    let cause = of.cause.clone().filter(|_| !silent);
    let refused = (of.refused_by_provider > 0)
        .then(|| format!("the provider refused {} requests that were allowed", grouped(of.refused_by_provider)));
    let problems = of.problems.iter().map(|problem| format!("bad row, the last good one counts: {problem}"));
    let parts: Vec<String> =
        cause.into_iter().chain(ends).chain(refused).chain(problems).chain(drain_depends(of)).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Puts each note under its row. In a terminal rows are apart by rules and may take several lines; in a pipe each is one.
fn with_notes(table: &str, notes: &[Option<String>], shape: Shape, width: Option<usize>) -> String {
    let plain = shape == Shape::Plain;
    let is_rule = |line: &str| line.starts_with(['─', '═', '╌', '┄', '-', '=']);
    let (mut out, mut row, mut heads) = (Vec::new(), 0, usize::from(plain));
    let lines: Vec<&str> = table.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        out.push((*line).to_owned());
        let ends_row = if plain { true } else { lines.get(at + 1).is_some_and(|next| is_rule(next)) && !is_rule(line) };
        if !ends_row {
            continue;
        }
        if plain && at == 0 || !plain && heads == 0 {
            heads = 1;
            continue;
        }
        if let Some(note) = notes.get(row).and_then(Option::as_ref) {
            out.push(wrapped(INDENT, note, width));
        }
        row += 1;
    }
    out.join("\n")
}

/// Breaks a line between words so that it fits; what follows stands under its text.
fn wrapped(indent: &str, text: &str, width: Option<usize>) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
    let under = " ".repeat(indent.chars().count());
    let (mut lines, mut line) = (Vec::new(), indent.to_owned());
    let mut chars = indent.chars().count();
    for word in text.split(' ') {
        let more = word.chars().count() + 1;
        if width.is_some_and(|width| chars + more > width) && line.trim() != indent.trim() {
            lines.push(line.trim_end().to_owned());
            (line, chars) = (under.clone(), under.len());
        }
        line.push_str(word);
        line.push(' ');
        chars += more;
    }
    lines.push(line.trim_end().to_owned());
    lines.join("\n")
}

/// `conservation: adds up (1,234 jobs)`, or what does not.
fn conservation(overview: &Overview) -> Vec<String> {
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
    vec![format!("conservation: adds up ({} jobs{})", grouped(jobs), counted(overview))]
}

/// How old the count is, once it says little of now.
fn counted(overview: &Overview) -> String {
    let seconds = |at: &str| at.parse::<Timestamp>().map(Timestamp::as_second).ok();
    let counted_at = overview.counted_at.as_deref().and_then(seconds);
    let age_s = counted_at.zip(seconds(&overview.at)).map_or(0, |(counted, now)| now - counted);
    if age_s <= COUNTED_OLD_S { String::new() } else { format!(", counted {age_s} s ago") }
}

/// `1,234,567`.
fn grouped(number: u64) -> String {
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
fn in_words(ms: u64) -> String {
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
