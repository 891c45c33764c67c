//! How a job is written.
