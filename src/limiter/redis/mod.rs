//! The limiter that all workers share: the quota's state machine as a function in Redis.
//!
//! Every connection is bound to the run id of the server at its other end, and any fault ends both. A connection that
//! reconnects by itself could lead to another server unnoticed. So a Redis Cluster is called over one connection per
//! master ([`connections`]), not by a client that reroutes by itself.
//! See `docs/decisions/0010-one-redis-connection-per-primary.md`.

pub mod client;
mod connections;
pub mod decode;
pub mod encode;
mod error;
pub mod keys;
pub mod library;
mod slots;
