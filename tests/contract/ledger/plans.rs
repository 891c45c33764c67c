//! Every statement of a job's way goes by an index, however many jobs there are: the plans of what is really run.
//!
//! Nothing is copied from the code: a full ledger is worked on through its faces, PostgreSQL tells the plan of each
//! statement it runs (`auto_explain`, triggers and foreign keys included), and SQLite is asked for the plan of each
//! statement that sqlx has seen. Refuses a scan of a large table that [`READ_IN_FULL`] does not give a reason for.

use super::*;

mod filling;
mod postgres;
mod sqlite;
mod work;

/// The tables that grow with every payment.
const LARGE: [&str; 5] = ["jobs", "attempts", "outcome_events", "rejected_messages", "job_audit"];
/// Far more than what a statement is for, and far fewer than there are.
const ROWS_MAX: u64 = 2_000;

/// Whichever table or index.
const ANY: &str = "*";
/// What reads a table, or one of its indexes, from end to end: the work, the index (or the table), and why that is right.
const READ_IN_FULL: [(&str, &str, &str); 17] = [
    ("outcomes are taken", "outcome_events_by_try", "partial: holds what is unpublished, and ends at the limit"),
    ("outcomes are taken", "outcome_events", "SQLite, as long as most are unpublished: by key, and ends at the limit"),
    ("states are counted", "jobs_by_provider_and_state", "counts all jobs, for people and metrics"),
    ("states are counted", "jobs", "the same, of a small table: PostgreSQL's choice"),
    (
        "account of the last minutes",
        "jobs_by_provider_and_state",
        "min(provider), and counts jobs that may change state",
    ),
    ("account of the last minutes", "jobs_with_a_message_left", "partial: holds jobs taken up without their messages"),
    ("account of the last minutes", "jobs_open_by_sweep", "counts open jobs; partial: holds no others"),
    ("settled jobs are counted anew", "jobs_by_provider_and_state", "counts all jobs, for a hundredth of the time"),
    ("settled jobs are counted anew", "jobs", "the same, of a small table: PostgreSQL's choice"),
    ("account of everything", ANY, "looks at every job, in whatever way; a person's wish"),
    ("a job's surroundings are told", "jobs_open_by_sweep", "counts the open jobs before one; a person's question"),
    ("jobs of a state are listed", "jobs_by_provider_and_state", "min(provider): reads the first entry"),
    ("dead jobs are counted", "jobs_by_provider_and_state", "min(provider): reads the first entry"),
    ("an erasure is counted", "jobs_by_provider_and_state", "min(provider): reads the first entry"),
    ("an account is erased", "jobs_by_provider_and_state", "min(provider): reads the first entry"),
    ("old jobs are emptied", "jobs_with_a_message_left", "partial: holds jobs taken up without their messages"),
    ("jobs of a state are listed", "jobs_pkey", "a page by ids, which passes over jobs of other states"),
];

/// The index of providers and their idempotency keys, as either database calls it.
const BY_PROVIDER: [&str; 2] = ["jobs_one_payment_per_provider_and_key", "sqlite_autoindex_jobs_2"];

/// One access to a table, as a plan names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Access {
    /// The work that led to it, as [`work`] names it.
    during: &'static str,
    sql: String,
    table: String,
    index: Option<String>,
    /// The index is entered by a condition.
    sought: bool,
    /// Entries that were read, where the database tells.
    rows: Option<u64>,
}

impl Access {
    fn is_in_full(&self) -> bool {
        !self.sought || self.rows.is_some_and(|rows| rows > ROWS_MAX)
    }

    fn reason(&self) -> Option<&'static str> {
        let what = self.index.as_ref().unwrap_or(&self.table);
        let known =
            READ_IN_FULL.iter().find(|(during, name, _)| *during == self.during && (name == what || *name == ANY));
        known.map(|(_, _, reason)| *reason)
    }
}

/// Where the plans of the statements come from that were run since it was asked last.
trait Explained {
    async fn accesses(&mut self, fixture: &Fixture, during: &'static str) -> Vec<Access>;
}

/// Nothing but what has a reason reads in full; and every duty did reach the large tables.
fn judge(kind: &str, accesses: &[Access]) {
    let bad: Vec<_> = accesses.iter().filter(|access| access.is_in_full() && access.reason().is_none()).collect();
    assert!(bad.is_empty(), "{kind}: without an index:\n{bad:#?}");
    for during in work::ON_THE_WAY {
        let sought = accesses.iter().any(|access| access.during == during && access.sought);
        assert!(sought, "{kind}: no index was used for: {during}: {accesses:#?}");
    }
    for during in work::OF_A_PROVIDER {
        let read: Vec<_> = accesses.iter().filter(|access| access.during == during).collect();
        let by_provider =
            |access: &&&Access| access.index.as_ref().is_some_and(|index| BY_PROVIDER.contains(&&**index));
        assert!(read.iter().filter(by_provider).any(|access| access.sought), "{kind}: {during}: {read:#?}");
    }
}
