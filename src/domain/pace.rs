//! Pace of a provider, for people: what the limits of its quota allow within one second and over time, and the egress
//! rate of its lanes.
//!
//! Limits hold for all processes together, the egress rate for each process on its own.

use std::fmt;

use super::egress::{EGRESS_SPAN, slowest, tightest_at_once};
use super::limit::Algorithm;
use super::provider::{Pacing, Provider};
use super::quota_limits::QuotaLimits;
use super::quota_spec::{LimitSpec, QuotaSpec};
use super::time::format_duration;

/// Resulting pace of one provider.
#[derive(Clone, Debug, PartialEq)]
pub struct Pace {
    /// `None`: no limit that applies to every charge has a window.
    pub rate: Option<PaceRate>,
    /// The limit that allows the fewest requests in flight, without the reserve; `None`: none counts them.
    pub in_flight: Option<LimitSpec>,
    /// Starts are spaced by the mean rate, in all processes together.
    pub is_even: bool,
    /// Egress rate of one process.
    pub egress_per_second: f64,
    /// The row has no `leak_per_second`.
    pub egress_is_default: bool,
}

/// Rate by the limits that have a window, without the reserve.
#[derive(Clone, Debug, PartialEq)]
pub struct PaceRate {
    /// The limit that allows the fewest requests within one second.
    pub at_once: LimitSpec,
    /// Requests that it allows within one second, if none were used before.
    pub within_second: u32,
    /// The limit with the lowest mean rate.
    pub over_time: LimitSpec,
    pub mean_per_second: f64,
}

impl Pace {
    /// The pace of a row among all rows: enabled ones of its quota share its limits. `None`: no limit applies to every
    /// charge.
    pub fn new<'a>(row: &'a Provider, rows: impl IntoIterator<Item = &'a Provider>) -> Option<Self> {
        let shares = |other: &&Provider| other.enabled && other.quota == row.quota && other.name != row.name;
        let rows: Vec<&Provider> = rows.into_iter().filter(shares).chain([row]).collect();
        let limits = QuotaLimits::of_rows(rows.iter().copied()).into_specs()?;
        Self::within(row, &limits, rows.iter().any(|row| row.pacing == Pacing::Even))
    }

    /// The pace of a row whose quota has this spec.
    pub fn under(row: &Provider, spec: &QuotaSpec) -> Option<Self> {
        Self::within(row, &spec.limits, spec.pacing == Some(Pacing::Even))
    }

    fn within(row: &Provider, limits: &[LimitSpec], is_even: bool) -> Option<Self> {
        let charges = || limits.iter().filter(|limit| limit.applies_to_every_charge());
        let allowances = || charges().filter_map(|limit| Some((limit, limit.allowance()?)));
        let rate = tightest_at_once(allowances()).zip(slowest(allowances()));
        let rate = rate.map(|((tightest, _, within_second), (slowest, allowance))| PaceRate {
            at_once: tightest.clone(),
            within_second,
            over_time: slowest.clone(),
            mean_per_second: allowance.mean_per_second(),
        });
        let in_flight = charges().filter(|limit| limit.algorithm == Algorithm::Concurrency);
        let in_flight = in_flight.min_by_key(|limit| limit.max_requests).cloned();
        (rate.is_some() || in_flight.is_some()).then(|| Self {
            rate,
            in_flight,
            is_even,
            egress_per_second: row.egress_per_second(),
            egress_is_default: row.leak_per_second.is_none(),
        })
    }

    /// Whether one limit decides the whole pace, so that the limit says it all.
    pub fn is_plain(&self) -> bool {
        let by_one_limit = match (&self.rate, &self.in_flight) {
            (Some(rate), None) => rate.at_once.name == rate.over_time.name && !self.is_even,
            (rate, _) => rate.is_none(),
        };
        by_one_limit && self.egress_is_default
    }

    /// The name of a limit of 0.
    fn closed_limit(&self) -> Option<&str> {
        let by_rate = self.rate.as_ref().filter(|rate| rate.within_second == 0).map(|rate| rate.at_once.name.as_str());
        let by_slots = self.in_flight.as_ref().filter(|limit| limit.max_requests == 0);
        by_rate.or_else(|| by_slots.map(|limit| limit.name.as_str()))
    }
}

/// `up to 100/s (limit per-second), 100000/1d over time (limit per-day), 5 at once (limit slots); egress 100/s per
/// process`.
impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(limit) = self.closed_limit() {
            return write!(f, "nothing: limit {limit} is closed");
        }
        if let Some(rate) = &self.rate {
            rate.write(f, self.is_even)?;
        }
        if let Some(LimitSpec { name, max_requests, .. }) = &self.in_flight {
            let before = if self.rate.is_some() { ", " } else { "up to " };
            write!(f, "{before}{max_requests} at once (limit {name})")?;
        }
        if self.rate.is_none() && self.egress_is_default {
            return f.write_str("; egress is not paced");
        }
        let by = if self.egress_is_default { "" } else { " (leak_per_second)" };
        write!(f, "; egress {} per process{by}", format_rate(self.egress_per_second))
    }
}

impl PaceRate {
    fn write(&self, f: &mut fmt::Formatter<'_>, is_even: bool) -> fmt::Result {
        let Self { at_once, over_time, .. } = self;
        let mean = format!("{}/{}", over_time.max_requests, format_duration(over_time.window));
        let same_limit = at_once.name == over_time.name;
        let same_rate = u128::from(self.within_second) * over_time.window.as_micros()
            == u128::from(over_time.max_requests) * EGRESS_SPAN.as_micros();
        if is_even {
            return write!(f, "{mean}, evenly spaced (limit {})", over_time.name);
        }
        write!(f, "up to {}/s", self.within_second)?;
        match (same_limit, same_rate) {
            (true, true) => write!(f, " (limit {})", at_once.name),
            (true, false) => write!(f, ", {mean} over time (limit {})", at_once.name),
            (false, _) => write!(f, " (limit {}), {mean} over time (limit {})", at_once.name, over_time.name),
        }
    }
}

/// A rate in the largest unit of time that it needs: `100/s`, `1.16/s`, `10/m`, `2.5/d`.
fn format_rate(per_second: f64) -> String {
    let units = [(1.0, "s"), (60.0, "m"), (3_600.0, "h"), (86_400.0, "d")];
    let fits = |(seconds, _): &(f64, &str)| per_second * seconds >= 0.995;
    let (seconds, unit) = units.into_iter().find(fits).unwrap_or((86_400.0, "d"));
    let number = format!("{:.2}", per_second * seconds);
    format!("{}/{unit}", number.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    fn limit(name: &str, max_requests: i64, window_ms: i64) -> LimitRow {
        LimitRow { name: name.to_owned(), max_requests, window_ms, ..LimitRow::default() }
    }

    fn provider(limits: Vec<LimitRow>, change: impl FnOnce(&mut ProviderRow)) -> Provider {
        let url = "https://acme.example/".to_owned();
        let mut row = ProviderRow { name: "acme".to_owned(), url, limits, ..ProviderRow::default() };
        change(&mut row);
        row.validate(1).unwrap()
    }

    fn text(row: &Provider, rows: &[&Provider]) -> String {
        Pace::new(row, rows.iter().copied()).unwrap().to_string()
    }

    #[test]
    fn pace_names_limits_and_egress_rate() {
        let second = || vec![limit("per-second", 100, 1_000)];
        let both = || vec![limit("per-second", 100, 1_000), limit("per-day", 100_000, 86_400_000)];
        let bucket = LimitRow { algorithm: "token_bucket".to_owned(), burst: Some(500), ..limit("bucket", 100, 1_000) };
        let leak = |leak| move |row: &mut ProviderRow| row.leak_per_second = Some(leak);
        let even = |row: &mut ProviderRow| row.pacing = "even".to_owned();
        let reserve = |row: &mut ProviderRow| row.reserve_percent = 50;
        let slots = |max_requests| LimitRow {
            name: "slots".to_owned(),
            algorithm: "concurrency".to_owned(),
            max_requests,
            ..LimitRow::default()
        };
        for (provider, is_plain, expected) in [
            (provider(second(), |_| ()), true, "up to 100/s (limit per-second); egress 100/s per process"),
            (
                provider(both(), |_| ()),
                false,
                "up to 100/s (limit per-second), 100000/1d over time (limit per-day); egress 100/s per process",
            ),
            (
                provider(both(), reserve),
                false,
                "up to 50/s (limit per-second), 50000/1d over time (limit per-day); egress 50/s per process",
            ),
            (
                provider(vec![bucket], |_| ()),
                true,
                "up to 599/s, 100/1s over time (limit bucket); egress 599/s per process",
            ),
            (
                provider(vec![limit("all", 600, 60_000)], |_| ()),
                true,
                "up to 600/s, 600/1m over time (limit all); egress 600/s per process",
            ),
            (
                provider(second(), leak(2.5)),
                false,
                "up to 100/s (limit per-second); egress 2.5/s per process (leak_per_second)",
            ),
            (
                provider(second(), leak(0.05)),
                false,
                "up to 100/s (limit per-second); egress 3/m per process (leak_per_second)",
            ),
            (provider(both(), even), false, "100000/1d, evenly spaced (limit per-day); egress 1.16/s per process"),
            (
                provider(vec![limit("all", 3, 86_400_000)], even),
                false,
                "3/1d, evenly spaced (limit all); egress 3/d per process",
            ),
            (provider(vec![limit("all", 0, 1_000)], |_| ()), true, "nothing: limit all is closed"),
            (provider(vec![slots(5)], |_| ()), true, "up to 5 at once (limit slots); egress is not paced"),
            (
                provider(vec![limit("all", 100, 1_000), slots(5)], |_| ()),
                false,
                "up to 100/s (limit all), 5 at once (limit slots); egress 100/s per process",
            ),
            (provider(vec![limit("all", 100, 1_000), slots(0)], |_| ()), false, "nothing: limit slots is closed"),
            (
                provider(vec![slots(5)], leak(2.5)),
                false,
                "up to 5 at once (limit slots); egress 2.5/s per process (leak_per_second)",
            ),
        ] {
            assert_eq!(text(&provider, &[]), expected);
            assert_eq!(Pace::new(&provider, []).unwrap().is_plain(), is_plain, "{expected}");
        }
    }

    #[test]
    fn pace_counts_all_enabled_rows_of_the_quota() {
        let named = |name: &str, max: i64, change: fn(&mut ProviderRow)| {
            provider(vec![limit("all", max, 1_000)], |row| {
                (row.name, row.quota) = (name.to_owned(), Some("shared".to_owned()));
                change(row);
            })
        };
        let row = named("acme", 100, |_| ());
        let other = named("other", 40, |_| ());
        let disabled = named("disabled", 7, |row| row.enabled = false);
        let apart = named("apart", 7, |row| row.quota = None);
        let even = named("even", 500, |row| row.pacing = "even".to_owned());
        let rows = [&row, &disabled, &apart];
        assert_eq!(text(&row, &rows), "up to 100/s (limit all); egress 100/s per process");
        assert_eq!(text(&row, &[&row, &other]), "up to 40/s (limit all); egress 100/s per process");
        assert_eq!(text(&row, &[&even, &row]), "100/1s, evenly spaced (limit all); egress 100/s per process");
        let spec = QuotaSpec {
            quota: row.quota.clone(),
            version: 1,
            limits: QuotaLimits::of_rows([&row, &other]).into_specs().unwrap(),
            account_rules: Vec::new(),
            pacing: None,
            grant_jitter: None,
            hold_max: Duration::ZERO,
            send_budget: Duration::ZERO,
            store_down: crate::domain::provider::StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        assert_eq!(Pace::under(&row, &spec), Pace::new(&row, [&other]));
    }
}
