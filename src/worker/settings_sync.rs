//! The settings in this process: polled by version, loaded when the version changes, and kept while they cannot be
//! read.
//!
//! A hint of the database triggers a poll at once ([`super::change_hints`]); without hints a change is seen at the next
//! poll. The last valid row of a provider stays in force while its row is invalid. Without one the provider has no lane.
//! The log names it in both cases. See `docs/decisions/0025-versioned-settings.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::settings::{InvalidRow, SettingsSnapshot, unknown_limits};
use crate::worker::meter::Meter;

/// Time between two polls of the settings version: half of the time within which a change takes effect.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Valid rows by name, at one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadedSettings {
    pub version: i64,
    pub providers: BTreeMap<ProviderName, Arc<Provider>>,
    pub invalid_rows: Vec<InvalidRow>,
}

impl LoadedSettings {
    /// The settings after a snapshot, given those before it.
    pub fn with_snapshot(&self, snapshot: SettingsSnapshot) -> Self {
        let mut next = Self { version: snapshot.version, ..Self::default() };
        for row in snapshot.providers {
            match row {
                Ok(provider) => {
                    next.providers.insert(provider.name.clone(), Arc::new(provider));
                }
                Err(bad) => {
                    let last_good = self.providers.get_key_value(bad.provider.as_str());
                    if let Some((name, provider)) = last_good {
                        let mut kept = Provider::clone(provider);
                        kept.paused |= bad.paused || !bad.enabled;
                        next.providers.insert(name.clone(), Arc::new(kept));
                    }
                    next.invalid_rows.push(bad);
                }
            }
        }
        next
    }

    /// Quotas whose limits are not all known, because an enabled invalid row without a last valid one may hold some of
    /// them. A disabled row holds none.
    pub fn quotas_with_unknown_limits(&self) -> BTreeSet<&str> {
        let unknown = |bad: &&InvalidRow| bad.enabled && !self.providers.contains_key(bad.provider.as_str());
        self.invalid_rows.iter().filter(unknown).map(|bad| bad.quota.as_str()).collect()
    }

    /// Why limits of this quota are unknown, one line for each row that may hold some; empty if all are known.
    pub fn unknown_limits(&self, quota: &ProviderName) -> Vec<String> {
        unknown_limits(&self.invalid_rows, quota, |name| self.providers.contains_key(name))
    }
}

/// Loads the settings once.
pub async fn load(ledger: &Database, before: &LoadedSettings) -> Result<LoadedSettings, LedgerError> {
    let known = before.with_snapshot(ledger.load_settings().await?);
    for bad in &known.invalid_rows {
        let kept = known.providers.keys().any(|name| name.as_str() == bad.provider);
        tracing::error!(
            provider = bad.provider,
            problems = ?bad.problems,
            last_valid_row_kept = kept,
            "invalid provider row"
        );
    }
    Ok(known)
}

/// Passes the settings version that the limiter's store knows to the poll; cheap to clone, one for every gate.
#[derive(Clone, Debug)]
pub struct StoreVersion(watch::Sender<i64>);

impl StoreVersion {
    /// The sender for the gates, and the receiver for [`poll`].
    pub fn channel() -> (Self, watch::Receiver<i64>) {
        let (sender, receiver) = watch::channel(0);
        (Self(sender), receiver)
    }

    /// Records that a store knows this version. A newer one than ours triggers a poll at once.
    pub fn observe(&self, version: i64) {
        self.0.send_if_modified(|highest| {
            let newer = version > *highest;
            *highest = version.max(*highest);
            newer
        });
    }
}

/// Reads the version, and loads the settings if it changed. A database with an older version than before was restored
/// from a backup: its version is raised above the old one, so that its limits take effect again.
pub async fn refresh(
    ledger: &Database,
    before: &LoadedSettings,
    store: i64,
) -> Result<Option<LoadedSettings>, LedgerError> {
    let version = ledger.settings_version().await?;
    let newest = store.max(before.version);
    if version < newest {
        tracing::error!(
            database_version = version,
            known_version = newest,
            "the database is older than before: was it restored from a backup? Its limits take effect now, but what \
             was sent since the backup is not in it. If this repeats, two databases share one limiter store: give each \
             its own limiter.prefix"
        );
        let raised = ledger.raise_settings_version(newest).await?;
        tracing::warn!(version = raised, "settings version raised");
    } else if version == before.version {
        return Ok(None);
    }
    load(ledger, before).await.map(Some)
}

/// Polls the settings until `stop` fires. `store`: the highest version that a limiter's store reported. `hinted`
/// triggers a poll without waiting for the next tick.
pub async fn poll(
    ledger: Database,
    poll: Duration,
    stop: CancellationToken,
    known: watch::Sender<Arc<LoadedSettings>>,
    mut store: watch::Receiver<i64>,
    hinted: Arc<Notify>,
    meter: Arc<Meter>,
) {
    let mut tick = interval(poll);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut failing, mut gates) = (false, true);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            newer = store.changed(), if gates => gates = newer.is_ok(),
            () = hinted.notified() => {}
            () = stop.cancelled() => return,
        }
        let before = known.borrow().clone();
        // Read before the database is asked: a version that the store knows by now, the database must know when it
        // answers.
        let store_version = *store.borrow_and_update();
        match refresh(&ledger, &before, store_version).await {
            Ok(None) => failing = false,
            Ok(Some(next)) => {
                failing = false;
                tracing::info!(version = next.version, providers = next.providers.len(), "settings loaded");
                known.send_replace(Arc::new(next));
                meter.record_reload();
            }
            Err(error) => {
                meter.record_failed_reload();
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "settings cannot be read; the last ones stay in force");
                }
            }
        }
    }
}
