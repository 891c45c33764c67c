//! Inspection of what is declared: what is missing, and what exists with other arguments.
//!
//! Nothing is created. Bindings cannot be queried by AMQP; a lane without one returns what is published to it, and its
//! publisher reports that. An inspection that the broker refuses is one line of the result and does not block the
//! others.

use futures_util::{FutureExt as _, StreamExt as _, stream};
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::FieldTable;

use super::declare::{declare, describe_mismatch};
use super::failure::with_call_limit;
use super::supervisor::Generation;
use super::topology::Declaration;
use crate::queue::{QueueError, TopologyProblem};

/// Looks at once: each takes some round trips, and a broker may be far away.
const CONCURRENT_MAX: usize = 16;

/// One line for each exchange and queue that is not as it would be declared.
pub(super) async fn topology_problems(
    generation: &Generation,
    declarations: &[Declaration],
) -> Result<Vec<TopologyProblem>, QueueError> {
    let looks = declarations.iter().map(|declaration| inspect_one(generation, declaration).boxed()).collect::<Vec<_>>();
    // To their ends, whatever the first of them finds: see `RabbitMq::to_its_end`.
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
