//! Business rules as values and functions: jobs, limits, outcomes, and the decisions that follow from them.
//!
//! This module uses no clock, randomness, I/O or serialisation. Beside `std` and the derive of `thiserror`, five files use one pure part of a
//! crate each: a schedule ([`backoff`]), currencies ([`amount`]), the calendar ([`format`] and [`cutoff`]) and Base64
//! ([`sensitive::secret`]). Time and random fractions are arguments, so each rule can be tested as a table.

pub mod account_faults;
pub mod amount;
pub mod backend_fault;
pub mod backoff;
pub mod breaker;
pub mod clear_time;
pub mod clock_comparison;
pub mod commit_memory;
pub mod cutoff;
pub mod disposition;
pub mod egress;
pub mod event_order;
pub mod expansion;
pub mod explain;
pub mod fair_order;
pub mod format;
pub mod intake_pace;
pub mod job;
pub mod job_filter;
pub mod kept_answers;
pub mod limit;
pub mod limit_usage;
pub mod local_fault;
pub mod names;
pub mod observed_limit;
pub mod outcome;
pub mod pace;
pub mod permit_protocol;
pub mod persist_window;
pub mod person;
pub mod printable;
pub mod provider;
pub mod quota;
pub mod quota_limits;
pub mod quota_spec;
pub mod response;
pub mod sensitive;
pub mod sum;
pub mod throttled_pace;
pub mod time;
pub mod unconfirmed;
pub mod wait_reason;
