//! What the rows of one quota say about single accounts, as rules on the limits that they carry together.
//!
//! Refuses to let one row lift another's limit: an account is exempt from a limit, or has a rate of its own, only as far
//! as every row that carries the limit says so.

use std::collections::{BTreeMap, BTreeSet};

use crate::domain::limit::{AccountRule, LimitOverride, Rate, Rule, Scope};
use crate::domain::provider::Provider;
use crate::domain::quota_spec::{LimitSpec, limit_under_rule};

/// One row's limit, and the name that it has in the quota.
pub(super) struct RowLimit<'a> {
    pub row: &'a Provider,
    pub spec: LimitSpec,
    pub name_in_quota: String,
}

/// What one row says about one account.
struct RowAccountRule<'a> {
    row: &'a Provider,
    rule: &'a AccountRule,
}

/// Rules that each name a limit of the quota, but for those that block an account.
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
    for (account, said) in accounts {
        let account = account.to_owned();
        if said.iter().any(|said| said.rule.rule == Rule::Blocked) {
            combined.push(AccountRule { account, limit: None, rule: Rule::Blocked });
            continue;
        }
        for limit in &limits {
            let carriers = carriers.iter().filter(|carrier| carrier.name_in_quota == *limit);
            if let Some(rule) = combined_rule(carriers, &said) {
                combined.push(AccountRule { account: account.clone(), limit: Some((*limit).to_owned()), rule });
            }
        }
    }
    combined
}

/// `None`: the limit's own numbers hold.
fn combined_rule<'a>(carriers: impl Iterator<Item = &'a RowLimit<'a>>, said: &[RowAccountRule<'_>]) -> Option<Rule> {
    let mut strictest: Option<LimitSpec> = None;
    let mut says_so = false;
    for carrier in carriers {
        let rule = rule_on(carrier, said);
        says_so |= rule.is_some();
        let own = match rule {
            Some(Rule::Exempt | Rule::Blocked) => continue,
            Some(rule) => limit_under_rule(less_reserve(carrier.row, rule), &carrier.spec)?,
            None => carrier.spec.clone(),
        };
        strictest = Some(strictest.map_or(own.clone(), |known| known.stricter_of(&own)));
    }
    if !says_so {
        return None;
    }
    let Some(LimitSpec { max_requests, window, burst, .. }) = strictest else { return Some(Rule::Exempt) };
    // What cannot be a rate is no rule: then the limit's own numbers hold, which come from numbers like these.
    Rate::new(max_requests, window).ok().map(|rate| Rule::Limit(LimitOverride { rate, burst }))
}

/// A rule's numbers, less what its row keeps in reserve.
fn less_reserve(row: &Provider, rule: Rule) -> Rule {
    let Rule::Limit(LimitOverride { rate, burst }) = rule else { return rule };
    let Ok(rate) = Rate::new(row.after_reserve(rate.max_requests()), rate.window()) else { return rule };
    Rule::Limit(LimitOverride { rate, burst: burst.map(|burst| row.after_reserve(burst).max(1)) })
}

/// What one row says about an account under one of its limits; a rule that names the limit goes first.
fn rule_on(carrier: &RowLimit<'_>, said: &[RowAccountRule<'_>]) -> Option<Rule> {
    let rules = || said.iter().filter(|said| said.row.name == carrier.row.name).map(|said| said.rule);
    let named = rules().find(|rule| rule.limit.as_deref() == Some(carrier.spec.name.as_str()));
    named.or_else(|| rules().find(|rule| rule.limit.is_none())).map(|rule| rule.rule)
}
