//! SQLite as the ledger.
