//! Limits and account rules that are changed for a time: setting a limit, and every return when the time has come.
//!
//! The row holds the return, so it survives every restart. Triggers end it with any other change of the
//! row. The return is one transaction with a comparison, so of several workers one applies it. Its audit row has the
//! worker as its author.

use super::dialect::Template;
use super::engine::{Args, args};
use super::result::{SqlRow, corrupt, from_row};
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ledger::provider_row::{AccountReturn, AccountRow, LimitReturn, Object, ProviderRow};

/// Most limits that one look returns: far more than operators change for a time.
const LOOK_MAX: u32 = 100;

pub(super) static END_RETURN: Template = Template::new(
    "UPDATE provider_limits SET until_at = NULL, then_max_requests = NULL, then_window_ms = NULL \
     WHERE provider = $1 AND name = $2 AND until_at IS NOT NULL",
);

pub(super) static END_ACCOUNT_RETURN: Template = Template::new(
    "UPDATE account_overrides SET until_at = NULL, then_row = NULL \
     WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3 AND until_at IS NOT NULL",
);

static SET_LIMIT: Template = Template::new(
    "UPDATE provider_limits SET max_requests = $3, window_ms = $4, until_at = {at:$5}, \
         then_max_requests = $6, then_window_ms = $7 WHERE provider = $1 AND name = $2",
);

static NOW: Template = Template::new("SELECT {now_ms} AS now_ms");

static PLANNED: Template = Template::new(
    "SELECT provider, name, NULL AS account, {ms:until_at} AS at_ms, {until:until_at} AS wait FROM provider_limits \
     WHERE until_at IS NOT NULL \
     UNION ALL \
     SELECT provider, limit_name, account, {ms:until_at}, {until:until_at} FROM account_overrides \
     WHERE until_at IS NOT NULL \
     ORDER BY 4 LIMIT $1",
);

/// On PostgreSQL a function does it: a worker has no right to change a limit.
static RETURN: Template = Template::by_dialect(
    "SELECT name FROM limits_return($1, $2)",
    "UPDATE provider_limits SET max_requests = then_max_requests, window_ms = then_window_ms, \
         until_at = NULL, then_max_requests = NULL, then_window_ms = NULL \
     WHERE provider = $1 AND name = $2 AND until_at <= {now}",
);

static END_RULE: Template = Template::new(
    "DELETE FROM account_overrides WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3 \
         AND until_at <= {now} AND then_row IS NULL",
);

static RETURN_RULE: Template = Template::by_dialect(
    "UPDATE account_overrides SET rule = then_row ->> 'rule', max_requests = (then_row ->> 'max_requests')::bigint, \
         window_ms = (then_row ->> 'window_ms')::bigint, burst = (then_row ->> 'burst')::bigint, \
         weight = coalesce((then_row ->> 'weight')::bigint, 1), until_at = NULL, then_row = NULL \
     WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3 \
         AND until_at <= {now} AND then_row IS NOT NULL",
    "UPDATE account_overrides SET rule = then_row ->> 'rule', max_requests = then_row ->> 'max_requests', \
         window_ms = then_row ->> 'window_ms', burst = then_row ->> 'burst', \
         weight = coalesce(then_row ->> 'weight', 1), until_at = NULL, then_row = NULL \
     WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3 \
         AND until_at <= {now} AND then_row IS NOT NULL",
);

/// The row that goes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReturningRow {
    Limit(String),
    Account { account: String, limit: Option<String> },
}

/// `limit per-second`, `account shop-7`.
impl std::fmt::Display for ReturningRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Limit(name) => write!(f, "limit {name}"),
            Self::Account { account, limit: None } => write!(f, "account {account}"),
            Self::Account { account, limit: Some(limit) } => write!(f, "account {account} at limit {limit}"),
        }
    }
}

/// A limit or an account's rule that goes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedReturn {
    pub provider: String,
    pub row: ReturningRow,
    pub at: DatabaseTime,
    /// Time until then by the database's clock; zero or less: it is due.
    pub in_ms: i64,
}

from_row!(row => PlannedReturn {
    provider, at;
    row: match row.get("account")? {
        Some(account) => ReturningRow::Account { account, limit: row.get("name")? },
        None => ReturningRow::Limit(row.get("name")?),
    },
    in_ms: row.get("wait")?,
});

/// The rate of a limit from now on, and its return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitWrite<'a> {
    pub provider: &'a ProviderName,
    pub limit: &'a str,
    pub rate: Rate,
    pub returns: Option<LimitReturn>,
}

impl Database {
    /// The readable row of a provider, with the settings version at which it was read. `None`: there is none.
    pub async fn readable_row_at(&self, provider: &ProviderName) -> Result<Option<(i64, ProviderRow)>, LedgerError> {
        let (version, rows) = self.readable_rows_at(provider).await?;
        Ok(rows.into_iter().next().map(|row| (version, row)))
    }

    /// Sets a limit's rate and its return, unless the settings have changed since `version`; returns whether they had
    /// not. A former return is ended first, so the audit has its end even where the new one is equal.
    pub async fn set_limit_at(
        &self,
        version: i64,
        write: &LimitWrite<'_>,
        by: Option<&Actor>,
    ) -> Result<bool, LedgerError> {
        let LimitWrite { provider, limit, rate, returns } = *write;
        let until_ms = returns.map(|returns| returns.until.0);
        let then_max = returns.map(|returns| returns.max_requests);
        let then_window_ms = returns.and_then(|returns| returns.window_ms);
        let (max_requests, window_ms) = (rate.max_requests(), rate.window_ms());
        let set = args![provider, limit, max_requests, window_ms, until_ms, then_max, then_window_ms];
        let steps = vec![
            self.unless_changed_since(version),
            self.step(&END_RETURN, args![provider, limit]),
            self.must_affect(&SET_LIMIT, set),
        ];
        Ok(self.atomically_by(steps, by).await?.is_some())
    }

    /// The database's clock.
    pub async fn clock(&self) -> Result<EpochMs, LedgerError> {
        Ok(EpochMs(self.query_row(&NOW, []).await?.get("now_ms")?))
    }

    /// The limits and account rules that go back, the next ones first; at most a hundred.
    pub async fn planned_returns(&self) -> Result<Vec<PlannedReturn>, LedgerError> {
        self.query_as(&PLANNED, args![LOOK_MAX]).await
    }

    /// Sets a row back whose time has come; returns whether it was this call. After another one, or after a change that
    /// ended the return, nothing happens.
    pub async fn return_row(&self, planned: &PlannedReturn, by: &Actor) -> Result<bool, LedgerError> {
        let PlannedReturn { provider, row, .. } = planned;
        let templates: &[&Template] = match row {
            ReturningRow::Limit(_) => &[&RETURN],
            ReturningRow::Account { .. } => &[&END_RULE, &RETURN_RULE],
        };
        for template in templates {
            let args: Args = match row {
                ReturningRow::Limit(limit) => args![provider, limit].into(),
                ReturningRow::Account { account, limit } => args![provider, account, limit.as_deref()].into(),
            };
            if self.atomically_by(vec![self.must_affect(template, args)], Some(by)).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The return in a row of `provider_limits`; `None`: the limit stays as it is.
pub(super) fn returns_of(row: &SqlRow) -> Result<Option<LimitReturn>, LedgerError> {
    let Some(until) = row.get::<Option<DatabaseTime>>("until_at")? else { return Ok(None) };
    let max_requests = row.get::<Option<i64>>("then_max_requests")?.unwrap_or_default();
    Ok(Some(LimitReturn { until, max_requests, window_ms: row.get("then_window_ms")? }))
}

/// The end of an account's rule in its row; `None`: it stays.
pub(super) fn account_returns_of(row: &SqlRow) -> Result<Option<AccountReturn>, LedgerError> {
    let Some(until) = row.get::<Option<DatabaseTime>>("until_at")? else { return Ok(None) };
    let then = row.get::<Option<Object>>("then_row")?.map(|columns| {
        let then = serde_json::from_value(serde_json::Value::Object(columns));
        let then: AccountRow = then.map_err(|_| corrupt("then_row", "holds no account rule"))?;
        let (account, limit_name) = (row.get("account")?, row.get("limit_name")?);
        Ok::<_, LedgerError>(Box::new(AccountRow { account, limit_name, ..then }))
    });
    Ok(Some(AccountReturn { until, then: then.transpose()? }))
}
