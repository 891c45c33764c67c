//! The parser of the limiter's replies: what it takes grants no more than was asked for, to those who asked.

use sluicegate::domain::decision::{Refusal, Want};
use sluicegate::domain::provider::BOOKING_HORIZON;
use sluicegate::limiter::redis::answer::{parse_reply, reply_to};

use super::Bytes;

/// Limits, limits on everything, wants (count, then the permits of each), and the answer.
pub fn holds(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let limits = usize::from(bytes.byte() % 8);
    let cells = usize::from(bytes.byte()) % (limits + 1);
    let wants: Vec<Want> = (0..bytes.byte() % 8).map(|_| Want::charges(u32::from(bytes.byte()), 1)).collect();
    let answer = bytes.0;
    let Ok(reply) = parse_reply(answer, limits, cells, wants.len()) else {
        return assert!(reply_to(&wants, answer, limits, cells).is_err());
    };
    // Every byte is accounted for, so nothing was made up.
    assert_eq!(answer.len(), 58 + reply.granted.len() * (12 + 6 * cells) + reply.passed_over.len() * 15);
    assert!(reply.granted.iter().all(|run| run.want < wants.len() && run.origins.len() == cells));
    assert!(reply.passed_over.iter().all(|passed| passed.want < wants.len() && passed.limit < limits));
    if let Some(Refusal::Limit { index }) = reply.refused.map(|refused| refused.by) {
        assert!(index <= limits);
    }
    if let Ok(checked) = reply_to(&wants, answer, limits, cells) {
        assert_eq!(checked, reply);
        for (index, want) in wants.iter().enumerate() {
            let runs = reply.granted.iter().filter(|run| run.want == index);
            assert!(runs.map(|run| u64::from(run.permits)).sum::<u64>() <= u64::from(want.permits));
        }
        assert!(reply.granted.iter().all(|run| u128::from(run.wait_us) <= BOOKING_HORIZON.as_micros()));
    }
}
