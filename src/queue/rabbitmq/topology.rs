//! The exchanges, queues and bindings, each argument with its reason. `docs/topology.md` shows the same.
//!
//! These are values; the parent module talks to the broker. Arguments can never change once declared, so nothing in here may be
//! changed without a new prefix.

use std::collections::BTreeMap;
use std::fmt;

use lapin::ExchangeKind;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};

use crate::domain::provider::ProviderName;
use crate::queue::{Destination, LANE_DELIVERY_LIMIT, QueueError, lane_queue};

/// In effect none: from `invalid` and `dead` nothing may be dropped. (`-1` is understood from 4.0 on only.)
const RETAINED_DELIVERY_LIMIT: i32 = 1_000_000;

#[derive(Clone, Debug, PartialEq)]
pub enum Declaration {
    Exchange { name: String, kind: ExchangeKind, arguments: Arguments },
    Queue { name: String, arguments: Arguments },
    Binding { queue: String, exchange: String, routing_key: String },
}

impl fmt::Display for Declaration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchange { name, .. } => write!(f, "exchange `{name}`"),
            Self::Queue { name, .. } => write!(f, "queue `{name}`"),
            Self::Binding { queue, exchange, .. } => write!(f, "binding of queue `{queue}` to exchange `{exchange}`"),
        }
    }
}

/// In the order in which they are documented. Texts are long strings, numbers are 32-bit integers.
pub type Arguments = Vec<(&'static str, AMQPValue)>;

/// Where one message is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub exchange: String,
    pub routing_key: String,
    pub mandatory: bool,
}

#[derive(Clone, Debug)]
pub struct Topology {
    prefix: String,
}

impl Topology {
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned() }
    }

    pub fn invalid(&self) -> String {
        format!("{}.invalid", self.prefix)
    }

    pub fn dead(&self) -> String {
        format!("{}.dead", self.prefix)
    }

    /// A route of the exchange of lanes that leads to no queue: the key is no provider's name.
    pub fn nowhere(&self) -> Route {
        Route { exchange: self.prefix.clone(), routing_key: "sluicegate.nowhere".to_owned(), mandatory: false }
    }

    fn outcomes(&self) -> String {
        format!("{}.outcomes", self.prefix)
    }

    /// What all providers share and these providers' lanes, in an order in which nothing names what is not there yet.
    ///
    /// # Errors
    /// When a provider's name is one that a queue of our own has.
    pub fn declarations(&self, providers: &[ProviderName]) -> Result<Vec<Declaration>, QueueError> {
        let mut declarations = self.shared();
        for provider in providers {
            declarations.extend(self.lane(provider)?);
        }
        Ok(declarations)
    }

    fn shared(&self) -> Vec<Declaration> {
        vec![
            exchange(self.prefix.clone(), ExchangeKind::Direct),
            exchange(self.outcomes(), ExchangeKind::Topic),
            // Messages stay in these until a person or the sweeper takes them.
            Declaration::Queue { name: self.invalid(), arguments: quorum(RETAINED_DELIVERY_LIMIT) },
            Declaration::Queue { name: self.dead(), arguments: quorum(RETAINED_DELIVERY_LIMIT) },
        ]
    }

    fn lane(&self, provider: &ProviderName) -> Result<Vec<Declaration>, QueueError> {
        let queue = self.lane_queue(provider)?;
        let exchange = self.prefix.clone();
        let routing_key = provider.as_str().to_owned();
        Ok(vec![
            Declaration::Queue { name: queue.clone(), arguments: self.lane_arguments() },
            Declaration::Binding { queue, exchange, routing_key },
        ])
    }

    /// # Errors
    /// When the provider's name is one that a queue of our own has.
    pub fn lane_queue(&self, provider: &ProviderName) -> Result<String, QueueError> {
        lane_queue(&self.prefix, provider)
    }

    /// The provider whose lane has this queue.
    pub fn provider_of(&self, queue: &str) -> Option<ProviderName> {
        let name = queue.strip_prefix(&self.prefix)?.strip_prefix('.')?;
        let provider = ProviderName::new(name).ok()?;
        self.lane_queue(&provider).ok().map(|_| provider)
    }

    fn lane_arguments(&self) -> Arguments {
        // Written out, because 4.0 made 20 the default.
        // <https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling>
        let mut arguments = quorum(LANE_DELIVERY_LIMIT.into());
        // What the broker gives up on goes to `dead`, straight through the default exchange.
        // <https://www.rabbitmq.com/docs/dlx#routing>
        arguments.push(("x-dead-letter-exchange", text("")));
        arguments.push(("x-dead-letter-routing-key", text(self.dead())));
        arguments.extend(at_least_once());
        arguments
    }

    pub fn route(&self, destination: &Destination) -> Result<Route, QueueError> {
        Ok(match destination {
            Destination::Lane(provider) => {
                self.lane_queue(provider)?;
                Route { exchange: self.prefix.clone(), routing_key: provider.as_str().to_owned(), mandatory: true }
            }
            Destination::Invalid { .. } => {
                Route { exchange: String::new(), routing_key: self.invalid(), mandatory: true }
            }
            // Not mandatory: having no queue bound for outcomes is a choice, not a fault.
            Destination::Outcomes { provider, state } => {
                Route { exchange: self.outcomes(), routing_key: format!("{provider}.{state}"), mandatory: false }
            }
        })
    }
}

fn exchange(name: String, kind: ExchangeKind) -> Declaration {
    Declaration::Exchange { name, kind, arguments: Vec::new() }
}

/// Replicated, and on disk before a publish is confirmed. <https://www.rabbitmq.com/docs/quorum-queues>
fn quorum(delivery_limit: i32) -> Arguments {
    vec![("x-queue-type", text("quorum")), ("x-delivery-limit", AMQPValue::LongInt(delivery_limit))]
}

/// The default strategy removes a message before its new queue has it. This one needs `reject-publish`, which without
/// a length limit rejects nothing.
/// <https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering>
fn at_least_once() -> [(&'static str, AMQPValue); 2] {
    [("x-dead-letter-strategy", text("at-least-once")), ("x-overflow", text("reject-publish"))]
}

fn text(value: impl Into<LongString>) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

pub fn table(arguments: &Arguments) -> FieldTable {
    let arguments = arguments.iter().map(|(key, value)| (ShortString::from(*key), value.clone()));
    arguments.collect::<BTreeMap<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(arguments: &Arguments) -> String {
        let shown = arguments.iter().map(|(key, value)| match value {
            AMQPValue::LongString(text) => format!("`{key}` = `\"{text}\"`"),
            other => format!("`{key}` = `{}`", other.as_long_int().unwrap()),
        });
        let shown = shown.collect::<Vec<_>>().join(" · ");
        if shown.is_empty() { shown } else { format!(" {shown}") }
    }

    fn row(declaration: &Declaration) -> String {
        match declaration {
            Declaration::Exchange { name, kind, arguments } => {
                format!("| exchange `{name}` | {} |{} |", format!("{kind:?}").to_lowercase(), cell(arguments))
            }
            Declaration::Queue { name, arguments } => format!("| queue `{name}` | quorum |{} |", cell(arguments)),
            Declaration::Binding { queue, exchange, routing_key } => {
                format!("| binding `{exchange}` → `{queue}` | | routing key `\"{routing_key}\"` |")
            }
        }
    }

    /// The page shows the rows of one lane, with places for its name.
    fn documented_form(topology: &Topology) -> Vec<String> {
        let stripe = ProviderName::new("stripe").unwrap();
        let mut rows: Vec<String> = topology.lane(&stripe).unwrap().iter().map(row).collect();
        rows.iter_mut().for_each(|row| *row = row.replace("stripe", "<provider>"));
        rows.extend(topology.shared().iter().map(row));
        rows
    }

    #[test]
    fn the_documentation_says_what_the_code_declares() {
        let rows = documented_form(&Topology::new("payments"));
        let page = include_str!("../../../docs/topology.md");
        let heads = ["| exchange `", "| queue `", "| binding `"];
        let documented: Vec<&str> =
            page.lines().filter(|line| heads.iter().any(|head| line.starts_with(head))).collect();
        assert_eq!(documented, rows, "docs/topology.md should read:\n{}", rows.join("\n"));
    }

    #[test]
    fn lane_cannot_use_a_reserved_queue_name() {
        let topology = Topology::new("payments");
        for name in crate::domain::provider::RESERVED_NAMES {
            assert!(topology.lane(&ProviderName::new(name).unwrap()).is_err(), "{name}");
        }
        assert!(topology.lane(&ProviderName::new("delay").unwrap()).is_ok());
    }

    #[test]
    fn only_outcomes_may_be_unroutable() {
        let topology = Topology::new("p");
        let stripe = ProviderName::new("stripe").unwrap();
        let lane = topology.route(&Destination::Lane(stripe.clone())).unwrap();
        assert!(lane.mandatory);
        let outcome = topology.route(&Destination::Outcomes { provider: stripe, state: "dead" }).unwrap();
        assert_eq!((outcome.routing_key.as_str(), outcome.mandatory), ("stripe.dead", false));
    }
}
