//! The ledger's history for limits, accounts and references whose past uses the limiter did not count, as values.
//!
//! The core says what history it needs, and keeps a result until calls have carried it to the limiter. The query is the
//! driver's ([`super::history`]). See `docs/decisions/0012-history-of-uncounted-usage.md`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::wait_queue::CountingScope;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{
    BATCH_MAX, CostByKind, CounterSeeds, LimiterReply, PastUse, Subject, SubjectHistory, UsageHistory,
};
use crate::domain::quota_spec::{QuotaSpec, SubjectQuery};
use crate::domain::time::Micros;
use crate::limiter::SubjectUses;

/// Most accounts, and most references, in one query.
pub(super) const SUBJECTS_MAX: usize = 100;
/// Wait after a query that failed.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Longest time between two checks for a result.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Accounts or references by key, each with its name in the ledger.
pub(super) type NamedSubjects = BTreeMap<String, (Subject, String)>;

/// The history that a reply shows to be needed and readable.
#[derive(Debug, Default)]
pub(super) struct HistoryNeeds {
    pub provider: bool,
    pub accounts: NamedSubjects,
    pub references: NamedSubjects,
}

impl HistoryNeeds {
    /// Adds the account and the reference of a request.
    pub fn add(&mut self, subjects: &[Subject], counted: &CountingScope, reference: Option<&str>, spec: &QuotaSpec) {
        for subject in subjects {
            let (named, name) = match spec.scope_of(subject) {
                Scope::Provider => continue,
                Scope::Account => (&mut self.accounts, counted.account.as_deref()),
                Scope::Reference => (&mut self.references, reference),
            };
            if let Some(name) = name.filter(|_| named.len() < SUBJECTS_MAX) {
                named.entry(subject.key.clone()).or_insert_with(|| (subject.clone(), name.to_owned()));
            }
        }
    }

    fn is_empty(&self) -> bool {
        !self.provider && self.accounts.is_empty() && self.references.is_empty()
    }
}

/// A history to query from the ledger.
#[derive(Debug)]
pub(crate) struct HistoryRequest {
    pub(super) needs: HistoryNeeds,
    pub(super) spec: Arc<QuotaSpec>,
    pub(super) state_epoch: Micros,
    pub(super) as_of: Micros,
}

/// The result of the last query, until it has been sent.
#[derive(Debug, Default)]
pub(super) struct HistoryStock {
    loaded: Option<CounterSeeds>,
    retry_at: Option<Instant>,
}

impl HistoryRequest {
    /// The query about these accounts or references; `None`: no limit needs it.
    pub(super) fn subject_query(&self, scope: Scope) -> Option<SubjectQuery> {
        let named = self.named(scope);
        let cells = named.values().flat_map(|(subject, _)| self.spec.subject_counters(subject));
        let longest_us = cells.filter(|cell| !cell.shadow).map(|cell| cell.window_us).max()?;
        let names = named.values().map(|(_, name)| name.clone()).collect();
        Some(SubjectQuery { scope, names, within: Duration::from_micros(longest_us) })
    }

    fn named(&self, scope: Scope) -> &NamedSubjects {
        if scope == Scope::Account { &self.needs.accounts } else { &self.needs.references }
    }

    /// The history of the provider's limits.
    pub(super) fn provider_history(&self, ended: Vec<PastUse>, in_flight: CostByKind) -> UsageHistory {
        UsageHistory { as_of: self.as_of, within: self.spec.lookback().count_within, ended, in_flight }
    }

    /// The histories of accounts or references, from the ledger's answer to this query.
    pub(super) fn subject_histories(&self, query: &SubjectQuery, uses: Vec<SubjectUses>) -> Vec<SubjectHistory> {
        let mut by_name: BTreeMap<String, SubjectUses> =
            uses.into_iter().map(|uses| (uses.name.clone(), uses)).collect();
        let history = |(subject, name): &(Subject, String)| {
            // A subject without an entry in the ledger was not used.
            let SubjectUses { ended, in_flight, .. } = by_name.remove(name).unwrap_or_default();
            let history = UsageHistory { as_of: self.as_of, within: query.within, ended, in_flight };
            SubjectHistory { subject: subject.clone(), history }
        };
        self.named(query.scope).values().map(history).collect()
    }

    /// The answer of a ledger without any uses.
    pub fn answer_without_uses(&self) -> CounterSeeds {
        let queries = [Scope::Account, Scope::Reference].map(|scope| self.subject_query(scope));
        let subjects = queries.iter().flatten().flat_map(|query| self.subject_histories(query, Vec::new()));
        CounterSeeds {
            state_epoch: self.state_epoch,
            provider: self.needs.provider.then(|| self.provider_history(Vec::new(), CostByKind::default())),
            subjects: subjects.collect(),
        }
    }
}

impl HistoryStock {
    /// Until when a job waits for a history that can be read in this many microseconds.
    pub fn wait_until(&self, now: Instant, readable_in_us: u64) -> Instant {
        let readable_at = now + Duration::from_micros(readable_in_us);
        readable_at.max(self.retry_at.unwrap_or(now)).max(now + CHECK_INTERVAL)
    }

    /// The query of what is needed, unless a result is there or a query has just failed.
    pub fn request(
        &self,
        needs: HistoryNeeds,
        spec: &Arc<QuotaSpec>,
        reply: &LimiterReply,
        now: Instant,
    ) -> Option<HistoryRequest> {
        if needs.is_empty() || self.loaded.is_some() || self.retry_at.is_some_and(|at| at > now) {
            return None;
        }
        let as_of = Micros(reply.now.0.saturating_sub(spec.start_delay_max_us()));
        Some(HistoryRequest { needs, spec: Arc::clone(spec), state_epoch: reply.state_epoch, as_of })
    }

    /// Keeps a result for the next calls.
    ///
    /// # Errors
    /// Text for an operator: the query failed. It is repeated a little later.
    pub fn store_result(&mut self, answer: Result<CounterSeeds, String>, now: Instant) -> Result<(), String> {
        if answer.is_err() {
            self.retry_at = Some(now + LEDGER_RETRY);
        }
        self.loaded = Some(answer?);
        Ok(())
    }

    /// Discards the result, because other settings may need another history.
    pub fn clear(&mut self) {
        self.loaded = None;
    }

    pub fn has_loaded(&self) -> bool {
        self.loaded.is_some()
    }

    /// As much of the result as one call can carry.
    pub fn next_seeds(&mut self) -> Option<CounterSeeds> {
        let loaded = self.loaded.as_mut()?;
        let mut seeds =
            CounterSeeds { state_epoch: loaded.state_epoch, provider: loaded.provider.take(), subjects: Vec::new() };
        while let Some(next) = loaded.subjects.pop() {
            if seeds.past_use_count() > 0 && seeds.past_use_count() + next.history.ended.len() > BATCH_MAX {
                loaded.subjects.push(next);
                break;
            }
            seeds.subjects.push(next);
        }
        self.loaded.take_if(|loaded| loaded.subjects.is_empty());
        Some(seeds)
    }
}
