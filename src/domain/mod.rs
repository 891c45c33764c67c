//! The rules of the house as values and functions: what a job, a limit, a refusal and an outcome are, and what follows
//! from them.
//!
//! Refuses: clocks, randomness, I/O, serialisation and every crate but `std` (one exception, named in [`backoff`]).
//! Time and random fractions are arguments, so each rule can be tested as a table.

pub mod backoff;
pub mod base64;
pub mod breaker;
pub mod clear_time;
pub mod clock_comparison;
pub mod clock_witness;
pub mod company;
pub mod decimal;
pub mod decision;
pub mod delay;
pub mod disposition;
pub mod echo;
pub mod expansion;
pub mod explain;
pub mod job;
pub mod late_row;
pub mod leaky_bucket;
pub mod limit;
pub mod local_fault;
pub mod lookup;
pub mod outcome;
pub mod own_share;
pub mod printable;
pub mod provider;
pub mod quota;
pub mod quota_spec;
pub mod refusals;
pub mod sensitive;
pub mod settlement;
pub mod shown_url;
pub mod time;
pub mod url_template;
pub mod variable;
pub mod write_pace;
