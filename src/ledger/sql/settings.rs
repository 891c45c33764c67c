//! Reading and changing settings in SQL: versions, raw rows and validated rows, and the audit with each change's author.
//!
//! Triggers write the audit, for plain SQL and commands alike, in the transaction of the change. They read the author
//! from settings of the session, or on SQLite from a row. The audit row of a job is completed after the change there.
//!
//! A read is consistent: the rows of three tables are read between two reads of the version, which every change bumps.
//! See `docs/decisions/0025-versioned-settings.md`.

use std::collections::BTreeMap;

use super::dialect::{Dialect, Template};
use super::engine::{Args, Step, Value, args};
use super::limit_returns::{account_returns_of, returns_of};
use super::pause_of_all::KEEP;
use super::result::{FromRow, SqlRow, corrupt, from_row, read, read_or_log};
use super::storable;
use crate::domain::job::JobId;
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::provider_row::{AccountRow, LimitRow, MISSING, Object, ProviderRow};
use crate::ledger::settings::{AuditPage, AuditRow, AuditedChange, InvalidRow, RawRate, SettingsSnapshot};

/// How often a read or an apply restarts because settings changed meanwhile.
pub(super) const TRIES_MAX: u32 = 10;

/// A provider's rows with the version that stamped them; or why they cannot be read.
pub(super) type Stamped = (String, Result<(ProviderRow, i64), InvalidRow>);

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
         {text:currencies} AS currencies, {text:decimals} AS decimals, {text:amount_step} AS amount_step, \
         \"order\", cutoff, \
         {ms:resumed_at} AS resumed_at_ms, version \
     FROM providers WHERE $1 IS NULL OR name = $1 ORDER BY name",
);

static LIMITS: Template = Template::new(
    "SELECT provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, \
         shadow, enabled, {ms:until_at} AS until_at_ms, then_max_requests, then_window_ms \
     FROM provider_limits WHERE $1 IS NULL OR provider = $1 ORDER BY provider, name",
);

static ACCOUNTS: Template = Template::new(
    "SELECT provider, account, limit_name, rule, max_requests, window_ms, burst, weight, \
         {ms:until_at} AS until_at_ms, {text:then_row} AS then_row \
     FROM account_overrides WHERE $1 IS NULL OR provider = $1 ORDER BY provider, account, COALESCE(limit_name, '')",
);

static RATE: Template =
    Template::new("SELECT max_requests, window_ms FROM provider_limits WHERE provider = $1 AND name = $2");

static SET_RATE: Template = Template::new(
    "UPDATE provider_limits SET max_requests = $3, window_ms = $4, \
         until_at = NULL, then_max_requests = NULL, then_window_ms = NULL WHERE provider = $1 AND name = $2",
);

pub(super) static SET_PAUSED: Template =
    Template::new("UPDATE providers SET paused = $2 WHERE name = $1 RETURNING name");

static RESUME: Template =
    Template::new("UPDATE providers SET paused = $2, resumed_at = {now} WHERE name = $1 RETURNING name");

impl Database {
    /// The current settings version; cheap, for polling.
    pub async fn settings_version(&self) -> Result<i64, LedgerError> {
        let rows = self.query_urgent(&VERSION, []).await?;
        rows.first().ok_or_else(|| corrupt("settings_version", "has no row"))?.get("version")
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
            let mut steps = vec![self.must_affect(&RAISE, args![was, raised])];
            if self.dialect() == Dialect::Sqlite {
                steps.push(self.must_affect(&AUDIT_RAISE, args![row(was), row(raised)]));
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
        rows.iter().map(|row| row.get("name")).collect()
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

    /// The rows of one provider, with the version at which they were read.
    pub(super) async fn readable_rows_at(
        &self,
        provider: &ProviderName,
    ) -> Result<(i64, Vec<ProviderRow>), LedgerError> {
        let (version, rows) = self.read_settings(Some(provider)).await?;
        Ok((version, rows.into_iter().map(|(_, row)| readable(row)).collect::<Result<_, _>>()?))
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
        let steps = vec![
            self.step(&RATE, args![provider, limit]),
            self.must_affect(&SET_RATE, args![provider, limit, rate.max_requests(), rate.window_ms()]),
        ];
        let Some(rows) = self.atomically_by(steps, by).await? else { return Ok(None) };
        // The row has the new rate by now; this is the former one.
        rows.iter().flatten().next().map(RawRate::from_row).transpose()
    }

    /// Returns whether the provider exists.
    pub async fn set_paused(&self, provider: &ProviderName, paused: bool) -> Result<bool, LedgerError> {
        self.set_paused_as(provider, paused, None).await
    }

    /// Sets the pause; with `by`, the audit names the author and the reason in the same transaction. A provider that is
    /// paused by itself leaves the pause of all that held it.
    pub async fn set_paused_as(
        &self,
        provider: &ProviderName,
        paused: bool,
        by: Option<&Actor>,
    ) -> Result<bool, LedgerError> {
        let sql = if paused { &SET_PAUSED } else { &RESUME };
        let mut steps = vec![self.must_affect(sql, args![provider, paused])];
        if paused {
            steps.push(self.step(&KEEP, args![provider]));
        }
        Ok(self.atomically_by(steps, by).await?.is_some())
    }

    pub(super) async fn read_settings(
        &self,
        provider: Option<&ProviderName>,
    ) -> Result<(i64, Vec<Stamped>), LedgerError> {
        let args: Args = args![provider].into();
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
    pub(super) async fn atomically_by(
        &self,
        steps: Vec<Step>,
        by: Option<&Actor>,
    ) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        let Some(by) = by else { return self.engine.atomically(steps).await };
        let rows = self.engine.atomically(self.settings_change_by(by, steps)).await?;
        Ok(rows.map(|rows| rows.into_iter().skip(LEADING_STEPS).collect()))
    }
}

fn assemble(providers: &[SqlRow], limits: &[SqlRow], accounts: &[SqlRow]) -> Result<Vec<Stamped>, LedgerError> {
    let (limits, accounts) = (by_provider(limits)?, by_provider(accounts)?);
    let stamped = |row: &SqlRow| {
        let name: String = row.get("name")?;
        let [limits, accounts] = [&limits, &accounts].map(|rows| rows.get(&name).map_or(&[][..], Vec::as_slice));
        let read = provider_row(row, limits, accounts).map_err(|error| unreadable(row, &name, &error));
        Ok((name, read))
    };
    providers.iter().map(stamped).collect()
}

type RowsByProvider<'a> = BTreeMap<String, Vec<&'a SqlRow>>;

fn by_provider(rows: &[SqlRow]) -> Result<RowsByProvider<'_>, LedgerError> {
    let mut grouped = RowsByProvider::new();
    for row in rows {
        grouped.entry(row.get("provider")?).or_default().push(row);
    }
    Ok(grouped)
}

/// What the plain columns of an unreadable row say: it blocks its quota, and `paused` and `enabled` apply.
fn unreadable(row: &SqlRow, name: &str, error: &LedgerError) -> InvalidRow {
    let quota = row.get::<Option<String>>("quota").ok().flatten();
    InvalidRow {
        provider: name.to_owned(),
        quota: quota.unwrap_or_else(|| name.to_owned()),
        enabled: row.get::<bool>("enabled").unwrap_or(true),
        paused: row.get::<bool>("paused").unwrap_or(false),
        problems: vec![match error {
            LedgerError::Corrupt(problem) => problem.clone(),
            other => other.to_string(),
        }],
    }
}

pub(super) fn readable(row: Result<(ProviderRow, i64), InvalidRow>) -> Result<ProviderRow, LedgerError> {
    row.map(|(row, _)| row)
        .map_err(|bad| LedgerError::Corrupt(format!("provider `{}`: {}", bad.provider, bad.problems.join("; "))))
}

fn provider_row(row: &SqlRow, limits: &[&SqlRow], accounts: &[&SqlRow]) -> Result<(ProviderRow, i64), LedgerError> {
    let provider = read!(row => ProviderRow {
        name, kind, quota, enabled, paused, url, mode, slot_release, transit_jitter_ms, pacing, reserve_percent,
        store_down, share_of, timeout_ms, send_budget_ms, connection_max_age_ms, reuse_connections, workers,
        bucket_capacity, leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms,
        idempotency_retention_s, request, lookup, statuses, currencies, decimals, amount_step, require, order, cutoff;
        pause_unmentioned: false,
        accounts_unmentioned: false,
        headers: row.get::<Option<Object>>("headers")?.unwrap_or_default(),
        resumed_at: row.get::<Option<EpochMs>>("resumed_at")?.map(|at| at.0),
        limits: limits.iter().map(|row| LimitRow::from_row(row)).collect::<Result<_, _>>()?,
        accounts: accounts.iter().map(|row| AccountRow::from_row(row)).collect::<Result<_, _>>()?,
    });
    Ok((provider, row.get("version")?))
}

from_row!(row => LimitRow {
    name, algorithm, max_requests, offset_ms, burst, scope, applies_to, shadow, enabled;
    window_ms: row.get::<Option<i64>>("window_ms")?.unwrap_or(MISSING),
    returns: returns_of(row)?,
});
from_row!(row => AccountRow {
    account, limit_name, rule, max_requests, window_ms, burst, weight;
    returns: account_returns_of(row)?,
});
from_row!(row => RawRate { max_requests, window_ms });

/// Sets author and reason for the triggers.
static SET_ACTOR: Template = Template::by_dialect(
    "SELECT set_config('sluicegate.os_user', $1, true) AS os_user, \
         set_config('sluicegate.because', COALESCE($2, ''), true) AS because, \
         set_config('application_name', COALESCE($3, current_setting('application_name')), true) AS program",
    "UPDATE settings_person SET os_user = $1, because = $2, program = COALESCE($3, 'sluicegate')",
);

/// For SQLite; PostgreSQL clears them at the transaction's end.
static FORGET_ACTOR: Template =
    Template::new("UPDATE settings_person SET os_user = NULL, because = NULL, program = NULL");

static COMPLETE_JOB_AUDIT: Template = Template::new(
    "UPDATE job_audit SET os_user = $1, because = $2, program = COALESCE($3, program) \
     WHERE id = (SELECT max(id) FROM job_audit WHERE job_id = $4)",
);

static READ_AUDIT: Template = Template::new(
    "SELECT id, {ms:at} AS at_ms, who, os_user, program, because, table_name, row_key, \
         {text:old_row} AS old_row, {text:new_row} AS new_row FROM settings_audit \
     WHERE id < $3 AND ($1 IS NULL OR (table_name <> 'settings_version' \
         AND (row_key = $1 OR substr(row_key, 1, length($1) + 1) = $1 || '/'))) \
     ORDER BY id DESC LIMIT $2",
);

impl Database {
    /// A transaction on settings with its author. The rows of its steps begin at [`LEADING_STEPS`].
    pub(super) fn settings_change_by(&self, by: &Actor, steps: Vec<Step>) -> Vec<Step> {
        let forget = (self.dialect() == Dialect::Sqlite).then(|| self.step(&FORGET_ACTOR, []));
        std::iter::once(self.step(&SET_ACTOR, actor_args(by))).chain(steps).chain(forget).collect()
    }

    /// A change of jobs, with its author on PostgreSQL. On SQLite, the caller completes each audit row afterwards.
    pub(super) fn job_changes_by(&self, by: &Actor, change: Vec<Step>) -> Vec<Step> {
        let author = (self.dialect() == Dialect::Postgres).then(|| self.must_affect(&SET_ACTOR, actor_args(by)));
        author.into_iter().chain(change).collect()
    }

    /// The change of one job, with its author on both databases.
    pub(super) fn job_change_by(&self, by: &Actor, id: &JobId, change: Vec<Step>) -> Vec<Step> {
        let mut all = self.job_changes_by(by, change);
        if self.dialect() == Dialect::Sqlite {
            let args: Args = actor_args(by).into_iter().chain(args![id]).collect();
            all.push(self.must_affect(&COMPLETE_JOB_AUDIT, args));
        }
        all
    }

    /// The last changes of a provider's rows (row, limits, account rules), or of all settings; newest first, at most
    /// `at_most`. Changes by SQL are listed like those by commands.
    pub async fn settings_audit(
        &self,
        provider: Option<&ProviderName>,
        at_most: u32,
    ) -> Result<Vec<AuditedChange>, LedgerError> {
        Ok(self.settings_audit_page(provider, None, at_most).await?.changes)
    }

    /// The same, of the changes with a number below `before`.
    pub async fn settings_audit_page(
        &self,
        provider: Option<&ProviderName>,
        before: Option<i64>,
        at_most: u32,
    ) -> Result<AuditPage, LedgerError> {
        let rows = self.query(&READ_AUDIT, args![provider, at_most, before.unwrap_or(i64::MAX)]).await?;
        let last = rows.last().filter(|_| rows.len() == at_most as usize);
        let next = last.and_then(|row| row.get("id").ok());
        Ok(AuditPage { changes: read_or_log(&rows, "settings_audit", "row_key"), next })
    }
}

/// Number of steps before the steps of the change.
const LEADING_STEPS: usize = 1;

pub fn actor_args(by: &Actor) -> [Value; 3] {
    args![storable(&by.os_user), by.reason.as_deref().map(storable), by.program]
}

from_row!(row => AuditRow { at, who, os_user, program, because, table_name, row_key, old_row, new_row });

impl FromRow for AuditedChange {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        AuditRow::from_row(row).map(Self::from)
    }
}
