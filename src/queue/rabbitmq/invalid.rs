//! The search for one message among those that could not be a job, by the digest of its bytes.
//!
//! AMQP has no way to look into a queue: each message is taken and kept unacknowledged. When the channel is closed, the broker
//! returns all of them to their places.

use lapin::options::BasicGetOptions;
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
    for _ in 0..INVALID_SEARCHED_MAX {
        let get = channel.basic_get(queue.as_str().into(), BasicGetOptions { no_ack: false });
        let message = match with_call_limit(get).await {
            Ok(Some(message)) => message.delivery,
            Ok(None) => return Ok(None),
            // Nothing was ever rejected where nothing is declared.
            Err(failure) if failure.is_not_found() => return Ok(None),
            Err(failure) => return Err(failure.into_error(&format!("look into queue `{queue}`"))),
        };
        let properties = wire::from_amqp(&message.properties);
        if headers::is_rejection(&properties, reason) && <[u8; 32]>::from(Sha256::digest(&message.data)) == sha256 {
            let receipt = Box::new(HeldMessage::new(message.acker, channel));
            return Ok(Some(InvalidLetter { body: message.data.into(), properties, receipt }));
        }
    }
    Err(too_many_invalid(&queue))
}
