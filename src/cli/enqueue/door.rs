//! The door through which `enqueue` hands payments over: the broker, or the ledger if `queue.url` names no broker.
//!
//! A published payment is recorded by a worker. At the ledger's door `enqueue` does what the worker does otherwise: it
//! judges each message by the rules of its provider's row, and records the payment in the backlog.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::app::{Services, providers};
use crate::cli::CommandError;
use crate::config::{CardNumbers, Config};
use crate::domain::job::InvalidMessage;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::BacklogRecord;
use crate::ledger::database::Database;
use crate::provider::ProviderFactory as _;
use crate::queue::message::{Decoded, decode};
use crate::queue::{Destination, OutgoingMessage, Properties, Queue, QueueError};
use crate::worker::decode::{DecodedMessage, MessageJudge};
use crate::worker::lane::LaneSettings;
use crate::worker::log_throttle::LogThrottle;
use crate::worker::settings_sync::LoadedSettings;

/// Providers whose payments cannot be handed over, and why.
pub type ClosedLanes = BTreeMap<ProviderName, String>;

pub enum Door {
    Broker(Arc<dyn Queue>),
    Ledger(LedgerDoor),
}

/// The ledger's door, with the rules of each provider's row.
pub struct LedgerDoor {
    ledger: Database,
    rows: BTreeMap<ProviderName, LaneSettings>,
    log_throttle: LogThrottle,
}

/// An open door.
pub struct OpenDoor {
    pub door: Door,
    pub closed: ClosedLanes,
}

/// A payment that may be handed over.
pub struct CheckedPayment {
    pub decoded: Decoded,
    lane: ProviderName,
    body: Bytes,
}

/// What became of a payment.
pub enum HandedOver {
    Published,
    Recorded,
    /// Recorded before, with the same content.
    Known,
    /// Another payment has its id or its key.
    Conflict(InvalidMessage),
}

/// Why a payment was not handed over.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl From<DoorError> for CommandError {
    fn from(error: DoorError) -> Self {
        match error {
            DoorError::Queue(error) => error.into(),
            DoorError::Ledger(error) => error.into(),
        }
    }
}

/// Why a message is no payment that may be handed over.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// For the terminal; it has no value of the message.
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// Opens the door of these providers. At the broker, declares the queues of all of them, and each of the `wanted` ones on
/// its own if the broker refuses.
///
/// # Errors
/// When a backend fails, or the broker refuses the queues of every wanted provider, of more than one.
pub async fn open(
    config: &Config,
    services: &Services,
    known: &[ProviderName],
    wanted: &[ProviderName],
) -> Result<OpenDoor, CommandError> {
    if let Some(queue) = services.queue(config).await? {
        let closed = match (declare_lanes(queue.as_ref(), known, wanted).await, wanted) {
            (Err(QueueError::Refused(why)), [only]) => ClosedLanes::from([(only.clone(), why)]),
            (declared, _) => declared?,
        };
        return Ok(OpenDoor { door: Door::Broker(queue), closed });
    }
    let ledger = services.ledger(config).await?;
    let settings = LoadedSettings::default().with_snapshot(ledger.load_settings().await?);
    let factory = providers(config)?;
    let mut closed: ClosedLanes = BTreeMap::new();
    let mut rows = BTreeMap::new();
    for (name, provider) in settings.providers {
        match factory.build(&provider) {
            Ok(client) => drop(rows.insert(name, LaneSettings { provider, client })),
            Err(error) => drop(closed.insert(name, format!("its provider row cannot be used: {error}"))),
        }
    }
    for bad in settings.invalid_rows {
        let Ok(name) = ProviderName::new(bad.provider) else { continue };
        closed.insert(name, format!("its provider row is invalid: {}", bad.problems.join("; ")));
    }
    Ok(OpenDoor { door: Door::Ledger(LedgerDoor { ledger, rows, log_throttle: LogThrottle::default() }), closed })
}

impl Door {
    /// Decodes a message as the worker does, at the ledger's door by the rules of the provider's row.
    pub async fn check(
        &self,
        body: &[u8],
        lane: &ProviderName,
        card_numbers: CardNumbers,
    ) -> Result<CheckedPayment, CheckError> {
        let message = match self {
            Self::Broker(_) => decode(body, lane, card_numbers).into(),
            Self::Ledger(LedgerDoor { ledger, rows, log_throttle }) => {
                MessageJudge { ledger, card_numbers, log_throttle }.decode(body, lane, rows.get(lane)).await?
            }
        };
        match message {
            DecodedMessage::Job(decoded) => {
                Ok(CheckedPayment { decoded: *decoded, lane: lane.clone(), body: Bytes::copy_from_slice(body) })
            }
            DecodedMessage::Invalid { invalid, .. } => Err(CheckError::Invalid(invalid.to_string())),
            DecodedMessage::NewerVersion(version) => {
                let why = format!("v is {version}: this program supports version 1; leave the field out");
                Err(CheckError::Invalid(why))
            }
        }
    }

    /// Hands a payment over. It returns once the broker has confirmed the message, or the record is committed.
    pub async fn hand_over(&self, payment: CheckedPayment) -> Result<HandedOver, DoorError> {
        let CheckedPayment { decoded, lane, body } = payment;
        match self {
            Self::Broker(queue) => {
                let properties = Properties {
                    message_id: Some(decoded.job.id.as_str().to_owned()),
                    content_type: Some("application/json".to_owned()),
                    ..Properties::default()
                };
                queue.publish(OutgoingMessage { destination: Destination::Lane(lane), body, properties }).await?;
                Ok(HandedOver::Published)
            }
            Self::Ledger(door) => {
                Ok(match door.ledger.record_backlog(&decoded.job, decoded.hash, Duration::ZERO).await? {
                    BacklogRecord::Recorded { .. } => {
                        door.ledger.record_news().send(Some(lane));
                        HandedOver::Recorded
                    }
                    BacklogRecord::Known => HandedOver::Known,
                    BacklogRecord::Conflict(invalid) => HandedOver::Conflict(invalid),
                })
            }
        }
    }
}

/// Declares the queues of all these providers. If the broker refuses, declares each `wanted` provider on its own, so
/// that a problem with one provider does not stop the others.
///
/// # Errors
/// When RabbitMQ is unreachable, or refuses the queues of every wanted provider.
pub async fn declare_lanes(
    queue: &dyn Queue,
    names: &[ProviderName],
    wanted: &[ProviderName],
) -> Result<ClosedLanes, QueueError> {
    match queue.declare(names).await {
        Ok(()) => return Ok(ClosedLanes::new()),
        Err(QueueError::Refused(_)) => {}
        Err(error) => return Err(error),
    }
    let mut closed = ClosedLanes::new();
    for name in wanted {
        match queue.declare(std::slice::from_ref(name)).await {
            Ok(()) => {}
            // All wanted providers are refused.
            Err(refusal @ QueueError::Refused(_)) if closed.len() + 1 == wanted.len() => return Err(refusal),
            Err(QueueError::Refused(why)) => {
                closed.insert(name.clone(), why);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(closed)
}
