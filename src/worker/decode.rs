//! Reading a message as a worker must: by the rules for new jobs, unless the ledger has its job already.
//!
//! Refuses to judge a recorded job anew: a rule may have become stricter since, and whoever may have been charged must
//! come to an end. Refuses to believe a message that it is recorded: id and content must be the ledger's.

use std::collections::BTreeSet;

use super::WorkerContext;
use crate::domain::job::{InvalidMessage, InvalidReason, Job, JobField};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::upkeep::MessageState;
use crate::provider::PaymentProvider;
use crate::queue::message::{DecodeError, Decoded, decode, decode_recorded};

const RECORDED_BEFORE: &str = "a new job would be refused by this rule; this one was recorded before";

/// Whether what was refused for this may have been taken when the rules were laxer.
fn may_be_recorded(reason: InvalidReason) -> bool {
    matches!(
        reason,
        InvalidReason::CardNumber
            | InvalidReason::Secret
            | InvalidReason::MissingAccount
            | InvalidReason::MissingReference
            | InvalidReason::TooLarge
    )
}

/// What the row of a lane says of messages.
pub struct RowRules<'a> {
    pub require: &'a BTreeSet<JobField>,
    /// Makes the requests.
    pub client: &'a dyn PaymentProvider,
}

impl RowRules<'_> {
    /// The message, if the row takes it.
    fn check(&self, decoded: Decoded) -> Result<Decoded, DecodeError> {
        let Some(invalid) = self.problem(&decoded.job) else { return Ok(decoded) };
        Err(DecodeError::Invalid { invalid, claimed_id: Some(decoded.job.id) })
    }

    fn problem(&self, job: &Job) -> Option<InvalidMessage> {
        if let Some(missing) = self.require.iter().find(|field| !job.has(**field)) {
            let detail = format!("{} is missing: the row of provider `{}` requires it", missing.name(), job.provider);
            return Some(InvalidMessage::new(missing.missing_reason(), detail));
        }
        let too_large = self.client.check_size(job).err()?;
        Some(InvalidMessage::new(InvalidReason::TooLarge, too_large.to_string()))
    }
}

/// Reads one message of a lane, by the rules of its row if they are known. Asks the ledger only of those that a stricter rule
/// refuses.
///
/// # Errors
/// The ledger's; what is wrong with the message is the inner result.
pub async fn decode_delivery(
    worker: &WorkerContext,
    body: &[u8],
    lane: &ProviderName,
    rules: Option<&RowRules<'_>>,
) -> Result<Result<Decoded, DecodeError>, LedgerError> {
    let judged = decode(body, lane, worker.options.card_numbers).and_then(|decoded| match rules {
        Some(rules) => rules.check(decoded),
        None => Ok(decoded),
    });
    if let Ok(decoded) = &judged {
        for warning in &decoded.warnings {
            tracing::warn!(provider = %lane, job = %decoded.job.id, "let through by worker.card_numbers: {warning}");
        }
    }
    let reason = match &judged {
        Err(DecodeError::Invalid { invalid, .. }) if may_be_recorded(invalid.reason) => invalid.reason,
        _ => return Ok(judged),
    };
    let Ok(decoded) = decode_recorded(body, lane) else { return Ok(judged) };
    match worker.backends.upkeep.message_state(&decoded.job, decoded.hash, i64::MAX).await? {
        MessageState::Open | MessageState::Superseded | MessageState::Finished => {
            let rule = reason.code();
            if worker.log_throttle.admits(lane.as_str(), RECORDED_BEFORE, rule) {
                tracing::warn!(provider = %lane, rule, "{RECORDED_BEFORE}");
            }
            Ok(Ok(decoded))
        }
        MessageState::NotRecorded | MessageState::Conflict => Ok(judged),
    }
}
