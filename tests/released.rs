//! The program as it is released: without the features that every other test target is built with, see `tests/run`.
#![allow(clippy::unwrap_used, reason = "a helper of a test fails its test")]

use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");

/// Whether the program's file contains this text.
fn holds(words: &str) -> bool {
    let status = Command::new("grep").args(["--quiet", "--text", "--fixed-strings", words, PROGRAM]).status().unwrap();
    status.success()
}

/// The released program contains no crash points: their names are not in its file.
#[test]
fn fault_injection_requires_its_feature() {
    assert!(holds("SLUICEGATE_CONFIG"), "the search does not find a text that the program contains");
    for words in ["SLUICEGATE_CRASH_AT", "dies on purpose", "after_sending"] {
        assert_eq!(holds(words), cfg!(feature = "faults"), "{words}");
    }
}

/// A build without OpenTelemetry rejects the address of a collector, and names the reason.
#[test]
#[cfg(not(feature = "otlp"))]
fn address_of_a_collector_is_rejected() {
    let endpoint = ("SLUICEGATE_TELEMETRY__OTLP_ENDPOINT", "http://127.0.0.1:4318");
    let output = Command::new(PROGRAM).arg("run").envs([endpoint]).output().unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(78), "{complaint}");
    assert!(complaint.contains("this build has no OpenTelemetry"), "{complaint}");
}
