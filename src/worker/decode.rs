//! Decoding of deliveries: new jobs by the rules of today, recorded jobs by the ledger.
//!
//! A rule may have become stricter after a job was recorded, and a payment that may have been charged must still
//! finish. So a message that a stricter rule rejects is looked up in the ledger; its id and content must be the
//! recorded ones.
//!
//! A message of a newer format than this program knows waits for a newer worker, at most as long as a payment may. After
//! that it is rejected, and an operator finds it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::WorkerContext;
use super::lane::LaneSettings;
use crate::domain::job::{InvalidMessage, InvalidReason, Job, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::upkeep::MessageState;
use crate::queue::message::{DecodeError, Decoded, decode, decode_recorded};
use crate::queue::{Properties, headers};

/// Delay before a message of a newer format is looked at again: about one step of a rolling deployment.
pub const NEWER_VERSION_DELAY: Duration = Duration::from_secs(60);
pub const NEWER_VERSION_TEXT: &str = "message of a newer format waits for a newer worker";
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

/// Decodes one message of a lane, by the rules of its row if they are known. The ledger is asked only about messages
/// that a stricter rule rejects.
pub async fn decode_delivery(
    worker: &WorkerContext,
    body: &[u8],
    lane: &ProviderName,
    row: Option<&LaneSettings>,
) -> Result<DecodedMessage, LedgerError> {
    let judged = decode(body, lane, worker.options.card_numbers).and_then(|decoded| {
        match row.and_then(|row| row_problem(row, &decoded.job)) {
            Some(invalid) => Err(DecodeError::Invalid { invalid, claimed_id: Some(decoded.job.id) }),
            None => Ok(decoded),
        }
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

/// The properties with which a message of a newer format is delayed again; `max_age` is its row's, if it has one.
///
/// # Errors
/// It has waited for too long since it was first seen.
pub fn wait_for_newer_worker(
    worker: &WorkerContext,
    lane: &ProviderName,
    properties: &Properties,
    version: u64,
    max_age: Option<Duration>,
) -> Result<Properties, InvalidMessage> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let properties = waiting_properties(properties, version, max_age, now)?;
    if worker.log_throttle.admits(lane.as_str(), NEWER_VERSION_TEXT, InvalidReason::NewerVersion.code()) {
        tracing::error!(provider = %lane, version, "{NEWER_VERSION_TEXT}");
    }
    Ok(properties)
}

/// A time in the future was not written by a worker: the wait starts again.
fn waiting_properties(
    properties: &Properties,
    version: u64,
    max_age: Option<Duration>,
    now: Duration,
) -> Result<Properties, InvalidMessage> {
    let since = headers::waits_since(properties).filter(|since| *since <= now).unwrap_or(now);
    if let Some(max_age) = max_age.filter(|max_age| now - since > *max_age) {
        let age = max_age.as_secs();
        let detail = format!("v: {version} is a newer format, and no newer worker came within max_age_s = {age}");
        return Err(InvalidMessage::new(InvalidReason::NewerVersion, detail));
    }
    Ok(headers::with_waits_since(properties.clone(), since))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_version_waits_until_max_age() {
        let at = Duration::from_secs;
        let judge = |properties: &Properties, now: u64| waiting_properties(properties, 2, Some(at(60)), at(now));
        let first = judge(&Properties::default(), 1_000).unwrap();
        assert_eq!(judge(&first, 1_060).unwrap(), first);
        let invalid = judge(&first, 1_061).unwrap_err();
        assert_eq!(invalid.reason, InvalidReason::NewerVersion);
        assert_eq!(invalid.detail, "v: 2 is a newer format, and no newer worker came within max_age_s = 60");
        // Without a row there is no maximum age.
        assert_eq!(waiting_properties(&first, 2, None, at(9_000)).unwrap(), first);
        for odd in ["99999999999", "soon", "-1"] {
            let mut properties = Properties::default();
            properties.headers.insert(headers::WAITS_SINCE.to_owned(), odd.to_owned());
            assert_eq!(judge(&properties, 1_000).unwrap(), first, "{odd}");
        }
        assert_eq!(headers::without_waits_since(first), Properties::default());
    }
}
