//! Why a job waits: a closed set of codes, the free text that some of them need, and the sentence made of both. And why
//! a gate grants no permit.
//!
//! The ledger stores the code, the limit and the text in a column each. The sentence is made here for people, and no
//! code reads it. So a sentence can be reworded without any effect on which jobs are woken or what `explain` says.

use std::fmt;

use super::names::named_enum;

named_enum! {
    /// Why a job waits. The code of each variant is stored in `jobs.wait_reason`, and is public and stable.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum WaitReason {
        /// Its message came before its time.
        NotBefore = "not_before",
        /// It got no worker slot at the egress rate in time.
        Egress = "egress",
        /// The limit of this name refused it.
        Limit(String) = "limit",
        /// Its cost exceeds what the limit of this name admits at once.
        CostExceedsLimit(String) = "cost_exceeds_limit",
        AccountBlocked = "account_blocked",
        /// The provider named a wait, for this job or another of its quota.
        ProviderPaused = "provider_paused",
        /// The response to its own request was a 429.
        Throttled = "throttled",
        LimiterCold = "limiter_cold",
        NeedsHistory = "needs_history",
        LimiterUnavailable = "limiter_unavailable",
        StaleSettings = "stale_settings",
        CircuitOpen = "circuit_open",
        /// Another job is the circuit breaker probe.
        CircuitProbing = "circuit_probing",
        /// An operator paused the provider.
        OperatorPaused = "operator_paused",
        /// The lane is held until an operator releases it, or until the ledger of another server is compared.
        LaneHeld = "lane_held",
        QuotaClosed = "quota_closed",
        Misconfigured = "misconfigured",
        RejectedStreak = "rejected_streak",
        /// Its request cannot be built from the provider's row.
        Unbuildable = "unbuildable",
        LocalFault = "local_fault",
        ObjectBusy = "object_busy",
        InProgress = "in_progress",
        OutcomeUnknown = "outcome_unknown",
        /// The provider is asked for the outcome.
        Lookup = "lookup",
        /// A look-up found nothing, and the request is sent once more.
        Resend = "resend",
        /// Its request failed, and nothing was sent.
        Retry = "retry",
        /// Its request was recorded too late for its permit.
        PermitMissed = "permit_missed",
        LedgerUnavailable = "ledger_unavailable",
        LedgerRefused = "ledger_refused",
        WorkerLost = "worker_lost",
    }
    /// The code in the ledger, in JSON and in the API.
    pub fn code(&self);
}

/// The codes that name a limit.
pub const LIMIT_CODES: [&str; 2] = ["limit", "cost_exceeds_limit"];

/// The codes of waits that the provider asked for; an operator can end them.
pub const PROVIDER_WAIT_CODES: [&str; 2] = ["provider_paused", "throttled"];

impl WaitReason {
    /// The limit that it names.
    pub fn limit(&self) -> Option<&str> {
        match self {
            Self::Limit(name) | Self::CostExceedsLimit(name) => Some(name),
            _ => None,
        }
    }

    /// The reason of this code and limit; `None` for an unknown code, and where the code names a limit and there is
    /// none, or the other way round.
    pub fn from_columns(code: &str, limit: Option<String>) -> Option<Self> {
        let reason = Self::ALL.into_iter().find(|reason| reason.code() == code)?;
        match (reason, limit) {
            (Self::Limit(_), Some(name)) => Some(Self::Limit(name)),
            (Self::CostExceedsLimit(_), Some(name)) => Some(Self::CostExceedsLimit(name)),
            (Self::Limit(_) | Self::CostExceedsLimit(_), None) | (_, Some(_)) => None,
            (reason, None) => Some(reason),
        }
    }

    /// Whether the limiter grants no permit to any job of the quota.
    pub fn is_limiter_wide(&self) -> bool {
        matches!(
            self,
            Self::ProviderPaused
                | Self::LimiterCold
                | Self::NeedsHistory
                | Self::LimiterUnavailable
                | Self::StaleSettings
        )
    }
}

/// A wait: its reason, and free text that nothing depends on, such as the provider's error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    pub reason: WaitReason,
    pub detail: Option<String>,
}

impl From<WaitReason> for Wait {
    fn from(reason: WaitReason) -> Self {
        Self { reason, detail: None }
    }
}

impl Wait {
    pub fn with_detail(reason: WaitReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: Some(detail.into()) }
    }

    /// The wait for a limit.
    pub fn for_limit(name: impl Into<String>) -> Self {
        Self::from(WaitReason::Limit(name.into()))
    }

    /// The wait of a job that costs more than the limit has free; cheaper ones pass it.
    pub fn for_slots_at_once(limit: impl Into<String>, cost: u16) -> Self {
        let detail = format!("it needs {cost} free slots at once, and cheaper payments pass it");
        Self::with_detail(WaitReason::Limit(limit.into()), detail)
    }

    /// The wait of a job whose cost is above the limit's capacity; it waits until the limit is raised.
    pub fn for_larger_limit(limit: impl Into<String>, cost: u16, at_once: u32) -> Self {
        let detail = format!("cost {cost} exceeds the {at_once} that it admits at once");
        Self::with_detail(WaitReason::CostExceedsLimit(limit.into()), detail)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&sentence(&self.reason, self.detail.as_deref()))
    }
}

/// The sentence that people read.
pub fn sentence(reason: &WaitReason, detail: Option<&str>) -> String {
    let what = match reason {
        WaitReason::NotBefore => "waits for its time",
        WaitReason::Egress => "waits for a worker slot at the egress rate",
        WaitReason::Limit(name) | WaitReason::CostExceedsLimit(name) => &format!("waits for limit {name}"),
        WaitReason::AccountBlocked => "its account is blocked by a rule of this provider",
        WaitReason::ProviderPaused => "the provider asked for a pause",
        WaitReason::Throttled => "throttled by the provider",
        WaitReason::LimiterCold => "the limiter has lost its state and waits",
        WaitReason::NeedsHistory => "usage of a limit is being read from the ledger",
        WaitReason::LimiterUnavailable => "the limiter store is unavailable",
        WaitReason::StaleSettings => "newer settings are being loaded",
        WaitReason::CircuitOpen => "the provider is down",
        WaitReason::CircuitProbing => "another job tests whether the provider is up again",
        WaitReason::OperatorPaused => "the provider is paused",
        WaitReason::LaneHeld => "the lane is held",
        WaitReason::QuotaClosed => "the quota is not open in this worker",
        WaitReason::RejectedStreak => "the provider rejected several payments in a row",
        WaitReason::Unbuildable => "the request cannot be built yet",
        WaitReason::ObjectBusy => "the provider is busy with this payment's object",
        WaitReason::InProgress => "the provider is still working on this payment",
        WaitReason::PermitMissed => "recorded too late for its permit, nothing was sent",
        WaitReason::WorkerLost => "a worker was lost while the request was in flight",
        WaitReason::Resend => "the provider does not know this payment: it is sent once more",
        // The detail says more, and is the whole sentence.
        WaitReason::Misconfigured => return detail.unwrap_or("the set-up is wrong").to_owned(),
        WaitReason::LocalFault => return detail.unwrap_or("the worker has a fault").to_owned(),
        WaitReason::OutcomeUnknown => return detail.unwrap_or("the outcome is unknown").to_owned(),
        WaitReason::Lookup => return detail.unwrap_or("the provider is asked for the outcome").to_owned(),
        WaitReason::Retry => return detail.unwrap_or("the request failed, nothing was sent").to_owned(),
        WaitReason::LedgerUnavailable => return detail.unwrap_or("the ledger was unavailable").to_owned(),
        WaitReason::LedgerRefused => return detail.unwrap_or("the ledger rejected a write").to_owned(),
    };
    with_detail(what, detail)
}

/// Past form of the sentence: `waited for limit per-account`.
pub fn past_sentence(reason: &WaitReason, detail: Option<&str>) -> String {
    let what = match reason {
        WaitReason::NotBefore => "waited for its time",
        WaitReason::Egress => "waited for a worker slot at the egress rate",
        WaitReason::Limit(name) | WaitReason::CostExceedsLimit(name) => &format!("waited for limit {name}"),
        other => return format!("delayed ({})", sentence(other, detail)),
    };
    with_detail(what, detail)
}

fn with_detail(what: &str, detail: Option<&str>) -> String {
    detail.map_or_else(|| what.to_owned(), |detail| format!("{what}: {detail}"))
}

/// Why a gate grants no permit, to all jobs or to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockReason {
    /// The named limit has no slot.
    Limit(String),
    /// The limiter state is cold: it grants nothing until earlier requests cannot count any more, or it is rebuilt.
    Cold,
    /// A limit does not know its past uses yet; the ledger is queried.
    NeedsHistory,
    /// The provider named a wait.
    Paused,
    StoreUnavailable(String),
    /// The store has newer settings than this process.
    StaleSettings,
    /// The job's cost is above what the named limit admits at once, so no window can ever admit it.
    Oversized {
        limit: String,
        max_cost: u32,
    },
    /// An operator's rule stops this account.
    AccountBlocked {
        account: String,
    },
    Stopping,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// One of each, as the ledger may hold it.
    fn stored() -> impl Iterator<Item = WaitReason> {
        WaitReason::ALL.into_iter().map(|reason| match reason {
            WaitReason::Limit(_) => WaitReason::Limit("per-minute".to_owned()),
            WaitReason::CostExceedsLimit(_) => WaitReason::CostExceedsLimit("per-minute".to_owned()),
            other => other,
        })
    }

    #[test]
    fn wait_reasons_round_trip() {
        for reason in stored() {
            let (code, limit) = (reason.code(), reason.limit().map(str::to_owned));
            assert_eq!(LIMIT_CODES.contains(&code), limit.is_some(), "{code}");
            // A limit is named exactly where the code means one.
            let other = if limit.is_some() { None } else { Some("per-minute".to_owned()) };
            assert_eq!(WaitReason::from_columns(code, other), None, "{code}");
            assert_eq!(WaitReason::from_columns(code, limit), Some(reason));
        }
        for code in ["", "LIMIT", "limits", "waits for limit per-minute", "NULL"] {
            assert_eq!(WaitReason::from_columns(code, None), None, "{code}");
        }
    }

    #[test]
    fn codes_are_distinct_snake_case() {
        let codes: BTreeSet<&str> = WaitReason::ALL.iter().map(WaitReason::code).collect();
        assert_eq!(codes.len(), WaitReason::ALL.len());
        for code in &codes {
            assert!(code.len() <= 32 && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{code}");
        }
        assert!(LIMIT_CODES.iter().chain(&PROVIDER_WAIT_CODES).all(|code| codes.contains(code)));
    }

    #[test]
    fn sentences_have_limit_and_detail() {
        assert_eq!(Wait::for_limit("per-minute").to_string(), "waits for limit per-minute");
        let costly = Wait::for_larger_limit("per-minute", 5, 3).to_string();
        assert_eq!(costly, "waits for limit per-minute: cost 5 exceeds the 3 that it admits at once");
        for reason in stored() {
            assert!(!sentence(&reason, None).is_empty() && !past_sentence(&reason, None).is_empty());
            let detailed = sentence(&reason, Some("connection refused"));
            assert!(detailed.ends_with("connection refused"), "{detailed}");
        }
        assert_eq!(past_sentence(&WaitReason::Limit("per-account".to_owned()), None), "waited for limit per-account");
        assert_eq!(past_sentence(&WaitReason::Throttled, None), "delayed (throttled by the provider)");
        let costly = past_sentence(&WaitReason::CostExceedsLimit("per-account".to_owned()), Some("cost 5 exceeds 3"));
        assert_eq!(costly, "waited for limit per-account: cost 5 exceeds 3");
        assert_eq!(past_sentence(&WaitReason::Misconfigured, Some("answered 401")), "delayed (answered 401)");
    }
}
