//! Validation of limits: rate, algorithm and scope together, because the allowed values depend on each other.
//!
//! A limit that its algorithm does not support is a problem. So is a provider without a limit on its charges: it would
//! be unlimited.

use std::collections::BTreeSet;
use std::time::Duration;

use super::validate::RowValidator;
use super::{LimitRow, MISSING};
use crate::domain::limit::{Algorithm, AppliesTo, Limit, MAX_REQUESTS, MAX_WINDOW, Rate, Scope};
use crate::domain::time::format_duration;

/// Most requests in a log per account or reference: each of them has a log of its own, so each must be small.
const SCOPED_LOG_MAX: u32 = 10_000;
const WINDOW_MISSING: &str =
    "window_ms is missing: write how long a window is, as 1000 for a second; only `concurrency` has none";
const WINDOW_UNSUPPORTED: &str =
    "window_ms is not supported by `concurrency`, which counts requests in flight: leave it out";
/// Shortest window that is counted in buckets of whole milliseconds.
const BUCKETED_WINDOW_MIN: Duration = Duration::from_secs(1);

impl RowValidator {
    pub fn limits(&mut self, rows: &[LimitRow]) -> Vec<Limit> {
        let mut names = BTreeSet::new();
        let mut limits = Vec::new();
        let mut all_good = true;
        for row in rows {
            if !names.insert(&row.name) {
                self.problem(format!("limit `{}`: is listed twice", row.name));
            }
            let (limit, is_good) =
                self.at(&format!("limit `{}`", row.name), |check| (check.limit(row), check.0.is_empty()));
            all_good &= limit.is_some() && is_good;
            limits.extend(limit.filter(|_| row.enabled));
        }
        if !rows.iter().any(|row| row.enabled) {
            self.problem(
                "a provider without an enabled limit is closed, not unlimited: add a [[provider.limit]] or a row of \
                 provider_limits",
            );
        } else if all_good && !limits.iter().any(Limit::applies_to_every_charge) {
            self.problem(
                "no enabled limit holds every charge: a limit that is shadow, of scope account or reference, or for \
                 lookups alone leaves the provider unlimited; add one of scope `provider` that applies to `all` or \
                 `charge`",
            );
        }
        limits
    }

    pub fn limit(&mut self, row: &LimitRow) -> Option<Limit> {
        let name = self.name("name", &row.name);
        let rate = if row.algorithm == Algorithm::Concurrency.name() {
            if row.window_ms != MISSING {
                self.problem(WINDOW_UNSUPPORTED);
            }
            self.in_flight(row.max_requests)
        } else {
            self.rate(row.max_requests, row.window_ms)
        };
        let algorithms = Algorithm::ALL.map(|algorithm| (algorithm.name(), algorithm));
        let scopes = Scope::ALL.map(|scope| (scope.name(), scope));
        let applies = AppliesTo::ALL.map(|applies| (applies.name(), applies));
        let month_ms = i64::try_from(MAX_WINDOW.as_millis()).unwrap_or(i64::MAX);
        let offset = self.ms("offset_ms", row.offset_ms, 0..=month_ms);
        let burst = row.burst.map(|burst| self.number("burst", burst, 1..=MAX_REQUESTS.into()));
        let algorithm = self.one_of("algorithm", &row.algorithm, &algorithms);
        let scope = self.one_of("scope", &row.scope, &scopes);
        let applies_to = self.one_of("applies_to", &row.applies_to, &applies);
        let limit = Limit {
            name: name?.as_str().to_owned(),
            algorithm: algorithm?,
            rate: rate?,
            offset,
            burst,
            scope: scope?,
            applies_to: applies_to?,
            shadow: row.shadow,
        };
        self.0.extend(unsupported_reasons(&limit));
        Some(limit)
    }

    /// The number of requests in flight.
    pub fn in_flight(&mut self, max_requests: i64) -> Option<Rate> {
        if max_requests == MISSING {
            self.problem("max_requests is missing: write how many requests may be in flight, or 0 to close the limit");
            return None;
        }
        let count = self.number("max_requests", max_requests, 0..=MAX_REQUESTS.into());
        Rate::at_once(count).ok().filter(|_| i64::from(count) == max_requests)
    }

    pub fn rate(&mut self, max_requests: i64, window_ms: i64) -> Option<Rate> {
        let left_out = [
            (max_requests, "max_requests is missing: write how many requests a window may hold, or 0 to close it"),
            (window_ms, WINDOW_MISSING),
        ];
        let missing = left_out.iter().filter(|(number, _)| *number == MISSING).map(|(_, what)| (*what).to_owned());
        self.0.extend(missing);
        if window_ms == MISSING {
            return None;
        }
        // Where one value is missing, the other is checked all the same.
        let count = if max_requests == MISSING {
            1
        } else {
            self.number("max_requests", max_requests, 0..=MAX_REQUESTS.into())
        };
        let window = Duration::from_millis(u64::try_from(window_ms).unwrap_or_default());
        match Rate::new(count.min(MAX_REQUESTS), window) {
            Ok(rate) => (i64::from(rate.max_requests()) == max_requests).then_some(rate),
            Err(problem) => {
                self.problem(problem.to_string());
                None
            }
        }
    }
}

/// Why the limit's algorithm does not support it in its scope; empty when it does.
pub fn unsupported_reasons(limit: &Limit) -> Vec<String> {
    match (limit.algorithm == Algorithm::Concurrency, limit.rate.is_at_once()) {
        (true, false) => return vec![WINDOW_UNSUPPORTED.to_owned()],
        (false, true) => return vec![WINDOW_MISSING.to_owned()],
        _ => {}
    }
    let mut problems = Vec::new();
    let Limit { algorithm, rate, offset, .. } = *limit;
    let (name, window) = (algorithm.name(), rate.window());
    let has_burst = matches!(algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
    if limit.burst.is_some() && !has_burst {
        problems.push(format!("burst is not supported by `{name}`: leave it out, or choose token_bucket or gcra"));
    }
    if !offset.is_zero() && algorithm != Algorithm::FixedWindow {
        problems.push(format!("offset_ms is not supported by `{name}`: leave it out, or choose fixed_window"));
    } else if !offset.is_zero() && offset >= window {
        problems.push(format!(
            "offset_ms is {}: must lie below the window, {} ms",
            offset.as_millis(),
            window.as_millis()
        ));
    }
    let refill_ms = u128::from(limit.capacity()) * window.as_millis();
    let refill_max_ms = u128::from(rate.max_requests()) * MAX_WINDOW.as_millis();
    if has_burst && refill_ms > refill_max_ms {
        problems.push(format!(
            "burst takes {rate} longer than 31 days to refill, and no usage is stored for longer: lower \
             burst, or raise max_requests"
        ));
    }
    if algorithm == Algorithm::SlidingWindow && window < BUCKETED_WINDOW_MIN {
        problems.push(format!(
            "window_ms is {}: sliding_window counts in 256 buckets of whole milliseconds, too coarse below {}; choose \
             sliding_log, which is exact",
            window.as_millis(),
            format_duration(BUCKETED_WINDOW_MIN)
        ));
    }
    if algorithm == Algorithm::SlidingLog && limit.scope != Scope::Provider && rate.max_requests() > SCOPED_LOG_MAX {
        problems.push(format!(
            "max_requests is {}: a sliding_log of scope `{scope}` keeps one log for each {scope}, of at most \
             {SCOPED_LOG_MAX} requests; choose sliding_window for more",
            rate.max_requests(),
            scope = limit.scope.name()
        ));
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::tests::with;
    use super::*;

    /// A row with a plain limit and the tested one, which therefore need not limit every charge.
    fn beside(change: &Value) -> Result<Limit, Vec<String>> {
        let mut limit = json!({"name": "this", "max_requests": 100, "window_ms": 60_000});
        limit.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        if limit["window_ms"].is_null() {
            limit.as_object_mut().unwrap().remove("window_ms");
        }
        let row = with(json!({"limit": [{"name": "plain", "max_requests": 5, "window_ms": 1000}, limit]}));
        let meant = row.validate(1).map_err(|bad| bad.problems)?;
        Ok(meant.limits.into_iter().find(|limit| limit.name == "this").unwrap())
    }

    #[test]
    fn every_algorithm_scope_and_use_is_valid() {
        for algorithm in Algorithm::ALL {
            for scope in Scope::ALL {
                for applies_to in AppliesTo::ALL {
                    let window_ms = (algorithm != Algorithm::Concurrency).then_some(60_000);
                    let limit = beside(&json!({
                        "algorithm": algorithm.name(), "scope": scope.name(), "applies_to": applies_to.name(),
                        "shadow": true, "window_ms": window_ms,
                    }));
                    let limit = limit.unwrap();
                    assert_eq!((limit.algorithm, limit.scope, limit.applies_to), (algorithm, scope, applies_to));
                    assert!(limit.shadow);
                }
            }
        }
    }

    #[test]
    fn limits_within_algorithm_bounds_are_valid() {
        let day = 86_400_000_i64;
        let table = [
            (json!({"algorithm": "token_bucket", "burst": 500}), 500),
            (json!({"algorithm": "gcra", "burst": 15}), 16),
            (json!({"algorithm": "gcra", "max_requests": 0, "burst": 15}), 0),
            (json!({"algorithm": "fixed_window", "offset_ms": 59_999}), 100),
            (json!({"algorithm": "token_bucket", "max_requests": 1, "window_ms": day, "burst": 31}), 31),
            (json!({"algorithm": "gcra", "max_requests": 1, "window_ms": day, "burst": 30}), 31),
            (json!({"algorithm": "sliding_window", "window_ms": 1_000}), 100),
            (json!({"scope": "account", "max_requests": 10_000}), 10_000),
            (json!({"scope": "reference", "max_requests": 10_001, "algorithm": "sliding_window"}), 10_001),
            (json!({"max_requests": 1_000_000}), 1_000_000),
            (json!({"algorithm": "concurrency", "max_requests": 5, "window_ms": null}), 5),
            (json!({"algorithm": "concurrency", "max_requests": 0, "window_ms": null}), 0),
        ];
        for (change, capacity) in table {
            assert_eq!(beside(&change).map(|limit| limit.capacity()), Ok(capacity), "{change}");
        }
    }

    #[test]
    fn unsupported_limits_are_reported_with_a_fix() {
        let day = 86_400_000_i64;
        let burst = "burst is not supported by `sliding_log`: leave it out, or choose token_bucket or gcra";
        let offset = "offset_ms is not supported by `sliding_log`: leave it out, or choose fixed_window";
        let refill = "burst takes 1/1d longer than 31 days to refill";
        let table = [
            (json!({"burst": 5}), burst),
            (json!({"burst": 5, "algorithm": "fixed_window"}), "burst is not supported by `fixed_window`"),
            (json!({"burst": 5, "algorithm": "sliding_window"}), "burst is not supported by `sliding_window`"),
            (json!({"offset_ms": 5}), offset),
            (json!({"offset_ms": 5, "algorithm": "gcra"}), "offset_ms is not supported by `gcra`"),
            (json!({"offset_ms": 60_000, "algorithm": "fixed_window"}), "must lie below the window, 60000 ms"),
            (json!({"algorithm": "token_bucket", "max_requests": 1, "window_ms": day, "burst": 32}), refill),
            (json!({"algorithm": "gcra", "max_requests": 1, "window_ms": day, "burst": 31}), refill),
            (
                json!({"algorithm": "sliding_window", "window_ms": 999}),
                "window_ms is 999: sliding_window counts in 256",
            ),
            (json!({"scope": "account", "max_requests": 10_001}), "keeps one log for each account, of at most 10000"),
            (json!({"scope": "reference", "max_requests": 10_001}), "keeps one log for each reference"),
            (json!({"algorithm": "concurrency"}), "window_ms is not supported by `concurrency`"),
            (json!({"algorithm": "concurrency", "window_ms": 0}), "window_ms is not supported by `concurrency`"),
            (json!({"algorithm": "concurrency", "window_ms": null, "burst": 5}), "burst is not supported by"),
            (json!({"algorithm": "concurrency", "window_ms": null, "offset_ms": 5}), "offset_ms is not supported by"),
            (json!({"algorithm": "concurrency", "window_ms": null, "max_requests": 1_000_001}), "max_requests"),
            (json!({"window_ms": null}), "window_ms is missing: write how long a window is"),
        ];
        for (change, problem) in table {
            let problems = beside(&change).unwrap_err();
            let named = problems.len() == 1 && problems[0].starts_with("limit `this`: ");
            assert!(named && problems[0].contains(problem), "{change}: {problems:#?}");
        }
    }

    /// No combination of limits leaves a provider unlimited.
    #[test]
    fn row_without_charge_limit_is_rejected() {
        let only = |change: Value| {
            let mut limit = json!({"name": "all", "max_requests": 5, "window_ms": 1000});
            limit.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            with(json!({"limit": [limit]})).validate(1).map_err(|bad| bad.problems)
        };
        for change in [
            json!({"shadow": true}),
            json!({"scope": "account"}),
            json!({"scope": "reference"}),
            json!({"applies_to": "lookup"}),
        ] {
            let problems = only(change.clone()).unwrap_err();
            assert!(
                problems.len() == 1 && problems[0].contains("add one of scope `provider`"),
                "{change}: {problems:?}"
            );
        }
        assert!(only(json!({"applies_to": "charge"})).is_ok());
        // A limit that cannot be read is the only problem.
        let problems = only(json!({"algorithm": "guess"})).unwrap_err();
        assert!(problems.len() == 1 && problems[0].contains("algorithm is `guess`"), "{problems:?}");
        let disabled = beside(&json!({"enabled": true, "scope": "account"}));
        assert!(disabled.is_ok(), "{disabled:?}");
    }
}
