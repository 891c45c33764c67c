//! The program that people run has no crash points and no seeded bugs in it.

use std::process::Command;

/// Whether the program's file holds these bytes.
fn holds(words: &str) -> bool {
    let program = env!("CARGO_BIN_EXE_sluicegate");
    let status = Command::new("grep").args(["--quiet", "--text", "--fixed-strings", words, program]).status().unwrap();
    status.success()
}

#[test]
fn fault_injection_requires_its_feature() {
    assert!(holds("SLUICEGATE_CONFIG"), "what is there is found");
    let words = ["SLUICEGATE_CRASH_AT", "SLUICEGATE_BUG", "dies on purpose", "after_sending", "ack_before_commit"];
    for words in words {
        assert_eq!(holds(words), cfg!(feature = "faults"), "{words}");
    }
}
