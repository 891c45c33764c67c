//! Account rules in the report of `check`: the accounts that a provider's row blocks or refuses, and the effect.
//!
//! Such a rule is an operator's decision, so it is no warning. But payments that wait for it are otherwise unexplained.

use std::collections::BTreeSet;

use crate::domain::format::count;
use crate::domain::limit::Rule;
use crate::domain::provider::Provider;

/// Most accounts of a rule that one finding names.
const ACCOUNTS_NAMED_MAX: usize = 5;

/// Accounts that rules of the row block or refuse, with the effect on their payments.
pub fn describe_account_rules(provider: &Provider) -> Vec<String> {
    let effects = [
        (Rule::Blocked, "blocked", "payments wait while the rule exists"),
        (Rule::Refuse, "refused", "payments end as declined"),
    ];
    let of_rule = |(rule, what, effect)| {
        let rules = provider.account_rules.iter().filter(|own| own.rule == rule);
        let accounts: BTreeSet<&str> = rules.map(|own| own.account.as_str()).collect();
        let named: Vec<&str> = accounts.iter().copied().take(ACCOUNTS_NAMED_MAX).collect();
        let more = match accounts.len().saturating_sub(named.len()) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let number = count(accounts.len() as u64, "account");
        (!accounts.is_empty()).then(|| format!("{number} {what} by a rule ({}{more}): {effect}", named.join(", ")))
    };
    effects.into_iter().filter_map(of_rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::check::FindingLevel;
    use crate::cli::check::static_checks::check_provider;
    use crate::config;
    use crate::domain::limit::AccountRule;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    #[test]
    fn blocked_and_refused_accounts_are_named() {
        let rule = |account: &str, limit: Option<&str>, rule| AccountRule {
            account: account.to_owned(),
            limit: limit.map(str::to_owned),
            rule,
        };
        let limit = LimitRow { name: "second".into(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
        let url = "https://pay.example.com".to_owned();
        let row = ProviderRow { name: "acme".to_owned(), url, limits: vec![limit], ..ProviderRow::default() };
        let mut provider = row.validate(1).unwrap();
        let refused = (0..7).map(|number| rule(&format!("shop-{number}"), None, Rule::Refuse));
        let blocked = [rule("b", None, Rule::Blocked), rule("b", Some("second"), Rule::Blocked)];
        provider.account_rules = refused.chain(blocked).chain([rule("e", None, Rule::Exempt)]).collect();
        assert_eq!(
            describe_account_rules(&provider),
            [
                "1 account blocked by a rule (b): payments wait while the rule exists",
                "7 accounts refused by a rule (shop-0, shop-1, shop-2, shop-3, shop-4 and 2 more): payments end as declined",
            ]
        );
        let config = config::load(None, [], &[]).unwrap();
        let findings = check_provider(&provider, &[&provider], &config);
        assert!(
            findings.iter().any(|found| found.level == FindingLevel::Ok && found.what.contains("accounts refused"))
        );
        provider.account_rules.retain(|own| own.rule == Rule::Exempt);
        assert_eq!(describe_account_rules(&provider), Vec::<String>::new());
    }
}
