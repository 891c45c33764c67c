//! Validation of account rows: exemptions from account limits, blocked and refused accounts, accounts with their own
//! limit, and weights.
//!
//! A row that can never take effect is a problem. Limits of scope `provider` apply to all accounts, whatever a rule
//! says. A weight belongs to the account, not to one of its limits.

use std::collections::BTreeSet;
use std::time::Duration;

use super::limits::unsupported_reasons;
use super::validate::RowValidator;
use super::{AccountRow, LimitRow};
use crate::domain::job::Identifier;
use crate::domain::limit::{
    AccountRule, Algorithm, AppliesTo, Limit, LimitOverride, MAX_REQUESTS, RULE_LIMIT, Rule, Scope,
};

/// Largest weight of an account, as constraint `override_weight_is_1_to_1000` has it.
const WEIGHT_MAX: i64 = 1_000;

impl RowValidator {
    pub fn accounts<'a>(&mut self, rows: &'a [AccountRow], limits: &[LimitRow]) -> Vec<AccountRule> {
        let mut keys = BTreeSet::new();
        let mut rule = |row: &'a AccountRow| {
            let is_new = keys.insert((&row.account, &row.limit_name));
            self.at(&format!("account `{}`", row.account), |check| {
                if !is_new {
                    check.problem("has two rows for the same limits: write them as one");
                }
                check.account(row, limits)
            })
        };
        rows.iter().filter_map(&mut rule).collect()
    }

    fn account(&mut self, row: &AccountRow, limits: &[LimitRow]) -> Option<AccountRule> {
        if Identifier::new(&row.account).is_err() {
            self.problem("account must be 1 to 64 characters of A-Z a-z 0-9 _ -");
        }
        self.weight(row);
        let rules = [
            ("exempt", Some(Rule::Exempt)),
            ("blocked", Some(Rule::Blocked)),
            ("refuse", Some(Rule::Refuse)),
            ("limit", None),
        ];
        let Some(rule) = &row.rule else {
            self.own_numbers(row);
            return None;
        };
        let rule = self.one_of("rule", rule, &rules)?;
        let own = self.own_numbers(row);
        self.check_affected_limits(row, limits, own);
        let rule = rule.or(own.map(Rule::Limit))?;
        Some(AccountRule { account: row.account.clone(), limit: row.limit_name.clone(), rule })
    }

    fn weight(&mut self, row: &AccountRow) {
        self.number("weight", row.weight, 1..=WEIGHT_MAX);
        if let (Some(limit), true) = (&row.limit_name, row.weight != 1) {
            self.problem(format!(
                "weight is {}, and limit_name is `{limit}`: a weight is the account's, not a limit's; leave limit_name out",
                row.weight
            ));
        }
        if row.rule.is_none() && row.weight == 1 {
            self.problem(
                "has no rule, and its weight is 1: it changes nothing; give it a rule or a weight, or leave it out",
            );
        }
    }

    /// The account's own numbers, for rule `limit` alone.
    fn own_numbers(&mut self, row: &AccountRow) -> Option<LimitOverride> {
        let rule = row.rule.as_deref().unwrap_or_default();
        let burst = row.burst.map(|burst| self.number("burst", burst, 1..=MAX_REQUESTS.into()));
        if burst.is_some() && rule != "limit" {
            self.problem("burst goes with rule `limit` only");
        }
        match (rule, row.max_requests, row.window_ms) {
            ("limit", Some(max_requests), Some(window_ms)) => {
                self.rate(max_requests, window_ms).map(|rate| LimitOverride { rate, burst })
            }
            ("limit", Some(max_requests), None) => {
                self.in_flight(max_requests).map(|rate| LimitOverride { rate, burst })
            }
            ("limit", ..) => {
                self.problem("rule `limit` needs max_requests, and window_ms except for a limit of `concurrency`");
                None
            }
            (_, None, None) => None,
            _ => {
                self.problem("max_requests and window_ms go with rule `limit` only");
                None
            }
        }
    }

    /// Checks that an exemption changes at least one limit, and that each changed one supports the rule's rate. Disabled
    /// limits count: disabling a limit must not invalidate its rules.
    fn check_affected_limits(&mut self, row: &AccountRow, limits: &[LimitRow], own: Option<LimitOverride>) {
        let named = limits.iter().find(|limit| Some(&limit.name) == row.limit_name.as_ref());
        if let (Some(name), None) = (&row.limit_name, named) {
            self.problem(format!("limit_name `{name}` is not a limit of this provider"));
            return;
        }
        let rule = row.rule.as_deref().unwrap_or_default();
        if let ("refuse", Some(name)) = (rule, &row.limit_name) {
            self.problem(format!(
                "rule is `refuse`, and limit_name is `{name}`: the account is refused, whatever its limits; leave \
                 limit_name out"
            ));
        }
        if matches!(rule, "blocked" | "refuse") {
            return;
        }
        let of_accounts = |limit: &&LimitRow| limit.scope == Scope::Account.name();
        if let Some(limit) = named.filter(|limit| !of_accounts(limit)) {
            self.problem(format!(
                "limit_name `{}` has scope `{}`: an account rule changes limits of scope `account` alone; name one of \
                 those, or leave limit_name out for all of them",
                limit.name, limit.scope
            ));
            return;
        }
        let touched: Vec<&LimitRow> = match named {
            Some(limit) => vec![limit],
            None => limits.iter().filter(of_accounts).collect(),
        };
        if touched.is_empty() && rule == "exempt" {
            self.problem(
                "rule `exempt` changes nothing: this provider has no limit of scope `account`; add one (the other rules need \
                 none)",
            );
        }
        let Some(own) = own else { return };
        let is_enforced = touched.iter().any(|limit| limit.enabled);
        // An invalid limit is reported with the limit itself.
        let touched: Vec<Limit> = touched.into_iter().filter_map(|limit| Self::default().limit(limit)).collect();
        let has_burst = |limit: &Limit| matches!(limit.algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
        // A rule on several limits sets the burst of those that have one.
        let burst_is_wrong = own.burst.is_some() && !touched.iter().any(has_burst);
        if named.is_none() && !is_enforced {
            self.rule_limit(own, touched.is_empty(), burst_is_wrong);
        }
        for limit in touched {
            let burst = own.burst.filter(|_| burst_is_wrong || has_burst(&limit));
            let with_own_rate = Limit { rate: own.rate, burst, ..limit.clone() };
            if unsupported_reasons(&limit).is_empty() {
                let problems = unsupported_reasons(&with_own_rate);
                self.0.extend(problems.into_iter().map(|problem| format!("at limit `{}`: {problem}", limit.name)));
            }
        }
    }

    /// Checks a rule that is a limit of its own, because the row enforces no account limit. Numbers of requests in flight
    /// may belong to a disabled limit, and to nothing else.
    fn rule_limit(&mut self, own: LimitOverride, is_alone: bool, burst_is_wrong: bool) {
        if own.rate.is_at_once() && !is_alone {
            return;
        }
        let limit = Limit {
            name: RULE_LIMIT.to_owned(),
            algorithm: Algorithm::SlidingLog,
            rate: own.rate,
            offset: Duration::ZERO,
            burst: own.burst.filter(|_| burst_is_wrong && is_alone),
            scope: Scope::Account,
            applies_to: AppliesTo::All,
            shadow: false,
        };
        let why = "this provider has no account limit, so the rule is a limit of its own, a sliding_log";
        self.0.extend(unsupported_reasons(&limit).into_iter().map(|problem| format!("{problem} ({why})")));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::super::tests::with;
    use super::*;
    use crate::domain::limit::Rate;

    fn limits() -> Value {
        json!([
            {"name": "all", "max_requests": 5, "window_ms": 1000},
            {"name": "hourly", "max_requests": 100, "window_ms": 3_600_000, "scope": "account"},
            {"name": "minutely", "max_requests": 7, "window_ms": 60_000, "scope": "account", "enabled": false,
             "algorithm": "fixed_window", "offset_ms": 30_000},
            {"name": "object", "max_requests": 5, "window_ms": 60_000, "scope": "reference"},
        ])
    }

    fn rules(limits: &Value, accounts: Value) -> Result<Vec<AccountRule>, Vec<String>> {
        let row = with(json!({"limit": limits, "account": accounts}));
        row.validate(1).map(|provider| provider.account_rules).map_err(|bad| bad.problems)
    }

    #[test]
    fn account_rules_validate_as_configured() {
        let rules = rules(
            &limits(),
            json!([
                {"account": "a", "rule": "exempt"},
                {"account": "a", "rule": "blocked", "limit_name": "all"},
                {"account": "b", "rule": "exempt", "limit_name": "minutely"},
                {"account": "c", "rule": "limit", "max_requests": 9, "window_ms": 60_000},
                {"account": "d", "rule": "limit", "limit_name": "hourly", "max_requests": 0, "window_ms": 1},
                {"account": "e", "weight": 1000},
                {"account": "f", "rule": "exempt", "weight": 2},
            ]),
        );
        let rule = |account: &str, limit: Option<&str>, rule| AccountRule {
            account: account.to_owned(),
            limit: limit.map(str::to_owned),
            rule,
        };
        let rate = |requests, window| {
            let rate = Rate::new(requests, Duration::from_millis(window)).unwrap();
            Rule::Limit(LimitOverride { rate, burst: None })
        };
        assert_eq!(
            rules.unwrap(),
            [
                rule("a", None, Rule::Exempt),
                rule("a", Some("all"), Rule::Blocked),
                rule("b", Some("minutely"), Rule::Exempt),
                rule("c", None, rate(9, 60_000)),
                rule("d", Some("hourly"), rate(0, 1)),
                rule("f", None, Rule::Exempt),
            ]
        );
    }

    #[test]
    fn ineffective_rules_are_reported_with_a_fix() {
        let own = |limit: Option<&str>, max_requests: i64, window_ms: i64| {
            json!({"account": "a", "rule": "limit", "limit_name": limit, "max_requests": max_requests,
                   "window_ms": window_ms})
        };
        let exempt = |limit: &str| json!({"account": "a", "rule": "exempt", "limit_name": limit});
        let table = [
            (exempt("all"), "limit_name `all` has scope `provider`: an account rule changes limits of scope `account`"),
            (exempt("object"), "limit_name `object` has scope `reference`"),
            (exempt("none"), "limit_name `none` is not a limit of this provider"),
            (own(Some("all"), 1, 1_000), "limit_name `all` has scope `provider`"),
            (own(Some("hourly"), 10_001, 1_000), "at limit `hourly`: max_requests is 10001: a sliding_log of scope"),
            // A rule without limit name covers all account limits, disabled ones too.
            (own(None, 5, 20_000), "at limit `minutely`: offset_ms is 30000: must lie below the window, 20000 ms"),
            (own(None, 1_000_001, 60_000), "max_requests is 1000001"),
            (
                json!({"account": "a", "rule": "limit", "limit_name": "hourly", "max_requests": 5, "window_ms": 1000, "burst": 2}),
                "at limit `hourly`: burst is not supported by `sliding_log`",
            ),
            (
                json!({"account": "a", "limit_name": "hourly", "rule": "exempt", "weight": 3}),
                "weight is 3, and limit_name is `hourly`: a weight is the account's",
            ),
            (
                json!({"account": "a", "rule": "refuse", "limit_name": "hourly"}),
                "rule is `refuse`, and limit_name is `hourly`: the account is refused, whatever its limits",
            ),
            (
                json!({"account": "a", "rule": "refuse", "max_requests": 5}),
                "max_requests and window_ms go with rule `limit` only",
            ),
            (
                json!({"account": "a", "weight": 3, "max_requests": 5, "window_ms": 1000}),
                "max_requests and window_ms go with rule `limit` only",
            ),
            (json!({"account": "a", "weight": 3, "burst": 5}), "burst goes with rule `limit` only"),
            (json!({"account": "a", "rule": "allow"}), "rule is `allow`: must be exempt or blocked or refuse or limit"),
        ];
        for (account, problem) in table {
            let problems = rules(&limits(), json!([account])).unwrap_err();
            let named = problems.len() == 1 && problems[0].starts_with("account `a`: ");
            assert!(named && problems[0].contains(problem), "{account}: {problems:#?}");
        }
    }

    /// Without account limits, an exemption has no effect; the other rules need none.
    #[test]
    fn only_an_exemption_needs_an_account_limit() {
        let plain = json!([{"name": "all", "max_requests": 5, "window_ms": 1000}]);
        let exempt = json!([{"account": "a", "rule": "exempt"}]);
        let problems = rules(&plain, exempt).unwrap_err();
        assert!(
            problems[0].contains("rule `exempt` changes nothing: this provider has no limit of scope"),
            "{problems:?}"
        );
        assert_eq!(rules(&plain, json!([{"account": "a", "rule": "blocked"}])).unwrap().len(), 1);
        assert_eq!(rules(&plain, json!([{"account": "a", "rule": "refuse"}])).unwrap()[0].rule, Rule::Refuse);
        assert_eq!(rules(&plain, json!([{"account": "a", "weight": 3}])), Ok(Vec::new()));
        let twice = json!([{"account": "a", "weight": 3}, {"account": "a", "rule": "blocked"}]);
        assert!(rules(&plain, twice).unwrap_err()[0].contains("has two rows for the same limits"));
    }

    /// A rule that replaces no enforced limit is a sliding log over all calls of its account.
    #[test]
    fn rule_without_account_limit_is_a_limit() {
        let plain = json!({"name": "all", "max_requests": 5, "window_ms": 1000});
        let other = |change: Value| {
            let mut limit = json!({"name": "own", "max_requests": 9, "window_ms": 60_000, "scope": "account"});
            limit.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            json!([plain, limit])
        };
        let alone = json!([plain]);
        let own = |change: Value| {
            let mut rule = json!({"account": "a", "rule": "limit", "max_requests": 3, "window_ms": 2_000});
            rule.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            rule.as_object_mut().unwrap().retain(|_, value| !value.is_null());
            rule
        };
        let at_once = json!({"window_ms": null});
        let mut disabled_slots = other(json!({"algorithm": "concurrency", "enabled": false}));
        disabled_slots[1].as_object_mut().unwrap().remove("window_ms");
        // Limits, the rule, and the window of the limit that the rule makes; or the problem.
        let table = [
            (alone.clone(), own(json!({})), Ok(Some(2_000))),
            (other(json!({})), own(json!({})), Ok(None)),
            (other(json!({"shadow": true})), own(json!({})), Ok(None)),
            (other(json!({"enabled": false})), own(json!({})), Ok(Some(2_000))),
            (other(json!({"scope": "reference"})), own(json!({})), Ok(Some(2_000))),
            (disabled_slots, own(at_once.clone()), Ok(None)),
            (alone.clone(), own(json!({"max_requests": 0})), Ok(Some(2_000))),
            (alone.clone(), own(json!({"max_requests": 10_001})), Err("keeps one log for each account")),
            (alone.clone(), own(at_once), Err("window_ms is missing")),
            (alone, own(json!({"burst": 2})), Err("burst is not supported by `sliding_log`")),
            (other(json!({"enabled": false, "algorithm": "token_bucket"})), own(json!({"burst": 2})), Ok(Some(2_000))),
        ];
        for (limits, rule, expected) in table {
            let made = with(json!({"limit": limits, "account": [rule]})).validate(1);
            let made = made.map(|provider| provider.rule_limit_window().map(|window| window.as_millis()));
            match (made, expected) {
                (Ok(made), Ok(expected)) => assert_eq!(made, expected, "{limits} {rule}"),
                (Err(bad), Err(part)) => {
                    assert!(bad.problems.len() == 1 && bad.problems[0].contains(part), "{rule}: {:?}", bad.problems);
                }
                (made, expected) => panic!("{limits} {rule}: {made:?}, expected {expected:?}"),
            }
        }
    }
}
