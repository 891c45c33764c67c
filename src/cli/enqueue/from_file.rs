//! The publisher of a JSON Lines file: it reports invalid lines by number and publishes the valid ones, a bounded
//! number at a time.
//!
//! It stops when RabbitMQ fails. Running the same file again is safe, because every line has its own id. If only one
//! provider's queues are refused, the lines of the others are published.

use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use tokio::io::{AsyncBufRead, BufReader};

use super::super::input::{self, Input, InputError, InputLine, LineReader};
use super::{CommandError, Console, Exit, UndeclaredLanes, check_message, outgoing};
use crate::config::{CardNumbers, QueueUrl};
use crate::domain::job::BODY_BYTES_MAX;
use crate::domain::provider::ProviderName;
use crate::queue::message::{Decoded, describe_error};
use crate::queue::{OutgoingMessage, Queue, QueueError};

/// Concurrent publishes: enough to hide a broker's fsync, few enough to keep in memory (64 KiB each).
const IN_FLIGHT_MAX: usize = 256;
/// The same with an embedded queue. All writes wait for one SQLite file, and a write that waits too long fails as
/// unavailable.
const IN_FLIGHT_MAX_EMBEDDED: usize = 16;

/// What to publish.
pub struct FileToPublish<'a> {
    pub file: &'a Path,
    /// The lane of all lines; `None`: each line names its provider.
    pub lane: Option<&'a ProviderName>,
    pub known_providers: &'a [ProviderName],
    /// Providers whose lines are not published, and why.
    pub undeclared: &'a UndeclaredLanes,
    /// The queue that the messages are published to.
    pub queue: &'a QueueUrl,
    pub card_numbers: CardNumbers,
    pub json: bool,
}

impl FileToPublish<'_> {
    fn max_in_flight(&self) -> usize {
        if *self.queue == QueueUrl::Embedded { IN_FLIGHT_MAX_EMBEDDED } else { IN_FLIGHT_MAX }
    }
}

#[derive(Debug, Default, Serialize)]
struct EnqueueReport {
    published: u64,
    bad: Vec<FailedLine>,
    /// Lines that the broker did not confirm.
    unconfirmed: Vec<FailedLine>,
    /// The queue failed, and the remaining lines were not read.
    #[serde(skip)]
    stopped: bool,
    /// The file cannot be read any further.
    #[serde(skip)]
    read_error: Option<io::Error>,
}

#[derive(Debug, Serialize)]
struct FailedLine {
    line: u64,
    reason: String,
}

/// Publishes a file's lines.
pub async fn run(order: &FileToPublish<'_>, queue: &dyn Queue, console: &mut Console) -> Result<Exit, CommandError> {
    let unreadable = |error: InputError| CommandError::Failed(format!("{}: {error}", order.file.display()));
    let Input { reader, size: bytes } = input::open(order.file).await.map_err(unreadable)?;
    let bar = progress_bar(bytes, console.draws_progress);
    // A line may be a little longer than its message: blanks and its end.
    let mut lines = LineReader::new(BufReader::new(reader), BODY_BYTES_MAX + 1_024);
    let mut report = EnqueueReport::default();
    let published = publish(&mut lines, order, queue, &bar, &mut report, console).await;
    bar.finish_and_clear();
    published?;
    let exit = print_report(&report, order, console)?;
    report.read_error.map_or(Ok(exit), |error| Err(unreadable(error.into())))
}

async fn publish<R: AsyncBufRead + Unpin>(
    lines: &mut LineReader<R>,
    order: &FileToPublish<'_>,
    queue: &dyn Queue,
    bar: &ProgressBar,
    report: &mut EnqueueReport,
    console: &mut Console,
) -> io::Result<()> {
    let mut in_flight = FuturesUnordered::new();
    let mut ended = false;
    loop {
        tokio::select! {
            // Confirms first, so that reading a fast file does not starve them.
            biased;
            Some((number, result)) = in_flight.next(), if !in_flight.is_empty() => match result {
                Ok(()) => report.published += 1,
                Err(error) => {
                    ended = true;
                    report.stopped = true;
                    record_failed_line(&mut report.unconfirmed, number, QueueError::to_string(&error), bar, console)?;
                }
            },
            line = lines.next(), if !ended && in_flight.len() < order.max_in_flight() => match line {
                // What is in flight is still confirmed and reported.
                Err(error) => {
                    ended = true;
                    report.read_error = Some(error);
                }
                Ok(None) => ended = true,
                Ok(Some(line)) => match prepare(line, order) {
                    Ok(None) => {}
                    Ok(Some(PreparedLine { number, warnings, lane, message })) => {
                        for warning in warnings {
                            bar.suspend(|| console.message(&format!("line {number}: warning: {warning}")))?;
                        }
                        match order.undeclared.get(&lane) {
                            Some(why) => record_failed_line(&mut report.unconfirmed, number, why.clone(), bar, console)?,
                            None => in_flight.push(async move { (number, queue.publish(message).await) }),
                        }
                    }
                    Err((number, reason)) => record_failed_line(&mut report.bad, number, reason, bar, console)?,
                },
            },
            else => return Ok(()),
        }
        bar.set_position(lines.consumed);
        bar.set_message(format!("{} published, {} invalid", report.published, report.bad.len()));
    }
}

fn record_failed_line(
    list: &mut Vec<FailedLine>,
    line: u64,
    reason: String,
    bar: &ProgressBar,
    console: &mut Console,
) -> io::Result<()> {
    bar.suspend(|| console.message(&format!("line {line}: {reason}")))?;
    list.push(FailedLine { line, reason });
    Ok(())
}

struct PreparedLine {
    number: u64,
    warnings: Vec<String>,
    lane: ProviderName,
    message: OutgoingMessage,
}

/// `None` for an empty line; the error is the line's number and what is wrong with it.
fn prepare(line: InputLine, order: &FileToPublish<'_>) -> Result<Option<PreparedLine>, (u64, String)> {
    let (number, bytes) = match line {
        InputLine::Text { number, bytes } => (number, bytes),
        InputLine::TooLong { number } => {
            return Err((number, format!("too_large: longer than {BODY_BYTES_MAX} bytes")));
        }
    };
    let body = bytes.trim_ascii();
    if body.is_empty() {
        return Ok(None);
    }
    let lane = lane_of(body, order).map_err(|reason| (number, reason))?;
    let checked = check_message(body, &lane, order.card_numbers);
    let Decoded { job, warnings, .. } = checked.map_err(|reason| (number, reason))?;
    let message = outgoing(lane.clone(), &job.id, Bytes::copy_from_slice(body));
    Ok(Some(PreparedLine { number, warnings, lane, message }))
}

fn lane_of(body: &[u8], order: &FileToPublish<'_>) -> Result<ProviderName, String> {
    #[derive(Deserialize)]
    struct Named {
        provider: Option<String>,
    }
    if let Some(lane) = order.lane {
        return Ok(lane.clone());
    }
    // The parser's own error would quote the line.
    let named: Named = serde_json::from_slice(body).map_err(|error| match error.classify() {
        Category::Data => "malformed: is not a JSON object with a text `provider`".to_owned(),
        _ => format!("malformed: {}", describe_error(&error)),
    })?;
    let name = named.provider.ok_or("names no `provider`, and --provider is not given")?;
    let lane = ProviderName::new(name).map_err(|problem| problem.to_string())?;
    if !order.known_providers.contains(&lane) {
        return Err(format!("there is no provider `{lane}` in the database"));
    }
    Ok(lane)
}

fn print_report(
    report: &EnqueueReport,
    order: &FileToPublish<'_>,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    if order.json {
        console.json(report)?;
    } else {
        console.line(&format!("{} published, {} invalid", report.published, report.bad.len()))?;
    }
    if report.read_error.is_some() {
        console.message(
            "stopped because the file cannot be read any further; fix that and run the same file again: published ids are \
             not charged twice",
        )?;
    } else if report.stopped {
        console.message(
            "stopped because the queue failed; run the same file again: published ids are not charged twice",
        )?;
    } else if !report.unconfirmed.is_empty() {
        let left = report.unconfirmed.len();
        console.message(&format!(
            "{left} not published, because their queues are declared differently; fix that and run the same file again: \
             published ids are not charged twice"
        ))?;
    }
    Ok(if report.bad.is_empty() && report.unconfirmed.is_empty() { Exit::Success } else { Exit::Failed })
}

fn progress_bar(bytes: Option<u64>, drawn: bool) -> ProgressBar {
    if !drawn {
        return ProgressBar::hidden();
    }
    let (bar, template) = match bytes {
        Some(bytes) => (ProgressBar::new(bytes), "{wide_bar} {percent} % · {msg} · {eta} left"),
        None => (ProgressBar::new_spinner(), "{spinner} {msg} · {elapsed}"),
    };
    // Redrawn by time, so that a slow broker shows as a moving clock.
    bar.enable_steady_tick(Duration::from_millis(200));
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
