#![no_main]
//! The fuzz target of request templates: passes libFuzzer's bytes to `properties::template`.

#[path = "../properties/mod.rs"]
#[allow(dead_code, reason = "each target needs one of them")]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::template::holds(data));
