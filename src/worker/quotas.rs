//! One gate per quota: rows that name the same quota share its limits, its line and its permits.
//!
//! Refuses to keep a gate open whose quota's limits are not known in full, or that no row names any more.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::settings_sync::{LoadedSettings, StoreVersion};
use crate::domain::clock_attestation::ClockAttestation;
use crate::domain::permit_protocol::{CostByKind, PastUse};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, QuotaSpec, SubjectQuery};
use crate::ledger::{Ledger, RecentUses, StoredLeader};
use crate::limiter::gate::{Gate, GateContext};
use crate::limiter::{LeaderRow, LeaderRows, Limiter, RecentAttempts, SubjectUses};

mod accounts;
mod combined;

pub use combined::{QuotaRows, quota_spec, quota_specs};

/// Incarnations travel to the limiter's store in six bytes.
const INCARNATION_BITS: u32 = 48;

/// What new settings changed of open quotas.
#[derive(Debug, Default)]
pub struct ChangedQuotas {
    /// Those that allow something else than before.
    pub limits_changed: BTreeSet<ProviderName>,
    /// Those whose named waits an operator has lifted.
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
    /// Gates settle through it to their end, so that it ends after them.
    limiter_stop: CancellationToken,
    background: TaskTracker,
}

struct OpenGate {
    gate: Gate,
    spec: watch::Sender<Arc<QuotaSpec>>,
}

impl Quotas {
    /// No gates yet; the limiter is tended from now on. `store_version` hears of settings that are newer than ours.
    #[must_use]
    pub fn new(limiter: Arc<dyn Limiter>, ledger: Arc<dyn Ledger>, store_version: StoreVersion) -> Self {
        let (limiter_stop, background) = (CancellationToken::new(), TaskTracker::new());
        let (tended, stop) = (Arc::clone(&limiter), limiter_stop.clone());
        background.spawn(async move { tended.run_background(stop).await });
        Self {
            limiter,
            recent: Arc::new(LedgerHistory(ledger)),
            store_version,
            open: Arc::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            limiter_stop,
            background,
        }
    }

    /// Tells every open gate what its quota allows now, opens gates for new quotas and closes those that nobody names.
    pub fn apply_settings(&self, known: &LoadedSettings) -> ChangedQuotas {
        let (mut changed, mut named) = (ChangedQuotas::default(), BTreeSet::new());
        let specs = quota_specs(known);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for QuotaRows { quota, spec, .. } in specs {
            named.insert(quota);
            let Some(spec) = spec else {
                tracing::error!(%quota, "nothing is granted: a row of this quota cannot be meant, and its limits are unknown");
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
        // What they had in flight keeps its slots to its deadline.
        open.retain(|quota, _| named.contains(quota));
        changed
    }

    #[must_use]
    pub fn gate(&self, quota: &ProviderName) -> Option<Gate> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).get(quota).map(|open| open.gate.clone())
    }

    /// Settles what is answered and closes all gates.
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
            // The gate's last call goes through the limiter as well. By now another gate may be open for the quota.
            let open = open.lock().unwrap_or_else(PoisonError::into_inner);
            if !open.contains_key(&quota) {
                limiter.close_quota(&quota);
            }
        });
        OpenGate { gate, spec }
    }
}

/// The ledger as witness for a limiter that lost its state.
struct LedgerHistory(Arc<dyn Ledger>);

#[async_trait]
impl RecentAttempts for LedgerHistory {
    async fn recent_uses(
        &self,
        quota: &ProviderName,
        lookback: Lookback,
    ) -> Result<(Vec<PastUse>, CostByKind), String> {
        let uses = self.0.recent_uses(quota, lookback).await.map_err(|error| error.to_string())?;
        let ended = uses.ended.into_iter().map(|(age, cost)| PastUse { age, cost });
        Ok((ended.collect(), uses.open))
    }

    async fn recent_subject_uses(
        &self,
        quota: &ProviderName,
        asked: &SubjectQuery,
    ) -> Result<Vec<SubjectUses>, String> {
        let uses = self.0.recent_subject_uses(quota, asked).await.map_err(|error| error.to_string())?;
        let of = |(name, RecentUses { ended, open: in_flight }): (String, RecentUses)| {
            let ended = ended.into_iter().map(|(age, cost)| PastUse { age, cost }).collect();
            SubjectUses { name, ended, in_flight }
        };
        Ok(uses.into_iter().map(of).collect())
    }
}

/// The ledger as keeper of the rows that say who grants.
pub struct LedgerLeaderRows(pub Arc<dyn Ledger>);

impl From<StoredLeader> for LeaderRow {
    fn from(StoredLeader { holder, term, age, now, attestation: word }: StoredLeader) -> Self {
        Self { holder, term, age, now, attestation: word }
    }
}

#[async_trait]
impl LeaderRows for LedgerLeaderRows {
    async fn leader_rows(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, LeaderRow>, String> {
        let rows = self.0.stored_leaders(quotas).await.map_err(|error| error.to_string())?;
        Ok(rows.into_iter().map(|(quota, row)| (quota, row.into())).collect())
    }

    async fn take_over(&self, quota: &ProviderName, from: Option<&str>, to: &str) -> Result<LeaderRow, String> {
        self.0.take_leadership(quota, from, to).await.map(LeaderRow::from).map_err(|error| error.to_string())
    }

    async fn record_attestation(&self, quota: &ProviderName, term: i64, word: &ClockAttestation) -> Result<(), String> {
        self.0.record_clock_attestation(quota, term, word).await.map_err(|error| error.to_string())
    }
}
