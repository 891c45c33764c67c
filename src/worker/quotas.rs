//! One gate per quota: rows that name the same quota share its limits, its line and its permits.
//!
//! Refuses the laxer of two: where rows of a quota differ, the lower rate, the longer hold and the safer release count.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::settings_watch::{Known, POLL, StoreVersion};
use crate::domain::decision::PastUse;
use crate::domain::limit::{AccountRule, Limit, Rule};
use crate::domain::provider::{Pacing, Provider, ProviderName, SlotRelease, StoreDown};
use crate::domain::quota_spec::{LimitSpec, QuotaSpec};
use crate::ledger::{Authority, Ledger};
use crate::limiter::authority::Timing;
use crate::limiter::gate::{Gate, GateParts};
use crate::limiter::{AuthorityRow, AuthorityRows, Limiter, RecentAttempts};

/// Incarnations travel to the limiter's store in six bytes.
const INCARNATION_BITS: u32 = 48;

/// What a quota's rows allow together; `None` when no enabled row names it, or one of its rows cannot be meant.
#[must_use]
pub fn quota_spec(known: &Known, quota: &ProviderName) -> Option<QuotaSpec> {
    if !known.knows_limits_of(quota) {
        return None;
    }
    let rows: Vec<&Provider> =
        known.providers.values().map(AsRef::as_ref).filter(|row| row.enabled && row.quota == *quota).collect();
    let mut limits: BTreeMap<String, LimitSpec> = BTreeMap::new();
    for row in &rows {
        for limit in &row.limits {
            add(&mut limits, row, limit_spec(row, limit));
        }
    }
    let jitters: Option<Vec<Duration>> = rows
        .iter()
        .map(|row| match row.slot_release {
            SlotRelease::Response => None,
            SlotRelease::Grant { transit_jitter } => Some(transit_jitter),
        })
        .collect();
    let mut account_rules: Vec<AccountRule> = rows.iter().flat_map(|row| row.account_rules.iter().cloned()).collect();
    account_rules.sort_by(|a, b| laxity(a).total_cmp(&laxity(b)));
    Some(QuotaSpec {
        quota: quota.clone(),
        version: known.version,
        limits: (!limits.is_empty()).then(|| limits.into_values().collect())?,
        account_rules,
        even: rows.iter().any(|row| row.pacing == Pacing::Even),
        grant_jitter: jitters.and_then(|jitters| jitters.into_iter().max()),
        hold_max: rows.iter().map(|row| row.hold_max()).max()?,
        send_budget: rows.iter().map(|row| row.send_budget).min()?,
        store_down: store_down(&rows),
        handover: Timing::polled_every(POLL).settled(),
    })
}

/// Shares only if all rows say so, and the smallest of them.
fn store_down(rows: &[&Provider]) -> StoreDown {
    let of = |row: &&Provider| match row.store_down {
        StoreDown::Wait => None,
        StoreDown::Share { of } => Some(of),
    };
    let all: Option<Vec<u32>> = rows.iter().map(of).collect();
    all.and_then(|all| all.into_iter().max()).map_or(StoreDown::Wait, |of| StoreDown::Share { of })
}

/// A limit as one row means it, less what the row keeps in reserve.
fn limit_spec(row: &Provider, limit: &Limit) -> LimitSpec {
    let percent = 100 - u64::from(row.reserve_percent.min(100));
    let share = |count: u32| u32::try_from(u64::from(count) * percent / 100).unwrap_or(0);
    LimitSpec {
        name: limit.name.clone(),
        algorithm: limit.algorithm,
        scope: limit.scope,
        applies_to: limit.applies_to,
        shadow: limit.shadow,
        max_requests: share(limit.rate.max_requests()),
        window: limit.rate.window(),
        offset: limit.offset,
        burst: limit.burst.map(|burst| share(burst).max(1)),
    }
}

/// Rows that name the same limit mean one, with the lower numbers; where they count otherwise, each counts.
fn add(limits: &mut BTreeMap<String, LimitSpec>, row: &Provider, spec: LimitSpec) {
    let kind = |spec: &LimitSpec| (spec.algorithm, spec.scope, spec.applies_to, spec.shadow, spec.offset);
    match limits.get_mut(&spec.name) {
        Some(other) if kind(other) == kind(&spec) => {
            other.max_requests = other.max_requests.min(spec.max_requests);
            other.window = other.window.max(spec.window);
            other.burst = match (other.burst, spec.burst) {
                (Some(one), Some(another)) => Some(one.min(another)),
                (one, another) => one.or(another),
            };
        }
        Some(_) => {
            let name = format!("{}@{}", spec.name, row.name);
            limits.insert(name.clone(), LimitSpec { name, ..spec });
        }
        None => {
            limits.insert(spec.name.clone(), spec);
        }
    }
}

/// Of several rules on one account the strictest is found first.
fn laxity(rule: &AccountRule) -> f64 {
    match rule.rule {
        Rule::Blocked => -1.0,
        Rule::Limit(rate) => rate.per_second(),
        Rule::Exempt => f64::INFINITY,
    }
}

/// The gates of a process, opened as quotas appear.
pub struct Quotas {
    limiter: Arc<dyn Limiter>,
    recent: Arc<dyn RecentAttempts>,
    store_version: StoreVersion,
    open: Mutex<HashMap<ProviderName, OpenGate>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    /// Gates settle through it to their end, so that it ends after them.
    limiter_stop: CancellationToken,
    tending: TaskTracker,
}

struct OpenGate {
    gate: Gate,
    spec: watch::Sender<Arc<QuotaSpec>>,
}

impl Quotas {
    /// No gates yet; the limiter is tended from now on. `store_version` hears of settings that are newer than ours.
    #[must_use]
    pub fn new(limiter: Arc<dyn Limiter>, ledger: Arc<dyn Ledger>, store_version: StoreVersion) -> Self {
        let (limiter_stop, tending) = (CancellationToken::new(), TaskTracker::new());
        let (tended, stop) = (Arc::clone(&limiter), limiter_stop.clone());
        tending.spawn(async move { tended.tend(stop).await });
        Self {
            limiter,
            recent: Arc::new(Witness(ledger)),
            store_version,
            open: Mutex::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            limiter_stop,
            tending,
        }
    }

    /// Tells every open gate what its quota allows now, opens gates for new quotas and closes those that nobody names.
    pub fn follow(&self, known: &Known) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for quota in known.providers.values().filter(|row| row.enabled).map(|row| &row.quota) {
            let Some(spec) = quota_spec(known, quota) else {
                tracing::error!(%quota, "nothing is granted: a row of this quota cannot be meant, and its limits are unknown");
                if open.remove(quota).is_some() {
                    self.limiter.closed(quota);
                }
                continue;
            };
            self.limiter.opened(&spec);
            match open.get(quota) {
                Some(gate) => {
                    gate.spec.send_if_modified(|current| {
                        let changed = **current != spec;
                        *current = Arc::new(spec);
                        changed
                    });
                }
                None => {
                    open.insert(quota.clone(), self.open_gate(spec));
                }
            }
        }
        self.close_unnamed(&mut open, known);
    }

    /// Forgets gates that no enabled row names; what they had in flight keeps its slots to its deadline.
    fn close_unnamed(&self, open: &mut HashMap<ProviderName, OpenGate>, known: &Known) {
        open.retain(|quota, _| {
            let named = known.providers.values().any(|row| row.enabled && row.quota == *quota);
            if !named {
                self.limiter.closed(quota);
            }
            named
        });
    }

    #[must_use]
    pub fn gate(&self, quota: &ProviderName) -> Option<Gate> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).get(quota).map(|open| open.gate.clone())
    }

    /// Settles what is answered and closes all gates.
    pub async fn close(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.limiter_stop.cancel();
        self.tending.close();
        self.tending.wait().await;
    }

    fn open_gate(&self, spec: QuotaSpec) -> OpenGate {
        let (spec, spec_rx) = watch::channel(Arc::new(spec));
        let store_version = self.store_version.clone();
        let (gate, task) = Gate::new(GateParts {
            limiter: Arc::clone(&self.limiter),
            recent: Arc::clone(&self.recent),
            spec: spec_rx,
            incarnation: rand::random::<u64>() >> (u64::BITS - INCARNATION_BITS),
            stop: self.stop.child_token(),
            newer: Arc::new(move |version| store_version.seen(version)),
        });
        self.tasks.spawn(task);
        OpenGate { gate, spec }
    }
}

/// The ledger as witness for a limiter that lost its state.
struct Witness(Arc<dyn Ledger>);

#[async_trait]
impl RecentAttempts for Witness {
    async fn recent_uses(&self, quota: &ProviderName, within: Duration) -> Result<(Vec<PastUse>, u32), String> {
        let uses = self.0.recent_uses(quota, within).await.map_err(|error| error.to_string())?;
        let ended = uses.ended.into_iter().map(|(age, cost)| PastUse { age, cost });
        Ok((ended.collect(), uses.open))
    }
}

/// The ledger as keeper of the rows that say who grants.
pub struct LedgerRows(pub Arc<dyn Ledger>);

impl From<Authority> for AuthorityRow {
    fn from(Authority { holder, term, age }: Authority) -> Self {
        Self { holder, term, age }
    }
}

#[async_trait]
impl AuthorityRows for LedgerRows {
    async fn authority(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, AuthorityRow>, String> {
        let rows = self.0.authority(quotas).await.map_err(|error| error.to_string())?;
        Ok(rows.into_iter().map(|(quota, row)| (quota, row.into())).collect())
    }

    async fn take(&self, quota: &ProviderName, from: Option<&str>, to: &str) -> Result<AuthorityRow, String> {
        self.0.take_authority(quota, from, to).await.map(AuthorityRow::from).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    #[test]
    fn a_quota_shares_if_all_its_rows_do_and_by_the_largest_number() {
        let of = |share_of: Option<i64>| ProviderRow {
            store_down: if share_of.is_some() { "share" } else { "wait" }.to_owned(),
            share_of,
            quota: Some("one".to_owned()),
            url: "https://acme.test/".to_owned(),
            limits: vec![LimitRow { name: "all".to_owned(), max_requests: 9, window_ms: 1_000, ..LimitRow::default() }],
            ..ProviderRow::default()
        };
        let share = |of| StoreDown::Share { of };
        let table = [
            (vec![of(None)], StoreDown::Wait),
            (vec![of(Some(3))], share(3)),
            (vec![of(Some(3)), of(Some(5)), of(Some(4))], share(5)),
            (vec![of(Some(3)), of(None)], StoreDown::Wait),
            (vec![of(Some(3)), ProviderRow { enabled: false, ..of(None) }], share(3)),
        ];
        for (rows, expected) in table {
            let named = rows.into_iter().enumerate().map(|(n, row)| ProviderRow { name: format!("acme-{n}"), ..row });
            let meant = named.map(|row| row.meant(1).unwrap());
            let providers = meant.map(|row| (row.name.clone(), Arc::new(row))).collect();
            let known = Known { version: 1, providers, bad: Vec::new() };
            let spec = quota_spec(&known, &ProviderName::new("one").unwrap()).unwrap();
            assert_eq!(spec.store_down, expected);
            // A worker that has not noticed yet acts on the row for three polls.
            assert!(spec.handover >= 3 * POLL);
        }
    }
}
