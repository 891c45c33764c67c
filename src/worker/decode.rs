//! Decoding of deliveries: new jobs by the rules of today, recorded jobs by the ledger.
//!
//! A rule may have become stricter after a job was recorded, and a payment that may have been charged must still
//! finish. So a message that a stricter rule rejects is looked up in the ledger; its id and content must be the
//! recorded ones.

use std::collections::BTreeSet;

use super::WorkerContext;
use crate::domain::job::{InvalidMessage, InvalidReason, Job, JobField, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::upkeep::MessageState;
use crate::provider::PaymentProvider;
use crate::queue::message::{DecodeError, Decoded, decode, decode_recorded};

const RECORDED_BEFORE: &str = "message accepted: its job is recorded, although this rule rejects new ones";

/// Whether a message that is rejected for this reason may have been recorded when the rules were laxer.
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

/// Rules of a lane's row for messages.
pub struct RowRules<'a> {
    pub require: &'a BTreeSet<JobField>,
    /// Builds the requests; knows their largest size.
    pub client: &'a dyn PaymentProvider,
}

/// What a message is.
pub enum DecodedMessage {
    /// A job, new or recorded. Boxed because it is moved more than once while it waits.
    Job(Box<Decoded>),
    /// Its format is newer than this program's.
    NewerVersion(u64),
    Invalid {
        invalid: InvalidMessage,
        claimed_id: Option<JobId>,
    },
}

impl From<Result<Decoded, DecodeError>> for DecodedMessage {
    fn from(decoded: Result<Decoded, DecodeError>) -> Self {
        match decoded {
            Ok(job) => Self::Job(Box::new(job)),
            Err(DecodeError::NewerVersion(version)) => Self::NewerVersion(version),
            Err(DecodeError::Invalid { invalid, claimed_id }) => Self::Invalid { invalid, claimed_id },
        }
    }
}

impl RowRules<'_> {
    /// The message, if the row accepts it.
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

/// Decodes one message of a lane, by the rules of its row if they are known. The ledger is asked only about messages
/// that a stricter rule rejects.
pub async fn decode_delivery(
    worker: &WorkerContext,
    body: &[u8],
    lane: &ProviderName,
    rules: Option<&RowRules<'_>>,
) -> Result<DecodedMessage, LedgerError> {
    let judged = decode(body, lane, worker.options.card_numbers).and_then(|decoded| match rules {
        Some(rules) => rules.check(decoded),
        None => Ok(decoded),
    });
    if let Ok(decoded) = &judged {
        for warning in &decoded.warnings {
            tracing::warn!(provider = %lane, job = %decoded.job.id, "accepted by worker.card_numbers: {warning}");
        }
    }
    let reason = match &judged {
        Err(DecodeError::Invalid { invalid, .. }) if may_be_recorded(invalid.reason) => invalid.reason,
        _ => return Ok(judged.into()),
    };
    let Ok(decoded) = decode_recorded(body, lane) else { return Ok(judged.into()) };
    match worker.backends.ledger.message_state(&decoded.job, decoded.hash, i64::MAX).await? {
        MessageState::Open | MessageState::Superseded | MessageState::Finished => {
            let rule = reason.code();
            if worker.log_throttle.admits(lane.as_str(), RECORDED_BEFORE, rule) {
                tracing::warn!(provider = %lane, rule, "{RECORDED_BEFORE}");
            }
            Ok(DecodedMessage::Job(Box::new(decoded)))
        }
        MessageState::NotRecorded | MessageState::Conflict => Ok(judged.into()),
    }
}
