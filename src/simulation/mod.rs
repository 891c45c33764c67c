//! A deployment in virtual time: what the provider rows, the arrivals and the provider's latency come to, without waiting.
//!
//! A discrete-event simulation around the limiter of production ([`crate::domain::quota`]): the gate that asks it in
//! batches, the leaky bucket, its workers, places, parking and retries follow the rules of `limiter::gate` and `worker`
//! with their own constants. Refuses clocks, tasks and I/O; what is random comes from the generator that is passed in, so
//! a seed repeats a run. `docs/simulate.md` says what is left out.

use std::time::Duration;

use rand::rngs::StdRng;

use crate::domain::disposition::RetryPolicy;
use crate::domain::provider::{Mode, Provider};
use crate::domain::quota_spec::QuotaSpec;

pub mod arrivals;
#[cfg(test)]
mod clear_time_tests;
mod event;
mod gate;
pub mod latency;
mod process;
pub mod result;
mod series;
#[cfg(test)]
mod tests;
mod windows;
mod world;

pub use arrivals::{JobArrival, JobArrivals};
pub use latency::LatencyModel;
pub use result::{SimulationResult, steady_rate};
pub use series::{Series, SeriesPoint};
pub use windows::WindowCount;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Model {
    pub spec: QuotaSpec,
    /// The row whose lane works the jobs off; other rows of its quota send nothing.
    pub provider: Provider,
    /// Worker processes that share the lane's queue and the quota.
    pub processes: u32,
    /// When the first instant of the arrivals is, on the limiter's clock: fixed windows are the calendar's.
    pub start_us: u64,
    /// From receipt to answer, at the provider.
    pub latency: LatencyModel,
    /// One way to the provider or back.
    pub transit: LatencyModel,
    /// A call to the limiter, there and back.
    pub round_trip: Duration,
    /// One commit to the ledger.
    pub commit: Duration,
    /// Share of requests that are answered 500, 0 to 1.
    pub faults: f64,
    /// The limiter begins without memory, as in a process that has just started, and must ask the ledger first.
    pub cold: bool,
}

impl Model {
    fn retry_policy(&self) -> RetryPolicy {
        RetryPolicy {
            max_attempts: self.provider.max_attempts,
            max_age: self.provider.max_age,
            backoff: self.provider.backoff,
            idempotency_retention: self.provider.idempotency_retention,
            // Look-ups are not simulated: what is unknown is sent again, or is for a person.
            lookup: None,
        }
    }

    fn is_blocking(&self) -> bool {
        self.provider.mode == Mode::Blocking
    }
}

/// Works all arrivals off and says what came of it.
#[must_use]
pub fn simulate(model: &Model, arrivals: &JobArrivals, rng: &mut StdRng) -> SimulationResult {
    let world = world::Simulation::new(model, arrivals, rng);
    result::summarize(model, arrivals, &world.run())
}
