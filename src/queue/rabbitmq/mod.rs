//! The queue in RabbitMQ, 3.10 and later, by AMQP 0-9-1.
//!
//! Each publish is judged by its own confirm, and lanes end with their connection: connections are not repaired
//! piecemeal. Consuming, publishing and declaring use separate connections. So a broker that blocks publishers still
//! takes acknowledgements, and one that refuses a declaration or an inspection ends no lane. lapin writes payloads into
//! its own log at WARN ("Server returned us a message") and frames at TRACE, so telemetry must filter it to
//! `lapin=error`.

use std::sync::OnceLock;

use async_trait::async_trait;

use super::{DeadLetter, LaneConsumer, OutgoingMessage, Queue, QueueError, TopologyProblem};
use crate::domain::provider::ProviderName;
mod channels;
mod connect;
mod consumer;
mod declare;
mod pipeline;
mod publisher;
mod receipt;
mod returns;
mod sanitizer;
mod supervisor;
mod topology;
mod wire;

pub use connect::RabbitSettings;

use consumer::RabbitLane;
use publisher::Publisher;
use supervisor::{DeclaredProviders, SupervisedConnection};
use topology::Topology;

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
        detached(async move { supervisor::declare(&generation, &topology, &names).await }).await?;
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
        self.publisher.publish(&message).await
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        let (generation, topology) = (self.declaring.generation().await?, self.topology.clone());
        detached(async move { consumer::take_dead_letter(&generation, &topology).await }).await
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        let queue = self.topology.lane_queue(provider)?;
        let generation = self.declaring.generation_for_readout().await?;
        detached(async move { declare::depth(&generation, &queue).await }).await
    }

    async fn topology_problems(&self, providers: &[ProviderName]) -> Result<Vec<TopologyProblem>, QueueError> {
        let mut declarations = self.topology.shared();
        for provider in providers {
            declarations.extend(self.topology.lane(provider)?);
        }
        let generation = self.declaring.generation().await?;
        detached(async move { declare::topology_problems(&generation, &declarations).await }).await
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
