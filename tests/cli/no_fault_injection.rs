//! The released program contains no crash points: their names are not in its file.

use std::process::Command;

/// Whether the program's file contains this text.
fn holds(words: &str) -> bool {
    let program = env!("CARGO_BIN_EXE_sluicegate");
    let status = Command::new("grep").args(["--quiet", "--text", "--fixed-strings", words, program]).status().unwrap();
    status.success()
}

#[test]
fn fault_injection_requires_its_feature() {
    assert!(holds("SLUICEGATE_CONFIG"), "the search does not find a text that the program contains");
    for words in ["SLUICEGATE_CRASH_AT", "dies on purpose", "after_sending"] {
        assert_eq!(holds(words), cfg!(feature = "faults"), "{words}");
    }
}
