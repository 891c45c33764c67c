//! The reconciliation of all jobs in one statement, so that all counts are of the same instant, and the totals of
//! finished jobs that it adds.
//!
//! Open jobs are counted twice, by state and by where they are. Finished jobs are compared with their events and
//! attempts. Earlier finished jobs come from the kept totals. So the cost grows with open, dead, reviewed and recently
//! finished jobs, and not with the whole ledger. See `docs/decisions/0005-reconcile-all-jobs.md`.
//!
//! To compare costs more than to count, so a count alone is possible: an overview needs no comparison each time.
//!
//! Once a minute, jobs that finished since the last update are added to the totals, found by the index of recent ones.
//! Payments write nothing there. SQL may change old jobs, so all are counted again from time to time. That takes at most
//! a hundredth of the time, and happens at once when the clock was set back.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{OPEN, READABLE};
use crate::ledger::LedgerError;
use crate::ledger::backlog::BlockedReason;
use crate::ledger::database::Database;
use crate::ledger::events::EVENTS_KEPT_FOR;
use crate::ledger::operator::STATES;
use crate::ledger::sql::claim::IS_UNHELD;
use crate::ledger::sql::dialect::Template;
use crate::ledger::sql::engine::{Args, args};
use crate::ledger::sql::fleet::LANES;
use crate::ledger::sql::result::{SqlRow, corrupt};
use crate::ledger::upkeep::{CheckScope, ProviderReconciliation};

/// Conditions of the indexes `jobs_finished_by_update` and `jobs_in_review_by_update`, and of all finished jobs.
const FINISHED_UNSCRUBBED: &str =
    "scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')";
const IN_REVIEW: &str = "state = 'review'";
const FINISHED: &str = "state NOT IN ('waiting', 'sending', 'unknown')";

/// A job with `not_before` ages from then on.
const SINCE: &str = "CASE WHEN not_before > created_at AND {readable:not_before} THEN not_before \
     WHEN {readable:created_at} THEN created_at END";

/// The first request of a job whose outcome is unknown. A request whose worker is lost is abandoned.
fn unknown_since() -> String {
    format!(
        "CASE WHEN {{readable:first_sent_at}} AND (state = 'unknown' OR state = 'sending' AND {IS_UNHELD}) \
             THEN first_sent_at END"
    )
}

/// It is due, and no worker has it, for so long ($1). A job of a lost worker is not due before its response.
const IS_OVERDUE: &str = "(NOT backlog AND wake_at <= {after:(0 - $1)} AND (holder IS NULL \
     OR NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = jobs.holder) \
         AND COALESCE(response_by, updated_at) <= {after:(0 - $1)}))";

/// No event is deleted that reports a younger change.
fn no_event() -> String {
    let kept_ms = EVENTS_KEPT_FOR.as_millis();
    format!(
        "updated_at > {{after:(0 - {kept_ms})}} AND NOT EXISTS (SELECT 1 FROM events WHERE events.job_id = jobs.id \
             AND events.state = jobs.state)"
    )
}

/// `accepted` is the reason that a response leaves; look-ups and operators leave other reasons. The state is an
/// expression, so that the index of charges, which holds all jobs that ever succeeded, does not fit.
const NO_CAUSE: &str = "state || '' = 'succeeded' AND (reason IS NULL OR reason = 'accepted') \
     AND NOT EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.outcome = 'accepted')";

/// The columns that only the row of open jobs fills.
const NOT_OF_OPEN: &str = "NULL AS oldest_ms, NULL AS unknown_ms, 0 AS active, 0 AS in_flight, 0 AS delayed, \
     NULL AS delayed_ms, 0 AS due, 0 AS overdue, 0 AS unreadable, 0 AS backlog, \
     0 AS waiting_cost";

fn reconciliation(states: Vec<String>, finished: &[String]) -> String {
    // Open jobs are read once for all counts: there may be a million. Most of them are in the backlog, so conditions that
    // leave the backlog out begin with that.
    let of = |which: &str| format!("count(CASE WHEN {which} THEN 1 END)");
    let open = [
        // First, because PostgreSQL takes the types of the columns from here.
        format!(
            "SELECT min(provider) AS provider, 'open' AS place, NULL AS state, {} AS jobs, \
                 {{aged:min(since)}} AS oldest_ms, \
                 CASE WHEN count(unknown_since) > 0 THEN {{aged:min(unknown_since)}} END AS unknown_ms, \
                 {} AS active, {} AS in_flight, count(waits_until) AS delayed, \
                 {{until:max(CASE WHEN waits_until IS NOT NULL AND NOT unreadable THEN waits_until END)}} AS delayed_ms, \
                 {} AS due, {} AS overdue, {} AS unreadable, {} AS backlog, \
                 CAST(coalesce(sum(CASE WHEN NOT is_unheld AND state = 'sending' THEN 0 \
                     WHEN state = 'waiting' THEN cost ELSE 1 END), 0) AS bigint) AS waiting_cost \
             FROM (SELECT provider, {SINCE} AS since, {} AS unknown_since, expires_at, {IS_UNHELD} AS is_unheld, wake_at, \
                       state, backlog, cost, {IS_OVERDUE} AS is_overdue, \
                       NOT ({READABLE}) AS unreadable, \
                       CASE WHEN NOT backlog AND {IS_UNHELD} AND wake_at > {{now}} THEN wake_at END AS waits_until \
                   FROM jobs WHERE {OPEN}) AS open_jobs GROUP BY provider || ''",
            of("expires_at <= {now}"),
            of("NOT is_unheld"),
            of("NOT is_unheld AND state = 'sending'"),
            of("NOT backlog AND is_unheld AND wake_at <= {now}"),
            of("is_overdue"),
            of("unreadable"),
            of("backlog"),
            unknown_since(),
        ),
    ];
    let checks = finished.iter().flat_map(|which| {
        [("without_event", no_event()), ("without_cause", NO_CAUSE.to_owned())]
            .map(|(place, fault)| part(place, &format!("{which} AND {fault}")))
    });
    let left = [unreadable_to_decide(), blocked_by_rules()];
    let parts: Vec<String> = open.into_iter().chain(states).chain(checks).chain(left).collect();
    format!("{LANES}, {LANE_STATES} {}", parts.join(" UNION ALL "))
}

impl Database {
    /// The jobs by provider and by where they are, at one instant. Counts the jobs that may change their state, and
    /// those that finished since the last update of the totals; `scope` bounds the rest.
    pub async fn reconcile(
        &self,
        overdue_after: Duration,
        scope: CheckScope,
    ) -> Result<Vec<ProviderReconciliation>, LedgerError> {
        let args: Args = args![overdue_after].into();
        let rows = match scope {
            CheckScope::CountsOnly => {
                let sql = self.dialect().render(&reconciliation(counted_with_totals(), &[]));
                self.engine.query_by_index(&sql, args).await?
            }
            // Not an argument: PostgreSQL would plan for any argument, and read the whole table for an unknown span.
            // And by index: its statistics are older than the last minutes.
            CheckScope::Since(since) => {
                let lately = format!("updated_at >= {{after:(0 - {})}}", since.as_millis());
                let finished = [FINISHED_UNSCRUBBED, IN_REVIEW].map(|which| format!("{which} AND {lately}"));
                let sql = self.dialect().render(&reconciliation(counted_with_totals(), &finished));
                self.engine.query_by_index(&sql, args).await?
            }
            CheckScope::All => {
                let sql = self.dialect().render(&reconciliation(vec![all_counted()], &[FINISHED.to_owned()]));
                self.engine.query(&sql, args).await?
            }
        };
        let mut accounts: BTreeMap<String, ProviderReconciliation> = BTreeMap::new();
        for row in rows {
            let provider: String = row.get("provider")?;
            let account = accounts
                .entry(provider.clone())
                .or_insert_with(|| ProviderReconciliation { provider, ..ProviderReconciliation::default() });
            add_row(account, &row)?;
        }
        let with_faults =
            |account: ProviderReconciliation| ProviderReconciliation { faults: account.discrepancies(), ..account };
        Ok(accounts.into_values().map(with_faults).collect())
    }
}

/// The states of each lane's jobs: steps from one to the next, like [`LANES`].
const LANE_STATES: &str = "words (provider, state) AS ( \
     SELECT provider, (SELECT min(state) FROM jobs WHERE jobs.provider = lanes.provider) FROM lanes \
     WHERE lanes.provider IS NOT NULL \
     UNION ALL \
     SELECT provider, (SELECT min(state) FROM jobs WHERE jobs.provider = words.provider AND jobs.state > words.state) \
     FROM words WHERE words.state IS NOT NULL)";

/// Jobs by state, all of them counted.
fn all_counted() -> String {
    format!(
        "SELECT provider, 'state' AS place, state, count(*) AS jobs, {NOT_OF_OPEN} FROM jobs GROUP BY provider, state"
    )
}

/// Jobs by state: open ones by an index, finished ones from the totals, and those that finished since. The small tables
/// are read by their keys, too: PostgreSQL overestimates a scan there so much that it compiles the whole statement.
fn counted_with_totals() -> Vec<String> {
    vec![
        format!(
            "SELECT jobs.provider, 'state' AS place, jobs.state, count(*) AS jobs, {NOT_OF_OPEN} \
             FROM lanes {{join}} jobs ON jobs.provider = lanes.provider AND jobs.state IN {NOT_FOR_GOOD} \
             GROUP BY jobs.provider, jobs.state"
        ),
        format!(
            "SELECT jobs.provider, 'state' AS place, jobs.state, count(*) AS jobs, {NOT_OF_OPEN} \
             FROM words {{join}} jobs ON jobs.provider = words.provider AND jobs.state = words.state \
             WHERE words.state NOT IN ('{}') GROUP BY jobs.provider, jobs.state",
            STATES.join("', '")
        ),
        format!(
            "SELECT provider, 'state' AS place, state, jobs, {NOT_OF_OPEN} FROM finished_jobs \
             WHERE provider > '' AND jobs > 0"
        ),
        format!(
            "SELECT min(provider) AS provider, 'state' AS place, min(state) AS state, count(*) AS jobs, {NOT_OF_OPEN} \
             FROM jobs WHERE {} GROUP BY provider || '', state || ''",
            finished_since_totals()
        ),
    ]
}

/// Jobs that wait for an operator, by the index of states: no list shows those whose rows cannot be read.
fn unreadable_to_decide() -> String {
    format!(
        "SELECT jobs.provider, 'unreadable' AS place, NULL AS state, count(*) AS jobs, {NOT_OF_OPEN} \
         FROM lanes {{join}} jobs ON jobs.provider = lanes.provider AND jobs.state IN ('review', 'dead') \
         WHERE NOT ({READABLE}) GROUP BY jobs.provider"
    )
}

/// Jobs of the backlog whose account a rule blocks, by the index of blocked flows.
fn blocked_by_rules() -> String {
    format!(
        "SELECT flows.provider, 'account_blocked' AS place, NULL AS state, CAST(sum(flows.waiting) AS bigint) AS jobs, \
             {NOT_OF_OPEN} \
         FROM lanes {{join}} flows ON flows.provider = lanes.provider AND flows.blocked_until IS NOT NULL \
         WHERE flows.blocked_reason = '{}' GROUP BY flows.provider",
        BlockedReason::AccountBlocked.code()
    )
}

/// Grouped by an expression, because SQLite would rather read all jobs in the order of an index on the column.
fn part(place: &str, which: &str) -> String {
    format!(
        "SELECT min(provider) AS provider, '{place}' AS place, NULL AS state, count(*) AS jobs, {NOT_OF_OPEN} \
         FROM jobs WHERE {which} GROUP BY provider || ''"
    )
}

fn add_row(account: &mut ProviderReconciliation, row: &SqlRow) -> Result<(), LedgerError> {
    let jobs: u64 = row.get("jobs")?;
    match row.get::<String>("place")?.as_str() {
        "state" => {
            account.recorded += jobs;
            let state: String = row.get("state")?;
            // The totals and the jobs that finished since are two rows.
            *account.states.entry(state).or_default() += jobs;
        }
        "open" => {
            (account.past_deadline, account.oldest_open) = (jobs, row.get("oldest")?);
            account.oldest_unknown = row.get("unknown")?;
            (account.delayed, account.delayed_for) = (row.get("delayed")?, row.get::<Option<Duration>>("delayed")?);
            (account.active, account.due, account.overdue) = (row.get("active")?, row.get("due")?, row.get("overdue")?);
            (account.in_flight, account.backlog) = (row.get("in_flight")?, row.get("backlog")?);
            account.waiting_cost = row.get("waiting_cost")?;
            account.unreadable += row.get::<u64>("unreadable")?;
        }
        "unreadable" => account.unreadable += jobs,
        "account_blocked" => account.account_blocked += jobs,
        // Finished jobs and those in review are counted separately.
        "without_event" => account.without_event += jobs,
        "without_cause" => account.without_accepted_attempt += jobs,
        other => return Err(corrupt("place", &format!("holds {other}"))),
    }
    Ok(())
}

/// Finished states that no command leaves. A dead job may be replayed, so it is counted with the jobs that wait for an
/// operator.
const FOR_GOOD: &str = "state IN ('succeeded', 'declined', 'expired', 'cancelled')";
/// All other states.
pub const NOT_FOR_GOOD: &str = "('waiting', 'sending', 'unknown', 'review', 'dead')";
/// The finished jobs of [`FOR_GOOD`], by the condition of index `jobs_finished_by_update`. No job is scrubbed
/// within its first day.
const FOR_GOOD_LATELY: &str = "scrubbed_at IS NULL \
     AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled') AND state <> 'dead'";

/// The totals end this long ago. A job's own instant precedes its commit by far less, since a statement is ended after
/// ten seconds.
const LAG_MS: u32 = 120_000;
/// Outdated totals are brought up to now in steps of this length: one statement for all could run into its timeout.
const STEP_MS: u32 = 300_000;
/// Interval of complete counts; longer if a count takes longer than a hundredth of it.
const RECOUNT_MS: u32 = 600_000;
const RECOUNT_FACTOR: u32 = 100;
/// Time limit of a complete count, the one query that may take long: a second per million jobs. On PostgreSQL it blocks
/// no other session; on SQLite, which has one connection, it blocks all.
const RECOUNT_MAX: Duration = Duration::from_secs(30 * 60);

const WITH_SUM: &str = "ON CONFLICT (provider, state) DO UPDATE SET";

fn of_mark(column: &str) -> String {
    format!("(SELECT {column} FROM finished_mark WHERE only_row)")
}

/// Finished jobs that the totals do not include yet. The upper end, a year ahead, is for PostgreSQL: it expects a third
/// of all rows for a range that is open on one side.
pub fn finished_since_totals() -> String {
    format!("{FOR_GOOD_LATELY} AND updated_at >= {} AND updated_at < {{after:31536000000}}", of_mark("counted_before"))
}

fn lagging() -> String {
    format!("{{after:(0 - {LAG_MS})}}")
}

/// One worker takes the mark and counts, perhaps for minutes; the others skip it.
fn take_mark(sets: &str, due: &str) -> String {
    format!(
        "UPDATE finished_mark SET {sets} \
         WHERE only_row IN (SELECT only_row FROM finished_mark WHERE {due} {{unlocked}}) RETURNING only_row"
    )
}

/// A new mark is at least the lag in the past. If it is not, the clock went back after it was set, and jobs that finish
/// now have an instant before it.
static BEGIN_RECOUNT: Template = Template::made(|_| {
    let sets = format!("counted_from = counted_before, counted_at = {{now}}, counted_before = {}", lagging());
    take_mark(&sets, &format!("recount_after <= {{now}} OR counted_before > {{after:(0 - {LAG_MS} / 2)}}"))
});

static CLEAR: Template = Template::new("UPDATE finished_jobs SET jobs = 0");

static COUNT_ALL: Template = Template::made(|_| {
    // An instant that is known at planning time keeps PostgreSQL on the index; the mark has just been set.
    format!(
        "INSERT INTO finished_jobs (provider, state, jobs) \
         SELECT provider, state, sum(jobs) FROM ( \
             SELECT provider, state, count(*) AS jobs FROM jobs WHERE {FOR_GOOD} GROUP BY provider, state \
             UNION ALL \
             SELECT provider, state, -count(*) FROM jobs WHERE {} AND updated_at >= {{after:(0 - 2 * {LAG_MS})}} \
             GROUP BY provider || '', provider, state) AS counted \
         WHERE true GROUP BY provider, state {WITH_SUM} jobs = excluded.jobs",
        finished_since_totals()
    )
});

static PLAN_RECOUNT: Template = Template::made(|_| {
    format!(
        "UPDATE finished_mark SET recount_after = CASE \
             WHEN {{now}} + {RECOUNT_FACTOR} * ({{now}} - counted_at) > {{after:{RECOUNT_MS}}} \
             THEN {{now}} + {RECOUNT_FACTOR} * ({{now}} - counted_at) ELSE {{after:{RECOUNT_MS}}} END"
    )
});

static ADVANCE_MARK: Template = Template::made(|_| {
    let lagging = lagging();
    let sets = format!(
        "counted_from = counted_before, counted_before = CASE \
             WHEN counted_before < {{after:(0 - {LAG_MS} - {STEP_MS})}} \
             THEN counted_before + ({{after:{STEP_MS}}} - {{now}}) ELSE {lagging} END"
    );
    take_mark(&sets, &format!("counted_before < {lagging}"))
});

static ADD_FINISHED: Template = Template::made(|_| {
    format!(
        "INSERT INTO finished_jobs (provider, state, jobs) \
         SELECT min(provider), min(state), count(*) FROM jobs \
         WHERE {FOR_GOOD_LATELY} AND updated_at >= {} AND updated_at < {} \
         GROUP BY provider || '', state || '' {WITH_SUM} jobs = finished_jobs.jobs + excluded.jobs",
        of_mark("counted_from"),
        of_mark("counted_before"),
    )
});

impl Database {
    /// Updates the totals of finished jobs, which a reconciliation adds to its own counts. One worker at a time calls
    /// this every few minutes. From time to time it counts all jobs, which takes long: the count goes on even when the
    /// caller gets a timeout.
    pub async fn update_finished_totals(&self) -> Result<(), LedgerError> {
        let recount = vec![
            self.must_affect(&BEGIN_RECOUNT, []),
            self.step(&CLEAR, []),
            self.step(&COUNT_ALL, []),
            self.step(&PLAN_RECOUNT, []),
        ];
        if self.engine.atomically_within(RECOUNT_MAX, recount).await?.is_none() {
            let add = vec![self.must_affect(&ADVANCE_MARK, []), self.step(&ADD_FINISHED, [])];
            self.engine.atomically(add).await?;
        }
        Ok(())
    }
}
