//! The steps of a dispatcher's claim on SQLite, which has no data-modifying WITH: a temporary table has the chosen
//! jobs.
//!
//! One transaction with the database's write lock, so nothing else happens in between.

use super::super::claim::CLAIMED_COLUMNS;
use super::super::dialect::Dialect;
use super::super::engine::Sql;
use super::super::upkeep::READABLE;
use super::super::upkeep::republish::{CLAIMABLE, RECORDED};
use super::claim::{IS_FREE, OrderText, start_of_job};
use super::{TAG_PER_COST, account_of, class_of};
use crate::domain::fair_order::PASSED_OVER_FIRST;

/// The jobs of one call. It belongs to the one connection, and is empty between the calls.
pub const CREATE_PICKS: &str = "CREATE TEMP TABLE IF NOT EXISTS flow_picks \
     (job_id TEXT, flow_class INTEGER, flow_account TEXT, flow_tag INTEGER, flow_weight INTEGER, flow_start INTEGER, \
     job_cost INTEGER, job_seq INTEGER)";
pub const EMPTY_PICKS: &str = "DELETE FROM flow_picks";

/// $1 the lane, $2 owner, $3 lease, $4 most jobs, $5 a quantum, $6 most jobs of a flow, $7 flows that are left out, $8
/// the last class. The last step returns the jobs; one row without a job if there is none.
pub fn steps(dialect: Dialect, order: OrderText) -> Vec<Sql> {
    let texts = [
        CREATE_PICKS.to_owned(),
        EMPTY_PICKS.to_owned(),
        pick(order),
        format!(
            "UPDATE jobs SET fence = fence + 1, lease_owner = $2, lease_until = {{after:$3}}, backlog = 0, \
                 unqueued = (state = 'waiting'), {}updated_at = {{now}} \
             WHERE id IN (SELECT job_id FROM flow_picks)",
            order.mark
        ),
        format!(
            "INSERT INTO flow_clocks (provider, class, virtual_time) \
             SELECT $1, flow_class, max(flow_start) + {PASSED_OVER_FIRST} FROM flow_picks \
             WHERE job_id IS NOT NULL GROUP BY flow_class ON CONFLICT (provider, class) \
                 DO UPDATE SET virtual_time = max(flow_clocks.virtual_time, excluded.virtual_time)"
        ),
        format!(
            "UPDATE flows SET waiting = max(flows.waiting - served.jobs, 0), \
                 tag = flows.tag + served.cost * {TAG_PER_COST} / flows.weight \
             FROM (SELECT flow_class, flow_account, count(job_id) AS jobs, sum(COALESCE(job_cost, 1)) AS cost \
                   FROM flow_picks GROUP BY flow_class, flow_account) AS served \
             WHERE flows.provider = $1 AND flows.class = served.flow_class AND flows.account = served.flow_account"
        ),
        format!(
            "SELECT 1 AS turns, {{until:(SELECT min(blocked_until) FROM flows \
                     WHERE provider = $1 AND blocked_until IS NOT NULL)}} AS next_wake_ms, flow_class, {}, {CLAIMED_COLUMNS} \
             FROM (SELECT 1) AS one LEFT JOIN flow_picks ON flow_picks.job_id IS NOT NULL \
             LEFT JOIN jobs ON jobs.id = flow_picks.job_id \
             ORDER BY flow_class, {}, flow_account, job_seq",
            RECORDED.trim_end_matches(", copy"),
            start_of_job(),
        ),
    ];
    texts.iter().map(|text| dialect.render(text)).collect()
}

/// The same choice as PostgreSQL's. A LIMIT cannot name a flow's quota, so the jobs of a flow are stepped through by
/// `seq`.
fn pick(OrderText { is_next, flow_max, .. }: OrderText) -> String {
    // `+` takes a column's affinity away, which an index on expressions does not have.
    let next = |flow: &str, after: &str| {
        format!(
            "(SELECT min(jobs.seq) FROM jobs WHERE jobs.provider = $1 AND {} = +{flow}.class AND {} = +{flow}.account \
                 AND jobs.backlog AND jobs.seq > {after} AND {READABLE} AND {CLAIMABLE})",
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
                   WHERE {IS_FREE} AND {is_next} \
                   ORDER BY class, tag LIMIT $4) AS front), \
         quanta (class, account, tag, weight, waiting, place, number) AS (\
             SELECT class, account, tag, weight, waiting, place, 0 FROM candidates \
             UNION ALL \
             SELECT class, account, tag, weight, waiting, place, number + 1 FROM quanta \
             WHERE (number + 1) * $5 < waiting AND place + (number + 1) * $5 < $4), \
         started AS (\
             SELECT class, account, tag, weight, tag + number * $5 * {TAG_PER_COST} / weight AS start, \
                 min($5, waiting - number * $5) AS jobs FROM quanta), \
         sums AS (\
             SELECT class, account, tag, weight, start, jobs, \
                 sum(jobs) OVER (ORDER BY class, start, account ROWS UNBOUNDED PRECEDING) - jobs AS sum_before \
             FROM started), \
         picked AS MATERIALIZED (\
             SELECT class, account, tag, weight, max(start) AS start, sum(min(jobs, $4 - sum_before)) AS quota \
             FROM sums WHERE sum_before < $4 GROUP BY class, account, tag, weight), \
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
