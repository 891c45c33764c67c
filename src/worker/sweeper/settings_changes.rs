//! Settings changes that the sweeper applies to jobs in the ledger: changed limits wake jobs, and flows get new weights.
//!
//! Jobs that a limit delayed wait for as long as the limit said then. The sweeper does not compute what a change allows:
//! the jobs request permits again, and the gate decides. Other changes of a row wake no job, because they could wake
//! hundreds of thousands. Of a change before the worker started only the time is known.
//!
//! A new flow has the weight that its account has at that moment. So only a change needs a sweep, and while nothing
//! changes, none costs anything.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{BATCH, RoundRobin, SWEEP_INTERVAL, SweepError};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::ledger::upkeep::{WaitCause, WakeFilter};
use crate::worker::WorkerContext;
use crate::worker::lane_control::LaneControl;
use crate::worker::quotas::quota_specs;
use crate::worker::settings_sync::LoadedSettings;

/// A job that was active for a moment during the first sweep, because it was due early, is found by the second. So is
/// a flow that a batch has inserted after the first, and that began before the change.
const SWEEPS_NEEDED: u32 = 2;

/// Changes of settings that sweeps have to apply.
#[derive(Default)]
pub struct SettingsChanges {
    pub limits: LimitChanges,
    pub weights: WeightChanges,
}

/// The limits of each lane when this sweeper last woke the jobs that they delayed.
#[derive(Debug, Default)]
pub struct LimitChanges {
    /// Version of the last settings.
    version: i64,
    lanes: BTreeMap<(ProviderName, WaitCause), LimitChange>,
}

#[derive(Debug)]
struct LimitChange {
    spec: Arc<QuotaSpec>,
    seen_at: Instant,
    /// `false`: this sweeper has just started, and the limits may have changed long ago.
    is_observed: bool,
    pauses_cleared: bool,
    /// Sweeps that found no further job to wake.
    finished_sweeps: u32,
}

/// Whether the newer of two specs allows no waiting job more than before.
fn is_unchanged(by: WaitCause, before: &QuotaSpec, spec: &QuotaSpec) -> bool {
    match by {
        WaitCause::Limit => before.has_same_allowance(spec),
        WaitCause::RetryAfter => before.resumed_at == spec.resumed_at,
    }
}

impl LimitChanges {
    /// Records the current limits. Limits that are new to this sweeper may have changed before it started.
    pub fn update(&mut self, known: &LoadedSettings, now: Instant) {
        if known.version == self.version {
            return;
        }
        self.version = known.version;
        self.lanes.retain(|(lane, _), _| known.providers.contains_key(lane));
        for quota in quota_specs(known) {
            // While a quota has an invalid row, its former limits apply.
            let Some(spec) = quota.spec.map(Arc::new) else { continue };
            for row in quota.rows {
                for by in [WaitCause::Limit, WaitCause::RetryAfter] {
                    let key = (row.name.clone(), by);
                    let before = self.lanes.get(&key);
                    if before.is_none_or(|change| !is_unchanged(by, &change.spec, &spec)) {
                        let (spec, was_seen) = (Arc::clone(&spec), before.is_some());
                        // The pauses of a lane that has just started are not older than its limits.
                        let change = LimitChange {
                            spec,
                            seen_at: now,
                            is_observed: was_seen,
                            pauses_cleared: !was_seen,
                            finished_sweeps: 0,
                        };
                        self.lanes.insert(key, change);
                    }
                }
            }
        }
    }

    /// Ends the lanes' pauses a second time, after the change has propagated: until then a gate may have refused a job
    /// by the former limits.
    pub fn clear_pauses(
        &mut self,
        lanes: &BTreeMap<ProviderName, Arc<LaneControl>>,
        propagation_time: Duration,
        now: Instant,
    ) {
        let propagated = |change: &&mut LimitChange| {
            !change.pauses_cleared && now.saturating_duration_since(change.seen_at) >= propagation_time
        };
        for ((lane, by), change) in &mut self.lanes {
            if let Some(change) = Some(change).filter(propagated) {
                change.pauses_cleared = true;
                lanes.get(lane).inspect(|pauses| match by {
                    WaitCause::Limit => pauses.clear_limit_pause(),
                    WaitCause::RetryAfter => pauses.clear_provider_pause(),
                });
            }
        }
    }

    /// The lanes whose limits have changed, and how long ago. A lane is included once every worker knows the change;
    /// before that, the former limits could still refuse its jobs.
    fn due(&self, known: &LoadedSettings, propagation_time: Duration, now: Instant) -> Vec<DueLane> {
        let flows = |lane: &ProviderName| known.providers.get(lane).is_some_and(|row| row.enabled && !row.paused);
        let due = |((lane, by), change): (&(ProviderName, WaitCause), &LimitChange)| {
            let ago = now.saturating_duration_since(change.seen_at);
            let is_due = change.finished_sweeps < SWEEPS_NEEDED && ago >= propagation_time && flows(lane);
            is_due.then(|| DueLane {
                lane: lane.clone(),
                waits_for: *by,
                changed_ago: change.is_observed.then_some(ago),
            })
        };
        self.lanes.iter().filter_map(due).collect()
    }

    fn record_sweep(&mut self, due: &DueLane) {
        if let Some(change) = self.lanes.get_mut(&(due.lane.clone(), due.waits_for)) {
            change.finished_sweeps += 1;
        }
    }
}

/// A lane whose waiting jobs are to be woken.
#[derive(Clone, Debug)]
struct DueLane {
    lane: ProviderName,
    waits_for: WaitCause,
    /// `None`: the change was before this sweeper started.
    changed_ago: Option<Duration>,
}

/// Time after which every worker knows a change and applies it.
pub fn propagation_time(worker: &WorkerContext) -> Duration {
    worker.options.settings_poll * 3
}

/// Wakes those jobs, batch after batch; the next sweep continues where this one ends.
pub async fn wake_jobs(
    worker: &WorkerContext,
    changes: &mut LimitChanges,
    known: &LoadedSettings,
) -> Result<(), SweepError> {
    let propagation_time = propagation_time(worker);
    let (mut result, mut woken) = (Ok(()), BTreeMap::<ProviderName, u32>::new());
    let mut lanes = RoundRobin::new(worker, changes.due(known, propagation_time, Instant::now()));
    while let Some((due, batches)) = lanes.next().await {
        let DueLane { lane, waits_for: by, changed_ago } = due.clone();
        if by == WaitCause::Limit {
            // The lanes' dispatchers see it within a second. A flow that is still at its limit is blocked again by its
            // first jobs.
            let unblocked = worker.backends.ledger.unblock_flows(&lane).await;
            result = result.and(unblocked.map(drop).map_err(SweepError::Ledger));
        }
        // Twice the time: a job refused by the new limits may be woken once more, one refused by the former must be.
        let which = WakeFilter {
            changed_ago,
            cause: by,
            propagation_time: propagation_time * 2,
            due_within: SWEEP_INTERVAL,
            at_most: BATCH,
        };
        match worker.backends.ledger.wake_waiting(&lane, &which).await {
            Ok(batch) => {
                *woken.entry(lane).or_default() += batch;
                if batch < BATCH {
                    changes.record_sweep(&due);
                }
                lanes.requeue(due, batches, batch);
            }
            // An error of one lane holds up no other.
            Err(error) => result = result.and(Err(SweepError::Ledger(error))),
        }
    }
    for (lane, jobs) in woken.iter().filter(|(_, jobs)| **jobs > 0) {
        tracing::info!(provider = %lane, jobs, "limits changed or a provider pause was lifted; waking waiting jobs");
    }
    result
}

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
pub async fn sync_weights(
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
    use super::*;
    use crate::domain::provider::Provider;
    use crate::domain::wait_reason::{Wait, WaitReason};
    use crate::fleet::report::{LaneState, PauseCause};
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    const PROPAGATION_TIME: Duration = Duration::from_secs(3);

    fn known(version: i64, change: impl Fn(&mut ProviderRow)) -> LoadedSettings {
        let limit = LimitRow { name: "all".to_owned(), max_requests: 5, window_ms: 1_000, ..LimitRow::default() };
        let row = |name: &str| {
            let mut row = ProviderRow {
                name: name.to_owned(),
                quota: Some("shared".to_owned()),
                url: "https://x.test/".to_owned(),
                limits: vec![limit.clone()],
                ..ProviderRow::default()
            };
            if name == "acme" {
                change(&mut row);
            }
            let provider: Provider = row.validate(version).unwrap();
            (provider.name.clone(), Arc::new(provider))
        };
        LoadedSettings { version, providers: ["acme", "bolt"].map(row).into(), invalid_rows: Vec::new() }
    }

    #[test]
    fn unchanged_limits_wake_no_job() {
        let mut changes = LimitChanges::default();
        let begun = Instant::now();
        let mut due_after = |known: &LoadedSettings, after_s: u64| {
            let now = begun + Duration::from_secs(after_s);
            changes.update(known, now);
            let due = changes.due(known, PROPAGATION_TIME, now);
            due.iter().for_each(|due| changes.record_sweep(due));
            let describe = |DueLane { lane, waits_for: by, changed_ago }: &DueLane| match (by, changed_ago) {
                (WaitCause::Limit, Some(ago)) => Some(format!("{lane} {ago:?}")),
                (WaitCause::Limit, None) => Some(format!("{lane} once")),
                (WaitCause::RetryAfter, Some(ago)) => Some(format!("{lane} resumed {ago:?}")),
                // A lane that is new to the sweeper is woken for both causes; this one is shown by the limits.
                (WaitCause::RetryAfter, None) => None,
            };
            due.iter().filter_map(describe).collect::<Vec<_>>().join(", ")
        };
        let as_before = known(1, |_| {});
        // A sweeper that has just started does not know what changed before.
        assert_eq!(due_after(&as_before, 0), "");
        assert_eq!(due_after(&as_before, 2), "");
        assert_eq!(due_after(&as_before, 3), "acme once, bolt once");
        assert_eq!(due_after(&as_before, 5), "acme once, bolt once", "a second time, for jobs that were active");
        assert_eq!(due_after(&as_before, 9), "");
        let header = known(2, |row| (row.max_attempts, row.timeout_ms, row.send_budget_ms) = (3, 20_000, 250));
        assert_eq!(due_after(&header, 10) + &due_after(&header, 20), "");
        let raised = known(3, |row| row.limits[0].max_requests = 4);
        assert_eq!(due_after(&raised, 30), "");
        assert_eq!(due_after(&raised, 33), "acme 3s, bolt 3s", "both share it");
        assert_eq!(due_after(&raised, 38), "acme 8s, bolt 8s");
        // A paused lane is woken when it is resumed.
        let paused = known(4, |row| (row.limits[0].max_requests, row.paused) = (3, true));
        assert_eq!(due_after(&paused, 40) + &due_after(&paused, 43), "bolt 3s");
        let resumed = known(5, |row| row.limits[0].max_requests = 3);
        assert_eq!(due_after(&resumed, 50), "acme 10s, bolt 10s");
        // The lane's own row is unchanged, but it allows more because a stricter row has left the quota.
        let alone = known(6, |row| row.quota = None);
        assert_eq!(due_after(&alone, 70) + &due_after(&alone, 73), "acme 3s, bolt 3s");
        assert_eq!(due_after(&alone, 80), "acme 10s, bolt 10s");
        // A resume wakes jobs that a provider pause delayed, and none that waits for a limit.
        let lifted = known(7, |row| (row.quota, row.resumed_at) = (None, Some(1_800_000_000_000)));
        assert_eq!(due_after(&lifted, 90) + &due_after(&lifted, 93), "acme resumed 3s");
    }

    #[test]
    fn limit_pauses_clear_again_after_propagation() {
        let (mut changes, begun) = (LimitChanges::default(), Instant::now());
        let pauses = Arc::new(LaneControl::default());
        let lanes: BTreeMap<_, _> = [(ProviderName::new("acme").unwrap(), Arc::clone(&pauses))].into();
        let (before, raised) = (known(1, |_| {}), known(2, |row| row.limits[0].max_requests = 4));
        for (after, known, by, rests) in [
            (0, &before, PauseCause::Limit, true),
            (1, &before, PauseCause::Limit, true),
            (2, &raised, PauseCause::Limit, true),
            (3, &raised, PauseCause::Limit, false),
            (4, &raised, PauseCause::Limit, true),
            (5, &raised, PauseCause::Provider, true),
        ] {
            let now = begun + PROPAGATION_TIME * after;
            changes.update(known, now);
            pauses.pause_claims(Duration::from_secs(600), by, WaitReason::Retry.into());
            changes.clear_pauses(&lanes, PROPAGATION_TIME, now);
            assert_eq!(pauses.status().does == LaneState::Resting, rests, "{after:?}");
        }
        pauses.clear_limit_pause();
        assert_eq!(pauses.status().pause.map(|pause| pause.by), Some(PauseCause::Provider));
        // The longer pause for a limit hid the other one.
        let pauses = LaneControl::default();
        pauses.pause_claims(Duration::from_secs(3_600), PauseCause::Limit, Wait::for_limit("all"));
        pauses.pause_sending(Duration::from_secs(60), PauseCause::Setup, WaitReason::Misconfigured.into());
        pauses.clear_limit_pause();
        let until = pauses.charges_paused_until().unwrap();
        assert!(until <= Instant::now() + Duration::from_secs(60), "{until:?}");
    }

    fn known_lanes(lanes: &[(&str, i64)]) -> LoadedSettings {
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
            let due = changes.due(&known_lanes(lanes));
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
        let settings = known_lanes(&[("acme", 1)]);
        for _ in 0..4 {
            assert_eq!(changes.due(&settings).len(), 1);
        }
    }
}
