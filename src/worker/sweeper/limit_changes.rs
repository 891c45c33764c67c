//! Jobs that a limit has put down, for as long as it was then, and whose limits have changed since.
//!
//! Refuses to reckon what a change allows: who was refused before it is asked for again, and the gate answers. Refuses to do
//! so for any other change of a row that it sees, because it may bring hundreds of thousands of jobs back; of what was changed
//! before it began it knows when, and not what.

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

/// What the limits of each lane were when this sweeper last saw to the jobs that they had put down.
#[derive(Debug, Default)]
pub struct LimitChanges {
    /// Of the settings that were looked at last.
    version: i64,
    lanes: BTreeMap<(ProviderName, WaitCause), LimitChange>,
}

#[derive(Debug)]
struct LimitChange {
    spec: Arc<QuotaSpec>,
    seen_at: Instant,
    /// `false`: this sweeper has just begun, and the limits may have been changed long ago.
    is_observed: bool,
    pauses_cleared: bool,
    /// Sweeps that found nobody more to wake.
    finished_sweeps: u32,
}

/// Who was in hand for a moment during the first, a copy of its message having come early, is found by the second.
const SWEEPS_NEEDED: u32 = 2;

/// Whether nobody who waits for this could be let go on by the newer of two specs.
fn is_unchanged(by: WaitCause, before: &QuotaSpec, spec: &QuotaSpec) -> bool {
    match by {
        WaitCause::Limit => before.has_same_allowance(spec),
        WaitCause::RetryAfter => before.resumed_at == spec.resumed_at,
    }
}

impl LimitChanges {
    /// Takes note of the limits as they are. Those that were never seen may have changed while nobody looked.
    pub fn update(&mut self, known: &LoadedSettings, now: Instant) {
        if known.version == self.version {
            return;
        }
        self.version = known.version;
        self.lanes.retain(|(lane, _), _| known.providers.contains_key(lane));
        for quota in quota_specs(known) {
            // Until it can be meant, its former limits hold.
            let Some(spec) = quota.spec.map(Arc::new) else { continue };
            for row in quota.rows {
                for by in [WaitCause::Limit, WaitCause::RetryAfter] {
                    let key = (row.name.clone(), by);
                    let before = self.lanes.get(&key);
                    if before.is_none_or(|change| !is_unchanged(by, &change.spec, &spec)) {
                        let (spec, was_seen) = (Arc::clone(&spec), before.is_some());
                        // A lane that has just begun never went by others.
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

    /// Ends what the lanes of this worker rest for, once more: while the change came to the gates, one may have refused a job by
    /// the former limits.
    pub fn clear_pauses(&mut self, lanes: &BTreeMap<ProviderName, Arc<LaneControl>>, settles: Duration, now: Instant) {
        let settled = |change: &&mut LimitChange| {
            !change.pauses_cleared && now.saturating_duration_since(change.seen_at) >= settles
        };
        for ((lane, by), change) in &mut self.lanes {
            if let Some(change) = Some(change).filter(settled) {
                change.pauses_cleared = true;
                lanes.get(lane).inspect(|pauses| match by {
                    WaitCause::Limit => pauses.clear_limit_pause(),
                    WaitCause::RetryAfter => pauses.clear_provider_pause(),
                });
            }
        }
    }

    /// The lanes whose limits have changed, once every worker knows it (who asks earlier may be refused by the former ones),
    /// and how long ago they were seen to.
    fn due(&self, known: &LoadedSettings, settles: Duration, now: Instant) -> Vec<DueLane> {
        let flows = |lane: &ProviderName| known.providers.get(lane).is_some_and(|row| row.enabled && !row.paused);
        let due = |((lane, by), change): (&(ProviderName, WaitCause), &LimitChange)| {
            let ago = now.saturating_duration_since(change.seen_at);
            let is_due = change.finished_sweeps < SWEEPS_NEEDED && ago >= settles && flows(lane);
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

/// A lane whose waiting jobs are to be asked for again.
#[derive(Clone, Debug)]
struct DueLane {
    lane: ProviderName,
    waits_for: WaitCause,
    /// `None`: nobody saw the change.
    changed_ago: Option<Duration>,
}

/// After so long every worker knows of a change and goes by it.
pub fn propagation_time(worker: &WorkerContext) -> Duration {
    worker.options.settings_poll * 3
}

/// Ends the waits of those jobs, batch after batch; what this sweep does not come to, the next one does.
pub async fn wake_jobs(
    worker: &WorkerContext,
    changes: &mut LimitChanges,
    known: &LoadedSettings,
) -> Result<(), SweepError> {
    let settles = propagation_time(worker);
    let (mut first, mut woken) = (Ok(()), BTreeMap::<ProviderName, u32>::new());
    let mut turns = RoundRobin::new(worker, changes.due(known, settles, Instant::now()));
    while let Some((due, batches)) = turns.next().await {
        let DueLane { lane, waits_for: by, changed_ago } = due.clone();
        // Twice: one refused by the new limits may be asked for once more, one refused by the former must be.
        let which = WakeFilter {
            changed_ago,
            cause: by,
            propagation_time: settles * 2,
            due_within: SWEEP_INTERVAL,
            at_most: BATCH,
        };
        match worker.backends.upkeep.wake_waiting(&lane, &which).await {
            Ok(batch) => {
                *woken.entry(lane).or_default() += batch;
                if batch < BATCH {
                    changes.record_sweep(&due);
                }
                turns.requeue(due, batches, batch);
            }
            // The other lanes are looked at all the same.
            Err(error) => first = first.and(Err(SweepError::Ledger(error))),
        }
    }
    for (lane, jobs) in woken.iter().filter(|(_, jobs)| **jobs > 0) {
        tracing::info!(provider = %lane, jobs, "limits have changed, or a named wait was lifted; those that waited for it are asked for again");
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::provider::Provider;
    use crate::fleet::report::PauseCause;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};
    use crate::worker::lane_control::LaneStatus;

    const SETTLES: Duration = Duration::from_secs(3);

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
            let due = changes.due(known, SETTLES, now);
            due.iter().for_each(|due| changes.record_sweep(due));
            let told = |DueLane { lane, waits_for: by, changed_ago }: &DueLane| match (by, changed_ago) {
                (WaitCause::Limit, Some(ago)) => Some(format!("{lane} {ago:?}")),
                (WaitCause::Limit, None) => Some(format!("{lane} once")),
                (WaitCause::RetryAfter, Some(ago)) => Some(format!("{lane} resumed {ago:?}")),
                // What goes for the limits of one that was never seen goes for its named waits.
                (WaitCause::RetryAfter, None) => None,
            };
            due.iter().filter_map(told).collect::<Vec<_>>().join(", ")
        };
        let as_before = known(1, |_| {});
        // Whoever begins does not know what changed before.
        assert_eq!(due_after(&as_before, 0), "");
        assert_eq!(due_after(&as_before, 2), "");
        assert_eq!(due_after(&as_before, 3), "acme once, bolt once");
        assert_eq!(due_after(&as_before, 5), "acme once, bolt once", "a second time, for who was in hand");
        assert_eq!(due_after(&as_before, 9), "");
        let header = known(2, |row| (row.max_attempts, row.timeout_ms, row.send_budget_ms) = (3, 20_000, 250));
        assert_eq!(due_after(&header, 10) + &due_after(&header, 20), "");
        let raised = known(3, |row| row.limits[0].max_requests = 4);
        assert_eq!(due_after(&raised, 30), "");
        assert_eq!(due_after(&raised, 33), "acme 3s, bolt 3s", "both share it");
        assert_eq!(due_after(&raised, 38), "acme 8s, bolt 8s");
        // One that is paused is woken when it goes on.
        let paused = known(4, |row| (row.limits[0].max_requests, row.paused) = (3, true));
        assert_eq!(due_after(&paused, 40) + &due_after(&paused, 43), "bolt 3s");
        let resumed = known(5, |row| row.limits[0].max_requests = 3);
        assert_eq!(due_after(&resumed, 50), "acme 10s, bolt 10s");
        // Whose own row says what it said is allowed more, because a stricter one has left the quota.
        let alone = known(6, |row| row.quota = None);
        assert_eq!(due_after(&alone, 70) + &due_after(&alone, 73), "acme 3s, bolt 3s");
        assert_eq!(due_after(&alone, 80), "acme 10s, bolt 10s");
        // A resume wakes those that a named wait has put down, and nobody who waits for a limit.
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
            let now = begun + SETTLES * after;
            changes.update(known, now);
            pauses.pause_intake(Duration::from_secs(600), by, "why");
            changes.clear_pauses(&lanes, SETTLES, now);
            assert_eq!(matches!(pauses.state(), LaneStatus::IntakePaused(_)), rests, "{after:?}");
        }
        pauses.clear_limit_pause();
        assert!(matches!(pauses.state(), LaneStatus::IntakePaused(pause) if pause.cause == PauseCause::Provider));
        // While nothing is sent, nothing is taken: the longer rest for a limit hid that.
        let pauses = LaneControl::default();
        pauses.pause_intake(Duration::from_secs(3_600), PauseCause::Limit, "waits for limit all");
        pauses.pause_sending(Duration::from_secs(60), PauseCause::Setup, "credentials");
        pauses.clear_limit_pause();
        assert_eq!(pauses.watch_intake().borrow().as_ref().map(|pause| pause.cause), Some(PauseCause::Setup));
    }
}
