//! The `enqueue` command: hands payments over, one from flags or many from a JSON Lines file.
//!
//! It publishes them with confirms, or records them if `queue.url` names no broker ([`door`]). It decodes each message as
//! the worker does, and hands over only valid ones. It does not publish to a queue that is declared differently, because
//! that queue could lose messages. Of a file, invalid lines are reported by number and a bounded number is handed over at
//! a time. It stops when the backend fails. Running the same file again is safe, because every line has its own id. If
//! only one provider's payments are refused, the lines of the others are handed over.

use std::path::PathBuf;

use bytes::Bytes;
use serde_json::json;
use serde_json::value::RawValue;

use self::conflicts::conflict_text;
use self::door::{CheckError, Door, HandedOver, OpenDoor};
use self::file::{FileToEnqueue, enqueue_file};
use super::provider::{parse_name, unknown_provider};
use super::{CommandContext, CommandError, Exit};
use crate::domain::provider::ProviderName;
use crate::ledger::record_notices::RecordNotices;
use crate::ledger::rejected::ContentOfId;
use crate::queue::message::Decoded;
use crate::worker::resend::provider_names;

mod conflicts;
pub mod door;
mod file;
mod report;

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

const FLAGS_MISSING: &str = "give --provider, --amount and --currency, or --file";

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
    let wanted = lane.as_ref().map_or(&known[..], std::slice::from_ref);
    let OpenDoor { door, closed } = door::open(cx.config, cx.services, &known, wanted).await?;
    if let Some((lane, why)) = lane.as_ref().and_then(|lane| closed.get_key_value(lane)) {
        let what = match door {
            Door::Broker(_) => "published to",
            Door::Ledger(_) => "recorded for",
        };
        return Err(CommandError::Failed(format!("nothing is {what} `{lane}`: {why}")));
    }
    if let Some(file) = &args.file {
        let order = FileToEnqueue {
            file,
            lane: lane.as_ref(),
            known_providers: &known,
            door: &door,
            closed: &closed,
            card_numbers: cx.config.worker.card_numbers,
            json: args.json,
        };
        return enqueue_file(&order, &ledger, cx.console).await;
    }
    match lane {
        Some(lane) => enqueue_one(args, &lane, &door, cx).await,
        None => Err(CommandError::Usage(FLAGS_MISSING.to_owned())),
    }
}

/// Hands the one payment of the flags over.
async fn enqueue_one(
    args: &Args,
    lane: &ProviderName,
    door: &Door,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    let (Some(amount), Some(currency)) = (args.amount, args.currency.as_deref()) else {
        return Err(CommandError::Usage(FLAGS_MISSING.to_owned()));
    };
    let ledger = cx.ledger().await?;
    let body = body(args, lane, amount, currency)?;
    let payment = match door.check(&body, lane, cx.config.worker.card_numbers).await {
        Ok(payment) => payment,
        Err(CheckError::Invalid(reason)) => return Err(CommandError::Usage(reason)),
        Err(CheckError::Ledger(error)) => return Err(error.into()),
    };
    let Decoded { job, hash, .. } = &payment.decoded;
    let id = job.id.clone();
    if let Door::Broker(_) = door
        && let Some(conflict) = ledger.find_conflicts(&[ContentOfId { id: id.clone(), hash: *hash }]).await?.first()
    {
        return Err(CommandError::Failed(format!("nothing is published: {}", conflict_text(&conflict.id))));
    }
    for warning in &payment.decoded.warnings {
        cx.console.message(&format!("warning: {warning}"))?;
    }
    let is_known = match door.hand_over(payment).await? {
        HandedOver::Conflict(invalid) => {
            return Err(CommandError::Failed(format!("nothing is recorded: {invalid}")));
        }
        HandedOver::Known => Some(true),
        HandedOver::Recorded => {
            let mut notices = RecordNotices::new(ledger);
            notices.add(lane);
            notices.send().await;
            Some(false)
        }
        HandedOver::Published => None,
    };
    if is_known == Some(true) {
        cx.console.message(&format!("{id} is already known, with the same content: nothing is changed"))?;
    }
    if args.json {
        let mut answer = json!({ "id": id.as_str(), "provider": lane.as_str() });
        if let Some(is_known) = is_known {
            answer["known"] = is_known.into();
        }
        cx.console.json(&answer)?;
    } else {
        cx.console.line(id.as_str())?;
    }
    Ok(Exit::Success)
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
