//! The settings as this process knows them: polled by version, loaded when it moved, kept when they cannot be read.
//!
//! Refuses bad rows: a provider whose row cannot be meant keeps its last good one, or has no lane, and is named in the
//! log either way.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::Worker;
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::settings::{BadRow, Settings, Snapshot};

/// How often the settings version is looked at: half of what a change may take to be in force.
pub const POLL: Duration = Duration::from_secs(1);

/// Good rows by name, at one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    pub version: i64,
    pub providers: BTreeMap<ProviderName, Arc<Provider>>,
    pub bad: Vec<BadRow>,
}

impl Known {
    /// What is known after a snapshot, given what was known before it.
    #[must_use]
    pub fn after(&self, snapshot: Snapshot) -> Self {
        let mut next = Self { version: snapshot.version, ..Self::default() };
        for row in snapshot.providers {
            match row {
                Ok(provider) => {
                    next.providers.insert(provider.name.clone(), Arc::new(provider));
                }
                Err(bad) => {
                    let last_good = self.providers.iter().find(|(name, _)| name.as_str() == bad.provider);
                    if let Some((name, provider)) = last_good {
                        let mut kept = Provider::clone(provider);
                        kept.paused |= bad.stopped;
                        next.providers.insert(name.clone(), Arc::new(kept));
                    }
                    next.bad.push(bad);
                }
            }
        }
        next
    }
}

impl Known {
    /// Whether a quota's limits are known in full: a bad row without a last good one may hold some of them.
    #[must_use]
    pub fn knows_limits_of(&self, quota: &ProviderName) -> bool {
        let unknown = |bad: &&BadRow| !self.providers.keys().any(|name| name.as_str() == bad.provider);
        !self.bad.iter().filter(unknown).any(|bad| bad.quota == quota.as_str())
    }
}

/// Loads the settings once.
///
/// # Errors
/// As the ledger's.
pub async fn load(settings: &dyn Settings, before: &Known) -> Result<Known, LedgerError> {
    let known = before.after(settings.load().await?);
    for bad in &known.bad {
        let kept = known.providers.keys().any(|name| name.as_str() == bad.provider);
        tracing::error!(provider = bad.provider, problems = ?bad.problems, last_good_row_kept = kept, "bad provider row");
    }
    Ok(known)
}

/// Follows the settings until the worker stops.
pub async fn follow(worker: Worker, known: watch::Sender<Arc<Known>>) {
    let mut tick = interval(worker.options.settings_poll);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut away = false;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = worker.stop.cancelled() => return,
        }
        let before = known.borrow().clone();
        let settings = worker.engines.settings.as_ref();
        let changed = async {
            if settings.version().await? == before.version {
                return Ok(None);
            }
            load(settings, &before).await.map(Some)
        };
        match changed.await {
            Ok(None) => away = false,
            Ok(Some(next)) => {
                away = false;
                tracing::info!(version = next.version, providers = next.providers.len(), "settings loaded");
                known.send_replace(Arc::new(next));
            }
            Err(error) if !away => {
                away = true;
                tracing::warn!(%error, "settings cannot be read; the last ones stay in force");
            }
            Err(_) => {}
        }
    }
}
