//! The acknowledged commits of one worker, as it remembers them: what proves that the database went back, which lanes are
//! held then, and how each lost payment is repaired.
//!
//! A database that lost its last commits is consistent and only older, so it cannot notice that itself. A worker can: what
//! it has committed can never be undone by later commits. See `docs/decisions/0054-the-database-went-back.md`.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::job::JobId;
use super::names::named_enum;
use super::outcome::FinalState;
use super::provider::ProviderName;

/// Time for which a commit is remembered.
pub const REMEMBERED_FOR: Duration = Duration::from_secs(15 * 60);
/// Most remembered payments.
pub const REMEMBERED_MAX: usize = 100_000;
/// From this many on, payments that are only recorded are not remembered: a flood of them must not displace payments that
/// were sent.
const RECORDED_MAX: usize = REMEMBERED_MAX / 2;
/// More claims than one payment can have. Fencing tokens of two records of one payment are further apart.
const CLAIMS_MAX: i64 = 1 << 31;

named_enum! {
    /// Why a lane is held.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum HoldCause {
        DatabaseWentBack = "database_went_back",
        /// Two servers take writes at once.
        TwoWritableServers = "two_writable_servers",
        /// An operator recovers a restored database.
        Recover = "recover",
    }
    /// The name in the database, in JSON and in messages.
    pub fn name(self);
}

impl HoldCause {
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| cause.name() == name)
    }
}

/// How far a payment was with a commit. `R` is what came of it, as it is written again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress<R> {
    /// Confirmed not charged: recorded, and nothing was sent.
    Recorded,
    /// A request may have charged.
    Sent,
    Ended(R),
}

/// Whether a payment is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Open,
    /// In review or dead: an operator's decision opens it again, with a higher fencing token.
    Decidable,
    Final,
}

impl End {
    pub fn of(state: FinalState) -> Self {
        match state {
            FinalState::Review | FinalState::Dead => Self::Decidable,
            FinalState::Succeeded | FinalState::Declined | FinalState::Expired | FinalState::Cancelled => Self::Final,
        }
    }
}

/// What is compared: a payment's newest commit that this worker knows, or its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub fence: i64,
    /// Number of the last request.
    pub number: u32,
    pub end: End,
}

impl Mark {
    /// Whether a ledger with this row lacks the commit; `None`: it has no such payment.
    pub fn is_missing_in(self, row: Option<Self>) -> bool {
        let Some(row) = row else { return true };
        let is_second_record = row.fence.saturating_sub(self.fence) > CLAIMS_MAX;
        let is_open_again = row.end == End::Open
            && match self.end {
                End::Open => false,
                End::Decidable => row.fence == self.fence,
                End::Final => true,
            };
        row.fence < self.fence || row.number < self.number || is_second_record || is_open_again
    }
}

/// A remembered commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit<R> {
    pub provider: ProviderName,
    pub mark: Mark,
    pub progress: Progress<R>,
    /// By the worker's clock.
    pub at: Duration,
}

/// What is done for a payment of which a commit is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair<'a, R> {
    /// The ledger has its end, or nothing was sent.
    Nothing,
    /// No row is left that could be repaired.
    ReportMissing,
    WriteAgain(&'a R),
    MakeUnknown,
}

/// The repair of a payment by what was remembered and by its row.
pub fn repair<R>(progress: &Progress<R>, row: Option<Mark>) -> Repair<'_, R> {
    match (row, progress) {
        (None, _) => Repair::ReportMissing,
        (Some(Mark { end: End::Decidable | End::Final, .. }), _) | (_, Progress::Recorded) => Repair::Nothing,
        (_, Progress::Ended(response)) => Repair::WriteAgain(response),
        (_, Progress::Sent) => Repair::MakeUnknown,
    }
}

/// Whether a lane is held once the database is proved to have gone back. `oldest_lost`: age of its oldest lost commit.
pub fn must_hold(idempotency_retention: Option<Duration>, oldest_lost: Option<Duration>) -> bool {
    // Other workers, some of them dead, may have lost commits of a lane of which this worker has lost none.
    idempotency_retention.is_none_or(|retention| oldest_lost.is_some_and(|age| age > retention / 2))
}

/// The newest commit of each payment.
#[derive(Debug)]
pub struct CommitMemory<R> {
    commits: HashMap<JobId, (u64, Commit<R>)>,
    /// By the order of their commits.
    order: BTreeMap<u64, JobId>,
    next: u64,
}

impl<R> Default for CommitMemory<R> {
    fn default() -> Self {
        Self { commits: HashMap::new(), order: BTreeMap::new(), next: 0 }
    }
}

impl<R> CommitMemory<R> {
    /// Remembers a commit; the former one of its payment is forgotten. False: the former one should have made this one
    /// impossible, and it stays as the proof.
    pub fn remember(&mut self, id: JobId, commit: Commit<R>) -> bool {
        if self.commits.get(&id).is_some_and(|(_, former)| former.mark.is_missing_in(Some(commit.mark))) {
            return false;
        }
        self.forget(&id);
        self.prune(commit.at);
        if !matches!(commit.progress, Progress::Recorded) || self.commits.len() < RECORDED_MAX {
            self.order.insert(self.next, id.clone());
            self.commits.insert(id, (self.next, commit));
            self.next += 1;
        }
        true
    }

    /// The newest commit of a payment.
    pub fn commit_of(&self, id: &JobId) -> Option<&Commit<R>> {
        self.commits.get(id).map(|(_, commit)| commit)
    }

    /// Records how far a payment is by a write that the ledger rejected. It was not committed, so the mark stays.
    pub fn record_late(&mut self, id: &JobId, fence: i64, progress: Progress<R>) {
        if let Some((_, commit)) = self.commits.get_mut(id).filter(|(_, commit)| commit.mark.fence == fence) {
            commit.progress = progress;
        }
    }

    /// The remembered payments, oldest commit first.
    pub fn marks(&mut self, now: Duration) -> Vec<(JobId, Mark)> {
        self.prune(now);
        let mark = |id: &JobId| Some((id.clone(), self.commits.get(id)?.1.mark));
        self.order.values().filter_map(mark).collect()
    }

    /// Takes the commit of a payment out.
    pub fn forget(&mut self, id: &JobId) -> Option<Commit<R>> {
        let (number, commit) = self.commits.remove(id)?;
        self.order.remove(&number);
        Some(commit)
    }

    /// Forgets commits that are too old, and the oldest ones if one more would be too many.
    fn prune(&mut self, now: Duration) {
        while let Some(oldest) = self.order.values().next() {
            let at = self.commits.get(oldest).map_or(Duration::ZERO, |(_, commit)| commit.at);
            if self.order.len() < REMEMBERED_MAX && now.saturating_sub(at) <= REMEMBERED_FOR {
                return;
            }
            let oldest = oldest.clone();
            self.forget(&oldest);
        }
    }
}

#[cfg(test)]
#[path = "commit_memory_tests.rs"]
mod tests;
