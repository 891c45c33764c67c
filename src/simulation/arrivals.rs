//! Arrivals of a simulation: when jobs come, and their accounts, costs and priorities.
//!
//! Jobs come all at once, at random at a mean rate, or as recorded. A run has at most [`JOBS_MAX`] jobs, because they
//! are kept in memory.

use std::collections::HashMap;
use std::time::Duration;

use rand::Rng;

use crate::domain::time::micros_up;

/// Most jobs of one run.
pub const JOBS_MAX: usize = 10_000_000;

/// One job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobArrival {
    /// Time since the start.
    pub at_us: u64,
    /// Index into [`JobArrivals::accounts`].
    pub account: Option<u32>,
    pub cost: u16,
    pub priority: u8,
    /// Time since the start from which the job must not be sent.
    pub expires_us: Option<u64>,
}

impl JobArrival {
    /// A job without account, of cost 1 and priority 0.
    pub fn at(at_us: u64) -> Self {
        Self { at_us, account: None, cost: 1, priority: 0, expires_us: None }
    }
}

/// Jobs sorted by their arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobArrivals {
    jobs: Vec<JobArrival>,
    accounts: Vec<String>,
    known: HashMap<String, u32>,
}

impl JobArrivals {
    /// Arrivals from jobs in any order.
    pub fn new(mut jobs: Vec<JobArrival>) -> Self {
        jobs.sort_by_key(|job| job.at_us);
        Self { jobs, ..Self::default() }
    }

    /// `jobs` jobs at the start, at most [`JOBS_MAX`].
    pub fn burst(jobs: usize) -> Self {
        Self::new(vec![JobArrival::at(0); jobs.min(JOBS_MAX)])
    }

    /// Independent arrivals at this mean rate (a Poisson process). Generation stops at one job more than [`JOBS_MAX`].
    pub fn at_rate(per_second: f64, lasting: Duration, rng: &mut impl Rng) -> Self {
        let mut jobs = Vec::new();
        let end_us = micros_up(lasting);
        let mut at_seconds = 0.0_f64;
        while per_second > 0.0 && jobs.len() <= JOBS_MAX {
            at_seconds += -(1.0 - rng.random::<f64>()).ln() / per_second;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive; saturates")]
            let at_us = (at_seconds * 1e6) as u64;
            if at_us >= end_us {
                break;
            }
            jobs.push(JobArrival::at(at_us));
        }
        Self::new(jobs)
    }

    /// The index of an account's name, for [`JobArrival::account`].
    pub fn account(&mut self, name: &str) -> u32 {
        if let Some(index) = self.known.get(name) {
            return *index;
        }
        let index = u32::try_from(self.accounts.len()).unwrap_or(u32::MAX);
        self.accounts.push(name.to_owned());
        self.known.insert(name.to_owned(), index);
        index
    }

    /// Adds jobs in any order.
    pub fn add(&mut self, jobs: impl IntoIterator<Item = JobArrival>) {
        self.jobs.extend(jobs);
        self.jobs.sort_by_key(|job| job.at_us);
    }

    pub fn jobs(&self) -> &[JobArrival] {
        &self.jobs
    }

    pub fn accounts(&self) -> &[String] {
        &self.accounts
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn arrival_rate_is_kept_and_reproducible() {
        let arrivals = |seed| JobArrivals::at_rate(50.0, Duration::from_secs(600), &mut StdRng::seed_from_u64(seed));
        let jobs = arrivals(1).jobs().len();
        assert!(jobs.abs_diff(30_000) < 700, "{jobs}");
        assert_eq!(arrivals(1), arrivals(1));
        assert_ne!(arrivals(1), arrivals(2));
        assert!(arrivals(1).jobs().is_sorted_by_key(|job| job.at_us));
        assert!(JobArrivals::at_rate(0.0, Duration::from_secs(600), &mut StdRng::seed_from_u64(1)).jobs().is_empty());
    }
}
