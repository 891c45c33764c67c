//! The search for one message among those that could not be a job, by the digest of its bytes.
//!
//! AMQP has no way to look into a queue: each message is taken and kept unacknowledged. Those that were passed are
//! returned to their places before the search ends, so that the next one sees them.

use lapin::Channel;
use lapin::options::{BasicGetOptions, BasicNackOptions, BasicQosOptions};
use sha2::{Digest as _, Sha256};

use super::channels::with_call_limit;
use super::consumer::HeldMessage;
use super::supervisor::Generation;
use super::topology::Topology;
use super::wire;
use crate::queue::{INVALID_SEARCHED_MAX, InvalidLetter, QueueError, headers, too_many_invalid};

pub async fn take(
    generation: &Generation,
    topology: &Topology,
    sha256: [u8; 32],
    reason: &str,
) -> Result<Option<InvalidLetter>, QueueError> {
    let (channel, queue) = (generation.open_channel().await?, topology.invalid());
    let mut passed = 0;
    for _ in 0..INVALID_SEARCHED_MAX {
        let get = channel.basic_get(queue.as_str().into(), BasicGetOptions { no_ack: false });
        let message = match with_call_limit(get).await {
            Ok(Some(message)) => message.delivery,
            Ok(None) => {
                return_passed(&channel, passed).await?;
                return Ok(None);
            }
            // Nothing was ever rejected where nothing is declared.
            Err(failure) if failure.is_not_found() => return Ok(None),
            Err(failure) => return Err(failure.into_error(&format!("look into queue `{queue}`"))),
        };
        let properties = wire::from_amqp(&message.properties);
        if headers::is_rejection(&properties, reason) && <[u8; 32]>::from(Sha256::digest(&message.data)) == sha256 {
            return_passed(&channel, passed).await?;
            let receipt = Box::new(HeldMessage::new(message.acker, channel));
            return Ok(Some(InvalidLetter { body: message.data.into(), properties, receipt }));
        }
        passed = message.delivery_tag;
    }
    return_passed(&channel, passed).await?;
    Err(too_many_invalid(&queue))
}

/// Returns the messages up to this delivery to the queue, and waits until the broker has read that.
async fn return_passed(channel: &Channel, last: u64) -> Result<(), QueueError> {
    // To the broker, 0 with `multiple` means all messages.
    if last == 0 {
        return Ok(());
    }
    let nack = channel.basic_nack(last, BasicNackOptions { multiple: true, requeue: true });
    let doing = "return the messages of a search";
    with_call_limit(nack).await.map_err(|failure| failure.into_error(doing))?;
    // A nack has no answer. The broker answers this call after it.
    let answered = with_call_limit(channel.basic_qos(0, BasicQosOptions::default())).await;
    answered.map_err(|failure| failure.into_error(doing))
}
