//! Discrete-event simulation of a deployment in virtual time: waits, drain time and utilisation from rows, arrivals and
//! latency.
//!
//! It runs the limiter of production ([`crate::domain::quota`]) and the gate's core ([`crate::limiter::gate::core`]).
//! Prefetch, delays and retries follow the rules and constants of `worker`. It uses no task or I/O, and of the clock
//! only an origin. Random values come from the given generator, so a seed repeats a run. `docs/simulate.md` says what is left out.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;

use crate::domain::backoff::RetryPolicy;
use crate::domain::provider::{Mode, Provider};
use crate::domain::quota_spec::QuotaSpec;

pub mod arrivals;
#[cfg(test)]
mod clear_time_tests;
#[cfg(test)]
mod cost_tests;
mod driver;
pub mod result;
#[cfg(test)]
mod tests;
mod world;

pub use arrivals::{JobArrival, JobArrivals, LatencyModel};
pub use result::{SimulationResult, WindowCount, steady_rate};

/// Deployment to simulate.
#[derive(Clone, Debug)]
pub struct Model {
    pub spec: QuotaSpec,
    /// The row whose lane processes the jobs; other rows of its quota send nothing.
    pub provider: Provider,
    /// Weights of accounts by name; 1 without an entry.
    pub weights: BTreeMap<String, u32>,
    /// Worker processes that share the lane's queue and the quota.
    pub processes: u32,
    /// Start of the arrivals on the limiter's clock: fixed windows follow the calendar.
    pub start_us: u64,
    /// From receipt to response, at the provider.
    pub latency: LatencyModel,
    /// One way to the provider or back.
    pub transit: LatencyModel,
    /// A call to the limiter, there and back.
    pub round_trip: Duration,
    /// One commit to the ledger.
    pub commit: Duration,
    /// The same of the last process, if its ledger is slower.
    pub commit_of_last: Option<Duration>,
    /// Share of requests that are answered 500, 0 to 1.
    pub faults: f64,
    /// The limiter begins cold, as in a new process, and must read the ledger first.
    pub cold: bool,
}

impl Model {
    fn retry_policy(&self) -> RetryPolicy {
        // Look-ups are not simulated: an unknown outcome is sent again, or goes to review.
        RetryPolicy { lookup: None, ..self.provider.retry_policy() }
    }

    fn is_blocking(&self) -> bool {
        self.provider.mode == Mode::Blocking
    }
}

/// Processes all arrivals and returns the result.
pub fn simulate(model: &Model, arrivals: &JobArrivals, rng: &mut StdRng) -> SimulationResult {
    let world = world::Simulation::new(model, arrivals, rng);
    result::summarize(model, arrivals, &world.run())
}
