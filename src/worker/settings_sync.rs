//! The settings as this process knows them: polled by version, loaded when it moved, kept when they cannot be read. A hint
//! of the database brings the next look forward; without hints a change is only seen later, by the next poll.
//!
//! Refuses bad rows: a provider whose row cannot be meant keeps its last good one, or has no lane, and is named in the
//! log either way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::settings::{InvalidRow, Settings, SettingsHints, SettingsSnapshot};
use crate::worker::meter::Meter;

/// How often the settings version is looked at: half of what a change may take to be in force.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Good rows by name, at one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadedSettings {
    pub version: i64,
    pub providers: BTreeMap<ProviderName, Arc<Provider>>,
    pub invalid_rows: Vec<InvalidRow>,
}

impl LoadedSettings {
    /// What is known after a snapshot, given what was known before it.
    #[must_use]
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
}

impl LoadedSettings {
    /// Quotas whose limits are not known in full: a bad row without a last good one may hold some of them. One that is
    /// disabled holds none.
    #[must_use]
    pub fn quotas_with_unknown_limits(&self) -> BTreeSet<&str> {
        let unknown = |bad: &&InvalidRow| bad.enabled && !self.providers.contains_key(bad.provider.as_str());
        self.invalid_rows.iter().filter(unknown).map(|bad| bad.quota.as_str()).collect()
    }
}

/// Loads the settings once.
///
/// # Errors
/// As the ledger's.
pub async fn load(settings: &dyn Settings, before: &LoadedSettings) -> Result<LoadedSettings, LedgerError> {
    let known = before.with_snapshot(settings.load().await?);
    for bad in &known.invalid_rows {
        let kept = known.providers.keys().any(|name| name.as_str() == bad.provider);
        tracing::error!(provider = bad.provider, problems = ?bad.problems, last_good_row_kept = kept, "bad provider row");
    }
    Ok(known)
}

/// Tells the watch which settings version the limiter's store knows; cheap to clone, for every gate.
#[derive(Clone, Debug)]
pub struct StoreVersion(watch::Sender<i64>);

impl StoreVersion {
    /// The sender for gates, and what [`follow`] listens to.
    #[must_use]
    pub fn channel() -> (Self, watch::Receiver<i64>) {
        let (sender, receiver) = watch::channel(0);
        (Self(sender), receiver)
    }

    /// A store answered that it knows this version. A newer one than ours makes the watch look at once.
    pub fn observe(&self, version: i64) {
        self.0.send_if_modified(|highest| {
            let newer = version > *highest;
            *highest = version.max(*highest);
            newer
        });
    }
}

/// Looks at the version afresh and loads the settings if it moved. A database that is older than what it once said was
/// restored from a backup; its version is raised above everything that it said, so that its limits count again.
///
/// # Errors
/// As the ledger's.
pub async fn refresh(
    settings: &dyn Settings,
    before: &LoadedSettings,
    store: i64,
) -> Result<Option<LoadedSettings>, LedgerError> {
    let version = settings.version().await?;
    let heard = store.max(before.version);
    if version < heard {
        tracing::error!(
            database_version = version,
            known_version = heard,
            "the database is older than what it said before: was it restored from a backup? Its limits count from now \
             on, and what was sent since the backup is not in it. If this repeats, two databases share one limiter store: \
             give each its own limiter.prefix"
        );
        let raised = settings.raise_version(heard).await?;
        tracing::warn!(version = raised, "settings version raised");
    } else if version == before.version {
        return Ok(None);
    }
    load(settings, before).await.map(Some)
}

/// Passes hints on until `stop` fires. Those that come while a look is under way become one more look.
pub async fn listen(mut hints: Box<dyn SettingsHints>, hinted: Arc<Notify>, stop: CancellationToken) {
    while let Some(()) = stop.run_until_cancelled(hints.next()).await {
        hinted.notify_one();
    }
}

/// Follows the settings until `stop` fires. `store`: the highest version that a limiter's store has told. `hinted`: look
/// now, and do not wait for the next poll.
pub async fn poll(
    settings: Arc<dyn Settings>,
    poll: Duration,
    stop: CancellationToken,
    known: watch::Sender<Arc<LoadedSettings>>,
    mut store: watch::Receiver<i64>,
    hinted: Arc<Notify>,
    meter: Arc<Meter>,
) {
    let mut tick = interval(poll);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut away, mut gates) = (false, true);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            newer = store.changed(), if gates => gates = newer.is_ok(),
            () = hinted.notified() => {}
            () = stop.cancelled() => return,
        }
        let before = known.borrow().clone();
        // Taken before the database is asked: what the store knew by now, the database must know when it answers.
        let told = *store.borrow_and_update();
        match refresh(settings.as_ref(), &before, told).await {
            Ok(None) => away = false,
            Ok(Some(next)) => {
                away = false;
                tracing::info!(version = next.version, providers = next.providers.len(), "settings loaded");
                known.send_replace(Arc::new(next));
                meter.record_reload();
            }
            Err(error) => {
                meter.record_failed_reload();
                if !std::mem::replace(&mut away, true) {
                    tracing::warn!(%error, "settings cannot be read; the last ones stay in force");
                }
            }
        }
    }
}
