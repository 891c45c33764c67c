//! One lane: its own channel, its prefetch, its deliveries and their receipts.
//!
//! Refuses to outlive its channel: when that ends, every receipt of this lane is void and the lane says so.

use std::collections::VecDeque;

use async_trait::async_trait;
use futures_util::StreamExt as _;

use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Acker, Channel, Connection, Consumer};

use super::failure::{Failure, limited};
use super::wire;
use crate::domain::provider::ProviderName;
use crate::queue::{Delivery, Lane, QueueError, Receipt};

pub(super) struct RabbitLane {
    provider: ProviderName,
    queue: String,
    channel: Channel,
    /// The one that takes messages comes last; those before it are cancelled and may still hold what had arrived.
    consumers: VecDeque<Consumer>,
    taking: bool,
    /// Why the lane is gone; from then on it answers nothing else.
    gone: Option<String>,
}

impl RabbitLane {
    pub async fn open(
        connection: &Connection,
        provider: &ProviderName,
        queue: String,
        places: u16,
    ) -> Result<Self, QueueError> {
        let opening = async {
            let channel = connection.create_channel().await?;
            // Before consuming: lapin buffers without bound, so this is the only bound there is. Per consumer, because
            // quorum queues know no other. <https://www.rabbitmq.com/docs/consumer-prefetch>
            channel.basic_qos(places, BasicQosOptions { global: false }).await?;
            Ok(channel)
        };
        let channel = limited(opening).await.map_err(|failure| failure.into_error("open a channel for a lane"))?;
        let mut lane =
            Self { provider: provider.clone(), queue, channel, consumers: VecDeque::new(), taking: false, gone: None };
        lane.consume().await?;
        Ok(lane)
    }

    async fn consume(&mut self) -> Result<(), QueueError> {
        let options = BasicConsumeOptions {
            // Not supported by RabbitMQ; off.
            no_local: false,
            // Every message is acknowledged by hand.
            no_ack: false,
            // Other workers take from the same lane.
            exclusive: false,
            nowait: false,
        };
        // Always the same tag: the broker then counts what the cancelled consumer still holds against the prefetch of
        // this one, so that `places` holds over a stop and a resume.
        let tag = self.provider.as_str().into();
        let call = self.channel.basic_consume(self.queue.as_str().into(), tag, options, FieldTable::default());
        match limited(call).await {
            Ok(consumer) => {
                self.consumers.push_back(consumer);
                self.taking = true;
                Ok(())
            }
            Err(failure) if failure.is_not_found() => Err(QueueError::Unroutable(self.provider.to_string())),
            Err(failure) => Err(failure.into_error("consume")),
        }
    }

    fn lost(&mut self, why: String) -> QueueError {
        let why = format!("lane `{}`: {why}", self.provider);
        self.gone = Some(why.clone());
        QueueError::Away(why)
    }
}

#[async_trait]
impl Lane for RabbitLane {
    /// Cancel-safe: a delivery leaves lapin's buffer only in the poll that returns it.
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError> {
        loop {
            if let Some(why) = &self.gone {
                return Err(QueueError::Away(why.clone()));
            }
            let Some(consumer) = self.consumers.front_mut() else {
                if self.channel.status().connected() {
                    return Ok(None);
                }
                return Err(self.lost("channel closed".to_owned()));
            };
            match consumer.next().await {
                // A delivery that can no longer be acknowledged is somebody else's already.
                Some(Ok(message)) if message.acker.usable() => return Ok(Some(delivery(message))),
                Some(Ok(_)) => return Err(self.lost("channel closed".to_owned())),
                Some(Err(error)) => return Err(self.lost(error.to_string())),
                // The end of a cancelled consumer comes after everything that had arrived.
                None if self.consumers.len() > 1 || !self.taking => {
                    self.consumers.pop_front();
                }
                None => return Err(self.lost("the broker ended the consumer".to_owned())),
            }
        }
    }

    async fn stop(&mut self) -> Result<(), QueueError> {
        if !self.taking {
            return Ok(());
        }
        let tag = self.provider.as_str().into();
        match limited(self.channel.basic_cancel(tag, BasicCancelOptions { nowait: false })).await {
            Ok(()) => {
                self.taking = false;
                Ok(())
            }
            Err(failure) => Err(self.lost(failure.describe("cancel the consumer"))),
        }
    }

    async fn resume(&mut self) -> Result<(), QueueError> {
        if let Some(why) = &self.gone {
            return Err(QueueError::Away(why.clone()));
        }
        if self.taking {
            return Ok(());
        }
        self.consume().await.map_err(|error| self.lost(error.to_string()))
    }
}

fn delivery(message: lapin::message::Delivery) -> Delivery {
    Delivery {
        properties: wire::from_amqp(&message.properties),
        redelivered: message.redelivered,
        receipt: Box::new(RabbitReceipt { acker: message.acker }),
        body: message.data.into(),
    }
}

struct RabbitReceipt {
    acker: Acker,
}

#[async_trait]
impl Receipt for RabbitReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        written(limited(self.acker.ack(BasicAckOptions { multiple: false })).await, "acknowledge")
    }

    async fn hand_back(self: Box<Self>) -> Result<(), QueueError> {
        let options = BasicNackOptions { multiple: false, requeue: true };
        written(limited(self.acker.nack(options)).await, "hand back")
    }
}

/// `Ok(true)` means that the frame was written (AMQP has no answer to it), `Ok(false)` that the channel is gone.
fn written(answer: Result<bool, Failure>, doing: &str) -> Result<(), QueueError> {
    match answer {
        Ok(true) => Ok(()),
        Ok(false) => Err(QueueError::Away(format!("{doing}: the lane's channel is gone"))),
        Err(failure) => Err(QueueError::Away(failure.describe(doing))),
    }
}
