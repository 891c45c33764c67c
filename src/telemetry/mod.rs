//! Telemetry: log lines on stderr as text or JSON, and with the feature `otlp` spans to a collector.
//!
//! No library logs below `warn`, and `lapin` not below `error`: it logs whole messages, payload included, when the
//! broker returns one (`lapin` 4.12, `returned_messages.rs`). No filter setting can weaken that. A long-running command
//! logs through [`NonBlocking`], so that a stalled reader does not block its work.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::sync::OnceLock;

use tracing::field::Field;
use tracing::{Event, Subscriber};
use tracing_subscriber::field::{MakeExt as _, RecordFields};
use tracing_subscriber::filter::{FilterExt as _, LevelFilter, Targets};
use tracing_subscriber::fmt::format::{FormatFields, Writer, debug_fn};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, MakeWriter};
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::registry;
use tracing_subscriber::registry::LookupSpan;

use crate::config::{LogConfig, LogFormat};
use crate::domain::printable::{printable, printable_json};
use crate::tls::Authorities;

mod non_blocking;
#[cfg(feature = "otlp")]
pub mod otlp;
pub mod repeated;
pub mod spans;

pub use non_blocking::NonBlocking;
use repeated::OutageLineFilter;

#[cfg(not(feature = "otlp"))]
type SpanLayer = tracing_subscriber::layer::Identity;
#[cfg(feature = "otlp")]
use otlp::SpanLayer;

/// Keeps telemetry alive; when dropped, it sends the remaining spans.
#[derive(Debug, Default)]
pub struct TelemetryGuard {
    #[cfg(feature = "otlp")]
    _exporting: Option<otlp::ExportGuard>,
}

static STDERR: OnceLock<NonBlocking> = OnceLock::new();

/// Standard error of a long-running process, written without waiting. Panics are written there too.
pub fn non_blocking_stderr() -> std::io::Result<NonBlocking> {
    if let Some(stderr) = STDERR.get() {
        return Ok(stderr.clone());
    }
    let stderr = STDERR.get_or_init({
        let stderr = NonBlocking::new(std::io::stderr())?;
        move || stderr
    });
    // The standard library's hook writes to stderr directly and could block.
    std::panic::set_hook(Box::new(move |panic| {
        let backtrace = Backtrace::capture();
        let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| format!("\n{backtrace}"));
        let thread = std::thread::current();
        let text = format!("thread `{}` {panic}{}", thread.name().unwrap_or("?"), backtrace.unwrap_or_default());
        if tracing::dispatcher::has_been_set() {
            tracing::error!("{text}");
        } else {
            stderr.clone().write_all(format!("{}\n", printable(&text)).as_bytes()).unwrap_or_default();
        }
    }));
    Ok(stderr.clone())
}

/// Number of log lines that this process dropped because they were not read in time.
pub fn log_lines_dropped() -> u64 {
    STDERR.get().map_or(0, NonBlocking::dropped)
}

/// Sends log lines to stderr for the rest of the process, through [`non_blocking_stderr`] if it was called before.
/// Sends spans to `otlp_endpoint` if there is one. Must not be called within a runtime: the exporter has its own.
///
/// # Errors
/// When a subscriber is installed already, or spans cannot be exported.
pub fn init(log: LogConfig, otlp_endpoint: Option<&str>, authorities: &Authorities) -> Result<TelemetryGuard, String> {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let coloured = std::io::stderr().is_terminal() && !no_color;
    let (spans, telemetry) = spans_to(otlp_endpoint, authorities)?;
    let subscriber = match STDERR.get() {
        Some(stderr) => subscriber(log, coloured, || stderr.clone(), spans),
        None => subscriber(log, coloured, std::io::stderr, spans),
    };
    tracing::subscriber::set_global_default(subscriber).map_err(|error| error.to_string())?;
    Ok(telemetry)
}

#[cfg(feature = "otlp")]
fn spans_to(endpoint: Option<&str>, authorities: &Authorities) -> Result<(Option<SpanLayer>, TelemetryGuard), String> {
    let Some((layer, exporting)) = endpoint.map(|endpoint| otlp::layer(endpoint, authorities)).transpose()? else {
        return Ok((None, TelemetryGuard::default()));
    };
    Ok((Some(layer), TelemetryGuard { _exporting: Some(exporting) }))
}

/// Without the feature, the configuration rejects an endpoint.
#[cfg(not(feature = "otlp"))]
fn spans_to(_: Option<&str>, _: &Authorities) -> Result<(Option<SpanLayer>, TelemetryGuard), String> {
    Ok((None, TelemetryGuard::default()))
}

/// Our own targets at `level`, libraries at `warn`, and those that could log a message body at `error`.
fn target_levels(level: tracing::Level) -> Targets {
    Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("sluicegate", level)
        .with_target(spans::TARGET, LevelFilter::OFF)
        .with_target("lapin", LevelFilter::ERROR)
        .with_target("lapin::channel", channel_level(level))
        // The end of a connection, which our supervisor logs with its cause.
        .with_target("lapin::channels", LevelFilter::OFF)
        .with_target("lapin::io_loop", LevelFilter::OFF)
        .with_target("sqlx", LevelFilter::WARN)
        // A connection that PostgreSQL has closed, which the pool's user logs with its cause.
        .with_target("sqlx_core::pool", LevelFilter::ERROR)
        .with_target("hyper", LevelFilter::WARN)
}

/// Only this target logs why the broker closed a channel. [`OutageLineFilter`] leaves out queues that do not exist yet.
/// Commands log errors only and report a missing queue themselves, so for them it is off.
fn channel_level(level: tracing::Level) -> LevelFilter {
    if level == tracing::Level::ERROR { LevelFilter::OFF } else { LevelFilter::ERROR }
}

fn subscriber<W>(
    log: LogConfig,
    coloured: bool,
    writer: W,
    spans: Option<SpanLayer>,
) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    // The library's default reads NO_COLOR, but not whether stderr is a terminal.
    let lines =
        tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(coloured && log.format == LogFormat::Text);
    let filter = target_levels(log.level).and(OutageLineFilter);
    let lines = match log.format {
        LogFormat::Text => lines.fmt_fields(TextFields).with_filter(filter).boxed(),
        // Fields beside the message instead of in "fields", as collectors expect.
        LogFormat::Json => lines.json().flatten_event(true).map_event_format(JsonLine).with_filter(filter).boxed(),
    };
    // An absent layer beside `lines` would enable each callsite, and each span would be created for no reader.
    let layers: Vec<_> = spans.map(Layer::boxed).into_iter().chain([lines]).collect();
    Box::new(registry().with(layers))
}

/// Fields of a text line: `message name=value`, with hidden characters escaped. The library escapes ESC and C1 only in
/// some of them, and leaves line ends, direction marks and invisible characters unchanged, also in JSON.
struct TextFields;

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
struct JsonLine<F>(F);

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

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;
    use crate::captured_log::{capture_log, capture_with};
    use crate::domain::printable::is_hidden;

    fn captured_log(log: LogConfig, coloured: bool, events: impl FnOnce()) -> String {
        let (log, _guard) = capture_with(|text| subscriber(log, coloured, move || text.clone(), None));
        events();
        log.text()
    }

    /// What the tests of log lines rely on, beside tests that capture none.
    #[test]
    fn line_that_another_thread_logs_first_is_captured() {
        fn log_once_more() {
            tracing::warn!("logged by two threads");
        }
        let (log, _guard) = capture_log();
        std::thread::spawn(log_once_more).join().unwrap();
        log_once_more();
        assert_eq!(log.lines_with("logged by two threads").len(), 1);
    }

    #[test]
    fn payload_printing_libraries_stay_quiet() {
        for level in [Level::INFO, Level::TRACE] {
            let text = captured_log(LogConfig { level, format: LogFormat::Text }, false, || {
                tracing::warn!(target: "lapin::returned_messages", "Server returned us a message: 4111111111111111");
                tracing::trace!(target: "lapin", "frame 4111111111111111");
                tracing::info!(target: "hyper::proto", "quiet-hyper");
                tracing::debug!(target: "sqlx::query", "quiet-sqlx");
                tracing::info!(target: "redis", "quiet-redis");
                tracing::error!(target: "lapin::channel", "loud-channel");
                tracing::error!(target: "lapin::channels", "quiet-connection");
                tracing::error!(target: "lapin::io_loop", "quiet-io");
                tracing::error!(target: "lapin", "loud-lapin");
                tracing::info!(target: "sluicegate::worker", "loud-own");
            });
            assert!(!text.contains("4111") && !text.contains("quiet-"), "{text}");
            assert!(["loud-lapin", "loud-own", "loud-channel"].iter().all(|loud| text.contains(loud)), "{text}");
        }
        let alone = captured_log(LogConfig { level: Level::ERROR, format: LogFormat::Text }, false, || {
            tracing::error!(target: "lapin::channel", "no queue of that name");
        });
        assert_eq!(alone, "", "a command reports it itself");
    }

    #[test]
    fn without_an_exporter_no_span_is_created() {
        for format in [LogFormat::Text, LogFormat::Json] {
            captured_log(LogConfig { level: Level::TRACE, format }, false, || {
                let created = [spans::job("acme", &Default::default()), spans::step("wait"), spans::request("charge")];
                assert!(created.iter().all(tracing::Span::is_disabled), "{created:?}");
            });
        }
    }

    /// A fail-over: each of hundreds of payments fails in several places.
    #[test]
    fn outage_logs_one_line_of_each_cause() {
        let text = captured_log(LogConfig { level: Level::INFO, format: LogFormat::Text }, false, || {
            for job in 0..300 {
                let error = format!("database unavailable: no words for {job}");
                tracing::warn!(target: "sluicegate::worker", job, error, "not claimed");
                tracing::warn!(target: "sluicegate::worker", job, %error, "not renewed");
                tracing::warn!(target: "sluicegate::queue", job, error = "broker unavailable: reset", "not published");
                tracing::warn!(target: "sluicegate::limiter", job, "the limiter leader has changed: it waits");
                tracing::warn!(target: "sqlx_core::pool::connection", error = "0 bytes at EOF", "quiet-pool");
                tracing::warn!(target: "sluicegate::worker", job, error = "the row is locked", "not locked");
                tracing::error!(target: "sluicegate::worker", job, error, "not recorded");
                tracing::error!(target: "lapin::channel", "NOT_FOUND - no queue 'payments.p{job}' in vhost '/'");
            }
        });
        let lines = |words: &str| text.lines().filter(|line| line.contains(words)).count();
        let outage = ["not claimed", "not renewed", "not published", "leader has changed"].map(lines);
        assert_eq!(outage, [1, 0, 1, 1], "a line of each cause, whatever failed for it");
        assert_eq!(["not locked", "not recorded", "no queue", "quiet-pool"].map(lines), [300, 300, 0, 0]);
    }

    #[test]
    fn hostile_text_stays_on_one_line() {
        const HOSTILE: &str =
            "x\ny 0\r\u{1b}[2J\u{9b}1m\u{85}\u{202e}\u{2066}\u{200b}\u{feff}\u{ad}\u{2028}\t\u{7f}\u{e0041}z";
        let error = std::io::Error::other(HOSTILE);
        let source: &(dyn std::error::Error + 'static) = &error;
        let events: [&dyn Fn(); 6] = [
            &|| tracing::warn!(target: "sluicegate", "{HOSTILE}"),
            &|| tracing::warn!(target: "sluicegate", text = HOSTILE, "said"),
            &|| tracing::warn!(target: "sluicegate", text = %HOSTILE, "said"),
            &|| tracing::warn!(target: "sluicegate", text = ?HOSTILE, "said"),
            &|| tracing::warn!(target: "sluicegate", text = ?format_args!("{HOSTILE}"), "said"),
            &|| tracing::warn!(target: "sluicegate", error = source, "said"),
        ];
        let hidden = |line: &str| line.trim_end_matches('\n').chars().any(is_hidden);
        for event in events {
            let text = captured_log(LogConfig { level: Level::INFO, format: LogFormat::Text }, false, event);
            assert!(!hidden(&text) && text.contains("\\u{202e}"), "{text:?}");
            let coloured = captured_log(LogConfig { level: Level::INFO, format: LogFormat::Text }, true, event);
            assert!(!coloured.contains("\u{1b}[2J") && coloured.lines().count() == 1, "{coloured:?}");
            let json = captured_log(LogConfig { level: Level::INFO, format: LogFormat::Json }, false, event);
            assert!(!hidden(&json) && json.contains("\\u"), "{json:?}");
            serde_json::from_str::<serde_json::Value>(&json).unwrap();
        }
    }

    #[test]
    fn json_lines_are_uncoloured_objects() {
        let event = || tracing::info!(target: "sluicegate", provider = "acme", "lane open");
        let json = captured_log(LogConfig { level: Level::INFO, format: LogFormat::Json }, true, event);
        let line: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
        assert_eq!((&line["message"], &line["provider"]), (&"lane open".into(), &"acme".into()));
        let plain = captured_log(LogConfig { level: Level::INFO, format: LogFormat::Text }, false, event);
        assert!(!plain.contains('\u{1b}') && plain.contains("provider=\"acme\""), "{plain:?}");
        assert!(
            captured_log(LogConfig { level: Level::INFO, format: LogFormat::Text }, true, event).contains('\u{1b}')
        );
    }
}
