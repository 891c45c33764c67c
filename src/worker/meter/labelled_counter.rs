//! Counters by label: one atomic each, behind a lock that is taken for writing only when a label is new.
//!
//! A label is never removed: a counter that vanished would look like one that was reset.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

#[derive(Debug)]
pub(super) struct LabelledCounter<K>(RwLock<BTreeMap<K, AtomicU64>>);

impl<K: Ord + Clone> LabelledCounter<K> {
    /// Starts with these labels, at zero.
    pub fn with_labels(labels: impl IntoIterator<Item = K>) -> Self {
        Self(RwLock::new(labels.into_iter().map(|label| (label, AtomicU64::new(0))).collect()))
    }

    pub fn increment(&self, label: K) {
        if let Some(count) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&label) {
            count.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let mut counts = self.0.write().unwrap_or_else(PoisonError::into_inner);
        counts.entry(label).or_default().fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self) -> Vec<(K, u64)> {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(label, count)| (label.clone(), count.load(Ordering::Relaxed))).collect()
    }
}
