//! Reading and changing settings in SQL: versions, raw rows and validated rows.
//!
//! A read is consistent: the rows of three tables are read between two reads of the version, which every change bumps.
//! See `docs/decisions/0025-versioned-settings.md`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::apply;
use super::audit::LEADING_STEPS;
use super::dialect::{Dialect, Template};
use super::engine::{Args, Step, Value};
use super::result::{SqlRow, corrupt};
use super::session::SettingsHints;
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::provider_row::{AccountRow, LimitRow, MISSING, Object, ProviderRow};
use crate::ledger::settings::{InvalidRow, RawRate, SettingsChange, SettingsSnapshot};

/// How often a read or an apply restarts because settings changed meanwhile.
const TRIES_MAX: u32 = 10;

/// A provider's rows with the version that stamped them; or why they cannot be read.
type Stamped = (String, Result<(ProviderRow, i64), InvalidRow>);

static VERSION: Template = Template::new("SELECT version FROM settings_version");

static RAISE: Template = Template::by_dialect(
    "SELECT settings_raise_version($1, $2) AS version",
    "UPDATE settings_version SET version = $2 WHERE version = $1",
);

/// For SQLite. On PostgreSQL a trigger does it: a worker has no right to write the audit.
static AUDIT_RAISE: Template = Template::new(
    "INSERT INTO settings_audit (who, program, table_name, row_key, old_row, new_row) \
     VALUES ({who}, {program}, 'settings_version', 'version', {json:$1}, {json:$2})",
);

static NAMES: Template = Template::new("SELECT name FROM providers ORDER BY name");

static PROVIDERS: Template = Template::new(
    "SELECT name, kind, quota, enabled, paused, url, mode, slot_release, transit_jitter_ms, pacing, \
         reserve_percent, store_down, share_of, timeout_ms, send_budget_ms, connection_max_age_ms, \
         reuse_connections, workers, bucket_capacity, \
         leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms, \
         idempotency_retention_s, {text:headers} AS headers, {text:request} AS request, \
         {text:lookup} AS lookup, {text:statuses} AS statuses, {text:require} AS require, \
         \"order\", \
         {ms:resumed_at} AS resumed_at, version \
     FROM providers WHERE $1 IS NULL OR name = $1 ORDER BY name",
);

static LIMITS: Template = Template::new(
    "SELECT provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, \
         shadow, enabled FROM provider_limits WHERE $1 IS NULL OR provider = $1 ORDER BY provider, name",
);

static ACCOUNTS: Template = Template::new(
    "SELECT provider, account, limit_name, rule, max_requests, window_ms, burst, weight \
     FROM account_overrides WHERE $1 IS NULL OR provider = $1 ORDER BY provider, account, COALESCE(limit_name, '')",
);

static RATE: Template =
    Template::new("SELECT max_requests, window_ms FROM provider_limits WHERE provider = $1 AND name = $2");

static SET_RATE: Template =
    Template::new("UPDATE provider_limits SET max_requests = $3, window_ms = $4 WHERE provider = $1 AND name = $2");

static SET_PAUSED: Template = Template::new("UPDATE providers SET paused = $2 WHERE name = $1 RETURNING name");

static RESUME: Template =
    Template::new("UPDATE providers SET paused = $2, resumed_at = {now} WHERE name = $1 RETURNING name");

impl Database {
    /// The current settings version; cheap, for polling.
    pub async fn settings_version(&self) -> Result<i64, LedgerError> {
        let rows = self.query_urgent(&VERSION, []).await?;
        rows.first().ok_or_else(|| corrupt("settings_version", "has no row"))?.int("version")
    }

    /// Makes the version at least one higher than `above`, with an audit row; returns the version. For a database that
    /// was restored from a backup: until then, stores with a newer version reject its limits.
    pub async fn raise_settings_version(&self, above: i64) -> Result<i64, LedgerError> {
        for _ in 0..TRIES_MAX {
            let was = self.settings_version().await?;
            if was > above {
                return Ok(was);
            }
            let raised = above.checked_add(1).ok_or_else(|| corrupt("settings_version", "is at its end"))?;
            let row = |version: i64| serde_json::json!({ "version": version }).to_string();
            let mut steps = vec![self.must_affect(&RAISE, [was.into(), raised.into()])];
            if self.dialect() == Dialect::Sqlite {
                steps.push(self.must_affect(&AUDIT_RAISE, [row(was).into(), row(raised).into()]));
            }
            if self.engine.atomically(steps).await?.is_some() {
                return Ok(raised);
            }
        }
        Err(LedgerError::Unavailable("settings change faster than their version can be raised".to_owned()))
    }

    pub async fn load_settings(&self) -> Result<SettingsSnapshot, LedgerError> {
        let (version, rows) = self.read_settings(None).await?;
        let meant = |(_, row): Stamped| row.and_then(|(row, version)| row.validate(version));
        Ok(SettingsSnapshot { version, providers: rows.into_iter().map(meant).collect() })
    }

    /// The names of all provider rows, readable or not.
    pub async fn provider_names(&self) -> Result<Vec<String>, LedgerError> {
        let rows = self.query(&NAMES, []).await?;
        rows.iter().map(|row| row.text("name")).collect()
    }

    /// Raw rows for `list`, `show` and diffs; of one provider, or all. A row that cannot be read is an [`InvalidRow`].
    pub async fn raw_rows(
        &self,
        provider: Option<&ProviderName>,
    ) -> Result<Vec<Result<ProviderRow, InvalidRow>>, LedgerError> {
        let (_, rows) = self.read_settings(provider).await?;
        Ok(rows.into_iter().map(|(_, row)| row.map(|(row, _)| row)).collect())
    }

    /// Raw rows for callers that need all of them.
    ///
    /// # Errors
    /// [`LedgerError::Corrupt`] names the first row that cannot be read.
    pub async fn readable_rows(&self, provider: Option<&ProviderName>) -> Result<Vec<ProviderRow>, LedgerError> {
        let (_, rows) = self.read_settings(provider).await?;
        rows.into_iter().map(|(_, row)| readable(row)).collect()
    }

    /// Applies the rows in one transaction: inserts, updates, and deletes limits and account rules that a row no longer
    /// lists. Providers that are not named stay. So does a pause that a row does not mention (`pause_unmentioned`).
    /// Returns the changes, also in a dry run.
    pub async fn apply_settings(
        &self,
        rows: &[ProviderRow],
        dry_run: bool,
    ) -> Result<Vec<SettingsChange>, LedgerError> {
        self.apply_rows(rows, dry_run, None).await
    }

    /// Applies rows like [`Database::apply_settings`], with author and reason in the audit.
    pub async fn apply_settings_as(
        &self,
        rows: &[ProviderRow],
        by: &Actor,
    ) -> Result<Vec<SettingsChange>, LedgerError> {
        self.apply_rows(rows, false, Some(by)).await
    }

    /// Changes a limit's rate and nothing else; returns the former rate. `None` when the limit does not exist.
    pub async fn set_rate(
        &self,
        provider: &ProviderName,
        limit: &str,
        rate: Rate,
    ) -> Result<Option<RawRate>, LedgerError> {
        self.set_rate_as(provider, limit, rate, None).await
    }

    /// Changes the rate; with `by`, the audit names the author and the reason in the same transaction.
    pub async fn set_rate_as(
        &self,
        provider: &ProviderName,
        limit: &str,
        rate: Rate,
        by: Option<&Actor>,
    ) -> Result<Option<RawRate>, LedgerError> {
        let (name, limit): (Value, Value) = (provider.as_str().into(), limit.into());
        let steps = vec![
            self.step(&RATE, [name.clone(), limit.clone()]),
            self.must_affect(&SET_RATE, [name, limit, rate.max_requests().into(), rate.window_ms().into()]),
        ];
        let Some(rows) = self.atomically_by(steps, by).await? else { return Ok(None) };
        let row = rows.iter().flatten().next().ok_or_else(|| corrupt("max_requests", "is missing"))?;
        // The row has the new rate by now; this is the former one.
        Ok(Some(RawRate { max_requests: row.int("max_requests")?, window_ms: row.opt_int("window_ms")? }))
    }

    /// Returns whether the provider exists.
    pub async fn set_paused(&self, provider: &ProviderName, paused: bool) -> Result<bool, LedgerError> {
        self.set_paused_as(provider, paused, None).await
    }

    /// Sets the pause; with `by`, the audit names the author and the reason in the same transaction.
    pub async fn set_paused_as(
        &self,
        provider: &ProviderName,
        paused: bool,
        by: Option<&Actor>,
    ) -> Result<bool, LedgerError> {
        let sql = if paused { &SET_PAUSED } else { &RESUME };
        let steps = vec![self.must_affect(sql, [provider.as_str().into(), paused.into()])];
        Ok(self.atomically_by(steps, by).await?.is_some())
    }

    /// Hints that settings may have changed, for one follower; `None` for a database that sends none: callers poll.
    pub fn settings_hints(&self) -> Option<SettingsHints> {
        self.engine.settings_hints()
    }

    async fn read_settings(&self, provider: Option<&ProviderName>) -> Result<(i64, Vec<Stamped>), LedgerError> {
        let args: Args = Arc::from([provider.map(ProviderName::as_str).into()]);
        let mut before = self.settings_version().await?;
        for _ in 0..TRIES_MAX {
            let providers = self.query(&PROVIDERS, args.clone()).await?;
            let limits = self.query(&LIMITS, args.clone()).await?;
            let accounts = self.query(&ACCOUNTS, args.clone()).await?;
            let after = self.settings_version().await?;
            if before == after {
                return Ok((after, assemble(&providers, &limits, &accounts)?));
            }
            before = after;
        }
        Err(LedgerError::Unavailable("settings change faster than they can be read".to_owned()))
    }

    /// Runs the steps in one transaction, with an author if there is one; returns the rows of each.
    async fn atomically_by(
        &self,
        steps: Vec<Step>,
        by: Option<&Actor>,
    ) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        let Some(by) = by else { return self.engine.atomically(steps).await };
        let rows = self.engine.atomically(self.settings_change_by(by, steps)).await?;
        Ok(rows.map(|rows| rows.into_iter().skip(LEADING_STEPS).collect()))
    }

    async fn apply_rows(
        &self,
        rows: &[ProviderRow],
        dry_run: bool,
        by: Option<&Actor>,
    ) -> Result<Vec<SettingsChange>, LedgerError> {
        apply::check(rows)?;
        for _ in 0..TRIES_MAX {
            let (version, present) = self.read_settings(None).await?;
            let named = |name: &str| rows.iter().any(|row| row.name == name);
            let present: Vec<ProviderRow> = present
                .into_iter()
                .filter(|(name, _)| named(name))
                .map(|(_, row)| readable(row))
                .collect::<Result<_, _>>()?;
            let over =
                |row: &ProviderRow| row.keep_unmentioned_pause(present.iter().find(|there| there.name == row.name));
            let wanted: Vec<ProviderRow> = rows.iter().map(over).collect();
            let (changes, mut writes) = self.settings_difference(&present, &wanted);
            if dry_run || changes.is_empty() {
                return Ok(changes);
            }
            writes.insert(0, self.unless_changed_since(version));
            if self.atomically_by(writes, by).await?.is_some() {
                return Ok(changes);
            }
        }
        Err(LedgerError::Unavailable("settings change faster than they can be applied".to_owned()))
    }
}

fn assemble(providers: &[SqlRow], limits: &[SqlRow], accounts: &[SqlRow]) -> Result<Vec<Stamped>, LedgerError> {
    let mut limits_of: BTreeMap<String, Vec<&SqlRow>> = BTreeMap::new();
    for row in limits {
        limits_of.entry(row.text("provider")?).or_default().push(row);
    }
    let mut accounts_of: BTreeMap<String, Vec<&SqlRow>> = BTreeMap::new();
    for row in accounts {
        accounts_of.entry(row.text("provider")?).or_default().push(row);
    }
    let stamped = |row: &SqlRow| {
        let name = row.text("name")?;
        let limits = limits_of.get(&name).map_or(&[][..], Vec::as_slice);
        let accounts = accounts_of.get(&name).map_or(&[][..], Vec::as_slice);
        let read = provider_row(row, limits, accounts).map_err(|error| unreadable(row, &name, &error));
        Ok((name, read))
    };
    providers.iter().map(stamped).collect()
}

/// What the plain columns of an unreadable row say: it blocks its quota, and `paused` and `enabled` apply.
fn unreadable(row: &SqlRow, name: &str, error: &LedgerError) -> InvalidRow {
    let quota = row.opt_text("quota").ok().flatten();
    InvalidRow {
        provider: name.to_owned(),
        quota: quota.unwrap_or_else(|| name.to_owned()),
        enabled: row.bool("enabled").unwrap_or(true),
        paused: row.bool("paused").unwrap_or(false),
        problems: vec![match error {
            LedgerError::Corrupt(problem) => problem.clone(),
            other => other.to_string(),
        }],
    }
}

fn readable(row: Result<(ProviderRow, i64), InvalidRow>) -> Result<ProviderRow, LedgerError> {
    row.map(|(row, _)| row)
        .map_err(|bad| LedgerError::Corrupt(format!("provider `{}`: {}", bad.provider, bad.problems.join("; "))))
}

fn provider_row(row: &SqlRow, limits: &[&SqlRow], accounts: &[&SqlRow]) -> Result<(ProviderRow, i64), LedgerError> {
    let provider = ProviderRow {
        name: row.text("name")?,
        kind: row.text("kind")?,
        quota: row.opt_text("quota")?,
        enabled: row.bool("enabled")?,
        paused: row.bool("paused")?,
        pause_unmentioned: false,
        url: row.text("url")?,
        mode: row.text("mode")?,
        slot_release: row.text("slot_release")?,
        transit_jitter_ms: row.int("transit_jitter_ms")?,
        pacing: row.text("pacing")?,
        reserve_percent: row.int("reserve_percent")?,
        store_down: row.text("store_down")?,
        share_of: row.opt_int("share_of")?,
        timeout_ms: row.int("timeout_ms")?,
        send_budget_ms: row.int("send_budget_ms")?,
        connection_max_age_ms: row.int("connection_max_age_ms")?,
        reuse_connections: row.opt_bool("reuse_connections")?,
        workers: row.int("workers")?,
        bucket_capacity: row.int("bucket_capacity")?,
        leak_per_second: row.opt_real("leak_per_second")?,
        max_wait_ms: row.int("max_wait_ms")?,
        max_attempts: row.int("max_attempts")?,
        max_age_s: row.int("max_age_s")?,
        backoff_base_ms: row.int("backoff_base_ms")?,
        backoff_max_ms: row.int("backoff_max_ms")?,
        idempotency_retention_s: row.opt_int("idempotency_retention_s")?,
        headers: object(row, "headers")?.unwrap_or_default(),
        request: object(row, "request")?,
        lookup: object(row, "lookup")?,
        statuses: object(row, "statuses")?,
        require: list(row, "require")?,
        order: row.text("order")?,
        resumed_at: row.opt_instant("resumed_at")?.map(|at| at.0),
        limits: limits.iter().map(|row| limit_row(row)).collect::<Result<_, _>>()?,
        accounts: accounts.iter().map(|row| account_row(row)).collect::<Result<_, _>>()?,
    };
    Ok((provider, row.int("version")?))
}

fn limit_row(row: &SqlRow) -> Result<LimitRow, LedgerError> {
    Ok(LimitRow {
        name: row.text("name")?,
        algorithm: row.text("algorithm")?,
        max_requests: row.int("max_requests")?,
        window_ms: row.opt_int("window_ms")?.unwrap_or(MISSING),
        offset_ms: row.int("offset_ms")?,
        burst: row.opt_int("burst")?,
        scope: row.text("scope")?,
        applies_to: row.text("applies_to")?,
        shadow: row.bool("shadow")?,
        enabled: row.bool("enabled")?,
    })
}

fn account_row(row: &SqlRow) -> Result<AccountRow, LedgerError> {
    Ok(AccountRow {
        account: row.text("account")?,
        limit_name: row.opt_text("limit_name")?,
        rule: row.opt_text("rule")?,
        max_requests: row.opt_int("max_requests")?,
        window_ms: row.opt_int("window_ms")?,
        burst: row.opt_int("burst")?,
        weight: row.int("weight")?,
    })
}

fn object(row: &SqlRow, column: &str) -> Result<Option<Object>, LedgerError> {
    let read = |text: String| serde_json::from_str(&text).map_err(|_| corrupt(column, "is not a JSON object"));
    row.opt_text(column)?.map(read).transpose()
}

fn list(row: &SqlRow, column: &str) -> Result<Vec<serde_json::Value>, LedgerError> {
    serde_json::from_str(&row.text(column)?).map_err(|_| corrupt(column, "is not a JSON array"))
}
