//! When a backlog will be through, by what the limits allow.
//!
//! An estimate, not a promise: it takes the backlog as it is, nothing new. Refuses to guess at limits that count each
//! account or reference on its own, because nobody knows whose jobs wait in the queue: [`on_each`] names them, and where
//! there is one, what the others allow is the least that it takes.

use std::time::Duration;

use crate::domain::limit::{Algorithm, AppliesTo, Limit, Scope};
use crate::domain::provider::{Pacing, Provider, SlotRelease};

/// How one limit of a provider stands now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    pub limit: String,
    pub free: u64,
}

/// How long the slowest limit on the whole provider takes to let `backlog` charges out. `hold` is how long a request is on
/// its way: a slot that is freed by the answer serves again only a window after it. A limit that `used` does not name is
/// taken to be wholly free. `None`: never, because one is closed.
#[must_use]
pub fn drained_in(provider: &Provider, backlog: u64, used: &[Used], hold: Duration) -> Option<Duration> {
    if backlog == 0 {
        return Some(Duration::ZERO);
    }
    let limits = provider.limits.iter().filter(|limit| limit.holds_every_charge());
    let each = limits.map(|limit| {
        let used = used.iter().find(|used| used.limit == limit.name);
        through(provider, limit, backlog, used.map(|used| used.free), hold)
    });
    let all: Option<Vec<Duration>> = each.collect();
    all.map(|all| all.into_iter().max().unwrap_or_default())
}

/// How long the leaky buckets of so many lanes take to let `backlog` out: the bucket is each process's own. `None`: never.
#[must_use]
pub fn leaked_in(provider: &Provider, backlog: u64, lanes: u32) -> Option<Duration> {
    let per_second = provider.outflow_per_second() * f64::from(lanes.max(1));
    if backlog == 0 { Some(Duration::ZERO) } else { drained_at(per_second, backlog) }
}

/// Limits that hold charges back and count each account or reference on its own, by name.
#[must_use]
pub fn on_each(provider: &Provider) -> Vec<String> {
    let holding = provider.limits.iter().filter(|limit| !limit.shadow && limit.applies_to != AppliesTo::Lookup);
    holding.filter(|limit| limit.scope != Scope::Provider).map(|limit| limit.name.clone()).collect()
}

/// How long `backlog` takes at this rate. `None`: nothing is sent.
#[must_use]
pub fn drained_at(per_second: f64, backlog: u64) -> Option<Duration> {
    #[allow(clippy::cast_precision_loss, reason = "counts of jobs are far below 2^53")]
    let backlog = backlog as f64;
    (per_second > 0.0).then(|| seconds(backlog / per_second))
}

/// The tightest limit on everything that the provider is sent, in requests per second.
#[must_use]
pub fn limit_per_second(provider: &Provider) -> Option<f64> {
    let limits = provider.limits.iter();
    let held = limits.filter(|limit| limit.scope == Scope::Provider && limit.applies_to != AppliesTo::Lookup);
    held.filter(|limit| !limit.shadow).map(|limit| limit.rate.per_second()).min_by(f64::total_cmp)
}

fn through(provider: &Provider, limit: &Limit, backlog: u64, free: Option<u64>, hold: Duration) -> Option<Duration> {
    let share = |count: u32| u64::from(provider.less_reserve(count));
    let per_window = share(limit.rate.max_requests());
    if per_window == 0 {
        return None;
    }
    let window = limit.rate.window();
    let free = free.unwrap_or_else(|| share(limit.capacity())).min(backlog);
    let bucket = matches!(limit.algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
    if bucket || provider.pacing == Pacing::Even {
        let at_once = if bucket { free } else { 1 };
        return Some(seconds(ratio(backlog - at_once.min(backlog), per_window) * window.as_secs_f64()));
    }
    let cycle = match (limit.algorithm, provider.slot_release) {
        (Algorithm::FixedWindow, _) => window,
        (_, SlotRelease::Response) => window + hold,
        (_, SlotRelease::Grant { transit_jitter }) => window + transit_jitter,
    };
    // Slots come back a cycle after they were taken: whole rounds, and a last one that begins with what is free now and
    // goes on with what is used now, whose slots come back spread over one cycle.
    let (rounds, last) = ((backlog - 1) / per_window, (backlog - 1) % per_window + 1);
    let free = free.min(per_window);
    let within = if last <= free { 0.0 } else { ratio(last - free, (per_window - free).max(1)) };
    #[allow(clippy::cast_precision_loss, reason = "a number of windows")]
    let cycles = rounds as f64 + within;
    Some(seconds(cycles * cycle.as_secs_f64()))
}

#[allow(clippy::cast_precision_loss, reason = "counts of jobs are far below 2^53")]
fn ratio(count: u64, of: u64) -> f64 {
    count as f64 / of as f64
}

/// Saturates: a backlog may take longer than a duration can say.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    fn limit_row((name, algorithm, max_requests, window_ms): &(&str, &str, i64, i64)) -> LimitRow {
        LimitRow {
            name: (*name).to_owned(),
            algorithm: (*algorithm).to_owned(),
            max_requests: *max_requests,
            window_ms: *window_ms,
            ..LimitRow::default()
        }
    }

    fn provider(limits: &[(&str, &str, i64, i64)], change: fn(&mut ProviderRow)) -> Provider {
        let mut row = ProviderRow {
            name: "acme".to_owned(),
            url: "https://acme.example/".to_owned(),
            limits: limits.iter().map(limit_row).collect(),
            ..ProviderRow::default()
        };
        change(&mut row);
        row.meant(1).unwrap()
    }

    #[test]
    fn the_slowest_limit_says_when_a_backlog_is_through() {
        let second: &[(&str, &str, i64, i64)] = &[("second", "sliding_log", 100, 1_000)];
        let both: &[(&str, &str, i64, i64)] =
            &[("second", "sliding_log", 100, 1_000), ("minute", "sliding_log", 600, 60_000)];
        let closed: &[(&str, &str, i64, i64)] = &[("all", "sliding_log", 0, 1_000)];
        let bucket: &[(&str, &str, i64, i64)] = &[("all", "token_bucket", 10, 1_000)];
        let day: &[(&str, &str, i64, i64)] = &[("all", "fixed_window", 1_000, 86_400_000)];
        let as_it_is: fn(&mut ProviderRow) = |_| ();
        let grant: fn(&mut ProviderRow) = |row| row.slot_release = "grant".to_owned();
        let even: fn(&mut ProviderRow) = |row| row.pacing = "even".to_owned();
        let reserve: fn(&mut ProviderRow) = |row| row.reserve_percent = 50;
        let account: fn(&mut ProviderRow) = |row| {
            row.limits.push(LimitRow {
                name: "each".to_owned(),
                scope: "account".to_owned(),
                max_requests: 1,
                window_ms: 60_000,
                ..LimitRow::default()
            });
        };
        for (limits, change, backlog, free, hold_ms, wanted_ms) in [
            (second, as_it_is, 0, None, 0, Some(0)),
            (second, as_it_is, 100, None, 0, Some(0)),
            (second, as_it_is, 101, None, 0, Some(1_000)),
            (second, as_it_is, 12_000, None, 0, Some(119_000)),
            // Everything is used: the slots come back over a window.
            (second, as_it_is, 100, Some(0), 0, Some(1_000)),
            (second, as_it_is, 50, Some(0), 0, Some(500)),
            (second, as_it_is, 60, Some(20), 0, Some(500)),
            // Each slot is taken for as long as the answer takes, too.
            (second, as_it_is, 12_000, None, 200, Some(142_800)),
            (second, grant, 12_000, None, 200, Some(124_950)),
            (second, even, 12_000, None, 200, Some(119_990)),
            (second, reserve, 101, None, 0, Some(2_000)),
            (second, account, 101, None, 0, Some(1_000)),
            (both, as_it_is, 6_000, None, 0, Some(540_000)),
            (bucket, as_it_is, 110, Some(10), 5_000, Some(10_000)),
            (bucket, as_it_is, 110, Some(0), 0, Some(11_000)),
            (day, as_it_is, 1_500, Some(1_000), 9_000, Some(86_400_000)),
            (closed, as_it_is, 1, None, 0, None),
            (closed, as_it_is, 0, None, 0, Some(0)),
        ] {
            let provider = provider(limits, change);
            let name = provider.limits[0].name.clone();
            let used: Vec<Used> = free.map(|free| Used { limit: name, free }).into_iter().collect();
            let told = drained_in(&provider, backlog, &used, Duration::from_millis(hold_ms));
            let told_ms = told.map(|told| u64::try_from(told.as_millis()).unwrap());
            let near = match (told_ms, wanted_ms) {
                (Some(told), Some(wanted)) => u64::abs_diff(told, wanted) <= 1,
                (told, wanted) => told == wanted,
            };
            assert!(near, "{limits:?} {backlog} {free:?} {hold_ms}: {told_ms:?}, not {wanted_ms:?}");
        }
    }

    #[test]
    fn the_steady_outflow_of_all_lanes_bounds_what_the_limits_allow() {
        // 1,500 at once by the limit, 5 a second by its bucket.
        let slow = provider(&[("all", "sliding_log", 1_500, 300_000)], |_| ());
        let leaked = |backlog, lanes| leaked_in(&slow, backlog, lanes).map(|leaked| leaked.as_millis());
        assert_eq!((leaked(236, 1), leaked(236, 2), leaked(0, 1)), (Some(47_200), Some(23_600), Some(0)));
        assert_eq!(leaked(236, 0), leaked(236, 1), "the one that will start");
        let fast = provider(&[("all", "sliding_log", 1_500, 300_000)], |row| row.leak_per_second = Some(100.0));
        assert_eq!(leaked_in(&fast, 236, 1).map(|leaked| leaked.as_millis()), Some(2_360));
        let closed = provider(&[("all", "sliding_log", 0, 1_000)], |_| ());
        assert_eq!(leaked_in(&closed, 1, 1), None);
    }

    #[test]
    fn limits_on_each_account_or_reference_are_named_while_they_hold_charges_back() {
        let of = |change: fn(&mut LimitRow)| {
            let limits: &[(&str, &str, i64, i64)] =
                &[("second", "sliding_log", 100, 1_000), ("each", "sliding_log", 6, 60_000)];
            let mut row = ProviderRow {
                name: "acme".to_owned(),
                url: "https://acme.example/".to_owned(),
                limits: limits.iter().map(limit_row).collect(),
                ..ProviderRow::default()
            };
            change(&mut row.limits[1]);
            on_each(&row.meant(1).unwrap())
        };
        let account: fn(&mut LimitRow) = |limit| limit.scope = "account".to_owned();
        let reference: fn(&mut LimitRow) = |limit| limit.scope = "reference".to_owned();
        assert_eq!((of(account), of(reference)), (vec!["each".to_owned()], vec!["each".to_owned()]));
        let nothing: [fn(&mut LimitRow); 4] = [
            |_| (),
            |limit| (limit.scope, limit.shadow) = ("account".to_owned(), true),
            |limit| (limit.scope, limit.enabled) = ("account".to_owned(), false),
            |limit| (limit.scope, limit.applies_to) = ("account".to_owned(), "lookup".to_owned()),
        ];
        for change in nothing {
            assert_eq!(of(change), Vec::<String>::new());
        }
    }

    #[test]
    fn a_rate_says_when_a_backlog_is_through() {
        assert_eq!(drained_at(0.2, 85), Some(Duration::from_secs(425)));
        assert_eq!((drained_at(0.0, 85), drained_at(1.0, 0)), (None, Some(Duration::ZERO)));
    }

    #[test]
    fn the_tightest_limit_on_charges_counts() {
        let per_second = |limits| limit_per_second(&provider(limits, |_| ()));
        assert_eq!(per_second(&[("a", "sliding_log", 100, 1_000), ("b", "sliding_log", 600, 60_000)]), Some(10.0));
        assert_eq!(per_second(&[("a", "sliding_log", 0, 1_000)]), Some(0.0));
    }
}
