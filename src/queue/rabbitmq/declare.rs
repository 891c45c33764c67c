//! Declarations, one call each, and the inspection of what is declared.
//!
//! Nothing is deleted or changed: a queue that exists with other arguments is an error that an operator fixes. An
//! inspection creates nothing. It cannot query bindings, which AMQP does not show; a lane without one returns what is
//! published to it, and its publisher reports that. An inspection that the broker refuses is one line of the result and
//! does not block the others.

use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _, stream};
use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;

use super::channels::{CallFailure, with_call_limit};
use super::supervisor::Generation;
use super::topology::{Declaration, table};
use crate::queue::{QueueError, TopologyProblem};

/// How long after a queue's creation its name may still be lost in a crash, and with it what was confirmed.
///
/// RabbitMQ writes the registry of quorum queues to disk between 0.5 and 1 s after it last changed (`auto_save` in ra's
/// `ra_directory.erl`); a broker killed before that creates the queue again, empty and without a leader (seen with 3.10.8).
const REGISTRY_SETTLES: Duration = Duration::from_millis(1_500);

/// Declares everything, and returns when it would outlive a crash of the broker.
pub async fn declare_all(generation: &Generation, declarations: &[Declaration]) -> Result<(), QueueError> {
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
pub async fn depth(generation: &Generation, queue: &str) -> Result<Option<u64>, QueueError> {
    // A channel of its own here too: asking for a queue that is not there closes it.
    let channel = generation.open_channel().await?;
    let options = QueueDeclareOptions::durable().passive();
    match with_call_limit(channel.queue_declare(queue.into(), options, FieldTable::default())).await {
        Ok(queue) => Ok(Some(u64::from(queue.message_count()))),
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure.into_error(&format!("look at queue `{queue}`"))),
    }
}

pub async fn declare(channel: &Channel, declaration: &Declaration) -> Result<(), CallFailure> {
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

pub fn explain(declaration: &Declaration, failure: CallFailure) -> QueueError {
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
fn describe_mismatch(declaration: &Declaration, failure: &CallFailure) -> String {
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

/// Looks at once: each takes some round trips, and a broker may be far away.
const CONCURRENT_MAX: usize = 16;

/// One line for each exchange and queue that is not as it would be declared.
pub async fn topology_problems(
    generation: &Generation,
    declarations: &[Declaration],
) -> Result<Vec<TopologyProblem>, QueueError> {
    let looks = declarations.iter().map(|declaration| inspect_one(generation, declaration).boxed()).collect::<Vec<_>>();
    // To their ends, whatever the first of them finds: see `detached`.
    let found: Vec<Result<Option<TopologyProblem>, QueueError>> =
        stream::iter(looks).buffered(CONCURRENT_MAX).collect().await;
    let lines = found.into_iter().map(|found| match found {
        Err(QueueError::Refused(words)) => Ok(Some(TopologyProblem::Refused(words))),
        found => found,
    });
    lines.filter_map(Result::transpose).collect()
}

async fn inspect_one(
    generation: &Generation,
    declaration: &Declaration,
) -> Result<Option<TopologyProblem>, QueueError> {
    let what = match declaration {
        Declaration::Exchange { name, .. } => format!("exchange `{name}`"),
        Declaration::Queue { name, .. } => format!("queue `{name}`"),
        Declaration::Binding { .. } => return Ok(None),
    };
    if !is_there(generation, declaration, &what).await? {
        return Ok(Some(TopologyProblem::Missing(format!("{what} is not there"))));
    }
    // An error closes a channel, so each look has one of its own. What is there and the same is left as it is.
    let channel = generation.open_channel().await?;
    match declare(&channel, declaration).await {
        Ok(()) => Ok(None),
        Err(failure) if failure.is_mismatch() => {
            Ok(Some(TopologyProblem::Mismatch(describe_mismatch(declaration, &failure))))
        }
        Err(failure) => Err(failure.into_error(&format!("look at {what}"))),
    }
}

async fn is_there(generation: &Generation, declaration: &Declaration, what: &str) -> Result<bool, QueueError> {
    let channel = generation.open_channel().await?;
    let asked = match declaration {
        Declaration::Exchange { name, kind, .. } => {
            let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
            with_call_limit(channel.exchange_declare(
                name.as_str().into(),
                kind.clone(),
                options,
                FieldTable::default(),
            ))
            .await
        }
        Declaration::Queue { name, .. } => {
            let options = QueueDeclareOptions::durable().passive();
            with_call_limit(channel.queue_declare(name.as_str().into(), options, FieldTable::default())).await.map(drop)
        }
        Declaration::Binding { .. } => return Ok(true),
    };
    match asked {
        Ok(()) => Ok(true),
        Err(failure) if failure.is_not_found() => Ok(false),
        Err(failure) => Err(failure.into_error(&format!("look at {what}"))),
    }
}
