//! The printed report of the benchmark `limiter`: a table per section for the terminal, or a Markdown page.
//!
//! Missed targets are listed again at the end.

use super::report::{Figure, FigureName, LimiterReport, Section, SubjectRow};
use super::{crowd, full_log, measure};
use sluicegate::cli::Console;
use sluicegate::domain::format::count;

/// The table of one section.
struct Table {
    title: String,
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    targets: Vec<String>,
}

const LEGEND: &str = "in brackets: times the empty script, times the correct ZSET script";

/// Prints the tables and the missed targets.
pub fn tables(report: &LimiterReport, console: &mut Console) -> std::io::Result<()> {
    for line in conditions(report) {
        console.line(&line)?;
    }
    console.line(LEGEND)?;
    for table in Section::ALL.iter().map(|section| lay_out(report, *section)) {
        console.lines(&format!("\n{}", table.title))?;
        console.table(&table.header, &table.rows)?;
        for target in &table.targets {
            console.line(&format!("target: {target}"))?;
        }
    }
    let missed = missed(report);
    console.lines(if missed.is_empty() { "\nall targets met" } else { "\nmissed targets:" })?;
    missed.iter().try_for_each(|line| console.line(line))
}

/// Prints the page `docs/benchmarks.md`.
pub fn markdown(report: &LimiterReport, console: &mut Console) -> std::io::Result<()> {
    console.lines(&format!(
        "# Benchmarks\n\nWritten by `{}`. Every figure is the median of its rounds, all in one run on one\n\
         redis-server. Absolute figures differ between machines; compare the ratios ({LEGEND}).\n",
        report.command
    ))?;
    for line in conditions(report) {
        console.line(&format!("- {line}"))?;
    }
    console.lines(&format!("\n{}", HOW.trim()))?;
    for table in Section::ALL.iter().map(|section| lay_out(report, *section)) {
        console.lines(&format!("\n## {}\n\n| {} |", table.title, table.header.join(" | ")))?;
        console.line(&format!("|{}", "---|".repeat(table.header.len())))?;
        for row in &table.rows {
            console.line(&format!("| {} |", row.join(" | ")))?;
        }
        if !table.targets.is_empty() {
            console.lines(&format!("\nTargets: {}.", table.targets.join("; ")))?;
        }
    }
    let missed = missed(report);
    console.lines(if missed.is_empty() { "\n## All targets met" } else { "\n## Missed targets\n" })?;
    missed.iter().try_for_each(|line| console.line(&format!("- {line}")))
}

const HOW: &str = "
*µs in the command* is what Redis counts for the command alone (`INFO commandstats`, by the wall clock); *µs of Redis
CPU* is the processor time of the whole server per call (`INFO cpu`), reading the call and writing the answer included.
Both are measured with 50 tasks on one connection, each with its own caller. *permits/s of one core* is permits ×
1,000,000 / µs of Redis CPU. Each call of ours releases the permits of the previous call; the references release
nothing. Our logs are full: every call uses the slots that have been free for longest. Windows are 10 ms there, so that
slots become free as fast as one core can ask. A log of a minute is filled with the script's clock replaced by a key,
and its single calls are timed by the slow log. The crowd's responses take 20 to 80 ms. The references are in
`benches/reference`.
";

fn conditions(report: &LimiterReport) -> Vec<String> {
    let server = match &report.server {
        Some(place) => {
            let core = place.core.map_or_else(|| "not pinned".to_owned(), |core| format!("alone on core {core}"));
            format!("private redis-server {}, no persistence, {core}", report.redis)
        }
        None => format!("redis-server {} that was named", report.redis),
    };
    let load = report.load.map_or_else(String::new, |load| format!(" · load average before the run {load}"));
    vec![
        format!("{} · {}{load}", report.machine, report.date),
        format!("sluicegate {} · {server}", report.sluicegate),
        format!("{} s per figure, median of {}", report.seconds_per_figure, count(report.rounds as u64, "round")),
    ]
}

fn lay_out(report: &LimiterReport, section: Section) -> Table {
    let rows: Vec<&SubjectRow> = report.rows.iter().filter(|row| row.section == section).collect();
    let mut names: Vec<FigureName> = rows.iter().flat_map(|row| row.figures.iter().map(|f| f.name)).collect();
    names.sort_unstable();
    names.dedup();
    let many = section == Section::ManyPermits;
    let mut header = vec![""];
    header.extend(many.then_some("permits per call"));
    header.extend(names.iter().map(|name| name.title()));
    let cells = |row: &&SubjectRow| {
        let mut cells = vec![row.subject.to_owned()];
        cells.extend(many.then(|| number(f64::from(row.permits_per_call))));
        let figure_cell =
            |name: &FigureName| row.figures.iter().find(|figure| figure.name == *name).map_or_else(String::new, cell);
        cells.extend(names.iter().map(figure_cell));
        cells
    };
    let mut targets: Vec<String> = Vec::new();
    for figure in rows.iter().flat_map(|row| &row.figures) {
        let Some(target) = &figure.target else { continue };
        let text = format!("{}: {}", figure.name.title(), target.says);
        if !targets.contains(&text) {
            targets.push(text);
        }
    }
    Table { title: title(report, section), header, rows: rows.iter().map(cells).collect(), targets }
}

fn title(report: &LimiterReport, section: Section) -> String {
    let tasks = measure::TASKS;
    match section {
        Section::OnePermit => "One permit per call".to_owned(),
        Section::ManyPermits => format!("Many permits per call, acquire and release in one, {tasks} tasks"),
        Section::FullLog => {
            let (calls, seconds) = (number(f64::from(report.log_calls)), full_log::WINDOW.as_secs());
            format!("A full log of {calls} calls in {seconds} s")
        }
        Section::Crowd => {
            let (tasks, limit, window) = (number(crowd::TASKS as f64), crowd::LIMIT, crowd::WINDOW.as_secs());
            format!("{tasks} tasks waiting at one gate, {limit} permits per {window} s, for {} s", report.crowd_seconds)
        }
    }
}

fn cell(figure: &Figure) -> String {
    let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{}×", number(ratio)));
    let mut text = number(figure.value);
    if figure.to_empty_script.is_some() || figure.to_correct_zset.is_some() {
        text = format!("{text} ({}, {})", ratio(figure.to_empty_script), ratio(figure.to_correct_zset));
    }
    match &figure.target {
        Some(target) if target.met => text + " met",
        Some(_) => text + " NOT MET",
        None => text,
    }
}

fn missed(report: &LimiterReport) -> Vec<String> {
    let mut lines = Vec::new();
    for row in &report.rows {
        for figure in &row.figures {
            if let Some(target) = figure.target.as_ref().filter(|target| !target.met) {
                let (title, value) = (figure.name.title(), number(figure.value));
                let permits = number(f64::from(row.permits_per_call));
                let subject = row.subject;
                lines.push(format!("{subject}, {permits} per call, {title}: {value}; target {}", target.says));
            }
        }
    }
    lines
}

/// A number with about three significant digits and grouped thousands.
pub fn number(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 || v.fract() == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.1 => 2,
        _ => 4,
    };
    let plain = format!("{value:.decimals$}");
    let (whole, fraction) = plain.split_once('.').unwrap_or((&plain, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if fraction.is_empty() { grouped } else { format!("{grouped}.{fraction}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let read: Vec<String> = [0.0, 0.00049, 1.234, 12.34, 123.4, 1234.5, 1_000_000.0].map(number).to_vec();
        assert_eq!(read, ["0", "0.0005", "1.23", "12.3", "123", "1,234", "1,000,000"]);
    }
}
