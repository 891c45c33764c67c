//! The recent requests of a quota, an account or a reference: for a limiter that rebuilds its state.
//!
//! Look-ups count like charges, one permit each. Usage is never underestimated. Ages are rounded down. A request
//! without a response counts as in flight for as long as any row allows one to be. Providers that left the quota, or
//! were deleted, are found in the audit. Statements read page by page, so none grows with the window. See
//! `docs/decisions/0012-history-of-uncounted-usage.md`.

use std::collections::BTreeMap;
use std::time::Duration;

use super::dialect::Template;
use super::engine::args;
use super::result::SqlRow;
use super::texts;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{BATCH_MAX, CostByKind};
use crate::domain::provider::{BOOKING_HORIZON, ProviderName, SEND_BUDGET_MAX, TIMEOUT_MAX};
use crate::domain::quota_spec::{Lookback, SubjectQuery};
use crate::domain::time::millis_up;
use crate::ledger::database::Database;
use crate::ledger::{LedgerError, RecentUses};

/// Most age buckets. Their ends add two entries, older uses one, and the limiter takes no more in one call.
const ENTRIES: u64 = BATCH_MAX as u64 - 3;
/// Requests read by one statement: some tenths of a second; the statement timeout is ten seconds.
const PAGE: u32 = 50_000;
/// Most age buckets of an account or a reference, so that one call can carry several of them.
const ENTRIES_OF_SUBJECT: u64 = 254;
/// A request may end while others are read, or have an end from a clock that was ahead.
const YEAR_MS: i64 = 365 * 86_400_000;
/// The provider counts a request no later than this after it was recorded: booked ahead, sent late, answered late.
#[allow(clippy::cast_possible_truncation, reason = "minutes")]
const ON_WIRE_MS: i64 = (BOOKING_HORIZON.as_millis() + SEND_BUDGET_MAX.as_millis() + TIMEOUT_MAX.as_millis()) as i64;

/// Uses by the age of their bucket; `None`: those that may be in flight.
type Uses = BTreeMap<Option<Duration>, CostByKind>;

/// The lookback as instants of the database's clock.
struct UseLookback {
    now_ms: i64,
    counted_ms: i64,
    noticed_ms: i64,
    bucket_ms: i64,
}

const SUMS: &str = "CAST(sum(CASE WHEN kind = 'lookup' THEN 0 ELSE cost END) AS bigint) AS charges, \
     CAST(sum(CASE WHEN kind = 'lookup' THEN 1 ELSE 0 END) AS bigint) AS lookups";

/// A request without a response is as young as the provider may have counted it, whatever the times in its row.
fn unanswered() -> String {
    format!(
        "CASE WHEN began_at > {{at:$3}} THEN NULL WHEN {{aged:began_at}} > {ON_WIRE_MS} \
             THEN {{aged:began_at}} - {ON_WIRE_MS} ELSE 0 END"
    )
}

static OF_ACCOUNTS: Template = Template::made(|_| of_subjects("account"));
static OF_REFERENCES: Template = Template::made(|_| of_subjects("reference"));

/// A request counts no later than the longest request takes. Those that began before that cannot count any more.
fn of_subjects(column: &str) -> String {
    format!(
        "SELECT name, age_ms / $4 * $4 AS least_age_ms, {SUMS} FROM ( \
             SELECT asked.value AS name, job_id, kind, \
                 CASE WHEN ended_at IS NULL OR (outcome = 'unknown' AND status IS NULL) THEN {} \
                     ELSE {{aged:ended_at}} END AS age_ms \
             FROM ({{texts:$5}}) AS asked {{join}} attempts ON attempts.{column} = asked.value \
             WHERE attempts.provider = $1 AND began_at > {{at:$2}} AND COALESCE(outcome, '') <> 'not_sent') AS used \
         {{join}} jobs ON jobs.id = used.job_id GROUP BY name, age_ms / $4",
        unanswered()
    )
}

static NOW: Template = Template::new("SELECT {now_ms} AS now_ms");

static RESTORED: Template =
    Template::new("SELECT 1 AS one FROM settings_audit WHERE at > {at:$1} AND table_name = 'settings_version' LIMIT 1");

/// A provider that left the quota uses it until all workers have loaded the change and its last request has
/// ended: an hour is far more than both.
static SHARING: Template = Template::new(
    "SELECT name FROM providers WHERE COALESCE(quota, name) = $1 \
     UNION SELECT old_row ->> 'name' AS name FROM settings_audit \
     WHERE at > {at:($2 - 3600000)} AND table_name = 'providers' \
         AND COALESCE(old_row ->> 'quota', old_row ->> 'name') = $1",
);

static OPEN: Template = Template::made(|_| {
    format!(
        "SELECT age_ms / $4 * $4 AS least_age_ms, {SUMS} FROM ( \
             SELECT job_id, kind, {} AS age_ms \
             FROM attempts WHERE provider = $1 AND ended_at IS NULL AND began_at > {{at:$2}}) AS used \
         {{join}} jobs ON jobs.id = used.job_id GROUP BY age_ms / $4",
        unanswered()
    )
});

static PAGE_START: Template = Template::made(|_| {
    format!(
        "SELECT {{ms:ended_at}} AS ended_ms FROM attempts \
         WHERE provider = $1 AND ended_at >= {{at:$2}} AND ended_at < {{at:$3}} \
         ORDER BY ended_at DESC LIMIT 1 OFFSET {PAGE}"
    )
});

static ENDED: Template = Template::made(|_| {
    format!(
        "SELECT age_ms / $4 * $4 AS least_age_ms, {SUMS} FROM ( \
             SELECT job_id, kind, CASE WHEN outcome = 'unknown' AND status IS NULL THEN {} \
                 ELSE {{aged:ended_at}} END AS age_ms \
             FROM attempts WHERE provider = $1 AND ended_at >= {{at:$2}} AND ended_at < {{at:$5}} \
                 AND outcome <> 'not_sent') AS used \
         {{join}} jobs ON jobs.id = used.job_id GROUP BY age_ms / $4",
        unanswered()
    )
});

static NOTICED: Template = Template::new(
    "SELECT 1 AS one WHERE EXISTS (SELECT 1 FROM attempts \
         WHERE provider = $1 AND ended_at >= {at:$2} AND ended_at < {at:$3} AND outcome <> 'not_sent') \
     OR EXISTS (SELECT 1 FROM attempts WHERE provider = $1 AND ended_at IS NULL \
         AND began_at > {at:$2} AND began_at <= {at:$3})",
);

impl Database {
    /// The providers that used a quota since then, if the ledger knows all their requests.
    async fn providers_sharing(&self, quota: &ProviderName, since: &UseLookback) -> Result<Vec<String>, LedgerError> {
        if !self.query(&RESTORED, args![since.noticed_ms]).await?.is_empty() {
            return Err(LedgerError::StatementFailed(
                "this database was restored from a backup lately: requests sent after the backup are missing"
                    .to_owned(),
            ));
        }
        let rows = self.query(&SHARING, args![quota, since.noticed_ms]).await?;
        rows.iter().map(|row| row.get("name")).collect()
    }

    async fn use_lookback(&self, lookback: Lookback, entries: u64) -> Result<UseLookback, LedgerError> {
        Ok(UseLookback::new(self.query_row(&NOW, []).await?.get("now_ms")?, lookback, entries))
    }

    async fn add_open(&self, provider: &str, since: &UseLookback, uses: &mut Uses) -> Result<(), LedgerError> {
        let args = args![provider, since.counted_ms, since.on_wire_ms(), since.bucket_ms];
        add(uses, &self.query_by_index(&OPEN, args).await?)
    }

    /// Adds ended requests, the youngest first. If more requests than a page share an instant, they are one page.
    async fn add_ended(&self, provider: &str, since: &UseLookback, uses: &mut Uses) -> Result<(), LedgerError> {
        let mut until_ms = since.now_ms.saturating_add(YEAR_MS);
        while until_ms > since.counted_ms {
            let page = self.query_by_index(&PAGE_START, args![provider, since.counted_ms, until_ms]).await?;
            let from_ms = page.first().map(|row| row.get("ended_ms")).transpose()?.unwrap_or(since.counted_ms);
            let args = args![provider, from_ms, since.on_wire_ms(), since.bucket_ms, until_ms];
            add(uses, &self.query_by_index(&ENDED, args).await?)?;
            until_ms = from_ms;
        }
        Ok(())
    }

    /// Recent requests of a quota: those that ended lately, and those that may not have ended. Includes all providers
    /// that share the quota or did so lately, deleted ones too. At most 1,000 entries; those older than `count_within`
    /// are one entry.
    ///
    /// Reads at least as far back as booking horizon, longest hold and longest padded window together. A request that
    /// began earlier and has no end counts as over. A database whose version was raised lately
    /// ([`Database::raise_settings_version`]) misses requests, so it returns an error. Takes some seconds for a
    /// million requests.
    pub async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<RecentUses, LedgerError> {
        let since = self.use_lookback(lookback, ENTRIES).await?;
        let (mut uses, mut noticed) = (Uses::new(), false);
        for provider in self.providers_sharing(quota, &since).await? {
            // Before the ended ones: a request that ends meanwhile is counted twice rather than never.
            self.add_open(&provider, &since, &mut uses).await?;
            self.add_ended(&provider, &since, &mut uses).await?;
            let before = args![&provider, since.noticed_ms, since.counted_ms];
            noticed = noticed || !self.query_by_index(&NOTICED, before).await?.is_empty();
        }
        let open = uses.remove(&None).unwrap_or_default();
        // An age beyond the lookback is capped to it, and added to the others of that age.
        let mut by_age = Uses::new();
        for (age, cost) in uses {
            add_to(&mut by_age, age.map(|age| age.min(lookback.count_within)), cost);
        }
        let mut ended: Vec<_> = by_age.into_iter().filter_map(|(age, cost)| Some((age?, cost))).collect();
        if noticed {
            ended.push((lookback.count_within, CostByKind::charges(1)));
        }
        Ok(RecentUses { ended, open })
    }

    /// Recent requests of accounts or references, one result for each; those without requests are left out. At most 256
    /// entries for each. The cost depends on their own requests alone.
    pub async fn recent_subject_uses(
        &self,
        quota: &ProviderName,
        asked: &SubjectQuery,
    ) -> Result<BTreeMap<String, RecentUses>, LedgerError> {
        let lookback = Lookback::all(asked.within);
        let since = self.use_lookback(lookback, ENTRIES_OF_SUBJECT).await?;
        let sql = if asked.scope == Scope::Account { &OF_ACCOUNTS } else { &OF_REFERENCES };
        let names = texts(asked.names.iter().map(String::as_str));
        let mut by_name: BTreeMap<String, Uses> = BTreeMap::new();
        for provider in self.providers_sharing(quota, &since).await? {
            let began_ms = since.counted_ms.saturating_sub(ON_WIRE_MS).max(0);
            let args = args![&provider, began_ms, since.on_wire_ms(), since.bucket_ms, names.clone()];
            for row in self.query_by_index(sql, args).await? {
                add(by_name.entry(row.get("name")?).or_default(), std::slice::from_ref(&row))?;
            }
        }
        let uses = |mut uses: Uses| {
            let open = uses.remove(&None).unwrap_or_default();
            let ended = uses.into_iter().filter_map(|(age, cost)| Some((age?, cost)));
            RecentUses { ended: ended.filter(|(age, _)| *age <= lookback.count_within).collect(), open }
        };
        Ok(by_name.into_iter().map(|(name, of)| (name, uses(of))).collect())
    }
}

impl UseLookback {
    fn new(now_ms: i64, lookback: Lookback, entries: u64) -> Self {
        // One of the databases cuts instants to milliseconds: one more, so that none drops out too early.
        let before = |within: Duration| {
            now_ms.saturating_sub(i64::try_from(millis_up(within)).unwrap_or(i64::MAX)).saturating_sub(1).max(0)
        };
        let bucket_ms = millis_up(lookback.count_within).div_ceil(entries).max(1);
        Self {
            now_ms,
            counted_ms: before(lookback.count_within),
            noticed_ms: before(lookback.notice_within),
            bucket_ms: i64::try_from(bucket_ms).unwrap_or(i64::MAX),
        }
    }

    /// A request without a response that began before this is no longer in flight.
    fn on_wire_ms(&self) -> i64 {
        self.now_ms.saturating_sub(ON_WIRE_MS)
    }
}

fn add(uses: &mut Uses, rows: &[SqlRow]) -> Result<(), LedgerError> {
    for row in rows {
        let cost = |of: &str| row.get::<Option<i64>>(of).map(|sum| u32::try_from(sum.unwrap_or(0)).unwrap_or(u32::MAX));
        let cost = CostByKind { charges: cost("charges")?, lookups: cost("lookups")? };
        add_to(uses, row.get("least_age")?, cost);
    }
    Ok(())
}

fn add_to(uses: &mut Uses, age: Option<Duration>, cost: CostByKind) {
    let sum = uses.entry(age).or_default();
    sum.charges = sum.charges.saturating_add(cost.charges);
    sum.lookups = sum.lookups.saturating_add(cost.lookups);
}
