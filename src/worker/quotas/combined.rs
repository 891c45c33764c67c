//! The spec of a quota, combined from its rows: their limits, and what they say about single accounts.
//!
//! Where rows of a quota differ, the stricter value counts: the lower rate, the longer hold and the safer slot release.
//! No row can lift another row's limit. An account is exempt from a limit, or has its own rate, only as far as every
//! row with that limit says so. An account that one row blocks or refuses is charged by none.
//! See `docs/decisions/0018-strictest-row-of-a-quota.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::domain::limit::{AccountRule, LimitOverride, Rule, Scope};
use crate::domain::provider::{Pacing, Provider, ProviderName, SlotRelease, StoreDown};
use crate::domain::quota_limits::QuotaLimits;
use crate::domain::quota_spec::{LimitSpec, QuotaSpec, limit_under_rule};
use crate::limiter::leader_election::LeadershipTiming;
use crate::worker::settings_sync::{LoadedSettings, POLL_INTERVAL};

/// The combined spec of a quota; `None` when no enabled row names it, or one of its rows is invalid.
pub fn quota_spec(known: &LoadedSettings, quota: &ProviderName) -> Option<QuotaSpec> {
    if known.quotas_with_unknown_limits().contains(quota.as_str()) {
        return None;
    }
    let rows: Vec<&Provider> =
        known.providers.values().map(AsRef::as_ref).filter(|row| row.enabled && row.quota == *quota).collect();
    combine_rows(known.version, quota, &rows)
}

/// [`quota_spec`] of each quota that an enabled row names, with those rows. One pass over all rows: there may be ten
/// thousand.
pub fn quota_specs(known: &LoadedSettings) -> Vec<QuotaRows<'_>> {
    let in_doubt = known.quotas_with_unknown_limits();
    let mut quotas: BTreeMap<&ProviderName, Vec<&Provider>> = BTreeMap::new();
    for row in known.providers.values().filter(|row| row.enabled) {
        quotas.entry(&row.quota).or_default().push(row);
    }
    let specs = quotas.into_iter().map(|(quota, rows)| {
        let spec = if in_doubt.contains(quota.as_str()) { None } else { combine_rows(known.version, quota, &rows) };
        QuotaRows { quota, rows, spec }
    });
    specs.collect()
}

/// A quota, its enabled rows, and their combined spec; `None` as in [`quota_spec`].
pub struct QuotaRows<'a> {
    pub quota: &'a ProviderName,
    pub rows: Vec<&'a Provider>,
    pub spec: Option<QuotaSpec>,
}

fn combine_rows(version: i64, quota: &ProviderName, rows: &[&Provider]) -> Option<QuotaSpec> {
    let mut limits = QuotaLimits::default();
    let mut carriers: Vec<RowLimit<'_>> = Vec::new();
    for row in rows {
        for limit in &row.limits {
            let own = LimitSpec::of_row(row, limit);
            let counted_as = limits.add(&row.name, own.clone());
            carriers.push(RowLimit { row, spec: own, name_in_quota: counted_as });
        }
        if let Some(window) = row.rule_limit_window() {
            let own = LimitSpec::of_rules(window);
            let counted_as = limits.add(&row.name, own.clone());
            carriers.push(RowLimit { row, spec: own, name_in_quota: counted_as });
        }
    }
    let jitters: Option<Vec<Duration>> = rows
        .iter()
        .map(|row| match row.slot_release {
            SlotRelease::Response => None,
            SlotRelease::Grant { transit_jitter } => Some(transit_jitter),
        })
        .collect();
    let members: BTreeSet<ProviderName> = rows.iter().map(|row| row.name.clone()).collect();
    Some(QuotaSpec {
        quota: quota.clone(),
        version,
        limits: limits.into_specs()?,
        account_rules: account_rules(rows, &carriers),
        pacing: pacing(rows),
        grant_jitter: jitters.and_then(|jitters| jitters.into_iter().max()),
        hold_max: rows.iter().map(|row| row.hold_max()).max()?,
        send_budget: rows.iter().map(|row| row.send_budget).min()?,
        store_down: store_down(rows),
        members: members.into_iter().collect(),
        resumed_at: rows.iter().map(|row| row.resumed_at).max().unwrap_or(0),
        handover: LeadershipTiming::with_poll_interval(POLL_INTERVAL).handover(),
    })
}

/// The spacing of starts: even if any row says so. A row with an egress rate of its own paces each process instead.
fn pacing(rows: &[&Provider]) -> Option<Pacing> {
    if rows.iter().any(|row| row.pacing == Pacing::Even) {
        return Some(Pacing::Even);
    }
    rows.iter().all(|row| row.leak_per_second.is_none()).then_some(Pacing::Burst)
}

/// Shares only if all rows say so, with the smallest share of them.
fn store_down(rows: &[&Provider]) -> StoreDown {
    let share = |row: &&Provider| match row.store_down {
        StoreDown::Wait => None,
        StoreDown::Share { workers } => Some(workers),
    };
    let all: Option<Vec<u32>> = rows.iter().map(share).collect();
    all.and_then(|all| all.into_iter().max()).map_or(StoreDown::Wait, |workers| StoreDown::Share { workers })
}

/// One row's limit, and its name in the quota.
struct RowLimit<'a> {
    row: &'a Provider,
    spec: LimitSpec,
    name_in_quota: String,
}

/// One row's rule for one account.
struct RowAccountRule<'a> {
    row: &'a Provider,
    rule: &'a AccountRule,
}

/// The combined rules. Each names a limit of the quota, except those that block or refuse an account.
fn account_rules(rows: &[&Provider], carriers: &[RowLimit<'_>]) -> Vec<AccountRule> {
    let mut accounts: BTreeMap<&str, Vec<RowAccountRule<'_>>> = BTreeMap::new();
    for row in rows {
        for rule in &row.account_rules {
            accounts.entry(&rule.account).or_default().push(RowAccountRule { row, rule });
        }
    }
    let limits: BTreeSet<&str> = carriers
        .iter()
        .filter(|carrier| carrier.spec.scope == Scope::Account)
        .map(|carrier| carrier.name_in_quota.as_str())
        .collect();
    let mut combined = Vec::new();
    for (account, rules) in accounts {
        let account = account.to_owned();
        if rules.iter().any(|row_rule| row_rule.rule.rule == Rule::Blocked) {
            combined.push(AccountRule { account, limit: None, rule: Rule::Blocked });
            continue;
        }
        if rules.iter().any(|row_rule| row_rule.rule.rule == Rule::Refuse) {
            combined.push(AccountRule { account: account.clone(), limit: None, rule: Rule::Refuse });
        }
        for limit in &limits {
            let carriers = carriers.iter().filter(|carrier| carrier.name_in_quota == *limit);
            if let Some(rule) = combined_rule(carriers, &rules) {
                combined.push(AccountRule { account: account.clone(), limit: Some((*limit).to_owned()), rule });
            }
        }
    }
    combined
}

/// The rule for one limit; `None`: the limit's own numbers apply.
fn combined_rule<'a>(carriers: impl Iterator<Item = &'a RowLimit<'a>>, rules: &[RowAccountRule<'_>]) -> Option<Rule> {
    let mut strictest: Option<LimitSpec> = None;
    let mut has_rule = false;
    for carrier in carriers {
        let rule = rule_on(carrier, rules);
        has_rule |= rule.is_some();
        let own = match rule {
            Some(Rule::Blocked) => None,
            Some(rule) => limit_under_rule(less_reserve(carrier.row, rule), &carrier.spec),
            None => carrier.spec.without_rule(),
        };
        let Some(own) = own else { continue };
        strictest = Some(strictest.map_or(own.clone(), |known| known.stricter_of(&own)));
    }
    if !has_rule {
        return None;
    }
    let Some(strictest) = strictest else { return Some(Rule::Exempt) };
    // Numbers that make no rate are no rule: then the limit's own apply, which come from numbers like these.
    strictest.rate().map(|rate| Rule::Limit(LimitOverride { rate, burst: strictest.burst }))
}

/// A rule's numbers without its row's reserve.
fn less_reserve(row: &Provider, rule: Rule) -> Rule {
    let Rule::Limit(LimitOverride { rate, burst }) = rule else { return rule };
    let rate = rate.lowered_to(row.after_reserve(rate.max_requests()));
    Rule::Limit(LimitOverride { rate, burst: burst.map(|burst| row.burst_after_reserve(burst)) })
}

/// One row's rule for an account under one of its limits; a rule that names the limit comes first.
fn rule_on(carrier: &RowLimit<'_>, account_rules: &[RowAccountRule<'_>]) -> Option<Rule> {
    let rules = || {
        let of_row = account_rules.iter().filter(|row_rule| row_rule.row.name == carrier.row.name);
        // A refused account has the limit's own numbers, for its look-ups.
        of_row.map(|row_rule| row_rule.rule).filter(|rule| rule.rule != Rule::Refuse)
    };
    let named = rules().find(|rule| rule.limit.as_deref() == Some(carrier.spec.name.as_str()));
    named.or_else(|| rules().find(|rule| rule.limit.is_none())).map(|rule| rule.rule)
}

#[cfg(test)]
#[path = "combined_tests.rs"]
mod tests;
