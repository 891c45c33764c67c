#![no_main]
//! The fuzz target of the message decoder: passes libFuzzer's bytes to `properties::message`.

#[path = "../properties/mod.rs"]
#[allow(dead_code, reason = "each target needs one of them")]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::message::holds(data));
