//! The flows of a lane apart from its claims: reports, ends of blocks, weights, refused accounts and repair.
//!
//! Reports take no lock, and read the rows of the lane's flows and no job.
//!
//! Blocks end after a change of limits, or when their instant has passed. A flow whose block ends starts at its class's
//! virtual time at the earliest: it does not make up for the time in which it was blocked. Rows are locked in the order
//! of their keys.
//!
//! A new flow takes its account's weight when it is inserted. A changed weight counts for later claims: tags that jobs
//! have moved on stay as they are.
//!
//! A lane at its limit claims few jobs, and none of a blocked flow. So jobs whose account a rule refuses are declined
//! where they wait. The jobs of one batch are of one flow: the triggers that count them out lock no other.
//!
//! Flows and jobs are written in one commit, so in one snapshot they agree. Where they do not, for instance after a
//! restore of one table, the flow is locked and counted again: each earlier change of it is committed by then.

use std::time::Duration;

use futures_util::future::join_all;

use super::{FLOW_COLUMNS, account_of, account_weight, class_of, update_flows, virtual_time};
use crate::domain::job::Identifier;
use crate::domain::outcome::ACCOUNT_REFUSED;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::{FlowReport, FlowStatus, LaneFlows, RepairedFlows};
use crate::ledger::database::Database;
use crate::ledger::sql::attempt::WRITTEN_COLUMNS;
use crate::ledger::sql::dialect::{Dialect, JobWriteText, Template, WriteTemplate};
use crate::ledger::sql::engine::{Args, args};
use crate::ledger::sql::events::WRITE_EVENT;
use crate::ledger::sql::result::{from_row, read_or_log};

static WAITING: Template = Template::made(|_| {
    format!(
        "SELECT {FLOW_COLUMNS} FROM flows WHERE provider = $1 AND queued \
         ORDER BY class, waiting DESC, account LIMIT $2"
    )
});

static LARGEST: Template = Template::made(|_| {
    format!(
        "SELECT {FLOW_COLUMNS}, {{ms:flows.blocked_until}} AS until_ms, flows.weight, \
             CAST(sum(CASE WHEN flows.blocked_until IS NULL OR flows.blocked_until <= {{now}} THEN flows.weight \
                 ELSE 0 END) OVER (PARTITION BY flows.class) AS bigint) AS class_weight, \
             count(*) OVER () AS flows, CAST(sum(flows.waiting) OVER () AS bigint) AS jobs \
         FROM flows WHERE flows.provider = $1 AND flows.queued \
         ORDER BY flows.waiting DESC, flows.class, flows.account LIMIT $2"
    )
});

/// The classes are listed, so that the primary key of `flows` fits.
static OF_ACCOUNT: Template = Template::made(|_| {
    format!(
        "SELECT {FLOW_COLUMNS} FROM flows WHERE provider = $1 AND class IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10) \
             AND account = $2 AND queued ORDER BY class"
    )
});

impl Database {
    /// The flows of a lane with jobs in the backlog: the most urgent class first, and in a class those with most jobs.
    pub async fn waiting_flows(&self, lane: &ProviderName, at_most: u32) -> Result<Vec<FlowStatus>, LedgerError> {
        self.query_as(&WAITING, args![lane, at_most]).await
    }

    /// The flows of a lane with most jobs in the backlog, for operators. Reads the lane's flows and no job.
    pub async fn largest_flows(&self, lane: &ProviderName, at_most: u32) -> Result<LaneFlows, LedgerError> {
        let rows = self.query(&LARGEST, args![lane, at_most]).await?;
        let Some(first) = rows.first() else { return Ok(LaneFlows::default()) };
        let largest = read_or_log(&rows, "flows", "account");
        Ok(LaneFlows { largest, flows: first.get("flows")?, waiting: first.get("jobs")? })
    }

    /// The flows of one account on a lane that have jobs in the backlog, the most urgent class first.
    pub async fn account_flows(
        &self,
        lane: &ProviderName,
        account: &Identifier,
    ) -> Result<Vec<FlowStatus>, LedgerError> {
        self.query_as(&OF_ACCOUNT, args![lane, account]).await
    }
}

from_row!(row => FlowReport {
    weight, class_weight;
    status: FlowStatus::from_row(row)?,
    blocked_until: row.get("until")?,
});

static UNBLOCK: Template = Template::made(|dialect| {
    unblock_flows(dialect, "flows.provider = $1 AND flows.blocked_until IS NOT NULL", "FOR UPDATE")
});

static WAKE: Template = Template::made(|dialect| unblock_flows(dialect, ENDED, "FOR UPDATE"));
/// Leaves out flows that another session has locked for long.
static WAKE_UNLOCKED: Template = Template::made(|dialect| unblock_flows(dialect, ENDED, "FOR UPDATE SKIP LOCKED"));

static NEXT_WAKE: Template = Template::new(
    "SELECT {until:(SELECT min(blocked_until) FROM flows \
             WHERE provider = $1 AND blocked_until IS NOT NULL)} AS next_wake_ms",
);

/// Ends the blocks of some flows of lane $1.
fn unblock_flows(dialect: Dialect, which: &str, lock: &str) -> String {
    let unblock = format!(
        "blocked_until = NULL, blocked_reason = NULL, blocked_limit = NULL, tag = {{greatest}}(flows.tag, {})",
        virtual_time("$1", "flows.class")
    );
    update_flows(dialect, &unblock, which, lock)
}

const ENDED: &str = "flows.provider = $1 AND flows.blocked_until <= {now}";

impl Database {
    /// Ends the blocks whose instant has passed.
    pub(super) async fn wake_flows(&self, lane: &ProviderName) -> Result<(), LedgerError> {
        self.query_or_skip_locked(&WAKE, &WAKE_UNLOCKED, args![lane].into()).await.map(drop)
    }

    pub(super) async fn next_wake(&self, lane: &ProviderName) -> Result<Option<Duration>, LedgerError> {
        self.query_row(&NEXT_WAKE, args![lane]).await?.get("next_wake")
    }

    /// Ends all blocks of a lane; returns how many.
    pub async fn unblock_flows(&self, lane: &ProviderName) -> Result<u32, LedgerError> {
        self.query_count(&UNBLOCK, args![lane]).await
    }
}

static SYNC_WEIGHTS: Template = Template::made(|dialect| {
    let weight = account_weight("flows.provider", "flows.account");
    let differs = format!("flows.provider = $1 AND flows.weight <> {weight}");
    update_flows(dialect, &format!("weight = {weight}"), &differs, "FOR UPDATE")
});

impl Database {
    /// Gives the flows of a lane the weights of their accounts, where they differ; returns how many differed. Later
    /// claims share by them.
    pub async fn sync_weights(&self, lane: &ProviderName) -> Result<u32, LedgerError> {
        self.query_count(&SYNC_WEIGHTS, args![lane]).await
    }
}

/// Most flows that one call looks at.
const FLOWS_MAX: u32 = 100;

/// Class 0 has unknown outcomes. The classes are listed, so that the primary key of `flows` fits.
static REFUSED_FLOWS: Template = Template::new(
    "SELECT flows.class, flows.account FROM account_overrides AS own {join} flows \
         ON flows.provider = own.provider AND flows.account = own.account \
             AND flows.class IN (1, 2, 3, 4, 5, 6, 7, 8, 9, 10) \
     WHERE own.provider = $1 AND own.rule = 'refuse' AND flows.waiting > 0 LIMIT $2",
);

static FLOW_JOBS: Template = Template::made(|_| {
    format!(
        "SELECT jobs.id FROM jobs WHERE jobs.provider = $1 AND {} = $2 AND {} = $3 AND jobs.backlog \
         ORDER BY jobs.seq LIMIT $4",
        class_of("jobs"),
        account_of("jobs"),
    )
});

static DECLINE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: "UPDATE jobs SET state = 'declined', reason = $2, fence = fence + 1, backlog = false, \
             updated_at = {now} {from} \
         WHERE id = $1 AND jobs.backlog AND jobs.state || '' = 'waiting' AND NOT maybe_charged"
        .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![WRITE_EVENT.into()],
    returning: "id",
});

impl Database {
    /// Declines jobs of the backlog whose account a rule of the lane refuses, with their events; returns how many. Jobs
    /// that may have been charged stay as they are.
    pub async fn decline_refused(&self, lane: &ProviderName, at_most: u32) -> Result<u32, LedgerError> {
        let mut declined = 0;
        for flow in self.query(&REFUSED_FLOWS, args![lane, FLOWS_MAX]).await? {
            let left = at_most.saturating_sub(declined);
            if left == 0 {
                break;
            }
            let (class, account) = (flow.get::<i64>("class")?, flow.get::<String>("account")?);
            let args = args![lane, class, account, left];
            let jobs = self.query_by_index(&FLOW_JOBS, args).await?;
            let ids: Vec<String> = jobs.iter().map(|job| job.get("id")).collect::<Result<_, _>>()?;
            let writes = ids.into_iter().map(|id| self.write(&DECLINE, args![id, ACCOUNT_REFUSED], Duration::ZERO));
            for written in join_all(writes).await {
                declined += u32::from(written?.is_some());
            }
        }
        Ok(declined)
    }
}

static DIFFERENT: Template = Template::made(|_| {
    let (class, account) = (class_of("jobs"), account_of("jobs"));
    format!(
        "SELECT class, account, max(is_known) AS is_known \
         FROM (SELECT {class} AS class, {account} AS account, count(*) AS jobs, 0 AS is_known FROM jobs \
               WHERE jobs.provider = $1 AND jobs.backlog GROUP BY {class}, {account} \
               UNION ALL SELECT class, account, 0 - waiting, 1 FROM flows WHERE provider = $1) AS both_sides \
         GROUP BY class, account HAVING sum(jobs) <> 0 ORDER BY class, account LIMIT $2"
    )
});

const OF_FLOW: &str = "flows.provider = $1 AND flows.class = $2 AND flows.account = $3";

static RECREATE: Template = Template::made(|_| {
    format!(
        "INSERT INTO flows (provider, class, account, tag, weight) VALUES ($1, $2, $3, {}, {}) \
         ON CONFLICT DO NOTHING",
        virtual_time("$1", "$2"),
        account_weight("$1", "$3"),
    )
});

/// For PostgreSQL: the next statement sees what was committed before the lock was free.
static LOCK: Template = Template::made(|_| format!("SELECT waiting FROM flows WHERE {OF_FLOW} FOR UPDATE"));

static RECOUNT: Template = Template::made(|_| {
    let waiting = format!(
        "(SELECT count(*) FROM jobs WHERE jobs.provider = $1 AND {} = $2 AND {} = $3 AND jobs.backlog)",
        class_of("jobs"),
        account_of("jobs"),
    );
    format!(
        "UPDATE flows SET waiting = {waiting}, \
             tag = CASE WHEN flows.waiting > 0 THEN flows.tag ELSE {{greatest}}(flows.tag, {}) END \
         WHERE {OF_FLOW} AND flows.waiting <> {waiting} RETURNING flows.account",
        virtual_time("$1", "$2"),
    )
});

static DELETE_IDLE: Template = Template::made(|dialect| {
    let unused = format!(
        "SELECT class, account FROM flows \
         WHERE flows.provider = $1 AND NOT flows.queued AND (flows.blocked_until IS NULL OR flows.blocked_until <= {{now}}) \
             AND (flows.tag <= {} OR flows.class NOT IN (\
                 SELECT busy.class FROM flows AS busy WHERE busy.provider = $1 AND busy.queued)) \
         LIMIT $2",
        virtual_time("$1", "flows.class")
    );
    match dialect {
        Dialect::Postgres => format!(
            "WITH unused AS MATERIALIZED ({unused} FOR UPDATE OF flows SKIP LOCKED) DELETE FROM flows USING unused \
             WHERE flows.provider = $1 AND flows.class = unused.class AND flows.account = unused.account \
             RETURNING flows.account"
        ),
        Dialect::Sqlite => {
            format!("DELETE FROM flows WHERE provider = $1 AND (class, account) IN ({unused}) RETURNING account")
        }
    }
});

impl Database {
    /// Deletes rows of flows without jobs whose tag the lane's virtual time has passed; returns how many.
    pub async fn remove_idle_flows(&self, lane: &ProviderName, at_most: u32) -> Result<u32, LedgerError> {
        self.query_count(&DELETE_IDLE, args![lane, at_most]).await
    }

    /// Compares the flows of a lane with its jobs, and repairs at most this many. Reads every job of the lane's
    /// backlog.
    pub async fn repair_flows(&self, lane: &ProviderName, at_most: u32) -> Result<RepairedFlows, LedgerError> {
        let mut repaired = RepairedFlows::default();
        for row in self.query_by_index(&DIFFERENT, args![lane, at_most]).await? {
            let (class, account, is_known) =
                (row.get::<i64>("class")?, row.get::<String>("account")?, row.get::<i64>("is_known")? != 0);
            tracing::warn!(provider = %lane, class, is_known, "the waiting jobs of a flow are counted again");
            let flow: Args = args![lane, class, account].into();
            let lock = (self.dialect() == Dialect::Postgres).then_some(&LOCK);
            let steps = [&RECREATE].into_iter().chain(lock).chain([&RECOUNT]).map(|sql| self.step(sql, flow.clone()));
            let rows = self.engine.atomically(steps.collect()).await?.unwrap_or_default();
            let changed = u32::from(rows.last().is_some_and(|rows| !rows.is_empty()));
            *(if is_known { &mut repaired.corrected } else { &mut repaired.recreated }) += changed;
        }
        Ok(repaired)
    }
}
