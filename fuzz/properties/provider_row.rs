//! Provider rows and files: a valid row is within its bounds, and no value computed from it overflows.

use std::time::Duration;

use sluicegate::domain::limit::{Limit, MAX_REQUESTS, MAX_WINDOW};
use sluicegate::domain::provider::Provider;
use sluicegate::ledger::provider_row::{ProviderRow, parse_provider_file};
use sluicegate::worker::lane::prefetch;

/// Input: a row as JSON if it begins with a brace, otherwise a provider file.
pub fn holds(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if !text.starts_with('{') {
        // Every problem is a readable line.
        return match parse_provider_file(text) {
            Ok(rows) => rows.iter().for_each(row),
            Err(problems) => assert!(!problems.is_empty()),
        };
    }
    if let Ok(read) = serde_json::from_str::<ProviderRow>(text) {
        let written = serde_json::to_string(&read).unwrap();
        assert!(serde_json::from_str::<ProviderRow>(&written).is_ok(), "{written}");
        row(&read);
    }
}

fn row(row: &ProviderRow) {
    match row.validate(7) {
        Ok(provider) => bounded(&provider),
        Err(bad) => assert!(!bad.problems.is_empty() && bad.provider == row.name),
    }
}

fn bounded(provider: &Provider) {
    assert!(provider.limits.iter().any(Limit::applies_to_every_charge), "unlimited");
    for limit in &provider.limits {
        assert!(limit.rate.max_requests() <= MAX_REQUESTS && limit.capacity() <= MAX_REQUESTS + 1);
        assert!(!limit.rate.window().is_zero() && limit.rate.window() <= MAX_WINDOW);
    }
    assert!(!provider.timeout.is_zero() && !provider.send_budget.is_zero() && provider.workers > 0);
    assert!(provider.hold_max() <= Duration::from_secs(660) && provider.max_wait <= Duration::from_secs(60));
    assert!(provider.egress_per_second() >= 0.0 && prefetch(provider) > 0);
    for failed in [0, 1, 7, u32::MAX] {
        assert!(provider.backoff.delay(failed, 1.0) <= provider.backoff.max);
    }
    assert!(provider.headers.values().all(|value| !value.chars().any(char::is_control)));
    assert!(provider.statuses.keys().all(|status| (100..=599).contains(status)));
}
