//! The chart of a simulation: waiting jobs over time, and the rate against the limit, with one colour per variant.
//!
//! It is plain SVG without scripts or embedded fonts, so every page and ticket can show it.

use std::path::Path;

use jiff::Timestamp;
use plotters::prelude::*;

use super::VariantRun;
use super::print::{clears_at, format_ms, group_thousands};
use crate::cli::CommandError;
use crate::simulation::SeriesPoint;

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

pub(super) fn write(path: &Path, columns: &[VariantRun], start: Timestamp) -> Result<(), CommandError> {
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
    fn long_names_and_numbers_are_shortened() {
        assert_eq!([0.0, 2.5, 999.0, 300_000.0].map(|value| number_label(&value)), ["0", "2.5", "999", "300,000"]);
        assert_eq!(
            (short_name("at 50/s").as_str(), short_name(&"ä".repeat(60)).chars().count()),
            ("at 50/s", NAME_MAX + 1)
        );
    }
}
