//! Reading a message as a worker must: by the rules for new jobs, unless the ledger has its job already.
//!
//! Refuses to judge a recorded job anew: a rule may have become stricter since, and whoever may have been charged must
//! come to an end. Refuses to believe a message that it is recorded: id and content must be the ledger's.

use std::collections::BTreeSet;

use super::Worker;
use crate::domain::job::{Invalid, InvalidReason, JobField};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::upkeep::Standing;
use crate::queue::message::{DecodeError, Decoded, decode, decode_recorded};

/// Whether what was refused for this may have been taken when the rules were laxer.
fn may_have_been_taken(reason: InvalidReason) -> bool {
    matches!(
        reason,
        InvalidReason::CardNumber
            | InvalidReason::Secret
            | InvalidReason::MissingAccount
            | InvalidReason::MissingReference
    )
}

/// The message, if it has each field that the provider's row requires.
fn complete(decoded: Decoded, require: &BTreeSet<JobField>) -> Result<Decoded, DecodeError> {
    let Some(missing) = require.iter().find(|field| !decoded.job.has(**field)) else { return Ok(decoded) };
    let (field, provider) = (missing.name(), &decoded.job.provider);
    let detail = format!("{field} is missing: the row of provider `{provider}` requires it");
    let invalid = Invalid::new(missing.missing(), detail);
    Err(DecodeError::Invalid { invalid, claimed_id: Some(decoded.job.id) })
}

/// Reads one message of a lane whose row requires these fields. Asks the ledger only of those that a stricter rule refuses.
///
/// # Errors
/// The ledger's; what is wrong with the message is the inner result.
pub async fn read(
    worker: &Worker,
    body: &[u8],
    lane: &ProviderName,
    require: &BTreeSet<JobField>,
) -> Result<Result<Decoded, DecodeError>, LedgerError> {
    let judged = decode(body, lane, worker.options.card_numbers).and_then(|decoded| complete(decoded, require));
    let reason = match &judged {
        Err(DecodeError::Invalid { invalid, .. }) if may_have_been_taken(invalid.reason) => invalid.reason,
        _ => return Ok(judged),
    };
    let Ok(decoded) = decode_recorded(body, lane) else { return Ok(judged) };
    match worker.engines.upkeep.standing(&decoded.job, decoded.hash, i64::MAX).await? {
        Standing::Open | Standing::Superseded | Standing::Settled => {
            let rule = reason.code();
            tracing::warn!(provider = %lane, rule, "a new job would be refused by this rule; this one was recorded before");
            Ok(Ok(decoded))
        }
        Standing::NotRecorded | Standing::Conflict => Ok(judged),
    }
}
