//! The leader row of a quota: the limiter that may grant its permits, as every worker reads it from the database.
//!
//! `limiter::leader_election` decides who the leader should be. See `docs/decisions/0014-leader-row-in-sql.md`.

use std::time::Duration;

use super::clock_attestation::ClockAttestation;
use super::time::Micros;

/// The limiter leader of a quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderRow {
    /// `redis:` and the run id of the one writable primary, or the id of the one process with an embedded limiter; or
    /// `share`: each worker grants its own share.
    pub holder: String,
    /// Increases by one with each change. Limiter state from another term is discarded.
    pub term: i64,
    /// Time since the holder changed, by the database's clock. Other workers see a change once it is committed.
    pub age: Duration,
    /// The database's clock when this was read, cut to milliseconds.
    pub now: Micros,
    /// The last clock attestation of a worker in this term, and its age.
    pub attestation: Option<(ClockAttestation, Duration)>,
}
