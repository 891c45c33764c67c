//! The copy columns in the writes that release a lease: one place for the four writes after which a job waits.
//!
//! These are: a delay, the release of a job that is not due, and the ends of an attempt and of a look-up.

use super::row::SqlRow;
use crate::ledger::LedgerError;
use crate::ledger::copies::ReturnPlan;

/// Columns that [`return_plan`] reads.
pub const RETURN_PLAN_COLUMNS: &str = "copy, unqueued";

/// A delay queue holds a copy; or the lane's queue does, and the job was claimed without it. A claim writes the latter
/// as an instant at which no copy can have been delayed.
const ON_ITS_WAY: &str = "COALESCE(delayed_until > {now} OR delayed_until <= created_at, false)";

/// For shorter waits, a job gets a second copy rather than none: the sweeper would be late for it.
const UNQUEUED_FROM_MS: u32 = 60_000;

/// Assignments for a job that waits until `wake`, and whose next copy would be in a delay queue for `step` ms. `{now}`
/// and `{after:…}` are the dialect's. `is_unsent` says whether the sweeper may publish the job when it is due.
///
/// A copy that returns by then is enough. A later one stays where it is, and the job waits without a copy. If the job
/// is due soon, or may have been charged, it gets a second copy.
pub fn delayed_copy_update(wake: &str, step: &str, is_unsent: &str) -> String {
    let back_in_time = format!("delayed_until <= {wake}");
    let in_ledger = format!("({is_unsent}) AND {wake} > {{after:{UNQUEUED_FROM_MS}}}");
    let is_kept = format!("{ON_ITS_WAY} AND ({back_in_time} OR ({is_unsent}))");
    format!(
        "copy = copy + CASE WHEN {ON_ITS_WAY} AND ({back_in_time} OR ({in_ledger})) THEN 0 ELSE 1 END, \
         unqueued = ({ON_ITS_WAY} AND NOT ({back_in_time}) AND {in_ledger}), \
         delayed_copy = CASE WHEN {is_kept} THEN delayed_copy ELSE copy + 1 END, \
         delayed_until = CASE WHEN {is_kept} THEN delayed_until ELSE {{after:{step}}} END"
    )
}

/// Reads the columns.
pub fn return_plan(row: &SqlRow) -> Result<ReturnPlan, LedgerError> {
    Ok(ReturnPlan { copy: row.int("copy")?, unqueued: row.bool("unqueued")? })
}
