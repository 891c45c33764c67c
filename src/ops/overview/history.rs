//! The history of the last fifteen minutes of every provider, in points of two seconds, over all workers.
//!
//! It is in memory only: a restart of this process clears it. Each provider of the overview has one ring buffer.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::fleet::Overview;

/// Points per provider: fifteen minutes.
const POINTS_MAX: usize = 450;
/// Points for the recent rate of a backlog: at most five minutes, at least one. Limits on accounts release jobs in
/// bursts, so ten seconds are too short.
const RECENT_POINTS_MAX: usize = 150;
const RECENT_POINTS_MIN: usize = 30;

/// The figures of one provider at one instant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HistoryPoint {
    pub at: String,
    /// `null` if it is unknown.
    pub rate_per_s: Option<f64>,
    pub limit_per_s: Option<f64>,
    /// `null` if only a lower bound is known.
    pub waiting: Option<u64>,
    /// 429s to requests with a permit since the previous point.
    pub throttled: u64,
}

#[derive(Debug, Default)]
pub struct OverviewHistory {
    providers: BTreeMap<String, ProviderHistory>,
    /// Of the last overview that was recorded.
    last_at: Option<String>,
}

#[derive(Debug, Default)]
struct ProviderHistory {
    points: VecDeque<HistoryPoint>,
    throttled_total: Option<u64>,
}

impl OverviewHistory {
    /// Whether the overview is later than the last recorded one.
    pub fn is_later(&self, overview: &Overview) -> bool {
        self.last_at.as_ref().is_none_or(|last_at| *last_at < overview.at)
    }

    /// Records a point of each provider, and drops providers that no longer exist.
    pub fn record(&mut self, overview: &Overview) {
        self.last_at = Some(overview.at.clone());
        self.providers.retain(|name, _| overview.providers.iter().any(|provider| provider.name == *name));
        for provider in &overview.providers {
            let ring = self.providers.entry(provider.name.clone()).or_default();
            let refused = provider.refused_by_provider;
            // When a worker ends, its count is gone. Then the sum is lower, and no new 429 is known.
            let throttled =
                ring.throttled_total.zip(refused).map_or(0, |(before, refused)| refused.saturating_sub(before));
            ring.throttled_total = refused.or(ring.throttled_total);
            if ring.points.len() == POINTS_MAX {
                ring.points.pop_front();
            }
            ring.points.push_back(HistoryPoint {
                at: overview.at.clone(),
                rate_per_s: provider.rate_per_s,
                limit_per_s: provider.limit_per_s,
                waiting: (!provider.waiting_is_at_least).then_some(provider.waiting),
                throttled,
            });
        }
    }

    /// Requests per second over the last minutes with a backlog, without a break. Providers without enough points are
    /// left out.
    pub fn recent_per_s(&self) -> BTreeMap<String, f64> {
        let lately = |(name, ring): (&String, &ProviderHistory)| Some((name.clone(), lately_per_s(ring)?));
        self.providers.iter().filter_map(lately).collect()
    }

    /// The last `count` points, oldest first.
    pub fn last_points(&self, provider: &str, count: usize) -> Vec<HistoryPoint> {
        let Some(ring) = self.providers.get(provider) else { return Vec::new() };
        let skipped = ring.points.len().saturating_sub(count);
        ring.points.iter().skip(skipped).cloned().collect()
    }
}

fn lately_per_s(ring: &ProviderHistory) -> Option<f64> {
    let busy = ring
        .points
        .iter()
        .rev()
        .take(RECENT_POINTS_MAX)
        .take_while(|point| point.waiting.is_none_or(|waiting| waiting > 0));
    let rates = busy.filter_map(|point| point.rate_per_s);
    let (sum, points) = rates.fold((0.0, 0_u32), |(sum, points), rate_per_s| (sum + rate_per_s, points + 1));
    (points as usize >= RECENT_POINTS_MIN).then(|| sum / f64::from(points))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{OverviewInput, overview};
    use crate::ledger::provider_row::ProviderRow;

    fn overview_with_throttled(refused: u64, names: &[&str]) -> Overview {
        let row = |name: &&str| ProviderRow { name: (*name).to_owned(), ..ProviderRow::default() };
        let mut overview =
            overview(&OverviewInput { rows: names.iter().map(row).collect(), ..OverviewInput::default() });
        overview.providers.iter_mut().for_each(|provider| provider.refused_by_provider = Some(refused));
        overview
    }

    #[test]
    fn history_is_bounded_and_counts_new_throttles() {
        let mut history = OverviewHistory::default();
        for refused in [5, 5, 7, 2, 3] {
            history.record(&overview_with_throttled(refused, &["acme", "bolt"]));
        }
        let throttled: Vec<u64> = history.last_points("acme", 9).iter().map(|point| point.throttled).collect();
        assert_eq!(throttled, [0, 0, 2, 0, 1]);
        assert_eq!(history.last_points("acme", 2).len(), 2);
        for _ in 0..500 {
            history.record(&overview_with_throttled(3, &["acme"]));
        }
        assert_eq!((history.last_points("acme", 9_999).len(), history.last_points("bolt", 9).len()), (POINTS_MAX, 0));
    }

    #[test]
    fn recent_rate_needs_one_minute_of_backlog() {
        let mut history = OverviewHistory::default();
        let mut enter = |points: usize, waiting, rate_per_s| {
            let mut overview = overview_with_throttled(0, &["acme"]);
            (overview.providers[0].waiting, overview.providers[0].rate_per_s) = (waiting, Some(rate_per_s));
            overview.providers[0].waiting_is_at_least = false;
            (0..points).for_each(|_| history.record(&overview));
            history.recent_per_s().get("acme").copied()
        };
        assert_eq!(enter(100, 0, 9.0), None);
        assert_eq!(enter(RECENT_POINTS_MIN - 1, 5, 0.0), None);
        // One burst, and nothing for the rest of the minute.
        assert_eq!(enter(1, 5, 3.0), Some(0.1));
        assert_eq!(enter(1, 0, 3.0), None, "nothing waits any more");
        assert_eq!(enter(2 * RECENT_POINTS_MAX, 5, 2.0), Some(2.0));
    }
}
