//! The last fifteen minutes of every provider, in points of two seconds, as this process saw all workers.
//!
//! Refuses to outlive the process and to grow: one ring per provider that the rows name.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::fleet::Overview;

/// Points kept: fifteen minutes.
const POINTS_MAX: usize = 450;

/// One provider at one instant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Point {
    pub at: String,
    pub rate_per_s: f64,
    pub limit_per_s: Option<f64>,
    pub waiting: u64,
    /// 429s to permits that we gave, since the point before.
    pub throttled: u64,
}

#[derive(Debug, Default)]
pub(super) struct History {
    providers: BTreeMap<String, Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    points: VecDeque<Point>,
    refused: Option<u64>,
}

impl History {
    /// Takes one more point of each provider; providers that are gone go.
    pub fn enter(&mut self, overview: &Overview) {
        self.providers.retain(|name, _| overview.providers.iter().any(|provider| provider.name == *name));
        for provider in &overview.providers {
            let ring = self.providers.entry(provider.name.clone()).or_default();
            let refused = provider.refused_by_provider;
            // A worker that ended takes its count along: then the sum is lower, and nothing is known to be new.
            let throttled = ring.refused.map_or(0, |before| refused.saturating_sub(before));
            ring.refused = Some(refused);
            if ring.points.len() == POINTS_MAX {
                ring.points.pop_front();
            }
            ring.points.push_back(Point {
                at: overview.at.clone(),
                rate_per_s: provider.rate_per_s,
                limit_per_s: provider.limit_per_s,
                waiting: provider.waiting,
                throttled,
            });
        }
    }

    /// The last `count` points, oldest first.
    pub fn last(&self, provider: &str, count: usize) -> Vec<Point> {
        let Some(ring) = self.providers.get(provider) else { return Vec::new() };
        let skipped = ring.points.len().saturating_sub(count);
        ring.points.iter().skip(skipped).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Evidence, overview};
    use crate::ledger::provider_row::ProviderRow;

    fn at(refused: u64, names: &[&str]) -> Overview {
        let row = |name: &&str| ProviderRow { name: (*name).to_owned(), ..ProviderRow::default() };
        let mut picture = overview(&Evidence { rows: names.iter().map(row).collect(), ..Evidence::default() });
        picture.providers.iter_mut().for_each(|provider| provider.refused_by_provider = refused);
        picture
    }

    #[test]
    fn points_are_bounded_and_refusals_are_differences() {
        let mut history = History::default();
        for refused in [5, 5, 7, 2, 3] {
            history.enter(&at(refused, &["acme", "bolt"]));
        }
        let throttled: Vec<u64> = history.last("acme", 9).iter().map(|point| point.throttled).collect();
        assert_eq!(throttled, [0, 0, 2, 0, 1]);
        assert_eq!(history.last("acme", 2).len(), 2);
        for _ in 0..500 {
            history.enter(&at(3, &["acme"]));
        }
        assert_eq!((history.last("acme", 9_999).len(), history.last("bolt", 9).len()), (POINTS_MAX, 0));
    }
}
