//! Account rules of a quota: what its rows say about single accounts, combined for each limit that the rows share.
//!
//! No row can lift another row's limit. An account is exempt from a limit, or has its own rate, only as far as every
//! row with that limit says so. An account that one row blocks or refuses is charged by none. See
//! `docs/decisions/0018-strictest-row-of-a-quota.md`.

use std::collections::{BTreeMap, BTreeSet};

use crate::domain::limit::{AccountRule, LimitOverride, Rule, Scope};
use crate::domain::provider::Provider;
use crate::domain::quota_spec::{LimitSpec, limit_under_rule};

/// One row's limit, and its name in the quota.
pub(super) struct RowLimit<'a> {
    pub row: &'a Provider,
    pub spec: LimitSpec,
    pub name_in_quota: String,
}

/// One row's rule for one account.
struct RowAccountRule<'a> {
    row: &'a Provider,
    rule: &'a AccountRule,
}

/// The combined rules. Each names a limit of the quota, except those that block or refuse an account.
pub(super) fn account_rules(rows: &[&Provider], carriers: &[RowLimit<'_>]) -> Vec<AccountRule> {
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
            Some(Rule::Exempt | Rule::Blocked) => continue,
            Some(rule) => limit_under_rule(less_reserve(carrier.row, rule), &carrier.spec)?,
            None => carrier.spec.clone(),
        };
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
