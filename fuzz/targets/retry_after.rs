#![no_main]
//! The fuzz target of the Retry-After parser: passes libFuzzer's bytes to `properties::retry_after`.

#[path = "../properties/mod.rs"]
#[allow(dead_code, reason = "each target needs one of them")]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::retry_after::holds(data));
