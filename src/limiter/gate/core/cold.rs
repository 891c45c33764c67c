//! A limiter state that was lost, until it is rebuilt from the ledger.
//!
//! First the booking horizon and the send budget must pass. Until then permits of the lost state may still start, and
//! the ledger contains only requests that have begun. Then the driver queries the ledger. While it does not answer, the
//! state stays cold. See `docs/decisions/0011-cold-start-and-rebuild.md`.

use tokio::time::Instant;

use super::{GateCore, Ticket};
use crate::domain::permit_protocol::RebuildData;
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use crate::limiter::gate::BlockReason;
use crate::limiter::gate::block::QueueBlock;

/// A cold state, and the ledger's data about its past.
#[derive(Debug)]
pub(super) struct ColdState {
    state_epoch: Micros,
    since: Instant,
    pub data: Option<RebuildData>,
}

/// The ledger is to be queried for the past of a cold state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColdQuery {
    pub state_epoch: Micros,
    /// The state grants by itself from then on.
    pub at_latest: Instant,
    pub(super) exact: bool,
}

/// The next step of a rebuild, and until when nothing can be granted.
#[derive(Debug)]
pub(crate) enum RebuildStep {
    Wait {
        until: Instant,
    },
    /// The ledger's query is still running: the gate polls it again at once, and refuses jobs until then.
    Querying {
        until: Instant,
    },
    Loaded {
        data: RebuildData,
        at: Instant,
    },
}

impl ColdState {
    /// The state that is known to be cold, or a new one if the state was lost again.
    fn resume_or_new(known: Option<Self>, state_epoch: Micros, now: Instant) -> Self {
        let known = known.filter(|cold| cold.state_epoch == state_epoch);
        known.unwrap_or(Self { state_epoch, since: now, data: None })
    }

    /// Last start of a permit that the lost state may have granted.
    fn last_start(&self, spec: &QuotaSpec) -> Instant {
        self.since + BOOKING_HORIZON + spec.send_budget
    }
}

impl<T: Ticket> GateCore<T> {
    /// Blocks the queue until no permit of the lost state can be used. After that it returns the query that the driver
    /// makes.
    pub(super) fn receive_cold(&mut self, spec: &QuotaSpec, query: ColdQuery, arrived: Instant) -> Option<ColdQuery> {
        let cold = ColdState::resume_or_new(self.cold.take(), query.state_epoch, arrived);
        let last_start = cold.last_start(spec);
        self.cold = Some(cold);
        if arrived >= last_start {
            return Some(query);
        }
        self.block_cold(query, last_start.min(query.at_latest), arrived);
        None
    }

    /// Takes the next step of a rebuild, for the reply that arrived then.
    pub fn resolve_cold(&mut self, query: ColdQuery, step: RebuildStep, arrived: Instant) {
        let is_querying = matches!(step, RebuildStep::Querying { .. });
        let until = match step {
            RebuildStep::Wait { until } | RebuildStep::Querying { until } => until,
            RebuildStep::Loaded { data, at } => {
                if let Some(cold) = &mut self.cold {
                    cold.data = Some(data);
                }
                at
            }
        };
        self.block_cold(query, until, arrived);
        if is_querying {
            self.call_at = arrived;
        }
        self.wait_for_verification(arrived);
    }

    fn block_cold(&mut self, query: ColdQuery, until: Instant, arrived: Instant) {
        self.block_until_retry(QueueBlock::new(BlockReason::Cold, until, query.exact, arrived));
    }
}
