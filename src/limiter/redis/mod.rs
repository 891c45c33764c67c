//! The limiter that a whole cluster shares: the quota's state machine as a function in Redis.
//!
//! Refuses a connection that heals itself: one that is rebuilt behind our back may lead to another server, so every
//! connection is bound to the run id that it was opened with, and any fault ends both. That is why a Redis Cluster is
//! spoken to over one such connection per master ([`links`]) and not by a client that reroutes by itself.

pub mod client;
mod connections;
pub mod decode;
pub mod encode;
mod error;
pub mod keys;
pub mod library;
pub mod peek;
mod slots;
