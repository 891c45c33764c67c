//! cli

pub mod fake_provider;
