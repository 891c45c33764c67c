//! An external view of the ledger and the broker: job states, waiting messages, and whether all jobs are finished.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, PgPool, Row as _};

use crate::records::{Event, FINAL, Published, Records, Row};
use crate::stand::{DATABASE, OUTCOMES, Stand};
use crate::support::UNPUBLISHED;

/// A view that connects again after a restart of the database.
pub struct Watch {
    pool: PgPool,
}

impl Watch {
    pub fn new(stand: &Stand) -> Self {
        let options: PgConnectOptions = stand.postgres.url(DATABASE).parse().unwrap();
        let _inside = stand.runtime.enter();
        let pool = PgPoolOptions::new().max_connections(2).acquire_timeout(Duration::from_secs(2));
        Self { pool: pool.connect_lazy_with(options) }
    }

    /// `None` while the database is unavailable or frozen.
    pub fn rows(&self, stand: &Stand, sql: &str) -> Option<Vec<PgRow>> {
        let asking = sqlx::query(AssertSqlSafe(sql.to_owned())).fetch_all(&self.pool);
        stand.runtime.block_on(async { tokio::time::timeout(Duration::from_secs(5), asking).await }).ok()?.ok()
    }

    pub fn number(&self, stand: &Stand, sql: &str) -> Option<i64> {
        self.rows(stand, sql)?.first()?.try_get(0).ok()
    }

    /// Number of jobs per state.
    pub fn states(&self, stand: &Stand) -> Option<BTreeMap<String, i64>> {
        let rows = self.rows(stand, "SELECT state, count(*) FROM jobs GROUP BY state")?;
        Some(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// True when this many jobs have finished, their events are published, and no queue holds a message.
    pub fn is_done(&self, stand: &Stand, jobs: usize) -> bool {
        let ended =
            |states: &BTreeMap<String, i64>| -> i64 { FINAL.iter().filter_map(|state| states.get(*state)).sum() };
        let states = self.states(stand);
        if states.is_none_or(|states| ended(&states) < i64::try_from(jobs).unwrap()) {
            return false;
        }
        self.number(stand, UNPUBLISHED) == Some(0)
            && self.waiting_messages(stand).is_some_and(|queues| queues.is_empty())
    }

    /// Ready messages of lanes.
    pub fn waiting_messages(&self, stand: &Stand) -> Option<BTreeMap<String, u32>> {
        let queues = stand.providers.keys().map(|name| format!("payments.{name}"));
        let count = |queue: String| {
            let ready = stand.runtime.block_on(stand.client.ready(&queue))?;
            Some((queue, ready))
        };
        let counted: Option<Vec<(String, u32)>> = queues.map(count).collect();
        Some(counted?.into_iter().filter(|(_, ready)| *ready > 0).collect())
    }

    /// Waits until all jobs are finished. The error names the unfinished ones.
    pub fn await_drained(&self, stand: &Stand, jobs: usize, within: Duration) -> Result<(), String> {
        let deadline = Instant::now() + within;
        while !self.is_done(stand, jobs) {
            if Instant::now() > deadline {
                return Err(self.left(stand, within));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn left(&self, stand: &Stand, within: Duration) -> String {
        let sql = "SELECT id || ' ' || state || ' attempts ' || attempts || ', wakes in ' || (wake_at - now()) || \
                   ', holder ' || coalesce(holder, 'none') || ': ' || coalesce(reason, wait_detail, wait_reason, '') \
                   FROM jobs WHERE state IN ('waiting', 'sending', 'unknown') ORDER BY wake_at LIMIT 30";
        let open: Vec<String> =
            self.rows(stand, sql).unwrap_or_default().iter().map(|row| row.get::<String, _>(0)).collect();
        let (states, queues) = (self.states(stand), self.waiting_messages(stand));
        format!("not drained within {within:?}: {states:?}, messages {queues:?}; open:\n  {}", open.join("\n  "))
    }

    /// The records of providers, producers, ledger and subscribers, for the oracles.
    pub fn records(&self, stand: &Stand, published: BTreeMap<String, Published>) -> Records {
        let providers = stand.providers.iter().map(|(name, placed)| (name.clone(), placed.provider.record())).collect();
        let events = stand.runtime.block_on(stand.client.drain(OUTCOMES));
        let event = |(_, body): (String, Vec<u8>)| {
            let body: Value = serde_json::from_slice(&body).unwrap();
            let text = |name: &str| body[name].as_str().unwrap().to_owned();
            Event { id: text("id"), provider: text("provider"), state: text("state") }
        };
        let sql = "SELECT id, provider, state, coalesce(reason, wait_detail, wait_reason, '') AS reason, amount, currency, account, \
                   (extract(epoch FROM settled.at) * 1000000)::bigint AS settled, \
                   (SELECT count(*) FROM attempts WHERE job_id = jobs.id AND began_at <= settled.at) AS requests FROM jobs \
                   LEFT JOIN (SELECT job_id, min(at) AS at FROM events GROUP BY job_id) AS settled \
                   ON settled.job_id = jobs.id";
        let row = |row: &PgRow| {
            let kept = Row {
                provider: row.get("provider"),
                state: row.get("state"),
                reason: row.get("reason"),
                amount: row.get("amount"),
                currency: row.get("currency"),
                account: row.get("account"),
                finished_wall_us: row.get::<Option<i64>, _>("settled").map(|us| u64::try_from(us).unwrap()),
                requests_until_finished: usize::try_from(row.get::<i64, _>("requests")).unwrap(),
            };
            (row.get("id"), kept)
        };
        let ledger = self.rows(stand, sql).expect("the database runs").iter().map(row).collect();
        let attempts =
            "SELECT job_id, (extract(epoch FROM began_at) * 1000000)::bigint FROM attempts ORDER BY began_at";
        let mut started_wall_us: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for row in self.rows(stand, attempts).expect("the database runs") {
            started_wall_us.entry(row.get(0)).or_default().push(u64::try_from(row.get::<i64, _>(1)).unwrap());
        }
        let events = events.into_iter().map(event).collect();
        Records { providers, published, ledger, events, started_wall_us }
    }
}
