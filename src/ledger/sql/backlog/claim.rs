//! A dispatcher's claim: the next jobs of a lane by class, fair share and age, claimed in one statement.
//!
//! One process at a time claims from a lane: it locks the lane's row of `flow_turns`, and its statement began after the
//! last claim was committed. It waits for the flows' locks, which batches of new jobs hold for the time of a commit. If
//! a lock is held for longer, such flows are left out. Jobs that another session has locked are always left out.
//!
//! SQLite has no data-modifying WITH. There, a temporary table has the chosen jobs, and the steps of a claim are one
//! transaction with the database's write lock, so nothing else happens in between.

use super::{TAG_PER_COST, account_of, class_of};
use crate::domain::fair_order::PASSED_OVER_FIRST;
use crate::domain::job::{COST_MAX, FlowKey};
use crate::domain::provider::JobOrder;
use crate::ledger::LedgerError;
use crate::ledger::backlog::{BacklogClaim, BacklogClaimRequest, BacklogJob};
use crate::ledger::database::Database;
use crate::ledger::sql::claim::{ABANDON, CLAIMED_COLUMNS, claimed};
use crate::ledger::sql::dialect::{Dialect, Template};
use crate::ledger::sql::engine::{Args, args};
use crate::ledger::sql::result::{FromRow, SqlRow};
use crate::ledger::sql::texts;
use crate::ledger::sql::upkeep::{CLAIMABLE, READABLE, RECORDED};
use crate::ledger::upkeep::RecordedJob;

/// The condition of index `flows_in_order`, without the flows ($6) and the classes ($7) that the process leaves out.
const IS_FREE: &str = "flows.provider = $1 AND flows.queued AND flows.blocked_until IS NULL \
     AND flows.class <= $7 AND flows.class || ' ' || flows.account NOT IN ({texts:$6})";

/// Whether no job of the flow's account is on its way, and none of a more urgent class waits. The condition of index
/// `jobs_in_order`, and the keys of the account's flows.
const IS_NEXT_OF_ACCOUNT: &str = "(flows.account = '' OR (\
     NOT EXISTS (SELECT 1 FROM jobs AS earlier WHERE earlier.provider = $1 AND earlier.account = flows.account \
         AND earlier.in_order AND NOT earlier.backlog \
         AND earlier.state IN ('waiting', 'sending', 'unknown', 'review')) \
     AND NOT EXISTS (SELECT 1 FROM flows AS urgent WHERE urgent.provider = $1 \
         AND urgent.class IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10) AND urgent.account = flows.account \
         AND urgent.class < flows.class AND urgent.waiting > 0)))";

/// Whether the flow has a job that costs less than the bound ($8); `of` compares a job with the flow. A subquery that is
/// no EXISTS, so that no plan reads the jobs of all flows at once.
fn has_cheap(of: &str) -> String {
    format!(
        "(SELECT cheap.cost FROM jobs AS cheap WHERE cheap.provider = $1 AND {of} AND cheap.backlog \
             AND cheap.cost < $8 LIMIT 1) IS NOT NULL"
    )
}

/// The same for an account whose order is kept: its first job counts.
fn is_first_cheap(of: &str) -> String {
    format!(
        "(SELECT cheap.cost FROM jobs AS cheap WHERE cheap.provider = $1 AND {of} AND cheap.backlog \
             ORDER BY cheap.seq LIMIT 1) < $8"
    )
}

/// What [`JobOrder`] adds to the statements of a claim.
#[derive(Clone, Copy)]
struct OrderText {
    /// A further condition of the candidates.
    is_next: &'static str,
    /// Whether an account's first job decides about the others.
    keeps_order: bool,
    /// Most jobs of a flow.
    flow_max: &'static str,
    /// A further column of the claimed jobs.
    mark: &'static str,
}

impl OrderText {
    const NONE: Self = Self { is_next: "true", keeps_order: false, flow_max: "$5", mark: "" };
    const ACCOUNT: Self = Self {
        is_next: IS_NEXT_OF_ACCOUNT,
        keeps_order: true,
        flow_max: "CASE WHEN flows.account = '' THEN $5 ELSE 1 END",
        mark: "in_order = (jobs.account IS NOT NULL), ",
    };

    /// The condition of the candidates. Without a bound of the cost, no job is read; `sign` before a flow's column takes
    /// its affinity away, where a database has that.
    fn is_candidate(self, sign: &str) -> String {
        let (class, account) = (class_of("cheap"), account_of("cheap"));
        let of = format!("{class} = {sign}flows.class AND {account} = {sign}flows.account");
        let fits = match self.keeps_order {
            true => {
                format!("CASE WHEN flows.account = '' THEN {} ELSE {} END", has_cheap(&of), is_first_cheap(&of))
            }
            false => has_cheap(&of),
        };
        format!("{IS_FREE} AND {} AND ($8 > {COST_MAX} OR {fits})", self.is_next)
    }
}

/// The start tag of a claimed job, for the order in which the jobs are sent.
fn start_of_job() -> String {
    format!(
        "flow_tag + (row_number() OVER (PARTITION BY flow_class, flow_account ORDER BY job_seq) - 1) \
             * {TAG_PER_COST} / flow_weight"
    )
}

static CLAIM: Template = Template::made(|_| statement("FOR UPDATE OF flows", OrderText::NONE));
/// Leaves out flows that another session has locked for long.
static CLAIM_UNLOCKED: Template = Template::made(|_| statement("FOR UPDATE OF flows SKIP LOCKED", OrderText::NONE));
static CLAIM_IN_ORDER: Template = Template::made(|_| statement("FOR UPDATE OF flows", OrderText::ACCOUNT));
static CLAIM_UNLOCKED_IN_ORDER: Template =
    Template::made(|_| statement("FOR UPDATE OF flows SKIP LOCKED", OrderText::ACCOUNT));

static FIRST_TURN: Template =
    Template::new("INSERT INTO flow_turns (provider) VALUES ($1) ON CONFLICT DO NOTHING RETURNING provider");

/// A separate statement after the claim: the claim does not see an attempt that began meanwhile.
static UNKNOWN_AGES: Template = Template::new(
    "SELECT job_id, {since:max(began_at)} AS unknown_age_ms FROM attempts \
     WHERE job_id IN ({texts:$1}) AND kind = 'charge' \
         AND COALESCE(outcome, 'unknown') IN ('unknown', 'in_progress') GROUP BY job_id",
);

impl Database {
    pub(super) async fn claim_free_flows(
        &self,
        request: &BacklogClaimRequest<'_>,
    ) -> Result<BacklogClaim, LedgerError> {
        let rows = self.claimed_rows(request).await?;
        let Some(first) = rows.first().filter(|row| row.get("turns").is_ok_and(|turns: i64| turns > 0)) else {
            // The lane's first claim makes its row.
            let made = self.query(&FIRST_TURN, args![request.lane]).await?;
            if made.is_empty() {
                return Ok(BacklogClaim::Busy);
            }
            return Box::pin(self.claim_free_flows(request)).await;
        };
        let next_wake = first.get("next_wake")?;
        let mut jobs = Vec::with_capacity(rows.len());
        for row in &rows {
            let Some(fence) = row.get::<Option<i64>>("fence")? else { continue };
            match BacklogJob::from_row(row) {
                Ok(job) => jobs.push(job),
                // This process would hold it for ever.
                Err(error) => {
                    let id: String = row.get("id")?;
                    tracing::error!(job = id, %error, "a job's row cannot be read; leaving it out. Repair it by SQL");
                    self.query(&ABANDON, args![id, fence]).await?;
                }
            }
        }
        self.add_unknown_ages(&mut jobs).await?;
        Ok(BacklogClaim::Claimed { jobs, next_wake })
    }

    async fn claimed_rows(&self, request: &BacklogClaimRequest<'_>) -> Result<Vec<SqlRow>, LedgerError> {
        let bounds = request.bounds;
        let except: Vec<String> = bounds.except.iter().map(flow_text).collect();
        let args: Args = args![
            request.lane,
            request.holder,
            bounds.at_most,
            bounds.quantum.max(1),
            bounds.flow_max.max(1),
            serde_json::Value::from(except).to_string(),
            u32::from(bounds.class_max.number()),
            bounds.cost_below.unwrap_or(u32::from(COST_MAX) + 1)
        ]
        .into();
        if self.dialect() == Dialect::Sqlite {
            let steps = sqlite_steps(bounds.order).map(|sql| self.step(sql, args.clone()));
            let rows = self.engine.atomically(steps.into()).await?;
            return Ok(rows.and_then(|mut rows| rows.pop()).unwrap_or_default());
        }
        match bounds.order {
            JobOrder::None => self.query_or_skip_locked(&CLAIM, &CLAIM_UNLOCKED, args).await,
            JobOrder::Account => self.query_or_skip_locked(&CLAIM_IN_ORDER, &CLAIM_UNLOCKED_IN_ORDER, args).await,
        }
    }

    async fn add_unknown_ages(&self, jobs: &mut [BacklogJob]) -> Result<(), LedgerError> {
        let unknown: Vec<&str> =
            jobs.iter().filter(|job| job.claimed.maybe_charged).map(|job| job.job.id.as_str()).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        for row in self.query_by_index(&UNKNOWN_AGES, [texts(unknown)]).await? {
            let (id, age): (String, _) = (row.get("job_id")?, row.get("unknown_age")?);
            if let Some(job) = jobs.iter_mut().find(|job| job.job.id.as_str() == id) {
                job.claimed.unknown_age = age;
            }
        }
        Ok(())
    }
}

/// As [`IS_FREE`] compares it. No account has a space.
fn flow_text(flow: &FlowKey) -> String {
    let account = flow.account.as_ref().map_or("", |account| account.as_str());
    format!("{} {account}", flow.class.number())
}

impl FromRow for BacklogJob {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        let RecordedJob { job, hash } = RecordedJob::from_row(row)?;
        Ok(Self { class: row.get("flow_class")?, claimed: claimed(&job, row)?, job, hash })
    }
}

/// The statement for PostgreSQL. $1 the lane, $2 holder, $3 most jobs, $4 a quantum, $5 most jobs of a flow,
/// $6 flows that are left out, $7 the last class, $8 the cost from which jobs are left out. Returns at least one row;
/// without a job, its `fence` is NULL.
///
/// Each flow has quanta of $4 jobs, and each quantum a start tag, as if a job cost 1. Those that start first are
/// claimed. Before quantum n of the flow at place p, at least p + n * $4 jobs are claimed, so later quanta are left
/// out.
///
/// Under its lock, a flow is looked at again, by columns of no index: only its primary key fits.
///
/// `claims` is read twice: once as it was when the statement began, and once under the lock.
fn statement(lock: &str, order: OrderText) -> String {
    let OrderText { flow_max, mark, .. } = order;
    let is_candidate = order.is_candidate("");
    let (class, account) = (class_of("jobs"), account_of("jobs"));
    format!(
        "WITH turn AS MATERIALIZED (\
             SELECT provider FROM flow_turns WHERE provider = $1 \
                 AND claims = (SELECT seen.claims FROM flow_turns AS seen WHERE seen.provider = $1) \
             FOR UPDATE SKIP LOCKED), \
         candidates AS MATERIALIZED (\
             SELECT class, account, tag, weight, waiting, row_number() OVER (ORDER BY class, tag, account) - 1 AS place \
             FROM (SELECT class, account, tag, weight, least(waiting, {flow_max}) AS waiting FROM flows \
                   WHERE {is_candidate} AND EXISTS (SELECT 1 FROM turn) ORDER BY class, tag LIMIT $3) AS front), \
         quanta AS MATERIALIZED (\
             SELECT class, account, tag + number * $4 * {TAG_PER_COST} / weight AS start, \
                 least($4, waiting - number * $4) AS jobs \
             FROM candidates CROSS JOIN LATERAL \
                 generate_series(0, least((waiting - 1) / $4, ($3 - place - 1) / $4)) AS number), \
         picked AS MATERIALIZED (\
             SELECT class, account, max(start) AS start, CAST(sum(least(jobs, $3 - sum_before)) AS bigint) AS quota \
             FROM (SELECT class, account, start, jobs, \
                       CAST(sum(jobs) OVER (ORDER BY class, start, account ROWS UNBOUNDED PRECEDING) AS bigint) - jobs \
                           AS sum_before \
                   FROM quanta) AS sums \
             WHERE sum_before < $3 GROUP BY class, account), \
         locked AS MATERIALIZED (\
             SELECT flow.class, flow.account, flow.tag, flow.weight, wanted.start, wanted.quota \
             FROM (SELECT class, account, start, quota FROM picked ORDER BY class, account) AS wanted \
             CROSS JOIN LATERAL (\
                 SELECT flows.class, flows.account, flows.tag, flows.weight FROM flows \
                 WHERE flows.provider = $1 AND flows.class = wanted.class AND flows.account = wanted.account \
                     AND flows.waiting > 0 AND flows.blocked_reason IS NULL LIMIT 1 {lock}) AS flow), \
         chosen AS MATERIALIZED (\
             SELECT next.id AS job_id, locked.class AS flow_class, locked.account AS flow_account, \
                 locked.tag AS flow_tag, locked.weight AS flow_weight, locked.start AS flow_start \
             FROM locked CROSS JOIN LATERAL (\
                 SELECT jobs.id FROM jobs \
                 WHERE jobs.provider = $1 AND {class} = locked.class AND {account} = locked.account AND jobs.backlog \
                     AND jobs.cost < $8 AND {READABLE} AND {CLAIMABLE} \
                 ORDER BY jobs.seq LIMIT locked.quota FOR UPDATE SKIP LOCKED) AS next), \
         taken AS (\
             UPDATE jobs SET fence = fence + 1, holder = $2, backlog = false, \
                 {mark}updated_at = {{now}} \
             FROM chosen WHERE jobs.id = chosen.job_id AND jobs.backlog \
             RETURNING flow_class, flow_account, flow_tag, flow_weight, flow_start, seq AS job_seq, {RECORDED}, {CLAIMED_COLUMNS}), \
         served AS MATERIALIZED (\
             SELECT CAST($1 AS text) AS provider, locked.class, locked.account, count(taken.id) AS jobs, \
                 CAST(sum(COALESCE(taken.cost, 1)) AS bigint) AS cost \
             FROM locked LEFT JOIN taken ON taken.flow_class = locked.class AND taken.flow_account = locked.account \
             GROUP BY locked.class, locked.account), \
         moved AS (\
             UPDATE flows SET waiting = greatest(flows.waiting - served.jobs, 0), \
                 tag = flows.tag + served.cost * {TAG_PER_COST} / flows.weight \
             FROM served WHERE flows.provider = served.provider AND flows.class = served.class \
                 AND flows.account = served.account), \
         timed AS (\
             INSERT INTO flow_clocks (provider, class, virtual_time) \
             SELECT $1, flow_class, max(flow_start) + {PASSED_OVER_FIRST} FROM taken GROUP BY flow_class \
             ON CONFLICT (provider, class) DO UPDATE SET virtual_time = excluded.virtual_time \
                 WHERE excluded.virtual_time > flow_clocks.virtual_time), \
         counted AS (\
             UPDATE flow_turns SET claims = claims + 1 WHERE provider = $1 AND EXISTS (SELECT 1 FROM locked)) \
         SELECT (SELECT count(*) FROM turn) AS turns, \
             {{until:(SELECT min(blocked_until) FROM flows WHERE provider = $1 AND blocked_until IS NOT NULL)}} \
                 AS next_wake_ms, taken.* \
         FROM (SELECT 1) AS one LEFT JOIN taken ON true ORDER BY flow_class, {}, flow_account, job_seq",
        start_of_job(),
    )
}

/// The jobs of one call. It belongs to the one connection, and is empty between the calls.
static CREATE_PICKS: Template = Template::new(
    "CREATE TEMP TABLE IF NOT EXISTS flow_picks \
     (job_id TEXT, flow_class INTEGER, flow_account TEXT, flow_tag INTEGER, flow_weight INTEGER, flow_start INTEGER, \
     job_cost INTEGER, job_seq INTEGER)",
);
static EMPTY_PICKS: Template = Template::new("DELETE FROM flow_picks");

static PICK: Template = Template::made(|_| pick(OrderText::NONE));
static PICK_IN_ORDER: Template = Template::made(|_| pick(OrderText::ACCOUNT));

static LEASE: Template = Template::made(|_| lease(OrderText::NONE));
static LEASE_IN_ORDER: Template = Template::made(|_| lease(OrderText::ACCOUNT));

static ADVANCE_CLOCKS: Template = Template::made(|_| {
    format!(
        "INSERT INTO flow_clocks (provider, class, virtual_time) \
         SELECT $1, flow_class, max(flow_start) + {PASSED_OVER_FIRST} FROM flow_picks \
         WHERE job_id IS NOT NULL GROUP BY flow_class ON CONFLICT (provider, class) \
             DO UPDATE SET virtual_time = max(flow_clocks.virtual_time, excluded.virtual_time)"
    )
});

static COUNT_OUT: Template = Template::made(|_| {
    format!(
        "UPDATE flows SET waiting = max(flows.waiting - served.jobs, 0), \
             tag = flows.tag + served.cost * {TAG_PER_COST} / flows.weight \
         FROM (SELECT flow_class, flow_account, count(job_id) AS jobs, sum(COALESCE(job_cost, 1)) AS cost \
               FROM flow_picks GROUP BY flow_class, flow_account) AS served \
         WHERE flows.provider = $1 AND flows.class = served.flow_class AND flows.account = served.flow_account"
    )
});

static READ_PICKS: Template = Template::made(|_| {
    format!(
        "SELECT 1 AS turns, {{until:(SELECT min(blocked_until) FROM flows \
                 WHERE provider = $1 AND blocked_until IS NOT NULL)}} AS next_wake_ms, flow_class, {}, {CLAIMED_COLUMNS} \
         FROM (SELECT 1) AS one LEFT JOIN flow_picks ON flow_picks.job_id IS NOT NULL \
         LEFT JOIN jobs ON jobs.id = flow_picks.job_id \
         ORDER BY flow_class, {}, flow_account, job_seq",
        RECORDED,
        start_of_job(),
    )
});

/// $1 the lane, $2 holder, $3 most jobs, $4 a quantum, $5 most jobs of a flow, $6 flows that are left out, $7
/// the last class, $8 the cost from which jobs are left out. The last step returns the jobs; one row without a job if there is none.
fn sqlite_steps(order: JobOrder) -> [&'static Template; 7] {
    let (pick, lease) = match order {
        JobOrder::None => (&PICK, &LEASE),
        JobOrder::Account => (&PICK_IN_ORDER, &LEASE_IN_ORDER),
    };
    [&CREATE_PICKS, &EMPTY_PICKS, pick, lease, &ADVANCE_CLOCKS, &COUNT_OUT, &READ_PICKS]
}

fn lease(OrderText { mark, .. }: OrderText) -> String {
    format!(
        "UPDATE jobs SET fence = fence + 1, holder = $2, backlog = 0, \
             {mark}updated_at = {{now}} \
         WHERE id IN (SELECT job_id FROM flow_picks)"
    )
}

/// The same choice as PostgreSQL's. A LIMIT cannot name a flow's quota, so the jobs of a flow are stepped through by
/// `seq`.
fn pick(order: OrderText) -> String {
    let (is_candidate, flow_max) = (order.is_candidate("+"), order.flow_max);
    // `+` takes a column's affinity away, which an index on expressions does not have.
    let next = |flow: &str, after: &str| {
        format!(
            "(SELECT min(jobs.seq) FROM jobs WHERE jobs.provider = $1 AND {} = +{flow}.class AND {} = +{flow}.account \
                 AND jobs.backlog AND jobs.seq > {after} AND jobs.cost < $8 AND {READABLE} AND {CLAIMABLE})",
            class_of("jobs"),
            account_of("jobs")
        )
    };
    // A flow without a job that can be claimed has a row, too: its tag moves on, so that it does not stay in front.
    format!(
        "INSERT INTO flow_picks (job_id, flow_class, flow_account, flow_tag, flow_weight, flow_start, job_cost, job_seq) \
         WITH RECURSIVE candidates AS MATERIALIZED (\
             SELECT class, account, tag, weight, waiting, row_number() OVER (ORDER BY class, tag, account) - 1 AS place \
             FROM (SELECT class, account, tag, weight, min(waiting, {flow_max}) AS waiting FROM flows \
                   WHERE {is_candidate} \
                   ORDER BY class, tag LIMIT $3) AS front), \
         quanta (class, account, tag, weight, waiting, place, number) AS (\
             SELECT class, account, tag, weight, waiting, place, 0 FROM candidates \
             UNION ALL \
             SELECT class, account, tag, weight, waiting, place, number + 1 FROM quanta \
             WHERE (number + 1) * $4 < waiting AND place + (number + 1) * $4 < $3), \
         started AS (\
             SELECT class, account, tag, weight, tag + number * $4 * {TAG_PER_COST} / weight AS start, \
                 min($4, waiting - number * $4) AS jobs FROM quanta), \
         sums AS (\
             SELECT class, account, tag, weight, start, jobs, \
                 sum(jobs) OVER (ORDER BY class, start, account ROWS UNBOUNDED PRECEDING) - jobs AS sum_before \
             FROM started), \
         picked AS MATERIALIZED (\
             SELECT class, account, tag, weight, max(start) AS start, sum(min(jobs, $3 - sum_before)) AS quota \
             FROM sums WHERE sum_before < $3 GROUP BY class, account, tag, weight), \
         chosen (class, account, tag, weight, start, quota, number, seq) AS (\
             SELECT class, account, tag, weight, start, quota, 1, {} FROM picked \
             UNION ALL \
             SELECT class, account, tag, weight, start, quota, number + 1, {} FROM chosen \
             WHERE number < quota AND seq IS NOT NULL) \
         SELECT jobs.id, chosen.class, chosen.account, chosen.tag, chosen.weight, chosen.start, jobs.cost, chosen.seq \
         FROM chosen LEFT JOIN jobs ON jobs.provider = $1 AND {} = +chosen.class AND {} = +chosen.account \
             AND jobs.backlog AND jobs.seq = chosen.seq \
         WHERE chosen.seq IS NOT NULL OR chosen.number = 1",
        next("picked", "-1"),
        next("chosen", "chosen.seq"),
        class_of("jobs"),
        account_of("jobs"),
    )
}
