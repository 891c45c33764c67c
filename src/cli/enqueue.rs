//! The `enqueue` command: publishes jobs with confirms, one from flags or many from a JSON Lines file.
//!
//! It decodes each message as the worker does, and publishes only valid ones. It does not publish to a queue that is
//! declared differently, because that queue could lose messages. Of a file, invalid lines are reported by number and a
//! bounded number is published at a time. It stops when RabbitMQ fails. Running the same file again is safe, because
//! every line has its own id. If only one provider's queues are refused, the lines of the others are published.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use indicatif::ProgressBar;
use serde::Deserialize;
use serde_json::error::Category;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::io::{AsyncBufRead, BufReader};

use super::enqueue_conflicts::{ConflictCheck, LineConflict, conflict_text};
use super::enqueue_report::{EnqueueReport, progress_bar, record_failed_line};
use super::input::{self, Input, InputError, InputLine, LineReader};
use super::provider::{parse_name, unknown_provider};
use super::{CommandContext, CommandError, Console, Exit};
use crate::config::QueueUrl;
use crate::domain::job::{BODY_BYTES_MAX, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::rejected::ContentOfId;
use crate::queue::message::{CardNumbers, DecodeError, Decoded, decode, describe_error};
use crate::queue::{Destination, OutgoingMessage, Properties, Queue, QueueError};
use crate::worker::resend::provider_names;

/// One job from flags, or many from a file.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The provider; with --file, the provider of every line (without it, each line names its own `provider`).
    #[arg(long, required_unless_present = "file")]
    provider: Option<String>,
    /// Amount in minor units (1299 is EUR 12.99).
    #[arg(long, required_unless_present = "file", value_parser = parse_minor_units, allow_negative_numbers = true)]
    amount: Option<i64>,
    /// ISO 4217 code.
    #[arg(long, required_unless_present = "file")]
    currency: Option<String>,
    /// Identifies the payment for ever; the same id is the same payment. Default: a new UUID v7, so running the
    /// command twice pays twice.
    #[arg(long, allow_hyphen_values = true)]
    id: Option<String>,
    /// Scope of per-account limits.
    #[arg(long, allow_hyphen_values = true)]
    account: Option<String>,
    /// Passed on to the provider.
    #[arg(long, allow_hyphen_values = true)]
    reference: Option<String>,
    /// Permits that the call uses, 1 to 1000.
    #[arg(long)]
    cost: Option<u32>,
    /// 0 to 9; higher first.
    #[arg(long)]
    priority: Option<u32>,
    /// Not before this instant (RFC 3339).
    #[arg(long, value_name = "TIME")]
    not_before: Option<String>,
    /// Not after this instant (RFC 3339).
    #[arg(long, value_name = "TIME")]
    expires_at: Option<String>,
    /// JSON object for the provider's request.
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,
    /// Key that the provider deduplicates by; default: the id.
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    idempotency_key: Option<String>,
    /// JSON Lines, one job message per line; `-` is stdin. Every line needs its own `id`, so the file can be run again.
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "amount", "currency", "id", "account", "reference", "cost", "priority", "not_before", "expires_at", "payload",
        "idempotency_key",
    ])]
    file: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When a backend fails; as a usage error when the one job is invalid. Invalid lines of a file are reported and give
/// exit code 1.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let lane = args.provider.as_deref().map(parse_name).transpose()?;
    let ledger = cx.ledger().await?;
    let known = provider_names(&ledger).await?;
    if let Some(lane) = lane.as_ref().filter(|lane| !known.contains(lane)) {
        return Err(unknown_provider(lane.as_str()));
    }
    let queue = cx.queue().await?;
    let wanted = lane.as_ref().map_or(&known[..], std::slice::from_ref);
    let undeclared = declare_lanes(queue.as_ref(), &known, wanted).await.map_err(|error| match (&lane, error) {
        (Some(lane), QueueError::Refused(why)) => {
            CommandError::Failed(format!("nothing is published to `{lane}`: {why}"))
        }
        (_, error) => error.into(),
    })?;
    if let Some(file) = &args.file {
        let order = FileToPublish {
            file,
            lane: lane.as_ref(),
            known_providers: &known,
            undeclared: &undeclared,
            queue: &cx.config.queue.url,
            card_numbers: cx.config.worker.card_numbers,
            json: args.json,
        };
        return publish_file(&order, queue.as_ref(), &mut ConflictCheck::new(ledger), cx.console).await;
    }
    let (Some(lane), Some(amount), Some(currency)) = (lane, args.amount, args.currency.as_deref()) else {
        return Err(CommandError::Usage("give --provider, --amount and --currency, or --file".to_owned()));
    };
    let body = body(args, &lane, amount, currency)?;
    let Decoded { job, warnings, hash } =
        check_message(&body, &lane, cx.config.worker.card_numbers).map_err(CommandError::Usage)?;
    if let Some(conflict) = ledger.find_conflicts(&[ContentOfId { id: job.id.clone(), hash }]).await?.first() {
        return Err(CommandError::Failed(format!("nothing is published: {}", conflict_text(&conflict.id))));
    }
    for warning in warnings {
        cx.console.message(&format!("warning: {warning}"))?;
    }
    queue.publish(outgoing(lane.clone(), &job.id, body)).await?;
    if args.json {
        cx.console.json(&json!({ "id": job.id.as_str(), "provider": lane.as_str() }))?;
    } else {
        cx.console.line(job.id.as_str())?;
    }
    Ok(Exit::Success)
}

/// Decodes a message as the worker does; the error is for the terminal and holds no value of the message.
fn check_message(body: &[u8], lane: &ProviderName, card_numbers: CardNumbers) -> Result<Decoded, String> {
    decode(body, lane, card_numbers).map_err(|error| match error {
        DecodeError::Invalid { invalid, .. } => invalid.to_string(),
        DecodeError::NewerVersion(version) => {
            format!("v is {version}: this program supports version 1; leave the field out")
        }
    })
}

/// Parses the amount. The likeliest mistake is an amount with a decimal point, so the error explains that.
fn parse_minor_units(text: &str) -> Result<i64, String> {
    let amount = text.parse().ok().filter(|amount| *amount >= 0);
    amount.ok_or_else(|| "write minor units, as digits alone: 12.99 EUR is 1299; up to 2^63 - 1".to_owned())
}

/// The job message of the contract, in its order; fields that were not given are left out.
fn body(args: &Args, lane: &ProviderName, amount: i64, currency: &str) -> Result<Bytes, CommandError> {
    let fields = [
        ("v", json!(1)),
        ("id", json!(args.id.clone().unwrap_or_else(|| uuid::Uuid::now_v7().to_string()))),
        ("provider", json!(lane.as_str())),
        ("amount", json!(amount)),
        ("currency", json!(currency)),
        ("account", json!(args.account)),
        ("reference", json!(args.reference)),
        ("idempotency_key", json!(args.idempotency_key)),
        ("cost", json!(args.cost)),
        ("priority", json!(args.priority)),
        ("not_before", json!(args.not_before)),
        ("expires_at", json!(args.expires_at)),
    ];
    let given = fields.iter().filter(|(_, value)| !value.is_null());
    let mut members: Vec<String> = given.map(|(key, value)| format!(r#""{key}":{value}"#)).collect();
    if let Some(payload) = &args.payload {
        // The parser's own error would quote the payload.
        let payload: &RawValue =
            serde_json::from_str(payload).map_err(|_| CommandError::Usage("--payload is not JSON".to_owned()))?;
        members.push(format!(r#""payload":{payload}"#));
    }
    Ok(format!("{{{}}}", members.join(",")).into())
}

fn outgoing(lane: ProviderName, id: &JobId, body: Bytes) -> OutgoingMessage {
    let properties = Properties {
        message_id: Some(id.as_str().to_owned()),
        content_type: Some("application/json".to_owned()),
        ..Properties::default()
    };
    OutgoingMessage { destination: Destination::Lane(lane), body, properties }
}

/// Providers whose queues the broker refuses to declare, and why: most likely another program declared them
/// differently.
pub type UndeclaredLanes = BTreeMap<ProviderName, String>;

/// Declares the queues of all these providers. If the broker refuses, declares each `wanted` provider on its own, so
/// that a problem with one provider does not stop the others.
///
/// # Errors
/// When RabbitMQ is unreachable, or refuses the queues of every wanted provider.
pub async fn declare_lanes(
    queue: &dyn Queue,
    names: &[ProviderName],
    wanted: &[ProviderName],
) -> Result<UndeclaredLanes, QueueError> {
    match queue.declare(names).await {
        Ok(()) => return Ok(UndeclaredLanes::new()),
        Err(QueueError::Refused(_)) => {}
        Err(error) => return Err(error),
    }
    let mut undeclared = UndeclaredLanes::new();
    for name in wanted {
        match queue.declare(std::slice::from_ref(name)).await {
            Ok(()) => {}
            // All wanted providers are refused.
            Err(refusal @ QueueError::Refused(_)) if undeclared.len() + 1 == wanted.len() => return Err(refusal),
            Err(QueueError::Refused(why)) => {
                undeclared.insert(name.clone(), why);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(undeclared)
}

/// Concurrent publishes: enough to hide a broker's fsync, few enough to keep in memory (64 KiB each).
const IN_FLIGHT_MAX: usize = 256;
/// The same with an embedded queue. All writes wait for one SQLite file, and a write that waits too long fails as
/// unavailable.
const IN_FLIGHT_MAX_EMBEDDED: usize = 16;

/// What to publish.
struct FileToPublish<'a> {
    file: &'a Path,
    /// The lane of all lines; `None`: each line names its provider.
    lane: Option<&'a ProviderName>,
    known_providers: &'a [ProviderName],
    /// Providers whose lines are not published, and why.
    undeclared: &'a UndeclaredLanes,
    /// The queue that the messages are published to.
    queue: &'a QueueUrl,
    card_numbers: CardNumbers,
    json: bool,
}

impl FileToPublish<'_> {
    fn max_in_flight(&self) -> usize {
        if *self.queue == QueueUrl::Embedded { IN_FLIGHT_MAX_EMBEDDED } else { IN_FLIGHT_MAX }
    }
}

/// Publishes a file's lines.
async fn publish_file(
    order: &FileToPublish<'_>,
    queue: &dyn Queue,
    check: &mut ConflictCheck,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let unreadable = |error: InputError| CommandError::Failed(format!("{}: {error}", order.file.display()));
    let Input { reader, size: bytes } = input::open(order.file).await.map_err(unreadable)?;
    let bar = progress_bar(bytes, console.draws_progress);
    // A line may be a little longer than its message: blanks and its end.
    let mut lines = LineReader::new(BufReader::new(reader), BODY_BYTES_MAX + 1_024);
    let mut report = EnqueueReport::default();
    let mut publishing = FilePublish { order, bar: &bar, report: &mut report, check, console };
    let published = publishing.run(&mut lines, queue).await;
    bar.finish_and_clear();
    published?;
    let exit = report.print(order.json, console)?;
    report.read_error.map_or(Ok(exit), |error| Err(unreadable(error.into())))
}

/// The publishing of a file: its parts that each line uses.
struct FilePublish<'a> {
    order: &'a FileToPublish<'a>,
    bar: &'a ProgressBar,
    report: &'a mut EnqueueReport,
    check: &'a mut ConflictCheck,
    console: &'a mut Console,
}

impl FilePublish<'_> {
    async fn run<R: AsyncBufRead + Unpin>(&mut self, lines: &mut LineReader<R>, queue: &dyn Queue) -> io::Result<()> {
        let mut in_flight = FuturesUnordered::new();
        let mut ended = false;
        loop {
            tokio::select! {
                // Confirms first, so that reading a fast file does not starve them.
                biased;
                Some((number, job, result)) = in_flight.next(), if !in_flight.is_empty() => match result {
                    Ok(()) => self.record_published(number, job).await?,
                    Err(error) => {
                        ended = true;
                        self.report.stopped = true;
                        let reason = QueueError::to_string(&error);
                        record_failed_line(&mut self.report.unconfirmed, number, reason, self.bar, self.console)?;
                    }
                },
                line = lines.next(), if !ended && in_flight.len() < self.order.max_in_flight() => match line {
                    // What is in flight is still confirmed and reported.
                    Err(error) => {
                        ended = true;
                        self.report.read_error = Some(error);
                    }
                    Ok(None) => ended = true,
                    Ok(Some(line)) => {
                        if let Some(PreparedLine { number, job, message }) = self.prepare(line)? {
                            in_flight.push(async move { (number, job, queue.publish(message).await) });
                        }
                    }
                },
                else => return self.finish().await,
            }
            self.bar.set_position(lines.consumed);
            self.bar.set_message(format!("{} published, {} invalid", self.report.published, self.report.bad.len()));
        }
    }

    /// The line's message; `None` when it is empty or was reported.
    fn prepare(&mut self, line: InputLine) -> io::Result<Option<PreparedLine>> {
        let (number, bytes) = match line {
            InputLine::TooLong { number } => {
                let reason = format!("too_large: longer than {BODY_BYTES_MAX} bytes");
                record_failed_line(&mut self.report.bad, number, reason, self.bar, self.console)?;
                return Ok(None);
            }
            InputLine::Text { bytes, .. } if bytes.trim_ascii().is_empty() => return Ok(None),
            InputLine::Text { number, bytes } => (number, bytes),
        };
        let (warnings, lane, prepared) = match prepare(number, bytes.trim_ascii(), self.order) {
            Ok(prepared) => prepared,
            Err(reason) => {
                record_failed_line(&mut self.report.bad, number, reason, self.bar, self.console)?;
                return Ok(None);
            }
        };
        for warning in warnings {
            self.bar.suspend(|| self.console.message(&format!("line {number}: warning: {warning}")))?;
        }
        if let Some(why) = self.order.undeclared.get(&lane) {
            record_failed_line(&mut self.report.unconfirmed, number, why.clone(), self.bar, self.console)?;
            return Ok(None);
        }
        Ok(Some(prepared))
    }

    async fn record_published(&mut self, number: u64, job: ContentOfId) -> io::Result<()> {
        self.report.published += 1;
        if self.report.conflicts_unknown {
            return Ok(());
        }
        let conflicts = self.check.add(number, job).await;
        self.record_conflicts(conflicts)
    }

    async fn finish(&mut self) -> io::Result<()> {
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

/// A line that is ready to be published.
struct PreparedLine {
    number: u64,
    job: ContentOfId,
    message: OutgoingMessage,
}

/// The warnings about a line, its lane and its message.
fn prepare(
    number: u64,
    body: &[u8],
    order: &FileToPublish<'_>,
) -> Result<(Vec<String>, ProviderName, PreparedLine), String> {
    let lane = lane_of(body, order)?;
    let Decoded { job, warnings, hash } = check_message(body, &lane, order.card_numbers)?;
    let message = outgoing(lane.clone(), &job.id, Bytes::copy_from_slice(body));
    Ok((warnings, lane, PreparedLine { number, job: ContentOfId { id: job.id, hash }, message }))
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
