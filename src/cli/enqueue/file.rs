//! The lines of a file on their way through the door: read, checked, handed over a bounded number at a time, reported.

use std::io;
use std::path::Path;

use futures_util::future::OptionFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use indicatif::ProgressBar;
use serde::Deserialize;
use serde_json::error::Category;
use tokio::io::{AsyncBufRead, BufReader};
use tokio::time::sleep_until;

use super::conflicts::{ConflictCheck, LineConflict};
use super::door::{CheckError, CheckedPayment, ClosedLanes, Door, DoorError, HandedOver};
use super::report::{EnqueueReport, HandedOverCount, progress_bar, record_failed_line};
use crate::cli::input::{self, Input, InputError, InputLine, LineReader};
use crate::cli::{CommandError, Console, Exit};
use crate::domain::job::BODY_BYTES_MAX;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::record_notices::RecordNotices;
use crate::ledger::rejected::ContentOfId;
use crate::queue::message::{CardNumbers, describe_error};

/// Payments that are handed over at once: enough to hide the sync of a disk, few enough to keep in memory (64 KiB each).
const IN_FLIGHT_MAX: usize = 256;

/// What to hand over.
pub struct FileToEnqueue<'a> {
    pub file: &'a Path,
    /// The lane of all lines; `None`: each line names its provider.
    pub lane: Option<&'a ProviderName>,
    pub known_providers: &'a [ProviderName],
    pub door: &'a Door,
    pub closed: &'a ClosedLanes,
    pub card_numbers: CardNumbers,
    pub json: bool,
}

/// Hands a file's lines over.
pub async fn enqueue_file(
    order: &FileToEnqueue<'_>,
    ledger: &Database,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let unreadable = |error: InputError| CommandError::Failed(format!("{}: {error}", order.file.display()));
    let Input { reader, size: bytes } = input::open(order.file).await.map_err(unreadable)?;
    let bar = progress_bar(bytes, console.draws_progress);
    // A line may be a little longer than its message: blanks and its end.
    let mut lines = LineReader::new(BufReader::new(reader), BODY_BYTES_MAX + 1_024);
    let count = match order.door {
        Door::Broker(_) => HandedOverCount::Published { published: 0 },
        Door::Ledger(_) => HandedOverCount::Recorded { recorded: 0, known: 0 },
    };
    let mut enqueuing = FileEnqueue {
        order,
        bar: &bar,
        report: EnqueueReport::new(count),
        check: ConflictCheck::new(ledger.clone()),
        notices: RecordNotices::new(ledger.clone()),
        console,
    };
    let enqueued = enqueuing.run(&mut lines).await;
    let report = enqueuing.report;
    bar.finish_and_clear();
    enqueued?;
    let exit = report.print(order.json, console)?;
    report.read_error.map_or(Ok(exit), |error| Err(unreadable(error.into())))
}

/// A file on its way: its parts that each line uses.
struct FileEnqueue<'a> {
    order: &'a FileToEnqueue<'a>,
    bar: &'a ProgressBar,
    report: EnqueueReport,
    check: ConflictCheck,
    notices: RecordNotices,
    console: &'a mut Console,
}

/// A line whose payment was handed over, or was not.
struct HandedLine {
    number: u64,
    lane: ProviderName,
    content: ContentOfId,
    result: Result<HandedOver, DoorError>,
}

/// A line whose payment may be handed over.
struct PreparedLine {
    number: u64,
    lane: ProviderName,
    payment: CheckedPayment,
}

impl PreparedLine {
    async fn hand_over(self, door: &Door) -> HandedLine {
        let Self { number, lane, payment } = self;
        let content = ContentOfId { id: payment.decoded.job.id.clone(), hash: payment.decoded.hash };
        HandedLine { number, lane, content, result: door.hand_over(payment).await }
    }
}

/// Why a line is not handed over.
enum LineProblem {
    Invalid(String),
    /// Its provider takes nothing now.
    Closed(String),
    /// The ledger failed.
    Failed(String),
}

impl FileEnqueue<'_> {
    async fn run<R: AsyncBufRead + Unpin>(&mut self, lines: &mut LineReader<R>) -> io::Result<()> {
        let mut in_flight = FuturesUnordered::new();
        let mut ended = false;
        loop {
            let notice_due_at = self.notices.due_at();
            tokio::select! {
                // What is handed over comes first, so that reading a fast file does not starve it. It also starts in
                // the order of the lines, in which payments of an account are recorded.
                biased;
                Some(line) = in_flight.next(), if !in_flight.is_empty() => self.record(line).await?,
                Some(()) = OptionFuture::from(notice_due_at.map(sleep_until)) => self.notices.send().await,
                line = lines.next(), if !ended && !self.report.stopped && in_flight.len() < IN_FLIGHT_MAX => match line {
                    // What is in flight is still reported.
                    Err(error) => {
                        ended = true;
                        self.report.read_error = Some(error);
                    }
                    Ok(None) => ended = true,
                    Ok(Some(line)) => {
                        if let Some(line) = self.prepare(line).await? {
                            in_flight.push(line.hand_over(self.order.door));
                        }
                    }
                },
                else => return self.finish().await,
            }
            self.bar.set_position(lines.consumed);
            self.bar.set_message(self.report.progress());
        }
    }

    /// The line's payment; `None` when it is empty or was reported.
    async fn prepare(&mut self, line: InputLine) -> io::Result<Option<PreparedLine>> {
        let (number, bytes) = match line {
            InputLine::TooLong { number } => {
                let reason = format!("too_large: longer than {BODY_BYTES_MAX} bytes");
                record_failed_line(&mut self.report.bad, number, reason, self.bar, self.console)?;
                return Ok(None);
            }
            InputLine::Text { bytes, .. } if bytes.trim_ascii().is_empty() => return Ok(None),
            InputLine::Text { number, bytes } => (number, bytes),
        };
        let failed = match prepare(number, bytes.trim_ascii(), self.order).await {
            Ok(prepared) => {
                for warning in &prepared.payment.decoded.warnings {
                    self.bar.suspend(|| self.console.message(&format!("line {number}: warning: {warning}")))?;
                }
                return Ok(Some(prepared));
            }
            Err(failed) => failed,
        };
        let (list, reason) = match failed {
            LineProblem::Invalid(reason) => (&mut self.report.bad, reason),
            LineProblem::Closed(reason) => (&mut self.report.unconfirmed, reason),
            LineProblem::Failed(reason) => {
                self.report.stopped = true;
                (&mut self.report.unconfirmed, reason)
            }
        };
        record_failed_line(list, number, reason, self.bar, self.console)?;
        Ok(None)
    }

    async fn record(&mut self, line: HandedLine) -> io::Result<()> {
        let HandedLine { number, lane, content, result } = line;
        let (list, reason) = match result {
            Ok(handed) => {
                self.report.count.add(&handed);
                match handed {
                    HandedOver::Published => return self.check_conflicts(number, content).await,
                    HandedOver::Known => return Ok(()),
                    HandedOver::Recorded => {
                        self.notices.add(&lane);
                        return Ok(());
                    }
                    HandedOver::Conflict(invalid) => (&mut self.report.conflicts, invalid.to_string()),
                }
            }
            Err(error) => {
                self.report.stopped = true;
                (&mut self.report.unconfirmed, error.to_string())
            }
        };
        record_failed_line(list, number, reason, self.bar, self.console)
    }

    async fn check_conflicts(&mut self, number: u64, content: ContentOfId) -> io::Result<()> {
        if self.report.conflicts_unknown {
            return Ok(());
        }
        let conflicts = self.check.add(number, content).await;
        self.record_conflicts(conflicts)
    }

    async fn finish(&mut self) -> io::Result<()> {
        self.notices.send().await;
        let conflicts = self.check.finish().await;
        self.record_conflicts(conflicts)
    }

    fn record_conflicts(&mut self, conflicts: Result<Vec<LineConflict>, LedgerError>) -> io::Result<()> {
        match conflicts {
            Ok(conflicts) => conflicts.into_iter().try_for_each(|LineConflict { line, reason }| {
                record_failed_line(&mut self.report.conflicts, line, reason, self.bar, self.console)
            }),
            // The lines are published, and workers check them anyway.
            Err(error) => {
                self.report.conflicts_unknown = true;
                self.bar.suspend(|| {
                    self.console.message(&format!("warning: published ids were not compared with the ledger: {error}"))
                })
            }
        }
    }
}

async fn prepare(number: u64, body: &[u8], order: &FileToEnqueue<'_>) -> Result<PreparedLine, LineProblem> {
    let lane = lane_of(body, order).map_err(LineProblem::Invalid)?;
    match order.door.check(body, &lane, order.card_numbers).await {
        Ok(payment) => match order.closed.get(&lane) {
            None => Ok(PreparedLine { number, lane, payment }),
            Some(why) => Err(LineProblem::Closed(why.clone())),
        },
        Err(CheckError::Invalid(reason)) => Err(LineProblem::Invalid(reason)),
        Err(CheckError::Ledger(error)) => Err(LineProblem::Failed(error.to_string())),
    }
}

fn lane_of(body: &[u8], order: &FileToEnqueue<'_>) -> Result<ProviderName, String> {
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
