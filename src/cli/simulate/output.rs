//! The results of a simulation: a table with one column per variant, or JSON.
//!
//! A window that exceeded its limit is marked, and jobs that never finish are counted.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};

use crate::cli::console::group_thousands;
use crate::cli::simulate::{Args, VariantRun};
use crate::cli::{CommandError, Console};
use crate::domain::pace::Pace;
use crate::simulation::{SimulationResult, WindowCount};

pub fn print_table(columns: &[VariantRun], start: Timestamp, console: &mut Console) -> Result<(), CommandError> {
    let header: Vec<&str> = std::iter::once("").chain(columns.iter().map(|column| column.name.as_str())).collect();
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut line = |title: &str, cell: &dyn Fn(&VariantRun) -> String| {
        rows.push(std::iter::once(title.to_owned()).chain(columns.iter().map(cell)).collect());
    };
    line("jobs", &|c| group_thousands(c.figures.jobs));
    line("wait p50", &|c| c.figures.wait.p50_ms.map_or_else(no_value, format_ms));
    line("wait p95", &|c| c.figures.wait.p95_ms.map_or_else(no_value, format_ms));
    line("wait p99", &|c| c.figures.wait.p99_ms.map_or_else(no_value, format_ms));
    line("wait max", &|c| c.figures.wait.max_ms.map_or_else(no_value, format_ms));
    line("clears in", &|c| c.figures.clears_in_ms.map_or_else(|| "never".to_owned(), format_ms));
    line("clears at", &|c| {
        clears_at(&c.figures, start).map_or_else(String::new, |at| clock_text(at, start, &TimeZone::system()))
    });
    line("deadlines missed", &|c| group_thousands(c.figures.deadlines_missed));
    let limits: Vec<String> = limit_names(columns);
    for limit in &limits {
        line(&format!("most in a window, {limit}"), &|c| {
            c.figures.windows.iter().find(|window| window.limit == *limit).map_or_else(String::new, window_text)
        });
    }
    line("rate", &|c| c.figures.rate_per_s.map_or_else(no_value, |rate| format!("{rate:.1}/s")));
    line("utilisation", &|c| c.figures.utilisation.map_or_else(no_value, |share| format!("{:.1} %", share * 100.0)));
    line("response after", &|c| format!("{:.0} ms", c.figures.hold_ms));
    line("requests", &|c| group_thousands(c.figures.requests));
    line("calls to the limiter", &|c| group_thousands(c.figures.limiter_calls));
    line("delayed", &|c| group_thousands(c.figures.delayed));
    type Count = fn(&SimulationResult) -> u64;
    let problems: [(&str, Count); 6] = [
        ("manual review", |f| f.review),
        ("dead", |f| f.dead),
        ("blocked accounts' jobs", |f| f.blocked),
        ("never sent", |f| f.unfinished),
        ("timed out", |f| f.timeouts),
        ("permits too late", |f| f.late_permits),
    ];
    for (title, count) in problems {
        if columns.iter().any(|column| count(&column.figures) > 0) {
            line(title, &|c| group_thousands(count(&c.figures)));
        }
    }
    console.table(&header, &rows)?;
    Ok(())
}

pub fn to_json(args: &Args, columns: &[VariantRun], start: Timestamp) -> Value {
    let variants = columns.iter().map(|column| {
        let model = &column.model;
        json!({
            "name": column.name,
            "changes": column.changes,
            "processes": model.processes,
            "workers": model.provider.workers,
            "pace": Pace::under(&model.provider, &model.spec).map(|pace| pace.to_string()),
            "holds": column.figures.holds(),
            "drained_at": clears_at(&column.figures, start).map(|at| format!("{at:.3}")),
            "figures": column.figures,
        })
    });
    json!({
        "start_at": format!("{start:.3}"),
        "seed": args.seed,
        "variants": variants.collect::<Vec<_>>(),
    })
}

/// Limits of all variants, in the order in which they appear.
fn limit_names(columns: &[VariantRun]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for window in columns.iter().flat_map(|column| &column.figures.windows) {
        if !names.contains(&window.limit) {
            names.push(window.limit.clone());
        }
    }
    names
}

fn window_text(window: &WindowCount) -> String {
    let WindowCount { largest, most, allows, .. } = window;
    let account = window.account.as_ref().map_or_else(String::new, |account| format!(", {account}"));
    let mark = if window.holds() { "" } else { " EXCEEDED" };
    let shadow = if window.shadow { ", shadow" } else { "" };
    format!("{largest} of {most} ({allows}{account}{shadow}){mark}")
}

pub fn clears_at(figures: &SimulationResult, start: Timestamp) -> Option<Timestamp> {
    start.checked_add(Duration::from_millis(figures.clears_in_ms?)).ok()
}

/// The time in the zone of the terminal, with its date if that differs from the start's.
fn clock_text(at: Timestamp, start: Timestamp, zone: &TimeZone) -> String {
    let (at, start) = (at.to_zoned(zone.clone()), start.to_zoned(zone.clone()));
    at.strftime(if at.date() == start.date() { "%H:%M:%S %Z" } else { "%F %H:%M:%S %Z" }).to_string()
}

/// A duration with two units at most.
pub fn format_ms(ms: u64) -> String {
    let seconds = ms / 1_000;
    match seconds {
        0 => format!("{ms} ms"),
        1..60 => format!("{seconds}.{} s", ms % 1_000 / 100),
        60..3_600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {:02} min", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{} d {:02} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// The cell of a value that was not measured.
fn no_value() -> String {
    "–".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_counts_are_formatted() {
        let shown = [0, 999, 1_250, 59_990, 60_000, 3_599_000, 3_600_000, 90_000_000].map(format_ms);
        assert_eq!(shown, ["0 ms", "999 ms", "1.2 s", "59.9 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "1 d 01 h"]);
        assert_eq!([0, 999, 1_000, 1_234_567].map(group_thousands), ["0", "999", "1,000", "1,234,567"]);
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let start = at("2026-11-30T23:00:00Z");
        assert_eq!(clock_text(at("2026-11-30T23:20:05.9Z"), start, &TimeZone::UTC), "23:20:05 UTC");
        assert_eq!(clock_text(at("2026-12-01T00:00:01Z"), start, &TimeZone::UTC), "2026-12-01 00:00:01 UTC");
        let tokyo = jiff::tz::TimeZoneDatabase::bundled().get("Asia/Tokyo").unwrap();
        assert_eq!(clock_text(at("2026-12-01T00:00:01Z"), start, &tokyo), "09:00:01 JST");
    }
}
