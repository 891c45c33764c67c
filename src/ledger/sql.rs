//! The ledger in SQL, once for both databases.
