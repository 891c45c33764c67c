//! When jobs come, and what they ask for: all at once, at random at a mean rate, or as recorded.
//!
//! Refuses more than [`JOBS_MAX`]: what is simulated is kept in memory.

use std::collections::HashMap;
use std::time::Duration;

use rand::Rng;

use crate::domain::time::micros_up;

/// Most jobs of one run.
pub const JOBS_MAX: usize = 10_000_000;

/// One job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobArrival {
    /// Since the start.
    pub at_us: u64,
    /// Which of [`Arrivals::accounts`].
    pub account: Option<u32>,
    pub cost: u16,
    pub priority: u8,
    /// Since the start: not to be sent from then on.
    pub expires_us: Option<u64>,
}

impl JobArrival {
    /// A plain job.
    #[must_use]
    pub fn at(at_us: u64) -> Self {
        Self { at_us, account: None, cost: 1, priority: 0, expires_us: None }
    }
}

/// Jobs in the order in which they come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobArrivals {
    jobs: Vec<JobArrival>,
    accounts: Vec<String>,
    known: HashMap<String, u32>,
}

impl JobArrivals {
    /// In any order.
    #[must_use]
    pub fn new(mut jobs: Vec<JobArrival>) -> Self {
        jobs.sort_by_key(|job| job.at_us);
        Self { jobs, ..Self::default() }
    }

    /// So many at the start.
    #[must_use]
    pub fn burst(jobs: usize) -> Self {
        Self::new(vec![JobArrival::at(0); jobs.min(JOBS_MAX)])
    }

    /// Independent of each other at this mean rate (a Poisson process). More than [`JOBS_MAX`] end with the first too many.
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

    /// The index of an account's name, for [`Arrival::account`].
    pub fn account(&mut self, name: &str) -> u32 {
        if let Some(index) = self.known.get(name) {
            return *index;
        }
        let index = u32::try_from(self.accounts.len()).unwrap_or(u32::MAX);
        self.accounts.push(name.to_owned());
        self.known.insert(name.to_owned(), index);
        index
    }

    /// More jobs, in any order.
    pub fn add(&mut self, jobs: impl IntoIterator<Item = JobArrival>) {
        self.jobs.extend(jobs);
        self.jobs.sort_by_key(|job| job.at_us);
    }

    #[must_use]
    pub fn jobs(&self) -> &[JobArrival] {
        &self.jobs
    }

    #[must_use]
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
        let come = |seed| JobArrivals::at_rate(50.0, Duration::from_secs(600), &mut StdRng::seed_from_u64(seed));
        let jobs = come(1).jobs().len();
        assert!(jobs.abs_diff(30_000) < 700, "{jobs}");
        assert_eq!(come(1), come(1));
        assert_ne!(come(1), come(2));
        assert!(come(1).jobs().is_sorted_by_key(|job| job.at_us));
        assert!(JobArrivals::at_rate(0.0, Duration::from_secs(600), &mut StdRng::seed_from_u64(1)).jobs().is_empty());
    }
}
