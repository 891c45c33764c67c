//! How long what waits for a provider takes to drain, by what its limits allow.
//!
//! Refuses to guess where nothing flows: paused, disabled, closed, or a row that cannot be meant. What others take from
//! the same quota, and what comes in meanwhile, is left out.

use crate::domain::provider::Provider;
use crate::ledger::provider_row::ProviderRow;

/// In milliseconds, rounded up; `None` where nothing flows.
pub(super) fn drained_in_ms(waiting: u64, row: &ProviderRow) -> Option<u64> {
    let provider = row.meant(0).ok().filter(|provider| provider.enabled && !provider.paused)?;
    let per_second = outflow_per_second(&provider);
    if per_second <= 0.0 {
        return None;
    }
    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    let ms = (waiting as f64 / per_second * 1_000.0).ceil();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an `as` cast saturates")]
    Some(ms as u64)
}

/// The tightest limit of every charge after what is kept in reserve, or the bucket's outflow if that is less.
fn outflow_per_second(provider: &Provider) -> f64 {
    let percent = 100 - u64::from(provider.reserve_percent.min(100));
    let rates = provider.limits.iter().filter(|limit| limit.holds_every_charge()).map(|limit| {
        let allowed = u64::from(limit.rate.max_requests()) * percent / 100;
        u32::try_from(allowed).map_or(0.0, f64::from) / limit.rate.window().as_secs_f64()
    });
    rates.chain(provider.leak_per_second).min_by(f64::total_cmp).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::provider_row::LimitRow;

    #[test]
    fn what_waits_drains_at_the_tightest_of_what_holds_it() {
        let limit = |name: &str, max_requests, window_ms| LimitRow {
            name: name.to_owned(),
            max_requests,
            window_ms,
            ..LimitRow::default()
        };
        let row = ProviderRow {
            name: "acme".to_owned(),
            url: "https://pay.example/".to_owned(),
            limits: vec![limit("second", 100, 1_000), limit("minute", 600, 60_000)],
            ..ProviderRow::default()
        };
        assert_eq!(drained_in_ms(0, &row), Some(0));
        assert_eq!(drained_in_ms(6_000, &row), Some(600_000));
        assert_eq!(drained_in_ms(1, &ProviderRow { leak_per_second: Some(3.0), ..row.clone() }), Some(334));
        assert_eq!(drained_in_ms(6_000, &ProviderRow { reserve_percent: 50, ..row.clone() }), Some(1_200_000));
        for nothing_flows in [
            ProviderRow { paused: true, ..row.clone() },
            ProviderRow { enabled: false, ..row.clone() },
            ProviderRow { url: String::new(), ..row.clone() },
            ProviderRow { limits: vec![limit("second", 100, 1_000), limit("shut", 0, 1_000)], ..row },
        ] {
            assert_eq!(drained_in_ms(6_000, &nothing_flows), None);
        }
    }
}
