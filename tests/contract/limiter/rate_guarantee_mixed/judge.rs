//! The judges of mixed limits: arrivals at the provider for sliding logs, and starts for the algorithms that count
//! starts. They share no code with the limiter.

use std::collections::BTreeMap;

use proptest::prelude::*;
use sluicegate::domain::limit::{Algorithm, Rate, Scope};
use sluicegate::domain::time::micros_up;
use sluicegate::provider::simulated::{FakeOptions, OnLimit, StrictProvider};

use super::{Attempt, World};

impl World {
    /// Judges sliding logs at the provider: requests count from their start until a window after the answer.
    pub fn judge_logs(&self) -> Result<u64, TestCaseError> {
        let mut full = 0;
        for limit in self.spec.limits.iter().filter(|limit| limit.algorithm == Algorithm::SlidingLog) {
            let mut of: BTreeMap<Option<u8>, Vec<&Attempt>> = BTreeMap::new();
            for attempt in &self.attempts {
                match (limit.scope, attempt.account) {
                    (Scope::Provider, _) => of.entry(None).or_default().push(attempt),
                    (_, Some(account)) => of.entry(Some(account)).or_default().push(attempt),
                    (_, None) => {}
                }
            }
            for (account, mut attempts) in of {
                attempts.sort_by_key(|attempt| attempt.arrived_us);
                let rate = Rate::new(limit.max_requests, limit.window).unwrap();
                let options = FakeOptions { limits: vec![rate], on_limit: OnLimit::Count, ..FakeOptions::default() };
                let mut provider = StrictProvider::new(options);
                for attempt in attempts {
                    (0..attempt.cost).for_each(|_| {
                        let _counted = provider.record_arrival(attempt.arrived_us);
                    });
                }
                let report = &provider.report().limits[0];
                prop_assert_eq!(report.breaches, 0, "{} of {} {} for {:?}", report.largest, limit.name, rate, account);
                full += u64::from(report.largest == u64::from(limit.max_requests));
            }
        }
        Ok(full)
    }

    /// Judges the algorithms that count starts, by the store's clock.
    pub fn judge_starts(&self) -> Result<(), TestCaseError> {
        let mut starts: Vec<(u64, u64)> =
            self.attempts.iter().map(|attempt| (attempt.start_us, u64::from(attempt.cost))).collect();
        starts.sort_unstable();
        for limit in &self.spec.limits {
            let (most, window_us) = (u64::from(limit.cost_max()), micros_up(limit.window));
            match limit.algorithm {
                Algorithm::SlidingLog | Algorithm::Concurrency => {}
                Algorithm::SlidingWindow => {
                    for (end_us, _) in &starts {
                        let within = starts.iter().filter(|(at_us, _)| at_us <= end_us && end_us - at_us < window_us);
                        let uses: u64 = within.map(|(_, cost)| cost).sum();
                        prop_assert!(uses <= most, "{} starts within {} of {}", uses, limit.name, end_us);
                    }
                }
                Algorithm::FixedWindow => {
                    let mut windows: BTreeMap<u64, u64> = BTreeMap::new();
                    for (at_us, cost) in &starts {
                        *windows.entry((at_us - micros_up(limit.offset)) / window_us).or_default() += cost;
                    }
                    let uses = windows.values().max().copied().unwrap_or(0);
                    prop_assert!(uses <= most, "{} starts in a window of {}", uses, limit.name);
                }
                Algorithm::TokenBucket | Algorithm::Gcra => {
                    let interval_us = window_us / u64::from(limit.max_requests);
                    let (mut level_us, mut last_us) = (0, 0);
                    for (at_us, cost) in &starts {
                        level_us = u64::saturating_sub(level_us, at_us - last_us) + cost * interval_us;
                        last_us = *at_us;
                        prop_assert!(level_us <= most * interval_us, "{} overflows at {}", limit.name, at_us);
                    }
                }
            }
        }
        Ok(())
    }
}
