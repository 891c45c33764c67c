//! The statements that apply a provider file: each change as SQL and as a description for the terminal.
//!
//! Invalid rows are rejected before anything is written. Values of JSON columns are left out of the descriptions.

use serde::Serialize;
use serde_json::Value as Json;

use super::dialect::Template;
use super::engine::{Args, Step, Value, args};
use super::limit_returns::{END_ACCOUNT_RETURN, END_RETURN};
use crate::domain::printable::describe_url_change;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::provider_row::{AccountRow, LimitRow, Object, ProviderRow, describe_value};
use crate::ledger::settings::SettingsChange;

const JSON_COLUMNS: [&str; 8] =
    ["headers", "request", "lookup", "statuses", "currencies", "decimals", "amount_step", "require"];

/// Statements of one apply, in an order that foreign keys allow, with the changes' descriptions.
#[derive(Default)]
struct ApplyPlan {
    changes: Vec<SettingsChange>,
    drop_accounts: Vec<Step>,
    providers: Vec<Step>,
    limits: Vec<Step>,
    accounts: Vec<Step>,
}

/// Validates the rows.
///
/// # Errors
/// [`LedgerError::StatementFailed`] with all problems of all rows.
pub fn check(rows: &[ProviderRow]) -> Result<(), LedgerError> {
    let problems: Vec<String> = rows
        .iter()
        .filter_map(|row| row.validate(0).err())
        .flat_map(|bad| {
            let name = bad.provider;
            bad.problems.into_iter().map(move |problem| format!("provider `{name}`: {problem}"))
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(LedgerError::StatementFailed(problems.join("; "))) }
}

static GUARD: Template = Template::by_dialect(
    "SELECT settings_hold_version($1) AS version",
    "UPDATE settings_version SET version = version WHERE version = $1",
);

/// The columns of a provider, each with its argument.
fn provider_places() -> Vec<(&'static str, String)> {
    let place = |((column, _), number): ((&'static str, Value), u32)| match JSON_COLUMNS.contains(&column) {
        true => (column, format!("{{json:${number}}}")),
        false => (column, format!("${number}")),
    };
    provider_columns(&ProviderRow::default()).into_iter().zip(1..).map(place).collect()
}

static INSERT_PROVIDER: Template = Template::made(|_| {
    let (columns, places): (Vec<_>, Vec<_>) = provider_places().into_iter().unzip();
    format!("INSERT INTO providers ({}) VALUES ({})", columns.join(", "), places.join(", "))
});

static UPDATE_PROVIDER: Template = Template::made(|_| {
    let sets = provider_places().into_iter().skip(1).map(|(column, place)| format!("{column} = {place}"));
    format!("UPDATE providers SET {} WHERE name = $1", sets.collect::<Vec<_>>().join(", "))
});

static INSERT_LIMIT: Template = Template::new(
    "INSERT INTO provider_limits (provider, name, algorithm, max_requests, window_ms, offset_ms, burst, \
         scope, applies_to, shadow, enabled) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
);

static UPDATE_LIMIT: Template = Template::new(
    "UPDATE provider_limits SET algorithm = $3, max_requests = $4, window_ms = $5, offset_ms = $6, \
         burst = $7, scope = $8, applies_to = $9, shadow = $10, enabled = $11, \
         until_at = {at:$12}, then_max_requests = $13, then_window_ms = $14 \
     WHERE provider = $1 AND name = $2",
);

static DELETE_LIMIT: Template = Template::new("DELETE FROM provider_limits WHERE provider = $1 AND name = $2");

pub(super) static INSERT_ACCOUNT: Template = Template::new(
    "INSERT INTO account_overrides (\
         provider, account, limit_name, rule, max_requests, window_ms, burst, weight, until_at, then_row) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, {at:$9}, {json:$10})",
);

pub(super) static UPDATE_ACCOUNT: Template = Template::new(
    "UPDATE account_overrides SET rule = $4, max_requests = $5, window_ms = $6, burst = $7, weight = $8, \
         until_at = {at:$9}, then_row = {json:$10} \
     WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3",
);

pub(super) static DELETE_ACCOUNT: Template = Template::new(
    "DELETE FROM account_overrides \
     WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3",
);

impl Database {
    /// A first step that rolls the transaction back when settings are no longer at `version`. It locks the version's
    /// row, so settings cannot change until the transaction ends.
    pub(super) fn unless_changed_since(&self, version: i64) -> Step {
        self.must_affect(&GUARD, args![version])
    }

    /// The changes, and the statements that make them.
    pub(super) fn settings_difference(
        &self,
        present: &[ProviderRow],
        wanted: &[ProviderRow],
    ) -> (Vec<SettingsChange>, Vec<Step>) {
        let mut plan = ApplyPlan::default();
        let empty = ProviderRow::default();
        for new in wanted {
            let old = present.iter().find(|row| row.name == new.name);
            self.provider_difference(&mut plan, old, new);
            let old = old.unwrap_or(&empty);
            self.limits_difference(&mut plan, &new.name, &old.limits, &new.limits);
            self.accounts_difference(&mut plan, &new.name, &old.accounts, &new.accounts);
        }
        let ApplyPlan { changes, drop_accounts, providers, limits, accounts } = plan;
        (changes, [providers, drop_accounts, limits, accounts].into_iter().flatten().collect())
    }

    fn provider_difference(&self, plan: &mut ApplyPlan, old: Option<&ProviderRow>, new: &ProviderRow) {
        let Some(old) = old else {
            plan.record(&new.name, "created".to_owned());
            plan.providers.push(self.must_affect(&INSERT_PROVIDER, provider_args(new)));
            return;
        };
        let columns = differing(old, new, &["limit", "account"]);
        for (column, was, is) in &columns {
            let what = match column.as_str() {
                "url" => format!("changed url {}", describe_url_change(was, is)),
                column if JSON_COLUMNS.contains(&column) => format!("changed {column}"),
                column => format!("changed {column} {was} → {is}"),
            };
            plan.record(&new.name, what);
        }
        if !columns.is_empty() {
            plan.providers.push(self.must_affect(&UPDATE_PROVIDER, provider_args(new)));
        }
    }

    fn limits_difference(&self, plan: &mut ApplyPlan, provider: &str, old: &[LimitRow], new: &[LimitRow]) {
        for gone in old.iter().filter(|old| !new.iter().any(|new| new.name == old.name)) {
            plan.record(provider, format!("limit {} removed", gone.name));
            plan.limits.push(self.must_affect(&DELETE_LIMIT, args![provider, &gone.name]));
        }
        for new in new {
            match old.iter().find(|old| old.name == new.name) {
                None => {
                    plan.record(provider, format!("limit {} added {}", new.name, new.describe()));
                    plan.limits.push(self.must_affect(&INSERT_LIMIT, limit_args(provider, new)));
                }
                Some(old) if old != new => {
                    let (was, is) = (old.describe_rate(), new.describe_rate());
                    if was != is {
                        plan.record(provider, format!("limit {} changed {was} → {is}", new.name));
                    }
                    if let Some(returns) = old.returns {
                        if new.returns.is_none() {
                            plan.record(provider, format!("limit {} no longer goes back: it was {returns}", new.name));
                        } else {
                            // The triggers cannot tell the same end again from no new end.
                            plan.limits.push(self.step(&END_RETURN, args![provider, &new.name]));
                        }
                    }
                    for (column, was, is) in differing(old, new, &["max_requests", "window_ms"]) {
                        plan.record(provider, format!("limit {} changed {column} {was} → {is}", new.name));
                    }
                    let args: Args = limit_args(provider, new).iter().chain(return_args(new).iter()).cloned().collect();
                    plan.limits.push(self.must_affect(&UPDATE_LIMIT, args));
                }
                Some(_) => {}
            }
        }
    }

    fn accounts_difference(&self, plan: &mut ApplyPlan, provider: &str, old: &[AccountRow], new: &[AccountRow]) {
        let same = |a: &AccountRow, b: &AccountRow| a.is_rule_of(&b.account, b.limit_name.as_deref());
        for gone in old.iter().filter(|old| !new.iter().any(|new| same(old, new))) {
            plan.record(provider, format!("{} removed", gone.describe_subject()));
            let args = args![provider, &gone.account, gone.limit_name.as_deref()];
            plan.drop_accounts.push(self.must_affect(&DELETE_ACCOUNT, args));
        }
        for new in new {
            match old.iter().find(|old| same(old, new)) {
                None => {
                    plan.record(provider, format!("{} added {}", new.describe_subject(), new.describe()));
                    plan.accounts.push(self.must_affect(&INSERT_ACCOUNT, account_args(provider, new)));
                }
                Some(old) if old != new => {
                    let subject = new.describe_subject();
                    match (&old.returns, &new.returns) {
                        (Some(returns), None) => {
                            plan.record(provider, format!("{subject} no longer ends: it was {returns}"));
                        }
                        (Some(_), Some(_)) => {
                            let args = args![provider, &new.account, new.limit_name.as_deref()];
                            plan.accounts.push(self.step(&END_ACCOUNT_RETURN, args));
                        }
                        (None, _) => {}
                    }
                    for (column, was, is) in differing(old, new, &[]) {
                        plan.record(provider, format!("{subject} changed {column} {was} → {is}"));
                    }
                    plan.accounts.push(self.must_affect(&UPDATE_ACCOUNT, account_args(provider, new)));
                }
                Some(_) => {}
            }
        }
    }
}

impl ApplyPlan {
    fn record(&mut self, provider: &str, what: String) {
        self.changes.push(SettingsChange { provider: provider.to_owned(), description: what });
    }
}

/// Columns whose values differ, with both values, by the names that the file uses.
fn differing<T: Serialize>(old: &T, new: &T, except: &[&str]) -> Vec<(String, String, String)> {
    let columns = |row: &T| match serde_json::to_value(row) {
        Ok(Json::Object(columns)) => columns,
        _ => Object::new(),
    };
    let (old, new) = (columns(old), columns(new));
    let mut names: Vec<&String> = old.keys().chain(new.keys()).collect();
    names.sort();
    names.dedup();
    names
        .into_iter()
        .filter(|name| !except.contains(&name.as_str()) && old.get(*name) != new.get(*name))
        .map(|name| (name.clone(), describe_value(old.get(name)), describe_value(new.get(name))))
        .collect()
}

/// The columns of a row of `providers`, with their values.
fn provider_columns(row: &ProviderRow) -> Vec<(&'static str, Value)> {
    macro_rules! columns {
        ($($field:ident),+ $(,)?) => { vec![$((stringify!($field), Value::from(row.$field.clone()))),+] };
    }
    let json = |object: &Object| Json::Object(object.clone()).to_string();
    let mut columns = columns! {
        name, kind, quota, enabled, paused, url, mode, slot_release, transit_jitter_ms, pacing, reserve_percent,
        store_down, share_of, timeout_ms, send_budget_ms, connection_max_age_ms, reuse_connections, workers,
        bucket_capacity, leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms,
        idempotency_retention_s, cutoff,
    };
    columns.push(("headers", json(&row.headers).into()));
    columns.extend(row.json_columns().map(|(column, object)| (column, object.as_ref().map(json).into())));
    let currencies = row.currencies.clone().map(|listed| Json::Array(listed).to_string());
    columns.push(("currencies", currencies.into()));
    columns.push(("require", Json::Array(row.require.clone()).to_string().into()));
    columns.push(("\"order\"", (&row.order).into()));
    columns
}

fn provider_args(row: &ProviderRow) -> Args {
    provider_columns(row).into_iter().map(|(_, value)| value).collect()
}

fn limit_args(provider: &str, row: &LimitRow) -> Args {
    let LimitRow { name, algorithm, max_requests, offset_ms, burst, scope, applies_to, shadow, enabled, .. } = row;
    let (window_ms, offset_ms) = (row.given_window_ms(), *offset_ms);
    args![provider, name, algorithm, *max_requests, window_ms, offset_ms, *burst, scope, applies_to, *shadow, *enabled]
        .into()
}

fn return_args(row: &LimitRow) -> Args {
    let returns = row.returns;
    let until = returns.map(|returns| returns.until.0);
    let max_requests = returns.map(|returns| returns.max_requests);
    args![until, max_requests, returns.and_then(|returns| returns.window_ms)].into()
}

pub(super) fn account_args(provider: &str, row: &AccountRow) -> Args {
    let (limit, rule) = (row.limit_name.as_deref(), row.rule.as_deref());
    let until = row.returns.as_ref().map(|returns| returns.until.0);
    let then = row.returns.as_ref().and_then(|returns| returns.then.as_ref()).map(|row| row.columns_only());
    let then = then.map(|columns| Json::Object(columns).to_string());
    args![provider, &row.account, limit, rule, row.max_requests, row.window_ms, row.burst, row.weight, until, then]
        .into()
}
