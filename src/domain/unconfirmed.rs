//! Refusals that may answer an earlier request of their connection: what counts at the end of the request's time.
//!
//! HTTP/1.1 matches a response to its request only by its place on the connection. If a refusal was a stray one, the
//! response to this request follows on the same connection. Until the request's deadline the payment stays in flight:
//! its slot is held, the connection is read and carries no other request, and no operator or expiry ends the payment.

use super::outcome::{Outcome, Refusal, UnknownCause};

/// What followed on the connection of an unconfirmed refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionEvidence {
    /// No other response until the deadline, or until the provider closed the connection.
    Silence,
    OtherResponse,
    /// Nothing is known: the refusal was cut off, so no second response could be told from it.
    Unread,
}

/// The outcome of an unconfirmed refusal. Without deduplication it stays unknown: a repeat of a stray one's payment
/// would be a second charge.
pub fn judge(refusal: Refusal, status: u16, deduplicates: bool, evidence: ConnectionEvidence) -> Outcome {
    match (evidence, deduplicates) {
        (ConnectionEvidence::OtherResponse, _) => {
            Outcome::Unknown { cause: UnknownCause::OtherResponse(status), retry_after: None }
        }
        (ConnectionEvidence::Silence, true) => refusal.into(),
        (ConnectionEvidence::Silence, false) | (ConnectionEvidence::Unread, _) => {
            Outcome::Unconfirmed { refusal, status }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refusal is believed in one case alone: it may be repeated, and no other response followed.
    #[test]
    fn refusal_counts_only_after_silence_with_deduplication() {
        for refusal in [
            Refusal::Throttled { retry_after: None },
            Refusal::Busy { retry_after: None },
            Refusal::Misconfigured { status: 401 },
        ] {
            for evidence in [ConnectionEvidence::Silence, ConnectionEvidence::OtherResponse, ConnectionEvidence::Unread]
            {
                for deduplicates in [false, true] {
                    let outcome = judge(refusal, 401, deduplicates, evidence);
                    let is_believed = evidence == ConnectionEvidence::Silence && deduplicates;
                    assert_eq!(outcome.may_have_charged(), !is_believed, "{evidence:?} {deduplicates}");
                    assert_eq!(outcome == Outcome::from(refusal), is_believed, "{evidence:?} {deduplicates}");
                }
            }
        }
    }
}
