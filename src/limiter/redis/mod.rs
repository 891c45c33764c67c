//! The limiter that a whole cluster shares: the quota's state machine as a script in Redis.
//!
//! Refuses a connection that heals itself: one that is rebuilt behind our back may lead to another server, so every
//! connection is bound to the run id that it was opened with, and any fault ends both.

pub mod answer;
pub mod client;
pub mod keys;
pub mod look;
pub mod script;
