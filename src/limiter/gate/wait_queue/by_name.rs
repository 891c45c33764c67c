//! An index of waiters by the names of their accounts and references, for the limits that count these on their own.
//!
//! The caller says by which of its names a waiter is added. A waiter may have both.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::{CountingScope, QueueKey};
use crate::domain::limit::Scope;

/// Waiters by the name of their account or reference.
type KeysByName = HashMap<Option<Arc<str>>, BTreeSet<QueueKey>>;

/// Waiters by their accounts and by their references.
#[derive(Debug, Default)]
pub(super) struct ByName {
    by_account: KeysByName,
    by_reference: KeysByName,
}

impl ByName {
    /// The index for a scope of limits, and the waiter's name in it.
    fn index<'a>(&mut self, of: Scope, scope: &'a CountingScope) -> Option<(&mut KeysByName, &'a Option<Arc<str>>)> {
        match of {
            Scope::Provider => None,
            Scope::Account => Some((&mut self.by_account, &scope.account)),
            Scope::Reference => Some((&mut self.by_reference, &scope.reference)),
        }
    }

    pub fn insert(&mut self, key: QueueKey, of: Scope, scope: &CountingScope) {
        if let Some((by_name, name)) = self.index(of, scope) {
            match by_name.get_mut(name) {
                Some(keys) => drop(keys.insert(key)),
                None => drop(by_name.insert(name.clone(), BTreeSet::from([key]))),
            }
        }
    }

    pub fn remove(&mut self, key: QueueKey, of: Scope, scope: &CountingScope) {
        if let Some((by_name, name)) = self.index(of, scope)
            && let Some(keys) = by_name.get_mut(name)
        {
            keys.remove(&key);
            if keys.is_empty() {
                by_name.remove(name);
            }
        }
    }

    /// Those of the same account or reference.
    pub fn related(&self, scope: &CountingScope) -> impl Iterator<Item = &BTreeSet<QueueKey>> {
        let by_account = self.by_account.get(&scope.account);
        by_account.into_iter().chain(self.by_reference.get(&scope.reference))
    }

    /// Those of the name that a limit of this scope counts.
    pub fn of_subject(&self, of: Scope, scope: &CountingScope) -> Option<&BTreeSet<QueueKey>> {
        match of {
            Scope::Provider => None,
            Scope::Account => self.by_account.get(&scope.account),
            Scope::Reference => self.by_reference.get(&scope.reference),
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        let keys = self.by_account.values().chain(self.by_reference.values());
        keys.inspect(|keys| assert!(!keys.is_empty(), "a name without waiters stays")).map(BTreeSet::len).sum()
    }
}

/// The scopes of limits by which a waiter has a name.
pub(super) fn named_scopes(scope: &CountingScope) -> impl Iterator<Item = Scope> + use<> {
    let account = scope.account.is_some().then_some(Scope::Account);
    account.into_iter().chain(scope.reference.is_some().then_some(Scope::Reference))
}
