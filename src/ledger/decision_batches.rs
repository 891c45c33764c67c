//! The decisions of operators about many payments: what a batch is, its digest, its rate, and the outcome of each payment.
//!
//! A preview names a set by its digest, and a batch begins only if the set has the same digest still. A worker applies
//! the batch, payment by payment. The outcome of each is written in the transaction of the payment's own change. So a
//! crash neither skips a payment nor decides twice.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use utoipa::ToSchema;

use super::operator::{Actor, Charge, CurrencyTotal, DatabaseTime, JobResolution, ResolutionRefusal};
use crate::domain::job::JobId;
use crate::domain::limit::{InvalidRate, Rate};
use crate::domain::provider::ProviderName;

/// Most ids that a selection may name.
pub const IDS_MAX: usize = 10_000;

/// What is decided about all payments of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BatchDecision {
    /// Payments in `review` were charged.
    Succeeded,
    /// Payments in `review` were not charged; do not retry.
    Declined,
    /// Payments in `review` are confirmed not charged: charge again with the same key and request.
    Resend,
    /// Payments that are `waiting` are not sent.
    Cancel,
    /// `dead` payments are tried again.
    Replay,
    /// `dead` payments become `cancelled`.
    Discard,
}

impl BatchDecision {
    pub const ALL: [Self; 6] =
        [Self::Succeeded, Self::Declined, Self::Resend, Self::Cancel, Self::Replay, Self::Discard];

    pub fn name(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Declined => "declined",
            Self::Resend => "resend",
            Self::Cancel => "cancel",
            Self::Replay => "replay",
            Self::Discard => "discard",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|decision| decision.name() == name)
    }

    /// The decision about each payment. Payments of a batch get no reference of their provider.
    pub fn resolution(self) -> JobResolution {
        match self {
            Self::Succeeded => JobResolution::Succeeded(Charge::default()),
            Self::Declined => JobResolution::Declined,
            Self::Resend => JobResolution::Resend,
            Self::Cancel => JobResolution::Cancel,
            Self::Replay => JobResolution::Replay,
            Self::Discard => JobResolution::Discard,
        }
    }

    /// Whether workers change the payments until their turn comes. Then the version of a payment does not matter.
    pub fn is_about_open_jobs(self) -> bool {
        self == Self::Cancel
    }

    /// Whether a payment can be refused at its turn for a reason that no preview checks.
    pub fn may_be_refused_later(self) -> bool {
        self.is_about_open_jobs() || self.resolution().needs_resend()
    }
}

/// One payment of a batch, as the operator has seen it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BatchMember {
    pub id: JobId,
    /// Its fencing token, which every decision and every claim raises; `None`: workers may change it meanwhile.
    pub seen_fence: Option<i64>,
}

/// The digest of a decision about a set of payments, in hexadecimal. Their order does not matter.
pub fn set_digest(decision: BatchDecision, members: &[BatchMember]) -> String {
    let mut sorted: Vec<&BatchMember> = members.iter().collect();
    sorted.sort_unstable();
    let mut hash = Sha256::new();
    hash.update(decision.name());
    for BatchMember { id, seen_fence } in sorted {
        // No id holds a separator.
        let version = seen_fence.map_or_else(|| "-".to_owned(), |fence| fence.to_string());
        hash.update(format!("\n{id}\t{version}"));
    }
    hex::encode(hash.finalize())
}

/// The digest of a set and of ids that the ledger does not know, which are cancelled ahead at a provider.
pub fn digest_with_unknown(set: &str, provider: &ProviderName, unknown: &[JobId]) -> String {
    let mut sorted: Vec<&JobId> = unknown.iter().collect();
    sorted.sort_unstable();
    let mut hash = Sha256::new();
    hash.update(format!("{set}\n{provider}"));
    for id in sorted {
        hash.update(format!("\n{id}"));
    }
    hex::encode(hash.finalize())
}

/// A payment of a selection, and whether the decision can be applied to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedJob {
    pub member: BatchMember,
    pub provider: String,
    pub amount: i64,
    pub currency: String,
    pub refusal: Option<ResolutionRefusal>,
}

/// How fast a batch is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRate(Rate);

/// Written where a batch names no rate.
pub const DEFAULT_RATE: &str = "50/1s";
/// The shortest and the longest time between two payments of a batch.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(1);
const LONGEST_INTERVAL: Duration = Duration::from_secs(3_600);

impl BatchRate {
    /// # Errors
    /// What is wrong, and how to write a rate.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rate: Rate = text.parse().map_err(|why: InvalidRate| why.to_string())?;
        if rate.max_requests() == 0 {
            return Err("is 0, so the batch would never end: write N/DURATION, like 50/1s".to_owned());
        }
        let interval = Self(rate).interval();
        if !(SHORTEST_INTERVAL..=LONGEST_INTERVAL).contains(&interval) {
            return Err(format!("is {rate}: write a rate between 1/1h and 1000/1s"));
        }
        Ok(Self(rate))
    }

    /// The time from one payment to the next.
    pub fn interval(self) -> Duration {
        self.0.window() / self.0.max_requests().max(1)
    }
}

impl std::fmt::Display for BatchRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A batch that is to begin.
#[derive(Clone, Debug)]
pub struct NewBatch {
    /// 32 hexadecimal digits, larger than those of all batches before.
    pub id: String,
    pub decision: BatchDecision,
    pub members: Vec<BatchMember>,
    pub sums: Vec<CurrencyTotal>,
    pub rate: BatchRate,
    pub by: Actor,
}

/// Whether a batch was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchStart {
    Started,
    /// A payment of the set has changed meanwhile. Nothing was written.
    Changed,
    /// This batch of the same set runs already. Nothing was written.
    Running(String),
}

/// Payments that a decision does not change, by the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusalCount {
    /// The reason's code, like `wrong_state`.
    pub refusal: String,
    /// The reason in words, for the example.
    pub text: String,
    pub jobs: u64,
    /// The id of one of them.
    pub example: String,
}

/// A batch as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct BatchSummary {
    pub id: String,
    #[schema(value_type = BatchDecision)]
    pub decision: String,
    /// `running`, `stopped` or `finished`.
    pub state: String,
    /// Payments of the batch.
    pub jobs: u64,
    pub applied: u64,
    /// By reason, most frequent first.
    pub refused: Vec<RefusalCount>,
    /// Payments without an outcome.
    pub remaining: u64,
    /// N/DURATION.
    pub rate: String,
    pub created_at: DatabaseTime,
    /// `user@host` of the operator, as the program says.
    pub person: String,
    /// The database's user, whatever the program says.
    pub database_user: String,
    pub because: String,
    /// When it finished or was stopped; `null`: it runs.
    pub finished_at: Option<DatabaseTime>,
    /// As `person` and `database_user`, of the stop.
    pub stopped_by: Option<String>,
    pub stopped_database_user: Option<String>,
    /// Number and sum of its payments by currency.
    pub sums: Vec<CurrencyTotal>,
    /// The worker that applies it; `null`: none.
    pub worker: Option<String>,
}

/// A page of batches, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct BatchPage {
    pub batches: Vec<BatchSummary>,
    /// The next page begins after this id; `null` on the last.
    pub next: Option<String>,
}

/// One payment of a batch, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct BatchJob {
    /// Its place in the batch, from 1.
    pub number: u64,
    pub id: String,
    /// `pending`, `applied` or `refused`.
    pub outcome: String,
    pub refusal: Option<String>,
    /// The refusal in words.
    pub text: Option<String>,
    pub at: Option<DatabaseTime>,
}

/// A page of a batch's payments, in the order of their turns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct BatchJobPage {
    pub jobs: Vec<BatchJob>,
    /// The next page begins after this number; `null` on the last.
    pub next: Option<u64>,
}

/// Filter of a list of a batch's payments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OutcomeFilter {
    Pending,
    Applied,
    Refused,
}

/// A batch that this worker has leased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeasedBatch {
    pub id: String,
    pub decision: BatchDecision,
    pub rate: BatchRate,
    /// Until the next payment may come.
    pub wait: Duration,
    pub person: String,
    pub database_user: String,
    pub because: String,
}

impl LeasedBatch {
    /// The author of each change, for the audit: the operator, and the batch beside the operator's reason.
    pub fn actor(&self) -> Actor {
        Actor {
            os_user: self.person.clone(),
            program: Some("sluicegate batch"),
            reason: Some(format!("{} (batch {} of {})", self.because, self.id, self.database_user)),
        }
    }
}

/// A payment whose turn comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchTurn {
    pub number: i64,
    pub member: BatchMember,
}

/// A turn of a batch, and the worker that has the lease.
#[derive(Clone, Copy, Debug)]
pub struct TurnAt<'a> {
    pub batch: &'a LeasedBatch,
    pub turn: &'a BatchTurn,
    pub worker: &'a str,
}

/// The result of one turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnResult {
    Applied,
    /// With the code of the refusal.
    Refused(&'static str),
    /// The payment has its outcome already. Nothing was changed.
    Done,
    /// The batch does not run any more, or another worker has it. Nothing was changed.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: &str, seen_fence: Option<i64>) -> BatchMember {
        BatchMember { id: JobId::new(id).unwrap(), seen_fence }
    }

    #[test]
    fn digest_covers_decision_ids_and_versions() {
        let set = [member("a", Some(1)), member("b", Some(2))];
        let digest = set_digest(BatchDecision::Resend, &set);
        assert_eq!(digest.len(), 64);
        assert_eq!(set_digest(BatchDecision::Resend, &[set[1].clone(), set[0].clone()]), digest, "any order");
        let others = [
            set_digest(BatchDecision::Declined, &set),
            set_digest(BatchDecision::Resend, &set[..1]),
            set_digest(BatchDecision::Resend, &[member("a", Some(1)), member("b", Some(3))]),
            set_digest(BatchDecision::Resend, &[member("a", Some(1)), member("b", None)]),
            set_digest(BatchDecision::Resend, &[member("a", Some(1)), member("c", Some(2))]),
            set_digest(BatchDecision::Resend, &[member("a", Some(12)), member("b", Some(2))]),
            set_digest(BatchDecision::Resend, &[]),
        ];
        for (index, other) in others.iter().enumerate() {
            assert!(*other != digest && !others[..index].contains(other), "{index}");
        }
    }

    #[test]
    fn digest_covers_unknown_ids_and_their_provider() {
        let [a, b] = ["a", "b"].map(|id| JobId::new(id).unwrap());
        let [acme, bolt] = ["acme", "bolt"].map(|name| ProviderName::new(name).unwrap());
        let digest = digest_with_unknown("set", &acme, &[a.clone(), b.clone()]);
        assert_eq!(digest_with_unknown("set", &acme, &[b.clone(), a.clone()]), digest, "any order");
        let others = [
            digest_with_unknown("other", &acme, &[a.clone(), b.clone()]),
            digest_with_unknown("set", &bolt, &[a.clone(), b.clone()]),
            digest_with_unknown("set", &acme, &[a]),
            digest_with_unknown("set", &acme, &[b]),
        ];
        for (index, other) in others.iter().enumerate() {
            assert!(*other != digest && !others[..index].contains(other), "{index}");
        }
    }

    #[test]
    fn rate_is_bounded_and_even() {
        for (text, ms, written) in
            [("50/1s", 20, "50/1s"), ("600/1m", 100, "600/1m"), ("1/h", 3_600_000, "1/1h"), ("1000/1s", 1, "1000/1s")]
        {
            let rate = BatchRate::parse(text).unwrap();
            assert_eq!((rate.interval(), rate.to_string()), (Duration::from_millis(ms), written.to_owned()));
        }
        for (text, words) in [
            ("0/1s", "would never end"),
            ("1001/1s", "between 1/1h and 1000/1s"),
            ("1/2h", "between 1/1h and 1000/1s"),
            ("50", "write N/DURATION"),
            ("5 at once", "write N/DURATION"),
            ("x/1s", "not a number"),
        ] {
            let why = BatchRate::parse(text).unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
        }
        assert!(BatchRate::parse(DEFAULT_RATE).is_ok());
    }

    #[test]
    fn decisions_are_known_by_their_names() {
        for decision in BatchDecision::ALL {
            assert_eq!(BatchDecision::from_name(decision.name()), Some(decision));
            assert_eq!(serde_json::to_value(decision).unwrap(), decision.name());
        }
        assert_eq!(BatchDecision::from_name("resent"), None);
    }
}
