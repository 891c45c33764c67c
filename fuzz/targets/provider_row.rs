#![no_main]
//! The fuzz target of provider rows and provider files: passes libFuzzer's bytes to `properties::provider_row`.

#[path = "../properties/mod.rs"]
#[allow(dead_code, reason = "each target needs one of them")]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::provider_row::holds(data));
