//! One gate per quota: rows that name the same quota share its limits, its line and its permits.
//!
//! Refuses to keep a gate open whose quota's limits are not known in full, or that no row names any more.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::settings_watch::{Known, StoreVersion};
use crate::domain::clock_witness::Word;
use crate::domain::decision::{ByKind, PastUse};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, QuotaSpec, SubjectsAsked};
use crate::ledger::{Authority, Ledger, RecentUses};
use crate::limiter::gate::{Gate, GateParts};
use crate::limiter::{AuthorityRow, AuthorityRows, Limiter, RecentAttempts, UsesOf};

mod accounts;
mod combined;

pub use combined::{QuotaRows, quota_spec, quota_specs};

/// Incarnations travel to the limiter's store in six bytes.
const INCARNATION_BITS: u32 = 48;

/// What new settings changed of open quotas.
#[derive(Debug, Default)]
pub struct ChangedQuotas {
    /// Those that allow something else than before.
    pub allow_otherwise: BTreeSet<ProviderName>,
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
    tending: TaskTracker,
}

struct OpenGate {
    gate: Gate,
    spec: watch::Sender<Arc<QuotaSpec>>,
}

impl Quotas {
    /// No gates yet; the limiter is tended from now on. `store_version` hears of settings that are newer than ours.
    #[must_use]
    pub fn new(limiter: Arc<dyn Limiter>, ledger: Arc<dyn Ledger>, store_version: StoreVersion) -> Self {
        let (limiter_stop, tending) = (CancellationToken::new(), TaskTracker::new());
        let (tended, stop) = (Arc::clone(&limiter), limiter_stop.clone());
        tending.spawn(async move { tended.tend(stop).await });
        Self {
            limiter,
            recent: Arc::new(Witness(ledger)),
            store_version,
            open: Arc::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            limiter_stop,
            tending,
        }
    }

    /// Tells every open gate what its quota allows now, opens gates for new quotas and closes those that nobody names.
    pub fn follow(&self, known: &Known) -> ChangedQuotas {
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
            self.limiter.opened(&spec);
            match open.get(quota) {
                Some(gate) => {
                    gate.spec.send_if_modified(|current| {
                        if !current.allows_as(&spec) {
                            changed.allow_otherwise.insert(quota.clone());
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
        self.tending.close();
        self.tending.wait().await;
    }

    fn open_gate(&self, spec: QuotaSpec) -> OpenGate {
        let quota = spec.quota.clone();
        let (spec, spec_rx) = watch::channel(Arc::new(spec));
        let store_version = self.store_version.clone();
        let (gate, task) = Gate::new(GateParts {
            limiter: Arc::clone(&self.limiter),
            recent: Arc::clone(&self.recent),
            spec: spec_rx,
            incarnation: rand::random::<u64>() >> (u64::BITS - INCARNATION_BITS),
            stop: self.stop.child_token(),
            newer: Arc::new(move |version| store_version.seen(version)),
        });
        let (open, limiter) = (Arc::clone(&self.open), Arc::clone(&self.limiter));
        self.tasks.spawn(async move {
            task.await;
            // The gate's last call goes through the limiter as well. By now another gate may be open for the quota.
            let open = open.lock().unwrap_or_else(PoisonError::into_inner);
            if !open.contains_key(&quota) {
                limiter.closed(&quota);
            }
        });
        OpenGate { gate, spec }
    }
}

/// The ledger as witness for a limiter that lost its state.
struct Witness(Arc<dyn Ledger>);

#[async_trait]
impl RecentAttempts for Witness {
    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<(Vec<PastUse>, ByKind), String> {
        let uses = self.0.recent_uses(quota, lookback).await.map_err(|error| error.to_string())?;
        let ended = uses.ended.into_iter().map(|(age, cost)| PastUse { age, cost });
        Ok((ended.collect(), uses.open))
    }

    async fn recent_uses_of(&self, quota: &ProviderName, asked: &SubjectsAsked) -> Result<Vec<UsesOf>, String> {
        let uses = self.0.recent_uses_of(quota, asked).await.map_err(|error| error.to_string())?;
        let of = |(name, RecentUses { ended, open }): (String, RecentUses)| {
            let ended = ended.into_iter().map(|(age, cost)| PastUse { age, cost }).collect();
            UsesOf { name, ended, open }
        };
        Ok(uses.into_iter().map(of).collect())
    }
}

/// The ledger as keeper of the rows that say who grants.
pub struct LedgerRows(pub Arc<dyn Ledger>);

impl From<Authority> for AuthorityRow {
    fn from(Authority { holder, term, age, now, word }: Authority) -> Self {
        Self { holder, term, age, now, word }
    }
}

#[async_trait]
impl AuthorityRows for LedgerRows {
    async fn authority(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, AuthorityRow>, String> {
        let rows = self.0.authority(quotas).await.map_err(|error| error.to_string())?;
        Ok(rows.into_iter().map(|(quota, row)| (quota, row.into())).collect())
    }

    async fn take(&self, quota: &ProviderName, from: Option<&str>, to: &str) -> Result<AuthorityRow, String> {
        self.0.take_authority(quota, from, to).await.map(AuthorityRow::from).map_err(|error| error.to_string())
    }

    async fn note_clock(&self, quota: &ProviderName, term: i64, word: &Word) -> Result<(), String> {
        self.0.note_clock(quota, term, word).await.map_err(|error| error.to_string())
    }
}
