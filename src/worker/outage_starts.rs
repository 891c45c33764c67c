//! Starts and ends of outages: since when each backend has not answered this process, by its pings.

use std::collections::BTreeMap;

use crate::fleet::report::BackendStatus;

/// Since when each backend has not answered this process.
#[derive(Debug, Default)]
pub(super) struct OutageStarts(BTreeMap<String, i64>);

impl OutageStarts {
    /// Adds to each backend that does not answer when that began. Returns those that answer again, with that time.
    pub(super) fn record(
        &mut self,
        backends: &mut BTreeMap<String, BackendStatus>,
        at_ms: i64,
    ) -> BTreeMap<String, i64> {
        let ended = self.0.extract_if(.., |name, _| backends.get(name).is_none_or(|backend| backend.ok)).collect();
        for (name, backend) in backends.iter_mut().filter(|(_, backend)| !backend.ok) {
            backend.since_ms = Some(*self.0.entry(name.clone()).or_insert(at_ms));
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outage_lasts_from_the_first_ping_that_fails_to_one_that_succeeds() {
        let backend = |ok| [("limiter".to_owned(), BackendStatus { ok, ..BackendStatus::default() })].into();
        let mut outages = OutageStarts::default();
        let seen = [(true, 1), (false, 2), (false, 3), (true, 4), (false, 5)].map(|(ok, at_ms)| {
            let mut backends: BTreeMap<String, BackendStatus> = backend(ok);
            let ended = outages.record(&mut backends, at_ms);
            (backends["limiter"].since_ms, ended.get("limiter").copied())
        });
        assert_eq!(seen, [(None, None), (Some(2), None), (Some(2), None), (None, Some(2)), (Some(5), None)]);
    }
}
