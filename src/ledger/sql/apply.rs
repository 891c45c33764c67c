//! The statements that apply a provider file: each change as SQL and as a description for the terminal.
//!
//! Invalid rows are rejected before anything is written. Values of JSON columns are left out of the descriptions.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value as Json;

use super::dialect::Template;
use super::engine::{Args, Step, Value};
use crate::domain::printable::describe_url_change;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::provider_row::{AccountRow, LimitRow, Object, ProviderRow};
use crate::ledger::settings::SettingsChange;

/// In the order of [`provider_args`].
const PROVIDER_COLUMNS: [&str; 32] = [
    "name",
    "kind",
    "quota",
    "enabled",
    "paused",
    "url",
    "mode",
    "slot_release",
    "transit_jitter_ms",
    "pacing",
    "reserve_percent",
    "store_down",
    "share_of",
    "timeout_ms",
    "send_budget_ms",
    "connection_max_age_ms",
    "reuse_connections",
    "workers",
    "bucket_capacity",
    "leak_per_second",
    "max_wait_ms",
    "max_attempts",
    "max_age_s",
    "backoff_base_ms",
    "backoff_max_ms",
    "idempotency_retention_s",
    "headers",
    "request",
    "lookup",
    "statuses",
    "require",
    "\"order\"",
];
const JSON_COLUMNS: [&str; 5] = ["headers", "request", "lookup", "statuses", "require"];

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

/// The argument of each of [`PROVIDER_COLUMNS`].
fn provider_places() -> impl Iterator<Item = (&'static str, String)> {
    PROVIDER_COLUMNS.into_iter().zip(1..).map(|(column, number)| {
        let is_json = JSON_COLUMNS.contains(&column);
        (column, if is_json { format!("{{json:${number}}}") } else { format!("${number}") })
    })
}

static INSERT_PROVIDER: Template = Template::made(|_| {
    let places: Vec<String> = provider_places().map(|(_, place)| place).collect();
    format!("INSERT INTO providers ({}) VALUES ({})", PROVIDER_COLUMNS.join(", "), places.join(", "))
});

static UPDATE_PROVIDER: Template = Template::made(|_| {
    let sets: Vec<String> = provider_places().skip(1).map(|(column, place)| format!("{column} = {place}")).collect();
    format!("UPDATE providers SET {} WHERE name = $1", sets.join(", "))
});

static INSERT_LIMIT: Template = Template::new(
    "INSERT INTO provider_limits (provider, name, algorithm, max_requests, window_ms, offset_ms, burst, \
         scope, applies_to, shadow, enabled) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
);

static UPDATE_LIMIT: Template = Template::new(
    "UPDATE provider_limits SET algorithm = $3, max_requests = $4, window_ms = $5, offset_ms = $6, \
         burst = $7, scope = $8, applies_to = $9, shadow = $10, enabled = $11 \
     WHERE provider = $1 AND name = $2",
);

static DELETE_LIMIT: Template = Template::new("DELETE FROM provider_limits WHERE provider = $1 AND name = $2");

static INSERT_ACCOUNT: Template = Template::new(
    "INSERT INTO account_overrides (\
         provider, account, limit_name, rule, max_requests, window_ms, burst, weight) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
);

static UPDATE_ACCOUNT: Template = Template::new(
    "UPDATE account_overrides SET rule = $4, max_requests = $5, window_ms = $6, burst = $7, weight = $8 \
     WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3",
);

static DELETE_ACCOUNT: Template = Template::new(
    "DELETE FROM account_overrides \
     WHERE provider = $1 AND account = $2 AND limit_name IS NOT DISTINCT FROM $3",
);

impl Database {
    /// A first step that rolls the transaction back when settings are no longer at `version`. It locks the version's
    /// row, so settings cannot change until the transaction ends.
    pub(super) fn unless_changed_since(&self, version: i64) -> Step {
        self.must_affect(&GUARD, [version.into()])
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
            plan.limits.push(self.must_affect(&DELETE_LIMIT, [provider.into(), gone.name.as_str().into()]));
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
                    for (column, was, is) in differing(old, new, &["max_requests", "window_ms"]) {
                        plan.record(provider, format!("limit {} changed {column} {was} → {is}", new.name));
                    }
                    plan.limits.push(self.must_affect(&UPDATE_LIMIT, limit_args(provider, new)));
                }
                Some(_) => {}
            }
        }
    }

    fn accounts_difference(&self, plan: &mut ApplyPlan, provider: &str, old: &[AccountRow], new: &[AccountRow]) {
        let same = |a: &AccountRow, b: &AccountRow| a.account == b.account && a.limit_name == b.limit_name;
        for gone in old.iter().filter(|old| !new.iter().any(|new| same(old, new))) {
            plan.record(provider, format!("{} removed", rule_of(gone)));
            let args = [provider.into(), gone.account.as_str().into(), gone.limit_name.as_deref().into()];
            plan.drop_accounts.push(self.must_affect(&DELETE_ACCOUNT, args));
        }
        for new in new {
            match old.iter().find(|old| same(old, new)) {
                None => {
                    plan.record(provider, format!("{} added {}", rule_of(new), new.describe()));
                    plan.accounts.push(self.must_affect(&INSERT_ACCOUNT, account_args(provider, new)));
                }
                Some(old) if old != new => {
                    for (column, was, is) in differing(old, new, &[]) {
                        plan.record(provider, format!("{} changed {column} {was} → {is}", rule_of(new)));
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

fn rule_of(row: &AccountRow) -> String {
    let limit = row.limit_name.as_ref().map(|name| format!(" at limit {name}")).unwrap_or_default();
    format!("account {}{limit}", row.account)
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

fn describe_value(value: Option<&Json>) -> String {
    match value {
        None | Some(Json::Null) => "none".to_owned(),
        Some(Json::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

fn provider_args(row: &ProviderRow) -> Args {
    let json = |object: Option<&Object>| Value::Text(object.map(|object| Json::Object(object.clone()).to_string()));
    Arc::from([
        row.name.as_str().into(),
        row.kind.as_str().into(),
        row.quota.as_deref().into(),
        row.enabled.into(),
        row.paused.into(),
        row.url.as_str().into(),
        row.mode.as_str().into(),
        row.slot_release.as_str().into(),
        row.transit_jitter_ms.into(),
        row.pacing.as_str().into(),
        row.reserve_percent.into(),
        row.store_down.as_str().into(),
        row.share_of.into(),
        row.timeout_ms.into(),
        row.send_budget_ms.into(),
        row.connection_max_age_ms.into(),
        row.reuse_connections.into(),
        row.workers.into(),
        row.bucket_capacity.into(),
        row.leak_per_second.into(),
        row.max_wait_ms.into(),
        row.max_attempts.into(),
        row.max_age_s.into(),
        row.backoff_base_ms.into(),
        row.backoff_max_ms.into(),
        row.idempotency_retention_s.into(),
        json(Some(&row.headers)),
        json(row.request.as_ref()),
        json(row.lookup.as_ref()),
        json(row.statuses.as_ref()),
        Value::Text(Some(Json::Array(row.require.clone()).to_string())),
        row.order.as_str().into(),
    ])
}

fn limit_args(provider: &str, row: &LimitRow) -> Args {
    Arc::from([
        provider.into(),
        row.name.as_str().into(),
        row.algorithm.as_str().into(),
        row.max_requests.into(),
        row.given_window_ms().into(),
        row.offset_ms.into(),
        row.burst.into(),
        row.scope.as_str().into(),
        row.applies_to.as_str().into(),
        row.shadow.into(),
        row.enabled.into(),
    ])
}

fn account_args(provider: &str, row: &AccountRow) -> Args {
    Arc::from([
        provider.into(),
        row.account.as_str().into(),
        row.limit_name.as_deref().into(),
        row.rule.as_deref().into(),
        row.max_requests.into(),
        row.window_ms.into(),
        row.burst.into(),
        row.weight.into(),
    ])
}
