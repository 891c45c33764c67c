#![no_main]
//! The fuzz target of jobs and their requests: passes libFuzzer's bytes to `properties::job_request`.

#[path = "../properties/mod.rs"]
#[allow(dead_code, reason = "each target needs one of them")]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::job_request::holds(data));
