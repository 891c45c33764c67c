//! Log line formats: one line per event, with every hidden character escaped.
//!
//! Messages and fields contain text from backends, providers and producers. The library escapes ESC and C1 only in some
//! of them. It leaves line ends, direction marks and invisible characters unchanged, also in JSON.

use std::fmt;

use tracing::field::Field;
use tracing::{Event, Subscriber};
use tracing_subscriber::field::{MakeExt as _, RecordFields};
use tracing_subscriber::fmt::format::{FormatFields, Writer, debug_fn};
use tracing_subscriber::fmt::{FmtContext, FormatEvent};
use tracing_subscriber::registry::LookupSpan;

use crate::domain::printable::{printable, printable_json};

/// Fields of a text line: `message name=value`.
pub struct TextFields;

impl<'w> FormatFields<'w> for TextFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        debug_fn(write_field).delimited(" ").format_fields(writer, fields)
    }
}

fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let value = format!("{value:?}");
    let value = printable(&value);
    match field.name() {
        "message" => writer.write_str(&value),
        // The source location, from libraries that use the crate `log`.
        name if name.starts_with("log.") => Ok(()),
        name if writer.has_ansi_escapes() => write!(writer, "\u{1b}[3m{name}\u{1b}[0m\u{1b}[2m=\u{1b}[0m{value}"),
        name => write!(writer, "{name}={value}"),
    }
}

/// A format of JSON lines, with hidden characters escaped in them.
pub struct JsonLine<F>(pub F);

impl<S, N, F> FormatEvent<S, N> for JsonLine<F>
where
    S: Subscriber + for<'l> LookupSpan<'l>,
    N: for<'w> FormatFields<'w> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        writer.write_str(&printable_json(&line))
    }
}
