//! Declaration of the queues of all providers, for a command.
//!
//! A problem with one provider's queues does not stop the others. The caller decides what a provider without queues
//! means.

use std::collections::BTreeMap;

use crate::domain::provider::ProviderName;
use crate::queue::{Queue, QueueError};

/// Providers whose queues the broker refuses to declare, and why: most likely another program declared them
/// differently.
pub type UndeclaredLanes = BTreeMap<ProviderName, String>;

/// Declares the queues of all these providers. If the broker refuses, declares each `wanted` provider on its own.
///
/// # Errors
/// When RabbitMQ is unreachable, or refuses the queues of every wanted provider.
pub async fn declare_lanes(
    queue: &dyn Queue,
    names: &[ProviderName],
    wanted: &[ProviderName],
) -> Result<UndeclaredLanes, QueueError> {
    match queue.declare(names).await {
        Ok(()) => return Ok(UndeclaredLanes::new()),
        Err(QueueError::Refused(_)) => {}
        Err(error) => return Err(error),
    }
    let mut undeclared = UndeclaredLanes::new();
    for name in wanted {
        match queue.declare(std::slice::from_ref(name)).await {
            Ok(()) => {}
            // All wanted providers are refused.
            Err(refusal @ QueueError::Refused(_)) if undeclared.len() + 1 == wanted.len() => return Err(refusal),
            Err(QueueError::Refused(why)) => {
                undeclared.insert(name.clone(), why);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(undeclared)
}
