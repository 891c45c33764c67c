//! Decoding of deliveries: new jobs by the rules of today, recorded jobs by the ledger.
//!
//! A rule may have become stricter after a job was recorded, and a payment that may have been charged must still
//! finish. So a message that a stricter rule rejects is looked up in the ledger; its id and content must be the
//! recorded ones.
//!
//! A message of a newer format than this program knows waits in the ledger for a newer worker ([`super::held`]).

use super::WorkerContext;
use super::lane::LaneSettings;
use super::log_throttle::LogThrottle;
use crate::domain::job::{InvalidMessage, InvalidReason, Job, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::rejected::RecordedContent;
use crate::queue::message::{CardNumbers, DecodeError, Decoded, decode, decode_recorded};

const RECORDED_BEFORE: &str = "message accepted: its job is recorded, although this rule rejects new ones";

/// Whether a message that is rejected for this reason may have been recorded when the rules were laxer.
fn may_be_recorded(reason: InvalidReason) -> bool {
    matches!(
        reason,
        InvalidReason::CardNumber
            | InvalidReason::Secret
            | InvalidReason::MissingAccount
            | InvalidReason::MissingReference
            | InvalidReason::UnsupportedCurrency
            | InvalidReason::UnsupportedAmount
            | InvalidReason::TooLarge
    )
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

/// Why a lane's row does not accept a job.
fn row_problem(row: &LaneSettings, job: &Job) -> Option<InvalidMessage> {
    if let Some(missing) = row.provider.require.iter().find(|field| !job.has(**field)) {
        let detail = format!("{} is missing: the row of provider `{}` requires it", missing.name(), job.provider);
        return Some(InvalidMessage::new(missing.missing_reason(), detail));
    }
    let sum = match row.provider.amounts.sum_of(job) {
        Ok(sum) => sum,
        Err(unsupported) => return Some(InvalidMessage::new(unsupported.reason(), unsupported.describe())),
    };
    let too_large = row.client.check_size(job, sum).err()?;
    Some(InvalidMessage::new(InvalidReason::TooLarge, too_large.to_string()))
}

/// Judges the messages of payments by the rules of today and by the ledger.
pub struct MessageJudge<'a> {
    pub ledger: &'a Database,
    pub card_numbers: CardNumbers,
    pub log_throttle: &'a LogThrottle,
}

impl MessageJudge<'_> {
    /// Decodes one message of a lane, by the rules of its row if they are known. The ledger is asked only about messages
    /// that a stricter rule rejects.
    pub async fn decode(
        &self,
        body: &[u8],
        lane: &ProviderName,
        row: Option<&LaneSettings>,
    ) -> Result<DecodedMessage, LedgerError> {
        let judged = decode(body, lane, self.card_numbers).and_then(|decoded| {
            match row.and_then(|row| row_problem(row, &decoded.job)) {
                Some(invalid) => Err(DecodeError::Invalid { invalid, claimed_id: Some(decoded.job.id) }),
                None => Ok(decoded),
            }
        });
        let reason = match &judged {
            Err(DecodeError::Invalid { invalid, .. }) if may_be_recorded(invalid.reason) => invalid.reason,
            _ => return Ok(judged.into()),
        };
        let Ok(decoded) = decode_recorded(body, lane) else { return Ok(judged.into()) };
        if self.ledger.recorded_content(&decoded.job, decoded.hash).await? != RecordedContent::Same {
            return Ok(judged.into());
        }
        let rule = reason.code();
        if self.log_throttle.admits(lane.as_str(), RECORDED_BEFORE, rule) {
            tracing::warn!(provider = %lane, rule, "{RECORDED_BEFORE}");
        }
        Ok(DecodedMessage::Job(Box::new(decoded)))
    }
}

/// Decodes one message that a worker has, as [`MessageJudge::decode`] does, and logs its warnings.
pub async fn decode_delivery(
    worker: &WorkerContext,
    body: &[u8],
    lane: &ProviderName,
    row: Option<&LaneSettings>,
) -> Result<DecodedMessage, LedgerError> {
    let judge = MessageJudge {
        ledger: &worker.backends.ledger,
        card_numbers: worker.options.card_numbers,
        log_throttle: &worker.log_throttle,
    };
    let decoded = judge.decode(body, lane, row).await?;
    if let DecodedMessage::Job(decoded) = &decoded {
        for warning in &decoded.warnings {
            tracing::warn!(provider = %lane, job = %decoded.job.id, "accepted by worker.card_numbers: {warning}");
        }
    }
    Ok(decoded)
}
