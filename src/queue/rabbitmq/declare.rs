//! Carries out declarations, one call each.
//!
//! Refuses to delete or to change: what exists with other arguments is an error that a person mends.

use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;

use super::failure::{Failure, limited};
use super::topology::{Declaration, table};
use crate::queue::QueueError;

/// Declares everything on a channel of its own, which an error closes.
pub(super) async fn declare_all(channel: &Channel, declarations: &[Declaration]) -> Result<(), QueueError> {
    for declaration in declarations {
        declare(channel, declaration).await.map_err(|failure| explain(declaration, failure))?;
    }
    Ok(())
}

async fn declare(channel: &Channel, declaration: &Declaration) -> Result<(), Failure> {
    match declaration {
        Declaration::Exchange { name, kind } => {
            let options = ExchangeDeclareOptions {
                passive: false,
                durable: true,
                auto_delete: false,
                // Producers publish to it, dead-lettering too.
                internal: false,
                nowait: false,
            };
            let call = channel.exchange_declare(name.as_str().into(), kind.clone(), options, FieldTable::default());
            limited(call).await
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
            limited(channel.queue_declare(name.as_str().into(), options, table(arguments))).await.map(drop)
        }
        Declaration::Binding { queue, exchange, routing_key } => {
            let call = channel.queue_bind(
                queue.as_str().into(),
                exchange.as_str().into(),
                routing_key.as_str().into(),
                QueueBindOptions { nowait: false },
                FieldTable::default(),
            );
            limited(call).await
        }
    }
}

fn explain(declaration: &Declaration, failure: Failure) -> QueueError {
    let what = match declaration {
        Declaration::Exchange { name, .. } => format!("exchange `{name}`"),
        Declaration::Queue { name, .. } => format!("queue `{name}`"),
        Declaration::Binding { queue, exchange, .. } => format!("binding of queue `{queue}` to exchange `{exchange}`"),
    };
    if failure.is_different() {
        return QueueError::Refused(format!(
            "{what} exists with other arguments than docs/topology.md says: empty and delete it, or set another \
             queue.prefix ({})",
            failure.describe("declare")
        ));
    }
    failure.into_error(&format!("declare {what}"))
}
