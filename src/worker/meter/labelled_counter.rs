//! Counts by a word: one atomic each, found under a lock that only the first of its kind takes for writing.
//!
//! Refuses to forget a word: a count that vanished would look like one that began anew.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

#[derive(Debug)]
pub(super) struct LabelledCounter<K>(RwLock<BTreeMap<K, AtomicU64>>);

impl<K: Ord + Clone> LabelledCounter<K> {
    /// Shows these from the beginning, at zero.
    pub fn with_labels(words: impl IntoIterator<Item = K>) -> Self {
        Self(RwLock::new(words.into_iter().map(|word| (word, AtomicU64::new(0))).collect()))
    }

    pub fn increment(&self, word: K) {
        if let Some(count) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&word) {
            count.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let mut counts = self.0.write().unwrap_or_else(PoisonError::into_inner);
        counts.entry(word).or_default().fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self) -> Vec<(K, u64)> {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(word, count)| (word.clone(), count.load(Ordering::Relaxed))).collect()
    }
}
