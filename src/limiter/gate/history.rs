//! Questions to the ledger for limits, accounts and references whose past the limiter did not count, and the answers on
//! their way to it.
//!
//! One question at a time, for those who wait now; so it costs what is in use, not what there was. An answer is read when
//! the limiter's clock shows that no permit from before can begin any more, and is for the state that needed it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, pending};
use tokio::time::Instant;

use super::GateParts;
use super::line::Of;
use crate::domain::decision::{BATCH_MAX, History, Reply, Seeds, Subject, SubjectHistory};
use crate::domain::limit::Scope;
use crate::domain::quota_spec::{QuotaSpec, SubjectsAsked};
use crate::domain::time::Micros;
use crate::limiter::{RecentAttempts, UsesOf};

/// Most accounts, and most references, in one question.
pub(super) const SUBJECTS_MAX: usize = 100;
/// After an answer that could not be given.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How long one waits at a time for an answer.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Accounts or references, by key, with the names that the ledger knows them by.
type Named = BTreeMap<String, (Subject, String)>;

/// What a reply showed to be needed and readable.
#[derive(Debug, Default)]
pub(super) struct Needs {
    pub provider: bool,
    accounts: Named,
    references: Named,
}

impl Needs {
    /// Adds the account and the reference of a want.
    pub fn add(&mut self, subjects: &[Subject], of: &Of, reference: Option<&str>, spec: &QuotaSpec) {
        for subject in subjects {
            let (named, name) = match spec.scope_of(subject) {
                Scope::Provider => continue,
                Scope::Account => (&mut self.accounts, of.account.as_deref()),
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

/// What the ledger told, for a state.
#[derive(Debug)]
pub(super) struct Told {
    born: Micros,
    provider: Option<History>,
    subjects: Vec<SubjectHistory>,
}

type Answer = Result<Told, String>;

#[derive(Default)]
pub(super) struct Histories {
    asked: Option<BoxFuture<'static, Answer>>,
    told: Option<Told>,
    not_before: Option<Instant>,
}

impl fmt::Debug for Histories {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Histories").field("told", &self.told).finish_non_exhaustive()
    }
}

impl Histories {
    /// Until when one waits that needs a history which can be read so soon.
    pub fn wait_until(&self, now: Instant, readable_in_us: u64) -> Instant {
        let readable_at = now + Duration::from_micros(readable_in_us);
        readable_at.max(self.not_before.unwrap_or(now)).max(now + LOOK_AGAIN)
    }

    /// Asks the ledger, unless it is asked already or could not answer a moment ago.
    pub fn ask(&mut self, needs: Needs, spec: &QuotaSpec, reply: &Reply, parts: &GateParts) {
        let now = Instant::now();
        let is_asked = self.asked.is_some() || self.told.is_some() || self.not_before.is_some_and(|at| at > now);
        if needs.is_empty() || is_asked {
            return;
        }
        let as_of = Micros(reply.now.0.saturating_sub(spec.in_hands_us()));
        let question = Question { needs, spec: spec.clone(), born: reply.born, as_of };
        let recent = Arc::clone(&parts.recent);
        self.asked = Some(Box::pin(async move { question.answered_by(&*recent).await }));
    }

    /// The answer, if it has come.
    pub fn ready(&mut self) -> Option<Answer> {
        let answer = self.asked.as_mut()?.now_or_never()?;
        self.asked = None;
        Some(answer)
    }

    /// Waits for the answer, for ever if nothing was asked.
    pub async fn answer(&mut self) -> Answer {
        let Some(asked) = &mut self.asked else { return pending().await };
        let answer = asked.await;
        self.asked = None;
        answer
    }

    /// Keeps an answer for the next calls.
    ///
    /// # Errors
    /// Text for a person: why there is none. It is asked for again a little later.
    pub fn keep(&mut self, answer: Answer) -> Result<(), String> {
        match answer {
            Ok(told) => self.told = Some(told),
            Err(cause) => {
                self.not_before = Some(Instant::now() + ASK_AGAIN);
                return Err(cause);
            }
        }
        Ok(())
    }

    /// Under other settings other things may be needed.
    pub fn forget(&mut self) {
        (self.asked, self.told) = (None, None);
    }

    pub fn has_told(&self) -> bool {
        self.told.is_some()
    }

    /// As much of what was told as one call can carry.
    pub fn next_seeds(&mut self) -> Option<Seeds> {
        let told = self.told.as_mut()?;
        let mut seeds = Seeds { born: told.born, provider: told.provider.take(), subjects: Vec::new() };
        while let Some(next) = told.subjects.pop() {
            if seeds.uses() > 0 && seeds.uses() + next.history.ended.len() > BATCH_MAX {
                told.subjects.push(next);
                break;
            }
            seeds.subjects.push(next);
        }
        self.told.take_if(|told| told.subjects.is_empty());
        Some(seeds)
    }
}

struct Question {
    needs: Needs,
    spec: QuotaSpec,
    born: Micros,
    as_of: Micros,
}

impl Question {
    async fn answered_by(self, recent: &dyn RecentAttempts) -> Answer {
        let mut told = Told { born: self.born, provider: None, subjects: Vec::new() };
        if self.needs.provider {
            let lookback = self.spec.lookback();
            let (ended, open) = recent.recent_uses(&self.spec.quota, lookback).await?;
            told.provider = Some(History { as_of: self.as_of, within: lookback.counted, ended, open });
        }
        for (scope, named) in [(Scope::Account, &self.needs.accounts), (Scope::Reference, &self.needs.references)] {
            told.subjects.extend(self.of_scope(recent, scope, named).await?);
        }
        Ok(told)
    }

    async fn of_scope(
        &self,
        recent: &dyn RecentAttempts,
        scope: Scope,
        named: &Named,
    ) -> Result<Vec<SubjectHistory>, String> {
        let cells = named.values().flat_map(|(subject, _)| self.spec.subject_cells(subject));
        let Some(longest_us) = cells.filter(|cell| !cell.shadow).map(|cell| cell.window_us).max() else {
            return Ok(Vec::new());
        };
        let within = Duration::from_micros(longest_us);
        let names = named.values().map(|(_, name)| name.clone()).collect();
        let uses = recent.recent_uses_of(&self.spec.quota, &SubjectsAsked { scope, names, within }).await?;
        let mut by_name: BTreeMap<String, UsesOf> = uses.into_iter().map(|of| (of.name.clone(), of)).collect();
        let history = |(subject, name): &(Subject, String)| {
            // One that the ledger has nothing of was not used.
            let UsesOf { ended, open, .. } = by_name.remove(name).unwrap_or_default();
            let history = History { as_of: self.as_of, within, ended, open };
            SubjectHistory { subject: subject.clone(), history }
        };
        Ok(named.values().map(history).collect())
    }
}
