//! The decoder of the limiter function's reply.
//!
//! The header of `lua/quota.lua` has the layout. Any other bytes are an error and never a grant, be it an unknown code
//! or a missing byte.

use crate::domain::format::count;
use crate::domain::permit_protocol::{
    BATCH_MAX, LimiterRefusal, LimiterReply, PermitGrant, PermitRequest, RefusalReason, Shortage, SkippedRequest,
};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::time::{Micros, micros_up};

/// Most grants (runs) in one valid reply; each permit can have its own start.
const GRANTS_MAX: u64 = 1_000_000;

/// Reads unsigned little-endian numbers off the front.
struct ByteReader<'a>(&'a [u8]);

impl ByteReader<'_> {
    fn take(&mut self, width: usize) -> Result<u64, String> {
        let (head, rest) = self.0.split_at_checked(width).ok_or_else(|| "it ends early".to_owned())?;
        self.0 = rest;
        Ok(head.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn count(&mut self, width: usize) -> Result<usize, String> {
        let value = self.take(width)?;
        usize::try_from(value).map_err(|_| format!("{value} is too large"))
    }
}

/// Decodes the reply to these requests. It must not grant more than was requested, or a start beyond the booking
/// horizon.
///
/// # Errors
/// Text that says what is invalid. Then nothing counts as granted.
pub fn decode_checked_reply(
    wants: &[PermitRequest],
    answer: &[u8],
    limits: usize,
    provider_cells: usize,
) -> Result<LimiterReply, String> {
    let reply = decode_reply(answer, limits, provider_cells, wants.len())?;
    let mut left: Vec<u32> = wants.iter().map(|want| want.permits).collect();
    for run in &reply.grants {
        let left = left.get_mut(run.request_index).and_then(|left| {
            *left = left.checked_sub(run.permits)?;
            Some(*left)
        });
        if left.is_none() || run.permits == 0 {
            return Err(format!(
                "{} for want {}, which asked for fewer",
                count(run.permits.into(), "permit"),
                run.request_index
            ));
        }
        if run.wait_us > micros_up(BOOKING_HORIZON) {
            return Err(format!("a permit that begins {} µs from now", run.wait_us));
        }
    }
    Ok(reply)
}

/// Decodes the reply to a call with `wants` requests under `limits` limits, of which the provider has `provider_cells`.
///
/// # Errors
/// Text that says what is invalid. Then nothing counts as granted.
pub fn decode_reply(answer: &[u8], limits: usize, provider_cells: usize, wants: usize) -> Result<LimiterReply, String> {
    let mut bytes = ByteReader(answer);
    let (code, exact, index) = (bytes.take(1)?, bytes.take(1)? == 1, bytes.count(2)?);
    let (wait_us, now_us) = (bytes.take(6)?, bytes.take(7)?);
    let version = i64::try_from(bytes.take(6)?).map_err(|error| error.to_string())?;
    let (born, calls, previous_call) = (Micros(bytes.take(7)?), bytes.take(6)?, bytes.take(6)?);
    let (remaining, decides, reset_us) = (bytes.take(4)?, bytes.count(2)?, bytes.take(6)?);
    let (readable, runs, passed) = (bytes.take(4)?, bytes.take(4)?, bytes.count(2)?);
    if runs > GRANTS_MAX || passed > BATCH_MAX {
        return Err(format!("{} and {} passed over", count(runs, "run"), count(passed as u64, "want")));
    }
    // The index after the last limit stands for pacing.
    let known = |index: usize, among: usize| {
        if index < among { Ok(index) } else { Err(format!("number {index} of {among}")) }
    };
    let mut granted = Vec::new();
    for _ in 0..runs {
        let want = known(bytes.count(2)?, wants)?;
        let permits = u32::try_from(bytes.take(4)?).map_err(|error| error.to_string())?;
        let wait_us = bytes.take(6)?;
        let origins = (0..provider_cells).map(|_| bytes.take(6)).collect::<Result<_, _>>()?;
        granted.push(PermitGrant { request_index: want, permits, wait_us, origins });
    }
    let mut passed_over = Vec::new();
    for _ in 0..passed {
        let (want, limit) = (known(bytes.count(2)?, wants)?, known(bytes.count(2)?, limits + 1)?);
        let (wait_us, exact, readable) = (bytes.take(6)?, bytes.take(1)? == 1, bytes.take(4)?);
        let no_slot = Shortage::NoSlot;
        let why = readable.checked_sub(1).map_or(no_slot, |readable_in_us| Shortage::NeedsHistory { readable_in_us });
        passed_over.push(SkippedRequest { request_index: want, limit, wait_us, exact, shortage: why });
    }
    if !bytes.0.is_empty() {
        return Err(format!("{} too many", count(bytes.0.len() as u64, "byte")));
    }
    let by = match code {
        0 => None,
        1 => Some(RefusalReason::Limit { index: known(index, limits + 1)? }),
        2 => Some(RefusalReason::Cold),
        3 => Some(RefusalReason::Paused),
        4 => Some(RefusalReason::StaleVersion),
        5 => Some(RefusalReason::StaleCall),
        6 => {
            let readable_in_us = readable.checked_sub(1).ok_or_else(|| "no time to read a history".to_owned())?;
            Some(RefusalReason::NeedsHistory { index: known(index, limits + 1)?, readable_in_us })
        }
        other => return Err(format!("refusal {other}")),
    };
    let refused = by.map(|by| LimiterRefusal { reason: by, wait_us, exact });
    Ok(LimiterReply {
        now: Micros(now_us),
        version,
        state_epoch: born,
        calls,
        previous_call,
        grants: granted,
        skipped: passed_over,
        remaining,
        deciding_limit: decides,
        reset_us,
        refused,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refused by limit 0 for 900 µs, exactly, at 50, after one run of two permits.
    fn encoded_reply() -> Vec<u8> {
        let fields: [(u64, usize); 19] = [
            (1, 1),
            (1, 1),
            (0, 2),
            (900, 6),
            (50, 7),
            (7, 6),
            (3, 7),
            (5, 6),
            (9, 6),
            (4, 4),
            (0, 2),
            (8, 6),
            (0, 4),
            (1, 4),
            (0, 2),
            (0, 2),
            (2, 4),
            (0, 6),
            (11, 6),
        ];
        fields.iter().flat_map(|(value, width)| value.to_le_bytes()[..*width].to_vec()).collect()
    }

    #[test]
    fn a_reply_is_read_as_the_header_says() {
        let reply = decode_reply(&encoded_reply(), 1, 1, 1).unwrap();
        assert_eq!(reply.grants, [PermitGrant { request_index: 0, permits: 2, wait_us: 0, origins: vec![11] }]);
        assert_eq!(
            reply.refused,
            Some(LimiterRefusal { reason: RefusalReason::Limit { index: 0 }, wait_us: 900, exact: true })
        );
        assert_eq!((reply.version, reply.state_epoch, reply.calls, reply.previous_call), (7, Micros(3), 5, 9));
        assert_eq!((reply.remaining, reply.reset_us), (4, 8));
    }

    #[test]
    fn malformed_reply_is_rejected() {
        let good = encoded_reply();
        for length in 0..good.len() {
            assert!(decode_reply(&good[..length], 1, 1, 1).is_err(), "cut to {length}");
        }
        assert!(decode_reply(&[good.clone(), vec![0]].concat(), 1, 1, 1).is_err());
        for (at, value) in [(0, 6), (0, 7), (2, 2), (58, 2), (64, 1)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(decode_reply(&bad, 1, 1, 1).is_err(), "byte {at} as {value}");
        }
        assert!(decode_reply(&good, 1, 1, 0).is_err(), "nothing was wanted");
    }

    #[test]
    fn excessive_or_distant_grants_are_rejected() {
        let asked = |permits, answer: &[u8]| decode_checked_reply(&[PermitRequest::charges(permits, 1)], answer, 1, 1);
        let mut answer = encoded_reply();
        assert_eq!(asked(2, &answer).map(|reply| reply.permits()), Ok(2));
        assert!(asked(1, &answer).is_err());
        answer[66] = 0;
        assert!(asked(2, &answer).is_err(), "a run of nothing");
        answer[66] = 1;
        let wait = |wait_us: u64| [&answer[..70], &wait_us.to_le_bytes()[..6], &answer[76..]].concat();
        assert!(asked(2, &wait(250_000)).is_ok());
        assert!(asked(2, &wait(250_001)).is_err());
    }
}
