//! The operators' queries and decisions in SQL, over any engine.
//!
//! Workers do not call them. Queries use existing indexes, and only the one job of a decision is locked.

use super::dialect::Dialect;

mod details;
mod erase;
mod history;
mod list;
mod precancel;
mod queue_position;
mod reload;
mod resolution;

pub struct OperatorStatements {
    precancel: precancel::PrecancelStatements,
    erase: erase::ErasureStatements,
    history: history::ArrivalStatements,
    list: list::JobListStatements,
    details: details::JobDetailStatements,
    queue_position: queue_position::QueuePositionStatements,
    reload: reload::ReloadStatements,
    resolution: resolution::ResolutionStatements,
}

impl OperatorStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            precancel: precancel::PrecancelStatements::new(dialect),
            erase: erase::ErasureStatements::new(dialect),
            history: history::ArrivalStatements::new(dialect),
            list: list::JobListStatements::new(dialect),
            details: details::JobDetailStatements::new(dialect),
            queue_position: queue_position::QueuePositionStatements::new(dialect),
            reload: reload::ReloadStatements::new(dialect),
            resolution: resolution::ResolutionStatements::new(dialect),
        }
    }
}
