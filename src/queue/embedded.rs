//! The queue in the SQLite database.
