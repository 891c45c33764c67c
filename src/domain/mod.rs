//! Business rules as values and functions: jobs, limits, outcomes, and the decisions that follow from them.
//!
//! This module uses no clock, randomness, I/O or serialisation, and no crate but `std` (one exception, named in
//! [`backoff`]). Time and random fractions are arguments, so each rule can be tested as a table.

pub mod account_faults;
pub mod backoff;
pub mod base64;
pub mod booking_ahead;
pub mod breaker;
pub mod clear_time;
pub mod clock_attestation;
pub mod clock_comparison;
pub mod deadline_misses;
pub mod decimal;
pub mod delay;
pub mod disposition;
pub mod echo;
pub mod egress;
pub mod env_variable;
pub mod expansion;
pub mod explain;
pub mod fair_order;
pub mod fallback_share;
pub mod flow;
pub mod group_commit;
pub mod job;
pub mod leader_row;
pub mod leaky_bucket;
pub mod limit;
pub mod local_fault;
pub mod lookup;
pub mod outcome;
pub mod pace;
pub mod permit_protocol;
pub mod permit_release;
pub mod persist_window;
pub mod printable;
pub mod provider;
pub mod quota;
pub mod quota_limits;
pub mod quota_spec;
pub mod redacted_url;
pub mod sensitive;
pub mod throttle_streak;
pub mod time;
pub mod url_template;
pub mod wait_reason;
