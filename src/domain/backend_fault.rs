//! The faults of a backend that answers and yet does not do its work: one sentence each, and its fix.
//!
//! `/readyz`, `status`, `check`, the page and the log all show the same sentence.

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendFault {
    #[error("the database cannot write: its disk is full")]
    DiskFull,
    #[error("the database cannot write: it is read-only")]
    ReadOnly,
    #[error(
        "the database cannot write: this user must be able to write the file that database.url names, and its folder"
    )]
    FileReadOnly,
    /// A commit of PostgreSQL has no end.
    #[error("the database commits nothing: each commit waits, as if a synchronous standby were missing")]
    StandbyMissing,
    /// A commit of SQLite has no end.
    #[error("the database commits nothing: another process holds its file, or the disk hangs")]
    CommitHangs,
    /// With the broker's reason.
    #[error("the broker blocks publishers: {0}")]
    PublishersBlocked(String),
}

impl BackendFault {
    pub fn fix(&self) -> &'static str {
        match self {
            Self::DiskFull => "Free space on the disk of the database, or enlarge it",
            Self::ReadOnly => {
                "Set database.url to the primary; on the primary, look at default_transaction_read_only of server, \
                 database and user"
            }
            Self::FileReadOnly => "Give this user the right to write the file and its folder, or set database.url",
            Self::StandbyMissing => {
                "Start the standby that synchronous_standby_names of PostgreSQL names, or change that setting"
            }
            Self::CommitHangs => "End the process that writes to the file, or look at its disk",
            Self::PublishersBlocked(_) => "Free what the broker is short of: `rabbitmqctl status` shows its alarms",
        }
    }
}
