//! PostgreSQL as the ledger.
