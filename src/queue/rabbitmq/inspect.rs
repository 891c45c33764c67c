//! Looks at what is declared: what is missing, and what exists with other arguments.
//!
//! Refuses to create: what is not there is told, and only what is there is held against its declaration. Bindings cannot be
//! asked for by AMQP; a lane without one returns what is published to it, and its publisher says so.

use lapin::Connection;
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::FieldTable;

use super::declare::{declare, explain, open_channel};
use super::failure::limited;
use super::topology::Declaration;
use crate::queue::QueueError;

/// One line for each exchange and queue that is not as it would be declared.
pub(super) async fn unfit(connection: &Connection, declarations: &[Declaration]) -> Result<Vec<String>, QueueError> {
    let mut lines = Vec::new();
    for declaration in declarations {
        let what = match declaration {
            Declaration::Exchange { name, .. } => format!("exchange `{name}`"),
            Declaration::Queue { name, .. } => format!("queue `{name}`"),
            Declaration::Binding { .. } => continue,
        };
        if !is_there(connection, declaration, &what).await? {
            lines.push(format!("{what} is not there"));
            continue;
        }
        // An error closes a channel, so each look has one of its own. What is there and the same is left as it is.
        let channel = open_channel(connection).await?;
        match declare(&channel, declaration).await {
            Ok(()) => {}
            Err(failure) if failure.is_different() => lines.push(explain(declaration, failure).to_string()),
            Err(failure) => return Err(failure.into_error(&format!("look at {what}"))),
        }
    }
    Ok(lines)
}

async fn is_there(connection: &Connection, declaration: &Declaration, what: &str) -> Result<bool, QueueError> {
    let channel = open_channel(connection).await?;
    let asked = match declaration {
        Declaration::Exchange { name, kind } => {
            let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
            limited(channel.exchange_declare(name.as_str().into(), kind.clone(), options, FieldTable::default())).await
        }
        Declaration::Queue { name, .. } => {
            let options = QueueDeclareOptions::durable().passive();
            limited(channel.queue_declare(name.as_str().into(), options, FieldTable::default())).await.map(drop)
        }
        Declaration::Binding { .. } => return Ok(true),
    };
    match asked {
        Ok(()) => Ok(true),
        Err(failure) if failure.is_not_found() => Ok(false),
        Err(failure) => Err(failure.into_error(&format!("look at {what}"))),
    }
}
