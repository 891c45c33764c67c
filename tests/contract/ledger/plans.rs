//! Query plans of the ledger: every statement on a job's path uses an index, however many jobs there are.
//!
//! The statements are those that the program runs on a full ledger. PostgreSQL reports the plan of each one
//! (`auto_explain`, triggers and foreign keys included). For SQLite, the plan of each statement known to sqlx is
//! queried. A scan of a large table needs a reason in [`READ_IN_FULL`].

use super::*;

mod backlog;
mod decision_batches;
mod filling;
mod history;
mod people;
mod postgres;
mod rejected;
mod search;
mod sqlite;
mod work;

/// The tables that grow with every payment.
const LARGE: [&str; 8] =
    ["jobs", "attempts", "events", "event_batches", "rejected_messages", "job_audit", "flows", "history_samples"];
/// More rows than a statement needs, and far fewer than the tables have.
const ROWS_MAX: u64 = 2_000;

/// Any table or index.
const ANY: &str = "*";
/// Accesses that read a table or an index from end to end: the work, the index (or the table), and the reason.
const READ_IN_FULL: [(&str, &str, &str); 53] = [
    ("rejected messages are announced", ANY, "partial: holds those without an event, and ends at the limit"),
    ("open rejected messages are measured", ANY, "partial: holds the open ones, and ends at 100,000"),
    ("rejected messages are counted", ANY, "partial: holds the open ones, and ends at 10,001"),
    ("a rejected message is decided", "settings_person", "SQLite: the one row of a change's author"),
    ("events are placed", "events", "SQLite: reads the last entry"),
    ("events are placed", "event_batches_pkey", "reads the last entry"),
    ("events are placed", "event_batches", "the same, of an empty table: PostgreSQL's choice"),
    ("events are read", "event_order", "its one row"),
    ("unpublished events are counted", ANY, "last entries, unpublished events, and those that have left the order"),
    ("old events are deleted", "event_order", "its one row"),
    ("old events are deleted", "event_batches", "the oldest ones, of a small table: PostgreSQL's choice"),
    ("states are counted", "jobs_by_state_and_time", "counts all jobs, for operators and metrics"),
    ("states are counted", "jobs", "the same, of a small table: PostgreSQL's choice"),
    ("account of the last minutes", "jobs_by_state_and_time", "min(provider), and counts jobs that may change state"),
    ("account of the last minutes", "jobs_open_by_wake", "counts open jobs; partial: holds no others"),
    ("account of the last minutes", "flows_by_wake", "partial: holds the blocked flows"),
    ("account of the last minutes", "flows_pkey", "the flows of a lane, of a small table: PostgreSQL's choice"),
    ("finished jobs are recounted", "jobs_by_state_and_time", "counts all jobs, for a hundredth of the time"),
    ("finished jobs are recounted", "jobs", "the same, of a small table: PostgreSQL's choice"),
    ("account of everything", ANY, "reads every job by any access; on an operator's request"),
    ("a job's queue position is read", "jobs_open_by_wake", "counts the open jobs before one; an operator's query"),
    ("jobs of a state are listed", "jobs_by_state_and_time", "min(provider): reads the first entry"),
    ("lanes with open jobs are read", "jobs_by_state_and_time", "min(provider): reads the first entry"),
    (
        "a job in the backlog is claimed for its repair",
        "flows",
        "the flow of one job, of a small table: PostgreSQL's choice",
    ),
    ("lanes with returns are read", "jobs_by_state_and_time", "min(provider): reads the first entry"),
    ("an erasure is counted", "jobs_by_state_and_time", "min(provider): reads the first entry"),
    ("an account is erased", "jobs_by_state_and_time", "min(provider): reads the first entry"),
    ("a job's history is read", "event_batches", "the publisher's batch, of a small table: PostgreSQL's choice"),
    ("a job's history is read", "flows", "by the flow of one job, of a small table: PostgreSQL's choice"),
    ("flows are looked at", ANY, "sorts the flows of a lane, and reads no job"),
    (
        "a job's queue position is read",
        "jobs_in_backlog",
        "the jobs of its flow, while there are few: PostgreSQL's choice",
    ),
    ("a job's queue position is read", "flows", "the flow of one job, of a small table: PostgreSQL's choice"),
    ("a place in the backlog is read", ANY, "counts the jobs before one; an operator's query"),
    ("flows are compared with their jobs", ANY, "reads the backlog of a lane, every few minutes"),
    ("a lane's blocks end", ANY, "reads the flows of a lane; an operator has changed a limit"),
    ("providers with a history are listed", "history_samples_pkey", "min(provider): reads the first entry"),
    (
        "providers with a history are listed",
        "sqlite_autoindex_history_samples_1",
        "min(provider): reads the first entry",
    ),
    ("lanes with open jobs are read", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    ("lanes with returns are read", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    ("account of the last minutes", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    ("jobs of a state are listed", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    ("jobs are searched", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    ("jobs are totalled", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    ("an erasure is counted", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    ("an account is erased", "sqlite_autoindex_jobs_2", "min(provider): reads the first entry"),
    (
        "a job's queue position is read",
        "other",
        "SQLite with statistics, which the program never makes: an operator's query",
    ),
    ("a job's queue position is read", "jobs", "the same"),
    ("jobs are listed", "jobs_by_time", "newest first: ends at the page's limit"),
    ("jobs are searched", "jobs_by_time", "newest first: reads a bounded number of jobs"),
    ("jobs are searched", "jobs_by_state_and_time", "the same, merged; min(provider) reads the first entry"),
    ("jobs are searched", "jobs_by_account_and_time", "the same, of an account"),
    ("jobs are totalled", "jobs_by_time", "counts a bounded number of jobs"),
    ("jobs are totalled", "jobs_by_state_and_time", "the same, merged; min(provider) reads the first entry"),
];

/// The index of providers and idempotency keys, by its name in PostgreSQL and in SQLite.
const BY_PROVIDER: [&str; 2] = ["jobs_one_payment_per_provider_and_key", "sqlite_autoindex_jobs_2"];

/// The indexes that lists of jobs use, whatever their filter.
const OF_LISTS: [&str; 9] = [
    "jobs_by_time",
    "jobs_by_state_and_time",
    "jobs_by_account_and_time",
    "jobs_by_reference",
    "jobs_one_payment_per_charge",
    "jobs_pkey",
    "sqlite_autoindex_jobs_1",
    // The providers.
    BY_PROVIDER[0],
    BY_PROVIDER[1],
];

/// One access to a table, as a plan names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Access {
    /// The work during which it ran, as [`work`] names it.
    during: &'static str,
    sql: String,
    table: String,
    index: Option<String>,
    /// The statement searches the index by a condition.
    sought: bool,
    /// Entries that were read, if the database reports them.
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

/// Source of the plans of all statements since the last call.
trait Explained {
    async fn accesses(&mut self, fixture: &Fixture, during: &'static str) -> Vec<Access>;
}

/// Every full read needs a reason, and each duty must have reached the large tables by an index.
fn judge(kind: &str, accesses: &[Access]) {
    let bad: Vec<_> = accesses.iter().filter(|access| access.is_in_full() && access.reason().is_none()).collect();
    assert!(bad.is_empty(), "{kind}: without an index:\n{bad:#?}");
    for during in work::ON_THE_WAY
        .into_iter()
        .chain(backlog::ON_THE_WAY)
        .chain(history::ON_THE_WAY)
        .chain(rejected::ON_THE_WAY)
        .chain(decision_batches::ON_THE_WAY)
    {
        let sought = accesses.iter().any(|access| access.during == during && access.sought);
        assert!(sought, "{kind}: no index was used for: {during}: {accesses:#?}");
    }
    for index in ["jobs_waiting_for_limits", "jobs_waiting_for_providers"] {
        let used = accesses.iter().any(|access| access.sought && access.index.as_deref() == Some(index));
        assert!(used, "{kind}: no statement used {index}: {accesses:#?}");
    }
    for (during, index) in search::LISTS {
        let used = accesses.iter().any(|access| access.during == during && access.index.as_deref() == Some(index));
        assert!(used, "{kind}: {during} without {index}: {accesses:#?}");
    }
    let sorted = accesses.iter().filter(|access| search::LISTS.iter().any(|(during, _)| *during == access.during));
    let others: Vec<_> = sorted
        .filter(|access| {
            access.table == "jobs" && !access.index.as_deref().is_some_and(|index| OF_LISTS.contains(&index))
        })
        .collect();
    assert!(others.is_empty(), "{kind}: lists by another index: {others:#?}");
    for during in work::OF_A_PROVIDER {
        let read: Vec<_> = accesses.iter().filter(|access| access.during == during).collect();
        let by_provider =
            |access: &&&Access| access.index.as_ref().is_some_and(|index| BY_PROVIDER.contains(&&**index));
        assert!(read.iter().filter(by_provider).any(|access| access.sought), "{kind}: {during}: {read:#?}");
    }
}
