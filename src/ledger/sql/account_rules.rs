//! Account rules that operators set one by one: writing a rule, and the authors of rules by the audit, in which triggers
//! record each change.

use std::collections::BTreeMap;

use super::apply::{DELETE_ACCOUNT, INSERT_ACCOUNT, UPDATE_ACCOUNT, account_args};
use super::dialect::Template;
use super::engine::args;
use super::limit_returns::END_ACCOUNT_RETURN;
use super::result::FromRow as _;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::provider_row::AccountRow;
use crate::ledger::settings::{AuditRow, AuditedChange};

/// Changes of account rules that are searched for authors.
const AUDIT_ROWS_MAX: u32 = 10_000;

static CHANGES: Template = Template::new(
    "SELECT id, {ms:at} AS at_ms, who, os_user, program, because, table_name, row_key, \
         {text:old_row} AS old_row, {text:new_row} AS new_row FROM settings_audit \
     WHERE table_name = 'account_overrides' AND substr(row_key, 1, length($1) + 1) = $1 || '/' \
     ORDER BY id DESC LIMIT $2",
);

static HAS_PAYMENT: Template =
    Template::new("SELECT 1 AS found FROM jobs WHERE provider = $1 AND account = $2 LIMIT 1");

/// The row of an account from now on.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleWrite<'a> {
    pub provider: &'a ProviderName,
    pub before: Option<&'a AccountRow>,
    /// `None`: the row is deleted.
    pub after: Option<&'a AccountRow>,
}

impl Database {
    /// Writes an account's row, unless the settings have changed since `version`; returns whether they had not.
    pub async fn set_account_rule_at(
        &self,
        version: i64,
        write: &RuleWrite<'_>,
        by: Option<&Actor>,
    ) -> Result<bool, LedgerError> {
        let RuleWrite { provider, before, after } = *write;
        let mut steps = vec![self.unless_changed_since(version)];
        let key = |row: &AccountRow| args![provider, &row.account, row.limit_name.as_deref()];
        match (before, after) {
            (None, None) => {}
            (None, Some(after)) => {
                steps.push(self.must_affect(&INSERT_ACCOUNT, account_args(provider.as_str(), after)));
            }
            (Some(before), None) => steps.push(self.must_affect(&DELETE_ACCOUNT, key(before))),
            (Some(_), Some(after)) => {
                if after.returns.is_some() {
                    // The triggers cannot tell the same end again from no new end.
                    steps.push(self.step(&END_ACCOUNT_RETURN, key(after)));
                }
                steps.push(self.must_affect(&UPDATE_ACCOUNT, account_args(provider.as_str(), after)));
            }
        }
        Ok(self.atomically_by(steps, by).await?.is_some())
    }

    /// The audited changes that made these rules what they are, by their keys in the audit.
    pub async fn authors_of_rules(
        &self,
        provider: &ProviderName,
        rules: &[AccountRow],
    ) -> Result<BTreeMap<String, AuditedChange>, LedgerError> {
        let rows = self.query(&CHANGES, args![provider, AUDIT_ROWS_MAX]).await?;
        let wanted: BTreeMap<String, &AccountRow> =
            rules.iter().map(|rule| (rule.audit_key(provider.as_str()), rule)).collect();
        let mut authors = BTreeMap::new();
        for row in rows.iter().filter_map(|row| AuditRow::from_row(row).ok()) {
            let makes = |rule: &&AccountRow| row.new_row.as_ref().is_some_and(|new| rule.is_audited_as(new));
            let is_author = wanted.get(&row.row_key).is_some_and(makes) && !row.is_planned_return();
            if is_author && !authors.contains_key(&row.row_key) {
                authors.insert(row.row_key.clone(), row.into());
            }
        }
        Ok(authors)
    }

    /// Whether any payment of the provider names the account.
    pub async fn account_has_payment(&self, provider: &ProviderName, account: &str) -> Result<bool, LedgerError> {
        Ok(!self.query_by_index(&HAS_PAYMENT, args![provider, account]).await?.is_empty())
    }
}
