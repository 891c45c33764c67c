//! Account rules that an operator sets by hand: what is blocked, refused, exempt or limited, by whom, why and until when.
//!
//! Commands and API share this code. A rule that the provider's row cannot use is rejected before anything is written. A
//! rule with an end goes back to the rule before it, so a rule for an hour never loses a block.

use std::str::FromStr;

use serde::Serialize;
use utoipa::ToSchema;

use super::change::{SettingsChangeError, TRIES_MAX, check_changed_row, row_to_change, too_fast};
use crate::domain::job::Identifier;
use crate::domain::limit::{InvalidRate, Rate};
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ledger::provider_row::{AccountReturn, AccountRow, ProviderRow};
use crate::ledger::settings::RuleWrite;
use crate::ops::until::Until;

/// A rule as an operator writes it: `5/1s`, `5 at once`, `blocked`, `refuse` or `exempt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrittenRule {
    Exempt,
    Blocked,
    Refuse,
    Limit(Rate),
}

/// Why a text is no rule, and how to write it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is no rule: write blocked, refuse, exempt or a rate ({0})")]
pub struct InvalidRule(InvalidRate);

impl FromStr for WrittenRule {
    type Err = InvalidRule;

    fn from_str(text: &str) -> Result<Self, InvalidRule> {
        match text {
            "exempt" => Ok(Self::Exempt),
            "blocked" => Ok(Self::Blocked),
            "refuse" => Ok(Self::Refuse),
            rate => Rate::parse_limit(rate).map(Self::Limit).map_err(InvalidRule),
        }
    }
}

impl WrittenRule {
    /// Sets rule and numbers of a row; the weight stays.
    fn write(self, row: &mut AccountRow) {
        let (rule, rate) = match self {
            Self::Exempt => ("exempt", None),
            Self::Blocked => ("blocked", None),
            Self::Refuse => ("refuse", None),
            Self::Limit(rate) => ("limit", Some(rate)),
        };
        row.rule = Some(rule.to_owned());
        row.max_requests = rate.map(|rate| rate.max_requests().into());
        row.window_ms = rate.and_then(Rate::window_ms);
        row.burst = None;
    }
}

/// The wanted row of an account.
#[derive(Clone, Debug)]
pub enum WantedRule {
    /// What is `None` stays as it is.
    Set {
        rule: Option<WrittenRule>,
        weight: Option<i64>,
        until: Until,
    },
    Unset,
}

/// The account whose rule changes; `limit`: the rule is for this limit alone.
#[derive(Clone, Copy, Debug)]
pub struct RuleSubject<'a> {
    pub provider: &'a ProviderName,
    pub account: &'a Identifier,
    pub limit: Option<&'a str>,
}

/// An account's row before and after a change.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleChange {
    pub before: Option<AccountRow>,
    pub after: Option<AccountRow>,
    /// No payment of the provider has ever named the account: its name may be mistyped.
    pub unknown_account: bool,
}

impl RuleChange {
    fn new(
        row: &ProviderRow,
        of: &RuleSubject<'_>,
        wanted: &WantedRule,
        now: EpochMs,
    ) -> Result<Self, SettingsChangeError> {
        let account = of.account.as_str();
        let before = row.accounts.iter().find(|row| row.is_rule_of(account, of.limit)).cloned();
        let none = AccountRow {
            account: account.to_owned(),
            limit_name: of.limit.map(str::to_owned),
            ..AccountRow::default()
        };
        let after = match wanted {
            WantedRule::Unset if before.is_none() => {
                let (provider, subject) = (row.name.clone(), none.describe_subject());
                return Err(SettingsChangeError::NoRule { provider, subject });
            }
            WantedRule::Unset => None,
            WantedRule::Set { rule, weight, until } => {
                let mut after = AccountRow { returns: None, ..before.clone().unwrap_or(none) };
                if let Some(rule) = rule {
                    rule.write(&mut after);
                }
                after.weight = weight.unwrap_or(after.weight);
                let invalid = |problem: String| SettingsChangeError::InvalidRow(vec![problem]);
                let until = until.instant_for(now, row).map_err(|problem| invalid(problem.to_string()))?;
                if let Some(until) = until {
                    let then = lasting(before.clone());
                    if then.as_deref() == Some(&after) {
                        let (account, rule) = (after.account.clone(), after.describe());
                        return Err(SettingsChangeError::SameRuleAfterwards { account, rule });
                    }
                    after.returns = Some(AccountReturn { until: DatabaseTime(until.0), then });
                }
                Some(after)
            }
        };
        Ok(Self { before, after, unknown_account: false })
    }

    pub fn is_change(&self) -> bool {
        self.before != self.after
    }

    /// The provider's row with this change.
    fn applied_to(&self, mut row: ProviderRow, of: &RuleSubject<'_>) -> ProviderRow {
        row.accounts.retain(|row| !row.is_rule_of(of.account.as_str(), of.limit));
        row.accounts.extend(self.after.clone());
        row
    }

    /// What an operator should know of an account that no payment names.
    pub fn warning(&self, of: &RuleSubject<'_>) -> Option<String> {
        let (account, provider) = (of.account, of.provider);
        self.unknown_account
            .then(|| format!("no payment of {provider} has ever named account `{account}`: check its name"))
    }
}

/// The row without an end: after a temporary rule, the row that would have come back.
fn lasting(before: Option<AccountRow>) -> Option<Box<AccountRow>> {
    match before {
        Some(AccountRow { returns: Some(AccountReturn { then, .. }), .. }) => then,
        lasting => lasting.map(Box::new),
    }
}

/// Changes an account's rule. The same rule and end again change nothing.
///
/// # Errors
/// [`SettingsChangeError`]; nothing was changed.
pub async fn change_rule(
    ledger: &Database,
    of: &RuleSubject<'_>,
    wanted: &WantedRule,
    by: Option<&Actor>,
) -> Result<RuleChange, SettingsChangeError> {
    let now = ledger.clock().await?;
    for _ in 0..TRIES_MAX {
        let (version, row) = row_to_change(ledger, of.provider).await?;
        let mut change = RuleChange::new(&row, of, wanted, now)?;
        check_changed_row(ledger, of.provider, &change.applied_to(row, of)).await?;
        if change.after.is_some() {
            change.unknown_account = !ledger.account_has_payment(of.provider, of.account.as_str()).await?;
        }
        let (before, after) = (change.before.as_ref(), change.after.as_ref());
        let write = RuleWrite { provider: of.provider, before, after };
        if !change.is_change() || ledger.set_account_rule_at(version, &write, by).await? {
            return Ok(change);
        }
    }
    Err(too_fast())
}

/// One account rule of a provider, as `accounts list` and the API show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct AccountRuleLine {
    pub account: String,
    /// The limit that the rule is for; `null`: all limits of scope `account`.
    pub limit: Option<String>,
    /// `5/1s`, `5 at once`, `blocked`, `refuse` or `exempt`; `null`: the row sets a weight alone.
    pub rule: Option<String>,
    pub burst: Option<i64>,
    pub weight: i64,
    /// When the rule ends by itself; `null`: it stays.
    pub until: Option<DatabaseTime>,
    /// The rule from then on, in words.
    pub then: Option<String>,
    /// Who made the rule, by the audit, and when.
    pub who: Option<String>,
    pub at: Option<DatabaseTime>,
    pub program: Option<String>,
    pub because: Option<String>,
}

/// The rules of a provider, by account and limit.
///
/// # Errors
/// When the provider does not exist, or the database fails.
pub async fn list_rules(
    ledger: &Database,
    provider: &ProviderName,
) -> Result<Vec<AccountRuleLine>, SettingsChangeError> {
    let (_, row) = row_to_change(ledger, provider).await?;
    let mut authors = ledger.authors_of_rules(provider, &row.accounts).await?;
    let line = |rule: AccountRow| {
        let author = authors.remove(&rule.audit_key(provider.as_str()));
        let (at, who) = (author.as_ref().map(|author| author.at), author.as_ref().map(|author| author.who.clone()));
        let (program, because) = author.map_or((None, None), |author| (author.program, author.because));
        AccountRuleLine {
            rule: rule.describe_rule(),
            until: rule.returns.as_ref().map(|returns| returns.until),
            then: rule.returns.as_ref().map(AccountReturn::describe_then),
            account: rule.account,
            limit: rule.limit_name,
            burst: rule.burst,
            weight: rule.weight,
            who,
            at,
            program,
            because,
        }
    };
    Ok(row.accounts.into_iter().map(line).collect())
}
