//! The parser of limiter replies: an accepted reply grants at most the permits requested, and only to their requests.

use sluicegate::domain::permit_protocol::{PermitRequest, RefusalReason};
use sluicegate::domain::provider::BOOKING_HORIZON;
use sluicegate::limiter::redis::decode::{decode_checked_reply, decode_reply};

use super::Bytes;

/// Input: number of limits, number of provider counters, requests (count, then the permits of each), and the reply.
pub fn holds(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let limits = usize::from(bytes.byte() % 8);
    let cells = usize::from(bytes.byte()) % (limits + 1);
    let wants: Vec<PermitRequest> =
        (0..bytes.byte() % 8).map(|_| PermitRequest::charges(u32::from(bytes.byte()), 1)).collect();
    let answer = bytes.0;
    let Ok(reply) = decode_reply(answer, limits, cells, wants.len()) else {
        return assert!(decode_checked_reply(&wants, answer, limits, cells).is_err());
    };
    // The lengths match exactly, so each byte of the reply was read.
    assert_eq!(answer.len(), 58 + reply.grants.len() * (12 + 6 * cells) + reply.skipped.len() * 15);
    assert!(reply.grants.iter().all(|run| run.request_index < wants.len() && run.origins.len() == cells));
    assert!(reply.skipped.iter().all(|passed| passed.request_index < wants.len() && passed.limit < limits));
    if let Some(RefusalReason::Limit { index }) = reply.refused.map(|refused| refused.reason) {
        assert!(index <= limits);
    }
    if let Ok(checked) = decode_checked_reply(&wants, answer, limits, cells) {
        assert_eq!(checked, reply);
        for (index, want) in wants.iter().enumerate() {
            let runs = reply.grants.iter().filter(|run| run.request_index == index);
            assert!(runs.map(|run| u64::from(run.permits)).sum::<u64>() <= u64::from(want.permits));
        }
        assert!(reply.grants.iter().all(|run| u128::from(run.wait_us) <= BOOKING_HORIZON.as_micros()));
    }
}
