//! The queue in RabbitMQ, 3.10 and later, by AMQP 0-9-1.
//!
//! Refuses to repair connections piecemeal and to lose sight of a message: each publish is judged by its own confirm,
//! lanes end with their connection. Consuming and publishing use separate connections, so that a broker that blocks
//! publishers still takes acknowledgements. lapin writes payloads into its own log at WARN ("Server returned us a
//! message") and frames at TRACE, so telemetry must filter it to `lapin=error`.

use async_trait::async_trait;

use super::{DeadLetter, Lane, Outgoing, Queue, QueueError, Unfit};
use crate::domain::provider::ProviderName;

mod accounts;
mod consumer;
mod dead;
mod declare;
mod failure;
pub mod flatten;
mod greeting;
mod guarded;
mod handshake;
mod header_text;
mod inspect;
mod pipeline;
mod publisher;
mod receipt;
mod settings;
mod supervisor;
mod tags;
mod topology;
mod utf8;
mod wire;

pub use settings::Settings;

use consumer::RabbitLane;
use publisher::Publisher;
use supervisor::{Declared, Link};
use topology::Topology;

pub struct RabbitMq {
    topology: Topology,
    consuming: Link,
    publisher: Publisher,
    declared: Declared,
}

impl RabbitMq {
    /// Starts connecting and returns at once; must be called on a tokio runtime.
    ///
    /// While the broker is away every call waits up to 5 s for it and then says [`QueueError::Away`] with the last
    /// failure, so callers retry with pauses of their own. Bad credentials and the like are [`QueueError::Refused`]
    /// until the first connection; after it they count as away.
    #[must_use]
    pub fn connect(settings: Settings) -> Self {
        let topology = Topology::new(&settings.prefix);
        let declared = Declared::default();
        // Only the consuming connection declares: two at once would double the work of every reconnection.
        let consuming = Link::start(settings.clone(), "consuming", declared.clone());
        let publishing = Link::start(settings, "publishing", Declared::default());
        Self { publisher: Publisher::new(publishing, topology.clone()), topology, consuming, declared }
    }
}

#[async_trait]
impl Queue for RabbitMq {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        let generation = self.consuming.generation().await?;
        supervisor::declare(&generation.connection, &self.topology, providers).await?;
        self.declared.add(providers);
        Ok(())
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn Lane>, QueueError> {
        if places == 0 {
            return Err(QueueError::Refused(
                "a lane needs at least one place: 0 means no bound to RabbitMQ".to_owned(),
            ));
        }
        let queue = self.topology.lane_queue(provider)?;
        let generation = self.consuming.generation().await?;
        Ok(Box::new(RabbitLane::open(&generation.connection, provider, queue, places).await?))
    }

    async fn publish(&self, message: Outgoing) -> Result<(), QueueError> {
        self.publisher.publish(&message).await
    }

    async fn take_dead(&self) -> Result<Option<DeadLetter>, QueueError> {
        let generation = self.consuming.generation().await?;
        dead::take(&generation.connection, &self.topology).await
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        let queue = self.topology.lane_queue(provider)?;
        let generation = self.consuming.generation().await?;
        declare::depth(&generation.connection, &queue).await
    }

    async fn unfit(&self, providers: &[ProviderName]) -> Result<Vec<Unfit>, QueueError> {
        let generation = self.consuming.generation().await?;
        let mut declarations = self.topology.shared();
        for provider in providers {
            declarations.extend(self.topology.lane(provider)?);
        }
        inspect::unfit(&generation.connection, &declarations).await
    }

    async fn ping(&self) -> Result<Option<String>, QueueError> {
        let generation = self.consuming.generation().await?;
        declare::open_channel(&generation.connection).await?;
        Ok(generation.version.clone())
    }
}
