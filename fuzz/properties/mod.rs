//! Properties that hold for every input, one module per fuzz target: `holds(bytes)` panics on a violation.
//!
//! The callers are libFuzzer, with bytes that it found, and the test that replays the kept corpus.

pub mod classify;
pub mod job_request;
pub mod limiter_reply;
pub mod message;
pub mod provider_row;
pub mod retry_after;
pub mod template;

use sluicegate::domain::provider::ProviderName;

/// Reads numbers and byte ranges from the front; missing input is zero or empty.
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// The bytes up to the next occurrence of `end`, which is dropped.
    pub fn until(&mut self, end: u8) -> &'a [u8] {
        let at = self.0.iter().position(|byte| *byte == end).unwrap_or(self.0.len());
        let (stretch, rest) = self.0.split_at(at);
        self.0 = rest.get(1..).unwrap_or_default();
        stretch
    }
}

pub fn lane() -> ProviderName {
    ProviderName::new("acme").unwrap()
}
