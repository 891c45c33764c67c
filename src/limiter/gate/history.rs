//! Queries of the ledger for past uses that the limiter did not count, and their results on the way to the limiter.
//!
//! They concern new limits, accounts and references. One query runs at a time, and only for jobs that wait now, so its
//! cost depends on current use. It runs once the limiter's clock shows that no earlier permit can start any more. Its
//! result is for the state that needed it. See `docs/decisions/0012-history-of-uncounted-usage.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, pending};
use tokio::time::Instant;

use super::GateContext;
use super::wait_queue::CountingScope;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{BATCH_MAX, CounterSeeds, LimiterReply, Subject, SubjectHistory, UsageHistory};
use crate::domain::quota_spec::{QuotaSpec, SubjectQuery};
use crate::domain::time::Micros;
use crate::limiter::{RecentAttempts, SubjectUses};

/// Most accounts, and most references, in one query.
pub(super) const SUBJECTS_MAX: usize = 100;
/// Wait after a query that failed.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Longest time between two checks for a result.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Accounts or references by key, each with its name in the ledger.
type NamedSubjects = BTreeMap<String, (Subject, String)>;

/// The history that a reply shows to be needed and readable.
#[derive(Debug, Default)]
pub(super) struct HistoryNeeds {
    pub provider: bool,
    accounts: NamedSubjects,
    references: NamedSubjects,
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

/// The ledger's history for one state of the limiter.
#[derive(Debug)]
pub(super) struct HistoryAnswer {
    state_epoch: Micros,
    provider: Option<UsageHistory>,
    subjects: Vec<SubjectHistory>,
}

type HistoryResult = Result<HistoryAnswer, String>;

#[derive(Default)]
pub(super) struct HistoryLoader {
    query: Option<BoxFuture<'static, HistoryResult>>,
    loaded: Option<HistoryAnswer>,
    retry_at: Option<Instant>,
}

impl fmt::Debug for HistoryLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HistoryLoader").field("loaded", &self.loaded).finish_non_exhaustive()
    }
}

impl HistoryLoader {
    /// Until when a job waits for a history that can be read in this many microseconds.
    pub fn wait_until(&self, now: Instant, readable_in_us: u64) -> Instant {
        let readable_at = now + Duration::from_micros(readable_in_us);
        readable_at.max(self.retry_at.unwrap_or(now)).max(now + CHECK_INTERVAL)
    }

    /// Queries the ledger, unless a query runs already or has just failed.
    pub fn start_query(&mut self, needs: HistoryNeeds, spec: &QuotaSpec, reply: &LimiterReply, parts: &GateContext) {
        let now = Instant::now();
        let is_asked = self.query.is_some() || self.loaded.is_some() || self.retry_at.is_some_and(|at| at > now);
        if needs.is_empty() || is_asked {
            return;
        }
        let as_of = Micros(reply.now.0.saturating_sub(spec.start_delay_max_us()));
        let query = HistoryQuery { needs, spec: spec.clone(), state_epoch: reply.state_epoch, as_of };
        let recent = Arc::clone(&parts.recent);
        self.query = Some(Box::pin(async move { query.run(&*recent).await }));
    }

    /// The query's result, if there is one now.
    pub fn poll_result(&mut self) -> Option<HistoryResult> {
        let answer = self.query.as_mut()?.now_or_never()?;
        self.query = None;
        Some(answer)
    }

    /// Waits for the query's result, for ever if no query runs.
    pub async fn wait_for_result(&mut self) -> HistoryResult {
        let Some(query) = &mut self.query else { return pending().await };
        let answer = query.await;
        self.query = None;
        answer
    }

    /// Keeps a result for the next calls.
    ///
    /// # Errors
    /// Text for an operator: the query failed. It is repeated a little later.
    pub fn store_result(&mut self, answer: HistoryResult) -> Result<(), String> {
        match answer {
            Ok(answer) => self.loaded = Some(answer),
            Err(cause) => {
                self.retry_at = Some(Instant::now() + LEDGER_RETRY);
                return Err(cause);
            }
        }
        Ok(())
    }

    /// Discards query and result, because other settings may need another history.
    pub fn clear(&mut self) {
        (self.query, self.loaded) = (None, None);
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

struct HistoryQuery {
    needs: HistoryNeeds,
    spec: QuotaSpec,
    state_epoch: Micros,
    as_of: Micros,
}

impl HistoryQuery {
    async fn run(self, recent: &dyn RecentAttempts) -> HistoryResult {
        let mut answer = HistoryAnswer { state_epoch: self.state_epoch, provider: None, subjects: Vec::new() };
        if self.needs.provider {
            let lookback = self.spec.lookback();
            let (ended, in_flight) = recent.recent_uses(&self.spec.quota, lookback).await?;
            answer.provider = Some(UsageHistory { as_of: self.as_of, within: lookback.count_within, ended, in_flight });
        }
        for (scope, named) in [(Scope::Account, &self.needs.accounts), (Scope::Reference, &self.needs.references)] {
            answer.subjects.extend(self.query_scope(recent, scope, named).await?);
        }
        Ok(answer)
    }

    async fn query_scope(
        &self,
        recent: &dyn RecentAttempts,
        scope: Scope,
        named: &NamedSubjects,
    ) -> Result<Vec<SubjectHistory>, String> {
        let cells = named.values().flat_map(|(subject, _)| self.spec.subject_counters(subject));
        let Some(longest_us) = cells.filter(|cell| !cell.shadow).map(|cell| cell.window_us).max() else {
            return Ok(Vec::new());
        };
        let within = Duration::from_micros(longest_us);
        let names = named.values().map(|(_, name)| name.clone()).collect();
        let uses = recent.recent_subject_uses(&self.spec.quota, &SubjectQuery { scope, names, within }).await?;
        let mut by_name: BTreeMap<String, SubjectUses> =
            uses.into_iter().map(|uses| (uses.name.clone(), uses)).collect();
        let history = |(subject, name): &(Subject, String)| {
            // A subject without an entry in the ledger was not used.
            let SubjectUses { ended, in_flight, .. } = by_name.remove(name).unwrap_or_default();
            let history = UsageHistory { as_of: self.as_of, within, ended, in_flight };
            SubjectHistory { subject: subject.clone(), history }
        };
        Ok(named.values().map(history).collect())
    }
}
