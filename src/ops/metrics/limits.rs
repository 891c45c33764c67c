//! The metrics of the limits: what each allows, and how much of it is used.
//!
//! The usage is that of the overview. Limits by account or reference have none.

use std::collections::BTreeMap;
use std::fmt;

use super::write::{Labels, MetricsWriter, float};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::LimitSpec;
use crate::limiter::LimitStatus;
use crate::worker::quotas::{QuotaRows, quota_specs};
use crate::worker::settings_sync::LoadedSettings;

/// One limit of a quota, for each provider of that quota.
struct LimitMetrics {
    provider: String,
    limit: LimitSpec,
    /// `None` if it counts accounts or references separately, or the store did not respond.
    used: Option<LimitStatus>,
}

fn limit_metrics(known: &LoadedSettings, used: &BTreeMap<ProviderName, Vec<LimitStatus>>) -> Vec<LimitMetrics> {
    let mut seen = Vec::new();
    for QuotaRows { quota, rows, spec } in quota_specs(known) {
        let Some(spec) = spec else { continue };
        let used = used.get(quota).map(Vec::as_slice).unwrap_or_default();
        for row in rows {
            seen.extend(spec.limits.iter().map(|limit| LimitMetrics {
                provider: row.name.to_string(),
                limit: limit.clone(),
                used: used.iter().find(|used| used.name == limit.name).cloned(),
            }));
        }
    }
    seen
}

/// Writes the capacity and the usage of each limit.
pub(super) fn write(
    writer: &mut MetricsWriter<'_>,
    known: &LoadedSettings,
    used: &BTreeMap<ProviderName, Vec<LimitStatus>>,
) -> Result<(), fmt::Error> {
    let limits = limit_metrics(known, used);
    // Without scope, kind of calls and shadow mode, the tightest limit could be one that applies to no charge.
    let each = |value: fn(&LimitSpec, Option<&LimitStatus>) -> Option<f64>| {
        let sample = move |LimitMetrics { provider, limit, used }: &LimitMetrics| {
            let labels = vec![
                ("provider", provider.clone()),
                ("limit", limit.name.clone()),
                ("scope", limit.scope.name().to_owned()),
                ("applies_to", limit.applies_to.name().to_owned()),
                ("shadow", limit.shadow.to_string()),
            ];
            Some((labels, value(limit, used.as_ref())?))
        };
        limits.iter().filter_map(sample).collect::<Vec<(Labels, f64)>>()
    };
    writer.gauge(
        "limit_requests",
        "Requests that the limit allows in its window or in flight, without the reserved share.",
        each(|limit, _| Some(f64::from(limit.max_requests))),
    )?;
    writer.gauge(
        "limit_window_seconds",
        "Length of the limit's window; absent for a limit of requests in flight.",
        each(|limit, _| (!limit.window.is_zero()).then_some(limit.window.as_secs_f64())),
    )?;
    writer.gauge(
        "limit_capacity_requests",
        "Requests that may count against the limit at once: its maximum, or the size of its bucket.",
        each(|limit, _| Some(f64::from(limit.cost_max()))),
    )?;
    writer.gauge(
        "limit_in_use",
        "Requests of all workers that count against the limit now; absent for limits by account or reference, and \
         while the limiter's store is unavailable.",
        each(|_, used| Some(float(used?.used))),
    )?;
    writer.gauge(
        "limit_retry_after_seconds",
        "Time until the limit lets the next request start, 0 if one may start now; absent for limits by account or reference, \
         for a limit that allows nothing, and while the limiter's store is unavailable.",
        each(|_, used| Some(used?.retry_after?.as_secs_f64())),
    )?;
    writer.gauge(
        "limit_reset_after_seconds",
        "Time until all of the limit is free again if nothing more is sent; absent for limits by account or reference, \
         and while the limiter's store is unavailable.",
        each(|limit, used| Some(used.filter(|_| !limit.window.is_zero())?.reset_after.as_secs_f64())),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::peek::tests::test_settings;

    #[test]
    fn limits_are_known_without_their_usage() {
        let limits = limit_metrics(&test_settings(), &BTreeMap::new());
        let limits: Vec<_> =
            limits.iter().map(|seen| (seen.provider.as_str(), seen.limit.name.as_str(), seen.used.is_some())).collect();
        assert_eq!(limits, [("plain", "all", false), ("scoped", "all", false), ("scoped", "each", false)]);
    }
}
