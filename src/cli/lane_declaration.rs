//! The broker's side of all providers, declared for a command: what is wrong with one provider's does not keep the others'
//! payments back.
//!
//! Refuses to judge what the broker would not declare: what can be lost there is the command's to know.

use std::collections::BTreeMap;

use crate::domain::provider::ProviderName;
use crate::queue::{Queue, QueueError};

/// Whose queues the broker refuses to declare, and why: one that somebody declared otherwise, most likely.
pub type UndeclaredLanes = BTreeMap<ProviderName, String>;

/// Declares what all these providers need. Where something is refused, each that is `wanted` is asked for on its own.
///
/// # Errors
/// When the broker is away, or refuses what each wanted one needs.
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
            // The last one that was left to hope for.
            Err(refusal @ QueueError::Refused(_)) if undeclared.len() + 1 == wanted.len() => return Err(refusal),
            Err(QueueError::Refused(why)) => {
                undeclared.insert(name.clone(), why);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(undeclared)
}
