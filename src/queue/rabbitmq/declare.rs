//! Declarations, one call each.
//!
//! Nothing is deleted or changed: a queue that exists with other arguments is an error that an operator fixes.

use std::time::Duration;

use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;

use super::failure::{CallFailure, with_call_limit};
use super::supervisor::Generation;
use super::topology::{Declaration, table};
use crate::queue::QueueError;

/// How long after a queue's creation its name may still be lost in a crash, and with it what was confirmed.
///
/// RabbitMQ writes the registry of quorum queues to disk between 0.5 and 1 s after it last changed (`auto_save` in ra's
/// `ra_directory.erl`); a broker killed before that creates the queue again, empty and without a leader (seen with 3.10.8).
const REGISTRY_SETTLES: Duration = Duration::from_millis(1_500);

/// Declares everything, and returns when it would outlive a crash of the broker.
pub(super) async fn declare_all(generation: &Generation, declarations: &[Declaration]) -> Result<(), QueueError> {
    let mut creates = false;
    for declaration in declarations {
        if let Declaration::Queue { name, .. } = declaration {
            creates = creates || depth(generation, name).await?.is_none();
        }
    }
    // A channel of its own, because an error closes it.
    let channel = generation.open_channel().await?;
    for declaration in declarations {
        declare(&channel, declaration).await.map_err(|failure| explain(declaration, failure))?;
    }
    if creates {
        tokio::time::sleep(REGISTRY_SETTLES).await;
    }
    Ok(())
}

/// Messages ready in a queue; `None` when it is not there.
pub(super) async fn depth(generation: &Generation, queue: &str) -> Result<Option<u64>, QueueError> {
    // A channel of its own here too: asking for a queue that is not there closes it.
    let channel = generation.open_channel().await?;
    let options = QueueDeclareOptions::durable().passive();
    match with_call_limit(channel.queue_declare(queue.into(), options, FieldTable::default())).await {
        Ok(queue) => Ok(Some(u64::from(queue.message_count()))),
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure.into_error(&format!("look at queue `{queue}`"))),
    }
}

pub(super) async fn declare(channel: &Channel, declaration: &Declaration) -> Result<(), CallFailure> {
    match declaration {
        Declaration::Exchange { name, kind, arguments } => {
            let options = ExchangeDeclareOptions {
                passive: false,
                durable: true,
                auto_delete: false,
                // Producers publish to it, dead-lettering too.
                internal: false,
                nowait: false,
            };
            let call = channel.exchange_declare(name.as_str().into(), kind.clone(), options, table(arguments));
            with_call_limit(call).await
        }
        Declaration::Queue { name, arguments } => {
            let options = QueueDeclareOptions {
                passive: false,
                // lapin's default is not durable; a quorum queue must be.
                durable: true,
                exclusive: false,
                auto_delete: false,
                nowait: false,
            };
            with_call_limit(channel.queue_declare(name.as_str().into(), options, table(arguments))).await.map(drop)
        }
        Declaration::Binding { queue, exchange, routing_key } => {
            let call = channel.queue_bind(
                queue.as_str().into(),
                exchange.as_str().into(),
                routing_key.as_str().into(),
                QueueBindOptions { nowait: false },
                FieldTable::default(),
            );
            with_call_limit(call).await
        }
    }
}

pub(super) fn explain(declaration: &Declaration, failure: CallFailure) -> QueueError {
    if failure.is_mismatch() {
        return QueueError::Refused(describe_mismatch(declaration, &failure));
    }
    failure.into_error(&format!("declare {}", describe(declaration)))
}

fn describe(declaration: &Declaration) -> String {
    match declaration {
        Declaration::Exchange { name, .. } => format!("exchange `{name}`"),
        Declaration::Queue { name, .. } => format!("queue `{name}`"),
        Declaration::Binding { queue, exchange, .. } => format!("binding of queue `{queue}` to exchange `{exchange}`"),
    }
}

/// For what exists otherwise than it is declared, with the broker's own words: they name the argument.
pub(super) fn describe_mismatch(declaration: &Declaration, failure: &CallFailure) -> String {
    let (of_what, fix) = match declaration {
        Declaration::Exchange { .. } => ("another type or other arguments", "delete it"),
        Declaration::Queue { .. } | Declaration::Binding { .. } => ("other arguments", "empty and delete it"),
    };
    format!(
        "{} exists with {of_what} than docs/topology.md says: {fix}, or set another queue.prefix ({})",
        describe(declaration),
        failure.describe("declare")
    )
}
