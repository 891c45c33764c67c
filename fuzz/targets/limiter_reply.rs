#![no_main]
//! The fuzz target of the limiter's reply parser: passes libFuzzer's bytes to `properties::limiter_reply`.

#[path = "../properties/mod.rs"]
#[allow(dead_code, reason = "each target needs one of them")]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::limiter_reply::holds(data));
