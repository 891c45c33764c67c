//! The gates of this process, one per quota: rows that name the same quota share its limits, wait queue and permits.
//!
//! A gate is open only while all limits of its quota are known and some enabled row names the quota.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::settings_sync::{LoadedSettings, StoreVersion};
use crate::domain::clock_comparison::{LeaderRow, QuotaAttestation};
use crate::domain::permit_protocol::{CostByKind, PastUse};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, QuotaSpec, SubjectQuery};
use crate::ledger::RecentUses;
use crate::ledger::database::Database;
use crate::limiter::gate::{Gate, GateContext};
use crate::limiter::{LeaderRows, Limiter, RecentAttempts, SubjectUses};

mod combined;

pub use combined::{QuotaRows, quota_spec, quota_specs};

/// Incarnations are sent to the limiter's store in six bytes.
const INCARNATION_BITS: u32 = 48;

/// Changes of open quotas by new settings.
#[derive(Debug, Default)]
pub struct ChangedQuotas {
    /// Quotas whose limits allow something else than before.
    pub limits_changed: BTreeSet<ProviderName>,
    /// Quotas whose provider pause an operator has lifted.
    pub resumed: BTreeSet<ProviderName>,
}

/// The gates of a process, opened as quotas appear.
pub struct Quotas {
    limiter: Arc<dyn Limiter>,
    recent: Arc<dyn RecentAttempts>,
    store_version: StoreVersion,
    open: Arc<Mutex<HashMap<ProviderName, OpenGate>>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    /// Stops the limiter's background task; fires after the gates have released their permits through it.
    limiter_stop: CancellationToken,
    background: TaskTracker,
}

struct OpenGate {
    gate: Gate,
    spec: watch::Sender<Arc<QuotaSpec>>,
}

impl Quotas {
    /// Starts without gates, and runs the limiter's background task. `store_version` receives newer settings versions.
    pub fn new(limiter: Arc<dyn Limiter>, ledger: Database, store_version: StoreVersion) -> Self {
        let (limiter_stop, background) = (CancellationToken::new(), TaskTracker::new());
        let (background_limiter, stop) = (Arc::clone(&limiter), limiter_stop.clone());
        background.spawn(async move { background_limiter.run_background(stop).await });
        Self {
            limiter,
            recent: Arc::new(ledger),
            store_version,
            open: Arc::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            limiter_stop,
            background,
        }
    }

    /// Applies the settings: updates the spec of every open gate, opens gates for new quotas, and closes those without
    /// a row.
    pub fn apply_settings(&self, known: &LoadedSettings) -> ChangedQuotas {
        let (mut changed, mut named) = (ChangedQuotas::default(), BTreeSet::new());
        let specs = quota_specs(known);
        let mut open = self.open.lock();
        for QuotaRows { quota, spec, .. } in specs {
            named.insert(quota);
            let Some(spec) = spec else {
                tracing::error!(
                    %quota,
                    "no permits for this quota: one of its provider rows is invalid, so its limits are unknown"
                );
                open.remove(quota);
                continue;
            };
            self.limiter.open_quota(&spec);
            match open.get(quota) {
                Some(gate) => {
                    gate.spec.send_if_modified(|current| {
                        if !current.has_same_allowance(&spec) {
                            changed.limits_changed.insert(quota.clone());
                        }
                        if current.resumed_at != spec.resumed_at {
                            changed.resumed.insert(quota.clone());
                        }
                        let newer = **current != spec;
                        *current = Arc::new(spec);
                        newer
                    });
                }
                None => {
                    open.insert(quota.clone(), self.open_gate(spec));
                }
            }
        }
        // Requests in flight keep their slots until their deadline.
        open.retain(|quota, _| named.contains(quota));
        changed
    }

    pub fn gate(&self, quota: &ProviderName) -> Option<Gate> {
        self.open.lock().get(quota).map(|open| open.gate.clone())
    }

    /// Releases the permits of finished requests and closes all gates.
    pub async fn close(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.limiter_stop.cancel();
        self.background.close();
        self.background.wait().await;
    }

    fn open_gate(&self, spec: QuotaSpec) -> OpenGate {
        let quota = spec.quota.clone();
        let (spec, spec_rx) = watch::channel(Arc::new(spec));
        let store_version = self.store_version.clone();
        let (gate, task) = Gate::new(GateContext {
            limiter: Arc::clone(&self.limiter),
            recent: Arc::clone(&self.recent),
            spec: spec_rx,
            incarnation: rand::random::<u64>() >> (u64::BITS - INCARNATION_BITS),
            stop: self.stop.child_token(),
            on_newer_version: Arc::new(move |version| store_version.observe(version)),
        });
        let (open, limiter) = (Arc::clone(&self.open), Arc::clone(&self.limiter));
        self.tasks.spawn(async move {
            task.await;
            // The gate's last call goes through the limiter too. By now another gate may be open for the quota.
            let open = open.lock();
            if !open.contains_key(&quota) {
                limiter.close_quota(&quota);
            }
        });
        OpenGate { gate, spec }
    }
}

/// The ledger as source for rebuilding lost limiter state.
#[async_trait]
impl RecentAttempts for Database {
    async fn recent_uses(
        &self,
        quota: &ProviderName,
        lookback: Lookback,
    ) -> Result<(Vec<PastUse>, CostByKind), String> {
        let uses = Database::recent_uses(self, quota, lookback).await.map_err(|error| error.to_string())?;
        Ok((past_uses(uses.ended), uses.open))
    }

    async fn recent_subject_uses(
        &self,
        quota: &ProviderName,
        asked: &SubjectQuery,
    ) -> Result<Vec<SubjectUses>, String> {
        let uses = Database::recent_subject_uses(self, quota, asked).await.map_err(|error| error.to_string())?;
        let subject_uses = |(name, RecentUses { ended, open: in_flight }): (String, RecentUses)| SubjectUses {
            name,
            ended: past_uses(ended),
            in_flight,
        };
        Ok(uses.into_iter().map(subject_uses).collect())
    }
}

fn past_uses(ended: Vec<(Duration, CostByKind)>) -> Vec<PastUse> {
    ended.into_iter().map(|(age, cost)| PastUse { age, cost }).collect()
}

/// The ledger as store of the leader rows.
#[async_trait]
impl LeaderRows for Database {
    async fn leader_rows(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, LeaderRow>, String> {
        self.stored_leaders(quotas).await.map_err(|error| error.to_string())
    }

    async fn take_over(&self, quota: &ProviderName, from: Option<&str>, to: &str) -> Result<LeaderRow, String> {
        self.take_leadership(quota, from, to).await.map_err(|error| error.to_string())
    }

    async fn record_attestations(&self, attestations: &[QuotaAttestation]) -> Result<(), String> {
        self.record_clock_attestations(attestations).await.map_err(|error| error.to_string())
    }
}
