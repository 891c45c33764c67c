//! The results of a simulation: a table with one column per variant, or JSON, and a chart with one colour per variant.
//!
//! A window that exceeded its limit is marked, and jobs that never finish are counted. The chart is plain SVG without
//! scripts or embedded fonts, so every page and ticket can show it.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use plotters::prelude::*;
use serde_json::{Value, json};

use crate::cli::console::group_thousands;
use crate::cli::simulate::{Args, VariantRun};
use crate::cli::{CommandError, Console};
use crate::domain::pace::Pace;
use crate::simulation::{SeriesPoint, SimulationResult, WindowCount};

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

const SIZE: (u32, u32) = (1_100, 760);
/// Colours that people with red–green colour blindness can distinguish (Okabe and Ito).
const COLOURS: [RGBColor; 12] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(120, 94, 20),
    RGBColor(70, 70, 70),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(51, 34, 136),
    RGBColor(136, 34, 85),
    RGBColor(17, 119, 51),
    RGBColor(153, 153, 51),
];
/// Up to this number of variants, lines have different widths, so that identical lines stay visible.
const DISTINCT_WIDTHS_MAX: u32 = 4;
/// Longest name in the chart, in characters.
const NAME_MAX: usize = 40;

type Curve = Vec<(f64, f64)>;

pub fn write_plot(path: &Path, columns: &[VariantRun], start: Timestamp) -> Result<(), CommandError> {
    let text = draw(columns, start)
        .map_err(|error| CommandError::Failed(format!("{}: cannot be drawn: {error}", path.display())))?;
    std::fs::write(path, text).map_err(|error| CommandError::Failed(format!("{}: {error}", path.display())))
}

fn draw(columns: &[VariantRun], start: Timestamp) -> Result<String, Box<dyn std::error::Error>> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let provider = columns.first().map_or("", |column| column.model.provider.name.as_str());
        let title = format!("{provider}: simulated from {}", start.strftime("%Y-%m-%d %H:%M:%S UTC"));
        let root = root.margin(10, 0, 0, 0).titled(&title, ("sans-serif", 20))?;
        let (upper, lower) = root.split_vertically(360);
        let last_s = columns.iter().flat_map(|column| column.figures.series.points.last()).map(|point| point.at_s);
        let (unit, per_unit_s) = time_unit(last_s.fold(0.0, f64::max));
        let x = |point: &SeriesPoint| point.at_s / per_unit_s;
        let waiting = columns.iter().map(|column| {
            let ends = match clears_at(&column.figures, start) {
                Some(at) => format!(
                    "clears at {} (in {})",
                    at.strftime("%H:%M:%S"),
                    column.figures.clears_in_ms.map_or_else(String::new, format_ms)
                ),
                None => "never clears".to_owned(),
            };
            #[allow(clippy::cast_precision_loss, reason = "for the eye")]
            let line = column.figures.series.points.iter().map(|point| (x(point), point.waiting as f64));
            (format!("{}: {ends}", short_name(&column.name)), line.collect::<Curve>(), None)
        });
        chart(&upper, &format!("time since the start ({unit})"), "not finished yet (jobs)", waiting.collect())?;
        let rates = columns.iter().map(|column| {
            let limit = column.model.provider.tightest_rate();
            let named = limit.map_or_else(String::new, |limit| format!(", limit {limit} (dashed)"));
            let line = smoothed_rate(column).into_iter().map(|(at_s, rate)| (at_s / per_unit_s, rate));
            (
                format!("{}{named}", short_name(&column.name)),
                line.collect::<Curve>(),
                limit.map(|limit| limit.per_second()),
            )
        });
        chart(&lower, &format!("time since the start ({unit})"), "rate at the provider (requests/s)", rates.collect())?;
        root.present()?;
    }
    Ok(text)
}

/// The unit of the time axis, and its length in seconds.
fn time_unit(last_s: f64) -> (&'static str, f64) {
    match last_s {
        ..=180.0 => ("seconds", 1.0),
        ..=10_800.0 => ("minutes", 60.0),
        ..=259_200.0 => ("hours", 3_600.0),
        _ => ("days", 86_400.0),
    }
}

/// The rate as a mean over the tightest limit's window, because requests may come in one burst per window.
fn smoothed_rate(column: &VariantRun) -> Curve {
    let series = &column.figures.series;
    let window_ms = column.model.provider.tightest_rate().map_or(0, |rate| rate.window().as_millis());
    let steps = usize::try_from(window_ms.div_ceil(u128::from(series.step_ms.max(1)))).unwrap_or(1);
    let steps = steps.clamp(1, (series.points.len() / 8).max(1));
    #[allow(clippy::cast_precision_loss, reason = "a few hundred points")]
    let mean = |points: &[SeriesPoint]| points.iter().map(|point| point.rate_per_s).sum::<f64>() / points.len() as f64;
    series.points.windows(steps).filter_map(|points| Some((points.last()?.at_s, mean(points)))).collect()
}

/// Whole numbers without decimals, large ones in groups of three.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole, and checked not to be negative")]
fn number_label(value: &f64) -> String {
    match value.fract().abs() < 1e-9 {
        true if *value >= 1_000.0 => group_thousands(*value as u64),
        true => format!("{value:.0}"),
        false => format!("{value:.1}"),
    }
}

/// Shortens a name to leave room for the lines.
fn short_name(name: &str) -> String {
    match name.char_indices().nth(NAME_MAX) {
        Some((end, _)) => format!("{}…", name.get(..end).unwrap_or_default().trim_end()),
        None => name.to_owned(),
    }
}

/// Draws lines with their names, some with a level to compare with.
fn chart(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    x_desc: &str,
    y_desc: &str,
    lines: Vec<(String, Curve, Option<f64>)>,
) -> Result<(), Box<dyn std::error::Error>> {
    let all = || lines.iter().flat_map(|(_, line, _)| line);
    let levels = lines.iter().filter_map(|(_, _, level)| *level);
    let x_max = all().map(|(x, _)| *x).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    // Space above the lines for their names.
    let room = 1.15 + 0.09 * f64::from(u32::try_from(lines.len()).unwrap_or(6).min(20));
    let y_max = all().map(|(_, y)| *y).chain(levels).fold(1.0, f64::max) * room;
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(42)
        .y_label_area_size(82)
        .build_cartesian_2d(0.0..x_max, 0.0..y_max)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(x_desc)
        .y_desc(y_desc)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15))
        .x_label_formatter(&number_label)
        .y_label_formatter(&number_label)
        .draw()?;
    let count = u32::try_from(lines.len()).unwrap_or(6);
    for (index, (name, line, level)) in (0_u32..).zip(lines) {
        let colour = COLOURS[index as usize % COLOURS.len()];
        // Different widths keep identical lines visible.
        let width = if count <= DISTINCT_WIDTHS_MAX { 2 + 2 * (count - 1 - index) } else { 2 };
        if let Some(level) = level {
            let ends = [(0.0, level), (x_max, level)];
            chart.draw_series(DashedLineSeries::new(ends, 7, 5, colour.stroke_width(1)))?;
        }
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(width)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], colour.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font(("sans-serif", 14))
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .legend_area_size(30)
        .draw()?;
    Ok(())
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

    #[test]
    fn long_names_and_numbers_are_shortened() {
        assert_eq!([0.0, 2.5, 999.0, 300_000.0].map(|value| number_label(&value)), ["0", "2.5", "999", "300,000"]);
        assert_eq!(
            (short_name("at 50/s").as_str(), short_name(&"ä".repeat(60)).chars().count()),
            ("at 50/s", NAME_MAX + 1)
        );
    }
}
