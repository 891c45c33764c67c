//! Names that no lane can have, because queues of Sluicegate's own have them. All other names are the domain's to
//! judge.

use super::QueueError;
use crate::domain::provider::{ProviderName, RESERVED_NAMES};

/// The lane's queue.
///
/// # Errors
/// [`QueueError::Refused`] when the provider has the name of one of our own queues.
pub(super) fn lane_queue(prefix: &str, provider: &ProviderName) -> Result<String, QueueError> {
    if RESERVED_NAMES.contains(&provider.as_str()) {
        return Err(QueueError::Refused(format!("provider `{provider}`: this name is reserved, choose another")));
    }
    Ok(format!("{prefix}.{provider}"))
}
