//! Weights of flows: the sweeper sets them after each change of a lane's settings.
//!
//! A new flow has the weight that its account has at that moment. So only a change needs a sweep, and while nothing
//! changes, none costs anything.

use std::collections::BTreeMap;

use super::SweepError;
use crate::domain::provider::ProviderName;
use crate::worker::WorkerContext;
use crate::worker::settings_sync::LoadedSettings;

/// A batch that began before the change may insert a flow after the first sweep.
const SWEEPS_NEEDED: u32 = 2;

/// The lanes whose flows may have other weights than their accounts.
#[derive(Debug, Default)]
pub struct WeightChanges(BTreeMap<ProviderName, RowChange>);

#[derive(Debug)]
struct RowChange {
    /// Version of the lane's row.
    version: i64,
    finished_sweeps: u32,
}

impl WeightChanges {
    /// The lanes whose settings have changed. All of them are due when this sweeper has just started.
    fn due(&mut self, known: &LoadedSettings) -> Vec<ProviderName> {
        self.0.retain(|lane, _| known.providers.contains_key(lane));
        let mut due = Vec::new();
        for (lane, row) in &known.providers {
            let new = || RowChange { version: row.version, finished_sweeps: 0 };
            let change = self.0.entry(lane.clone()).or_insert_with(new);
            if change.version != row.version {
                *change = new();
            }
            if change.finished_sweeps < SWEEPS_NEEDED {
                due.push(lane.clone());
            }
        }
        due
    }

    fn record_sweep(&mut self, lane: &ProviderName) {
        if let Some(change) = self.0.get_mut(lane) {
            change.finished_sweeps += 1;
        }
    }
}

/// Sets the weights of the lanes whose settings have changed.
pub async fn sync(
    worker: &WorkerContext,
    changes: &mut WeightChanges,
    known: &LoadedSettings,
) -> Result<(), SweepError> {
    let due = changes.due(known);
    if due.is_empty() {
        return Ok(());
    }
    let with_flows = worker.backends.ledger.lanes_with_flows().await?;
    let mut result = Ok(());
    for lane in changes.due(known) {
        // A flow that comes later has the weight that its account has then.
        let synced = if with_flows.contains(&lane) { worker.backends.ledger.sync_weights(&lane).await } else { Ok(0) };
        match synced {
            Ok(flows) => {
                changes.record_sweep(&lane);
                if flows > 0 {
                    tracing::info!(provider = %lane, flows, "weights of accounts changed; their flows have them now");
                }
            }
            // An error of one lane holds up no other.
            Err(error) => result = result.and(Err(SweepError::Ledger(error))),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    fn known(lanes: &[(&str, i64)]) -> LoadedSettings {
        let row = |&(name, version): &(&str, i64)| {
            let limit = LimitRow { name: "all".to_owned(), max_requests: 5, window_ms: 1_000, ..LimitRow::default() };
            let (name, url) = (name.to_owned(), "https://x.test/".to_owned());
            let row =
                ProviderRow { name, url, limits: vec![limit], ..ProviderRow::default() }.validate(version).unwrap();
            (row.name.clone(), Arc::new(row))
        };
        LoadedSettings { version: 9, providers: lanes.iter().map(row).collect(), invalid_rows: Vec::new() }
    }

    #[test]
    fn only_a_changed_lane_is_due() {
        let mut changes = WeightChanges::default();
        let mut sweep = |lanes: &[(&str, i64)]| {
            let due = changes.due(&known(lanes));
            due.iter().for_each(|lane| changes.record_sweep(lane));
            due.iter().map(ProviderName::as_str).collect::<Vec<_>>().join(" ")
        };
        let both = [("acme", 1), ("bolt", 2)];
        assert_eq!([sweep(&both), sweep(&both), sweep(&both)], ["acme bolt", "acme bolt", ""]);
        let changed = [("acme", 1), ("bolt", 3)];
        assert_eq!([sweep(&changed), sweep(&changed), sweep(&changed)], ["bolt", "bolt", ""]);
        assert_eq!(sweep(&changed[..1]), "");
        assert_eq!(sweep(&changed), "bolt", "a row that comes back");
    }

    #[test]
    fn failed_sweep_is_repeated() {
        let mut changes = WeightChanges::default();
        let settings = known(&[("acme", 1)]);
        for _ in 0..4 {
            assert_eq!(changes.due(&settings).len(), 1);
        }
    }
}
