//! The message decoder: an accepted message is a job within the contract's bounds, and encoding it again keeps its
//! content.

use serde_json::value::RawValue;
use sluicegate::domain::job::{BODY_BYTES_MAX, InvalidReason, REFERENCE_CHARS_MAX};
use sluicegate::queue::message::{CardNumbers, DecodeError, decode, encode};

use super::lane;

/// Input: the body of a message.
pub fn holds(body: &[u8]) {
    let decoded = match decode(body, &lane(), CardNumbers::Off) {
        Ok(decoded) => decoded,
        Err(DecodeError::NewerVersion(version)) => return assert!(version > 1),
        Err(DecodeError::Invalid { invalid, .. }) => {
            assert!(invalid.detail.len() < 300 && !invalid.detail.chars().any(char::is_control));
            return assert_ne!(invalid.reason, InvalidReason::CardNumber);
        }
    };
    let job = &decoded.job;
    assert!(body.len() <= BODY_BYTES_MAX);
    assert!(job.amount > 0 && (1..=1_000).contains(&job.cost) && job.priority <= 9);
    let reference = job.reference.as_deref().unwrap_or_default();
    assert!(reference.chars().count() <= REFERENCE_CHARS_MAX && !reference.contains('\0'));
    if let Some(payload) = &job.payload {
        assert!(payload.starts_with('{') && serde_json::from_str::<&RawValue>(payload).is_ok());
    }
    let again = decode(&encode(job), &lane(), CardNumbers::Off);
    assert_eq!(again.as_ref(), Ok(&decoded), "the encoded job decodes to another job");
    match decode(body, &lane(), CardNumbers::Refuse) {
        Ok(strict) => assert_eq!(strict, decoded),
        Err(DecodeError::Invalid { invalid, claimed_id }) => {
            assert_eq!((invalid.reason, claimed_id.as_ref()), (InvalidReason::CardNumber, Some(&job.id)));
        }
        Err(newer) => panic!("{newer}"),
    }
}
