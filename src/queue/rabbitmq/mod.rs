//! The queue in RabbitMQ, 3.10 and later, by AMQP 0-9-1.
//!
//! Each publish is judged by its own confirm, and lanes end with their connection: connections are not repaired
//! piecemeal. Consuming, publishing and declaring use separate connections. So a broker that blocks publishers still
//! takes acknowledgements, and one that refuses a declaration or an inspection ends no lane. lapin writes payloads into
//! its own log at WARN ("Server returned us a message") and frames at TRACE, so telemetry must filter it to
//! `lapin=error`.
//!
//! Nothing is deleted or changed: a queue that exists with other arguments is an error that an operator fixes. An
//! inspection creates nothing. It cannot query bindings, which AMQP does not show; a lane without one returns what is
//! published to it, and its publisher reports that. An inspection that the broker refuses is one line of the result and
//! does not block the others.

use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;

use super::{DeadLetter, InvalidLetter, LaneConsumer, OutgoingMessage, Queue, QueueError, TopologyProblem};
use crate::domain::backend_fault::BackendFault;
use crate::domain::provider::ProviderName;

mod channels;
mod confirms;
mod connect;
mod consumer;
mod nacks;
mod pipeline;
mod publisher;
mod receipt;
mod returns;
mod sanitizer;
mod supervisor;
mod topology;
mod wire;

pub use connect::RabbitSettings;

use channels::{CallFailure, with_call_limit};
use consumer::RabbitLane;
use publisher::Publisher;
use supervisor::{DeclaredProviders, Generation, SupervisedConnection};
use topology::{Declaration, Topology, table};

pub struct RabbitMq {
    settings: RabbitSettings,
    topology: Topology,
    /// For declarations and looks, of which the broker may refuse any.
    declaring: SupervisedConnection,
    /// For lanes. Made with the first of them: commands have none.
    consuming: OnceLock<SupervisedConnection>,
    publisher: Publisher,
    declared: DeclaredProviders,
}

impl RabbitMq {
    /// Starts connecting and returns at once; must be called on a tokio runtime.
    ///
    /// While the broker is unavailable every call waits up to 5 s for it and then says [`QueueError::Unavailable`] with
    /// the last failure, so callers retry with pauses of their own. Bad credentials and the like are
    /// [`QueueError::Refused`] until the first connection; after it they count as unavailable.
    pub fn connect(settings: RabbitSettings) -> Self {
        let topology = Topology::new(&settings.prefix);
        let declared = DeclaredProviders::default();
        let declaring = SupervisedConnection::start(settings.clone(), "declaring", declared.clone());
        let publishing = SupervisedConnection::start(settings.clone(), "publishing", DeclaredProviders::default());
        let publisher = Publisher::new(publishing, topology.clone());
        Self { settings, topology, declaring, consuming: OnceLock::new(), publisher, declared }
    }

    fn consuming(&self) -> &SupervisedConnection {
        self.consuming.get_or_init(|| {
            SupervisedConnection::start(self.settings.clone(), "consuming", DeclaredProviders::default())
        })
    }
}

/// Runs a declaration or a look to its end, though its caller may lose interest. lapin ends a connection when it closes
/// a channel on which the broker is refusing something at that moment, and a channel is closed by dropping it.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, QueueError>> + Send + 'static,
) -> Result<T, QueueError> {
    let failed = |error| Err(QueueError::Unavailable(format!("a look at the broker failed: {error}")));
    tokio::spawn(work).await.unwrap_or_else(failed)
}

#[async_trait]
impl Queue for RabbitMq {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        let (generation, topology) = (self.declaring.generation().await?, self.topology.clone());
        let names = providers.to_vec();
        detached(async move { declare_all(&generation, &topology, &names).await }).await?;
        self.declared.add(providers);
        Ok(())
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        if places == 0 {
            return Err(QueueError::Refused(
                "a lane needs at least one place: 0 means no bound to RabbitMQ".to_owned(),
            ));
        }
        let queue = self.topology.lane_queue(provider)?;
        let generation = self.consuming().generation().await?;
        Ok(Box::new(RabbitLane::open(&generation, provider, queue, places).await?))
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        // Its stream ends early only with the process.
        let ended = || QueueError::NotConfirmed("publish: the publisher has ended".to_owned());
        self.publisher.publish_all(vec![message]).next().await.map_or_else(|| Err(ended()), |(_, published)| published)
    }

    fn publish_all(&self, messages: Vec<OutgoingMessage>) -> BoxStream<'_, (usize, Result<(), QueueError>)> {
        self.publisher.publish_all(messages)
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        let (generation, topology) = (self.declaring.generation().await?, self.topology.clone());
        detached(async move { consumer::take_dead_letter(&generation, &topology).await }).await
    }

    async fn take_invalid(&self) -> Result<Option<InvalidLetter>, QueueError> {
        let (generation, topology) = (self.declaring.generation().await?, self.topology.clone());
        detached(async move { consumer::take_invalid(&generation, &topology).await }).await
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        let queue = self.topology.lane_queue(provider)?;
        let generation = self.declaring.generation_for_readout().await?;
        detached(async move { queue_depth(&generation, &queue).await }).await
    }

    async fn topology_problems(&self, providers: &[ProviderName]) -> Result<Vec<TopologyProblem>, QueueError> {
        let declarations = self.topology.declarations(providers)?;
        let generation = self.declaring.generation().await?;
        detached(async move { find_topology_problems(&generation, &declarations).await }).await
    }

    async fn publish_fault(&self) -> Option<BackendFault> {
        self.publisher.fault().await
    }

    /// Of the connections that the process needs by now, all must be there.
    async fn ping(&self) -> Result<Option<String>, QueueError> {
        let consuming = async {
            match self.consuming.get() {
                Some(link) => link.generation_for_readout().await.map(drop),
                None => Ok(()),
            }
        };
        let answering = async {
            let generation = self.declaring.generation_for_readout().await?;
            detached(async move { generation.open_channel().await.map(|_| generation.version.clone()) }).await
        };
        let (version, ()) = tokio::try_join!(answering, consuming)?;
        Ok(version)
    }
}

/// How long after a queue's creation its name may still be lost in a crash, and with it what was confirmed.
///
/// RabbitMQ writes the registry of quorum queues to disk between 0.5 and 1 s after it last changed (`auto_save` in ra's
/// `ra_directory.erl`); a broker killed before that creates the queue again, empty and without a leader (seen with 3.10.8).
const REGISTRY_SETTLES: Duration = Duration::from_millis(1_500);

/// Declares what all providers share and these providers' lanes, and returns when it would outlive a crash of the
/// broker.
async fn declare_all(
    generation: &Generation,
    topology: &Topology,
    providers: &[ProviderName],
) -> Result<(), QueueError> {
    let declarations = &topology.declarations(providers)?;
    let mut creates = false;
    for declaration in declarations {
        if let Declaration::Queue { name, .. } = declaration {
            creates = creates || queue_depth(generation, name).await?.is_none();
        }
    }
    // A channel of its own, because an error closes it.
    let channel = generation.open_channel().await?;
    for declaration in declarations {
        declare(&channel, declaration, false).await.map_err(|failure| match failure.is_mismatch() {
            true => QueueError::Refused(describe_mismatch(declaration, &failure)),
            false => failure.into_error(&format!("declare {declaration}")),
        })?;
    }
    if creates {
        tokio::time::sleep(REGISTRY_SETTLES).await;
    }
    Ok(())
}

/// Messages ready in a queue; `None` when it is not there.
async fn queue_depth(generation: &Generation, queue: &str) -> Result<Option<u64>, QueueError> {
    // A channel of its own here too: asking for a queue that is not there closes it.
    let channel = generation.open_channel().await?;
    let options = QueueDeclareOptions::durable().passive();
    match with_call_limit(channel.queue_declare(queue.into(), options, FieldTable::default())).await {
        Ok(queue) => Ok(Some(u64::from(queue.message_count()))),
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure.into_error(&format!("look at queue `{queue}`"))),
    }
}

/// Declares one thing; `passive` asks only whether it is there.
async fn declare(channel: &Channel, declaration: &Declaration, passive: bool) -> Result<(), CallFailure> {
    match declaration {
        Declaration::Exchange { name, kind, arguments } => {
            // Not internal: producers publish to it, dead-lettering too.
            let options = ExchangeDeclareOptions { passive, durable: true, ..ExchangeDeclareOptions::default() };
            let call = channel.exchange_declare(name.as_str().into(), kind.clone(), options, table(arguments));
            with_call_limit(call).await
        }
        Declaration::Queue { name, arguments } => {
            // lapin's default is not durable; a quorum queue must be.
            let options = QueueDeclareOptions { passive, ..QueueDeclareOptions::durable() };
            with_call_limit(channel.queue_declare(name.as_str().into(), options, table(arguments))).await.map(drop)
        }
        Declaration::Binding { queue, exchange, routing_key } => {
            let (queue, exchange, key) = (queue.as_str().into(), exchange.as_str().into(), routing_key.as_str().into());
            let options = QueueBindOptions { nowait: false };
            with_call_limit(channel.queue_bind(queue, exchange, key, options, FieldTable::default())).await
        }
    }
}

/// For what exists otherwise than it is declared, with the broker's own words: they name the argument.
fn describe_mismatch(declaration: &Declaration, failure: &CallFailure) -> String {
    let (of_what, fix) = match declaration {
        Declaration::Exchange { .. } => ("another type or other arguments", "delete it"),
        Declaration::Queue { .. } | Declaration::Binding { .. } => ("other arguments", "empty and delete it"),
    };
    format!(
        "{declaration} exists with {of_what} than docs/topology.md says: {fix}, or set another queue.prefix ({})",
        failure.describe("declare")
    )
}

/// Looks at once: each takes some round trips, and a broker may be far away.
const CONCURRENT_MAX: usize = 16;

/// One line for each exchange and queue that is not as it would be declared.
async fn find_topology_problems(
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
    if let Declaration::Binding { .. } = declaration {
        return Ok(None);
    }
    // An error closes a channel, so each look has one of its own. What is there and the same is left as it is.
    for passive in [true, false] {
        let channel = generation.open_channel().await?;
        match declare(&channel, declaration, passive).await {
            Ok(()) => {}
            Err(failure) if passive && failure.is_not_found() => {
                return Ok(Some(TopologyProblem::Missing(format!("{declaration} is not there"))));
            }
            Err(failure) if !passive && failure.is_mismatch() => {
                return Ok(Some(TopologyProblem::Mismatch(describe_mismatch(declaration, &failure))));
            }
            Err(failure) => return Err(failure.into_error(&format!("look at {declaration}"))),
        }
    }
    Ok(None)
}
