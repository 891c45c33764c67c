//! The overview: everything that is known of all providers, as `/api/v1/overview` and `status --json` show it.
//!
//! Refuses to leave a number out in silence: what could not be asked is `null`, and a warning says why. Pure: the same
//! [`Evidence`] gives the same picture.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Conserved;
use super::counted::Counted;
use super::drain::{Used, drained_at, limit_per_second, on_each};
use super::lately::lanes;
pub use super::limits::LimitOverview;
use super::limits::{in_force, limits};
use super::standing::{RowSays, Standing, State, Subject, standing};
use super::warnings::warnings;
use super::workers::Worker;
use crate::domain::limit::{Limit, Rule};
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::operator::At;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::BadRow;
use crate::limiter::LimitUse;

/// What was gathered; a source that could not be asked is empty, and in `away`.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Milliseconds since the Unix epoch.
    pub at_ms: i64,
    pub version: String,
    /// The process that answers; empty when none does.
    pub worker: String,
    /// As written.
    pub rows: Vec<ProviderRow>,
    /// As meant; for a bad row the last good one.
    pub providers: BTreeMap<ProviderName, Arc<Provider>>,
    pub bad: Vec<BadRow>,
    pub workers: Vec<Worker>,
    /// By provider; `None`: the ledger could not be counted.
    pub accounts: Option<BTreeMap<String, Conserved>>,
    /// When that was counted, in milliseconds since the Unix epoch.
    pub counted_at_ms: Option<i64>,
    /// Requests per second over the last minutes in which jobs waited, by provider, where that is long enough to say.
    pub lately_per_s: BTreeMap<String, f64>,
    /// Messages ready in a lane's queue.
    pub depths: BTreeMap<String, u64>,
    /// Milliseconds since the Unix epoch.
    pub oldest_ms: BTreeMap<String, i64>,
    /// By provider that is paused: who paused it, when and why, in words.
    pub paused_by: BTreeMap<String, String>,
    /// By quota.
    pub used: BTreeMap<ProviderName, Vec<LimitUse>>,
    pub database_away: Option<String>,
    pub away: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Overview {
    pub at: String,
    pub version: String,
    /// The process that answers.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub worker: String,
    pub providers: Vec<ProviderOverview>,
    pub conservation: Vec<Conserved>,
    /// When the ledger's payments were counted last: a large ledger is not counted at every look. `null`: not at all.
    #[serde(default)]
    pub counted_at: Option<String>,
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ProviderOverview {
    pub name: String,
    pub quota: String,
    pub enabled: bool,
    pub paused: bool,
    pub mode: String,
    pub version: i64,
    pub state: State,
    pub cause: Option<String>,
    pub ends_in_ms: Option<u64>,
    /// What is wrong with its row.
    pub problems: Vec<String>,
    /// A row counts: the written one or, while that is bad, the last good one. Without any nothing is sent.
    #[serde(default)]
    pub has_good_row: bool,
    /// Those in force: of a bad row, the last good one's.
    pub limits: Vec<LimitOverview>,
    /// Requests begun in the last ten seconds, over ten; all workers.
    pub rate_per_s: f64,
    pub limit_per_s: Option<f64>,
    /// Jobs without a request on the wire: parked, due, only in the queue yet, or in hand.
    pub waiting: u64,
    pub queued: Option<u64>,
    pub parked: u64,
    pub in_hand: u64,
    pub in_flight: u64,
    pub oldest_waiting_at: Option<String>,
    /// What waits, by what the limits on the whole provider allow; the least that it takes if `drain_depends_on` names
    /// others.
    pub drained_in_ms: Option<u64>,
    /// Limits that count each account or reference on its own: whose payments wait decides.
    #[serde(default)]
    pub drain_depends_on: Vec<String>,
    /// What waits at the rate of the last minutes: a guess, where `drain_depends_on` names a limit and something was sent.
    #[serde(default)]
    pub drained_about_ms: Option<u64>,
    pub review: u64,
    pub dead: u64,
    pub succeeded: u64,
    pub declined: u64,
    pub expired: u64,
    pub cancelled: u64,
    pub unknown: u64,
    pub sending: u64,
    /// 429s to permits that we gave, since the processes started.
    pub refused_by_provider: u64,
}

/// The whole picture.
#[must_use]
pub fn overview(evidence: &Evidence) -> Overview {
    let mut providers: Vec<ProviderOverview> = evidence.rows.iter().map(|row| with_row(evidence, row)).collect();
    let accounts = || evidence.accounts.iter().flatten();
    let read: BTreeSet<&str> = evidence.rows.iter().map(|row| row.name.as_str()).collect();
    let mut unread: BTreeSet<&str> = accounts().map(|(provider, _)| provider.as_str()).collect();
    unread.extend(evidence.bad.iter().map(|bad| bad.provider.as_str()));
    providers.extend(unread.difference(&read).map(|name| without_row(evidence, name)));
    Overview {
        at: At(evidence.at_ms).to_string(),
        version: evidence.version.clone(),
        worker: evidence.worker.clone(),
        providers,
        conservation: accounts().map(|(_, account)| account.clone()).collect(),
        counted_at: evidence.counted_at_ms.map(|at_ms| At(at_ms).to_string()),
        warnings: warnings(evidence),
    }
}

fn with_row(evidence: &Evidence, row: &ProviderRow) -> ProviderOverview {
    let meant = evidence.providers.get(row.name.as_str());
    let bad = evidence.bad.iter().find(|bad| bad.provider == row.name);
    let counted = Counted::of(evidence, &row.name);
    let version = meant.map_or(0, |provider| provider.version);
    let used = meant.and_then(|provider| evidence.used.get(&provider.quota));
    let good = meant.filter(|_| bad.is_some()).map(|provider| in_force(provider));
    let limits = limits(row, good, used.map(Vec::as_slice).unwrap_or_default());
    let in_words: BTreeMap<String, String> =
        limits.iter().map(|limit| (limit.name.clone(), limit.rate_in_words())).collect();
    let problems = bad.map_or(&[][..], |bad| &bad.problems[..]);
    let closed = meant.and_then(|provider| {
        let closed = |limit: &&Limit| limit.holds_every_charge() && limit.rate.max_requests() == 0;
        provider.limits.iter().find(closed).map(|limit| format!("{} ({})", limit.name, limit.rate))
    });
    let paused = row.paused || meant.is_some_and(|provider| provider.paused);
    let told = standing(
        &Subject {
            name: &row.name,
            row: Some(RowSays { enabled: row.enabled, paused, version }),
            problems,
            in_force: meant.is_some(),
            paused_by: evidence.paused_by.get(&row.name).map(String::as_str),
            closed: closed.as_deref(),
            limits: &in_words,
            waiting: counted.waiting() > 0,
            database_away: evidence.database_away.as_deref(),
        },
        &evidence.workers,
    );
    let drained_in_ms = meant.and_then(|provider| drained_ms(evidence, provider, &limits, &counted, &told));
    let drain_depends_on = meant.map(|provider| on_each(provider)).unwrap_or_default();
    let drained_about_ms = match drained_in_ms {
        Some(least_ms) if !drain_depends_on.is_empty() => about_ms(evidence, &row.name, &counted, least_ms),
        _ => None,
    };
    ProviderOverview {
        quota: row.quota.clone().unwrap_or_else(|| row.name.clone()),
        enabled: row.enabled,
        paused,
        mode: row.mode.clone(),
        version,
        problems: problems.to_vec(),
        has_good_row: has_good_row(evidence, &row.name),
        limits,
        limit_per_s: meant.and_then(|provider| limit_per_second(provider)),
        drained_in_ms,
        drain_depends_on,
        drained_about_ms,
        ..counts(&row.name, &counted, told)
    }
}

/// Whether workers go by a row of it. One that can be meant and that no worker could ever call has no good one before it.
pub(super) fn has_good_row(evidence: &Evidence, name: &str) -> bool {
    let nobody_says = !evidence.workers.iter().any(Worker::is_live);
    let used = nobody_says || lanes(&evidence.workers, name).any(|(worker, _)| worker.is_live());
    used && evidence.providers.contains_key(name)
}

/// It has none any more; or what stands in it cannot be read.
fn without_row(evidence: &Evidence, name: &str) -> ProviderOverview {
    let (counted, limits) = (Counted::of(evidence, name), BTreeMap::new());
    let bad = evidence.bad.iter().find(|bad| bad.provider == name);
    let subject = Subject {
        name,
        row: None,
        problems: bad.map_or(&[][..], |bad| &bad.problems[..]),
        in_force: evidence.providers.contains_key(name),
        paused_by: None,
        closed: None,
        limits: &limits,
        waiting: counted.waiting() > 0,
        database_away: None,
    };
    let told = counts(name, &counted, standing(&subject, &evidence.workers));
    match bad {
        None => told,
        Some(bad) => ProviderOverview {
            quota: bad.quota.clone(),
            enabled: bad.enabled,
            problems: bad.problems.clone(),
            has_good_row: has_good_row(evidence, name),
            ..told
        },
    }
}

/// What does not depend on a row.
fn counts(name: &str, counted: &Counted<'_>, told: Standing) -> ProviderOverview {
    let oldest = counted.evidence.oldest_ms.get(name).filter(|at_ms| **at_ms <= counted.evidence.at_ms);
    let refused = lanes(&counted.evidence.workers, name).map(|(_, lane)| lane.throttled_total).sum();
    ProviderOverview {
        name: name.to_owned(),
        quota: name.to_owned(),
        enabled: false,
        paused: false,
        mode: String::new(),
        version: 0,
        state: told.state,
        cause: told.cause,
        ends_in_ms: told.ends_in_ms,
        problems: Vec::new(),
        has_good_row: false,
        limits: Vec::new(),
        rate_per_s: counted.rate_per_s(),
        limit_per_s: None,
        waiting: counted.waiting(),
        queued: counted.queued,
        parked: counted.account.map_or(0, |account| account.parked),
        in_hand: counted.in_hand,
        in_flight: counted.in_flight,
        oldest_waiting_at: oldest.map(|at_ms| At(*at_ms).to_string()),
        drained_in_ms: None,
        drain_depends_on: Vec::new(),
        drained_about_ms: None,
        review: counted.in_state("review"),
        dead: counted.in_state("dead"),
        succeeded: counted.in_state("succeeded"),
        declined: counted.in_state("declined"),
        expired: counted.in_state("expired"),
        cancelled: counted.in_state("cancelled"),
        unknown: counted.in_state("unknown"),
        sending: counted.in_state("sending"),
        refused_by_provider: refused,
    }
}

/// In how many milliseconds what waits now would be through if the provider's row were this one and all of its limits
/// were free. `None`: never, because it sends nothing.
#[must_use]
pub fn drained_if(evidence: &Evidence, provider: &Provider) -> Option<u64> {
    if !provider.enabled || provider.paused {
        return None;
    }
    let counted = Counted::of(evidence, provider.name.as_str());
    let through = counted.through(provider, backlog(evidence, provider, &counted), &[])?;
    Some(u64::try_from(through.as_millis()).unwrap_or(u64::MAX))
}

/// Those that share a quota share what it lets out, so their backlogs are one.
fn backlog(evidence: &Evidence, provider: &Provider, counted: &Counted<'_>) -> u64 {
    let others =
        evidence.providers.values().filter(|other| other.quota == provider.quota && other.name != provider.name);
    let others = others.filter(|other| other.enabled && !other.paused);
    let theirs: u64 = others.map(|other| Counted::of(evidence, other.name.as_str()).waiting()).sum();
    let own = counted.waiting();
    if own == 0 { 0 } else { own + theirs }
}

fn drained_ms(
    evidence: &Evidence,
    provider: &Provider,
    limits: &[LimitOverview],
    counted: &Counted<'_>,
    told: &Standing,
) -> Option<u64> {
    if !told.state.drains() {
        return None;
    }
    let backlog = backlog(evidence, provider, counted);
    // What a rule blocks is parked again and again, until the rule is gone.
    if counted.only_parked() && provider.account_rules.iter().any(|rule| rule.rule == Rule::Blocked) {
        return None;
    }
    let used: Vec<Used> =
        limits.iter().filter_map(|limit| Some(Used { limit: limit.name.clone(), free: limit.free? })).collect();
    let through = counted.through(provider, backlog, &used)?;
    let rest = match told.state {
        State::Cold | State::PausedByProvider if backlog > 0 => told.ends_in_ms.unwrap_or(0),
        _ => 0,
    };
    let through_ms = rest.saturating_add(u64::try_from(through.as_millis()).unwrap_or(u64::MAX));
    let last_wake_ms = counted.account.and_then(|account| account.parked_for_ms).unwrap_or(0);
    Some(through_ms.max(last_wake_ms))
}

/// At the rate of the last minutes, and no sooner than the limits on the whole provider allow.
fn about_ms(evidence: &Evidence, name: &str, counted: &Counted<'_>, least_ms: u64) -> Option<u64> {
    let through = drained_at(*evidence.lately_per_s.get(name)?, counted.waiting())?;
    Some(u64::try_from(through.as_millis()).unwrap_or(u64::MAX).max(least_ms))
}

#[cfg(test)]
#[path = "overview_tests.rs"]
mod tests;
