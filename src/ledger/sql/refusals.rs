//! Refusals of single payments: how often a provider has refused one whose like it takes.
//!
//! The count is in the ledger, because a payment waits for minutes between two refusals, and another worker may send it
//! then. A refused payment has one row here; others have none. A new version of the provider's row begins a new count,
//! and so does an operator's replay.

use super::dialect::Template;
use super::engine::args;
use crate::domain::disposition::Refusals;
use crate::ledger::database::Database;
use crate::ledger::{LeaseToken, LedgerError};

/// $1 job, $2 fence, $3 version of the provider's row. The outcomes are those of a request that passed; the index of the
/// attempts by provider and end bounds the search by the last refusal.
static RECORD: Template = Template::made(|_| {
    let passed = "EXISTS (\
        SELECT 1 FROM jobs AS own JOIN attempts AS passed ON passed.provider = own.provider \
        WHERE own.id = payment_refusals.job_id AND passed.ended_at > payment_refusals.refused_at \
            AND passed.began_at > payment_refusals.refused_at AND passed.kind = 'charge' AND passed.job_id <> own.id \
            AND COALESCE(passed.account, '') = COALESCE(own.account, '') \
            AND passed.outcome IN ('accepted', 'declined', 'busy', 'in_progress'))";
    let goes_on = "payment_refusals.row_version = excluded.row_version AND NOT EXISTS (\
        SELECT 1 FROM jobs AS own WHERE own.id = payment_refusals.job_id AND own.revived_at > payment_refusals.refused_at)";
    format!(
        "INSERT INTO payment_refusals (job_id, refusals, alone, row_version, refused_at) \
         SELECT jobs.id, 1, 1, $3, {{now}} FROM jobs \
         WHERE jobs.id = $1 AND jobs.fence = $2 AND jobs.holder IS NOT NULL \
         ON CONFLICT (job_id) DO UPDATE SET \
             refusals = CASE WHEN {goes_on} THEN payment_refusals.refusals + 1 ELSE 1 END, \
             alone = CASE WHEN NOT ({goes_on}) THEN 1 WHEN {passed} THEN payment_refusals.alone + 1 \
                 ELSE payment_refusals.alone END, \
             row_version = excluded.row_version, refused_at = excluded.refused_at \
         RETURNING refusals, alone"
    )
});

impl Database {
    /// Counts a refusal of a payment whose lease this is, under this version of its provider's row. `None`: the lease is
    /// stale.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn record_refusal(&self, lease: &LeaseToken, row_version: i64) -> Result<Option<Refusals>, LedgerError> {
        let row = self.query_one(&RECORD, args![&lease.id, lease.fence, row_version]).await?;
        row.map(|row| Ok(Refusals { all: row.get("refusals")?, alone: row.get("alone")? })).transpose()
    }
}
