//! The `enqueue` command: publishes jobs with confirms, one from flags or many from a file.
//!
//! It decodes each message as the worker does, and publishes only valid ones. It does not publish to a queue that is
//! declared differently, because that queue could lose messages.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::provider::{parse_name, unknown_provider};
use super::{CommandError, Console, Exit};
use crate::app::Services;
use crate::config::Config;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::queue::message::{CardNumbers, DecodeError, Decoded, decode};
use crate::queue::{Destination, OutgoingMessage, Properties, Queue, QueueError};
use crate::worker::resend::provider_names;

mod from_file;

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

/// The job message of the contract; fields that were not given are left out.
#[derive(Serialize)]
struct JobMessage<'a> {
    v: u8,
    id: &'a str,
    provider: &'a str,
    amount: i64,
    currency: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    account: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_before: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a RawValue>,
}

/// Runs the command.
///
/// # Errors
/// When a backend fails; as a usage error when the one job is invalid. Invalid lines of a file are reported and give
/// exit code 1.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let lane = args.provider.as_deref().map(parse_name).transpose()?;
    let ledger = services.ledger(config).await?;
    let known = provider_names(&ledger).await?;
    if let Some(lane) = lane.as_ref().filter(|lane| !known.contains(lane)) {
        return Err(unknown_provider(lane.as_str()));
    }
    let queue = services.queue(config).await?;
    let wanted = lane.as_ref().map_or(&known[..], std::slice::from_ref);
    let undeclared = declare_lanes(queue.as_ref(), &known, wanted).await.map_err(|error| match (&lane, error) {
        (Some(lane), QueueError::Refused(why)) => {
            CommandError::Failed(format!("nothing is published to `{lane}`: {why}"))
        }
        (_, error) => error.into(),
    })?;
    if let Some(file) = &args.file {
        let order = from_file::FileToPublish {
            file,
            lane: lane.as_ref(),
            known_providers: &known,
            undeclared: &undeclared,
            queue: &config.queue.url,
            card_numbers: config.worker.card_numbers,
            json: args.json,
        };
        return from_file::run(&order, queue.as_ref(), console).await;
    }
    let (Some(lane), Some(amount), Some(currency)) = (lane, args.amount, args.currency.as_deref()) else {
        return Err(CommandError::Usage("give --provider, --amount and --currency, or --file".to_owned()));
    };
    let body = body(args, &lane, amount, currency)?;
    let Decoded { job, warnings, .. } =
        check_message(&body, &lane, config.worker.card_numbers).map_err(CommandError::Usage)?;
    for warning in warnings {
        console.message(&format!("warning: {warning}"))?;
    }
    queue.publish(outgoing(lane.clone(), &job.id, body)).await?;
    if args.json {
        console.json(&json!({ "id": job.id.as_str(), "provider": lane.as_str() }))?;
    } else {
        console.line(job.id.as_str())?;
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

fn body(args: &Args, lane: &ProviderName, amount: i64, currency: &str) -> Result<Bytes, CommandError> {
    let generated = uuid::Uuid::now_v7().to_string();
    // The parser's own error would quote the payload.
    let payload: Option<&RawValue> = args
        .payload
        .as_deref()
        .map(|text| serde_json::from_str(text).map_err(|_| CommandError::Usage("--payload is not JSON".to_owned())))
        .transpose()?;
    let message = JobMessage {
        v: 1,
        id: args.id.as_deref().unwrap_or(&generated),
        provider: lane.as_str(),
        amount,
        currency,
        account: args.account.as_deref(),
        reference: args.reference.as_deref(),
        idempotency_key: args.idempotency_key.as_deref(),
        cost: args.cost,
        priority: args.priority,
        not_before: args.not_before.as_deref(),
        expires_at: args.expires_at.as_deref(),
        payload,
    };
    let bytes = serde_json::to_vec(&message).map_err(|error| CommandError::Failed(error.to_string()))?;
    Ok(bytes.into())
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
