//! The inputs that fuzzing kept, through the same functions, so that they hold without its toolchain too.

#[path = "../../fuzz/properties/mod.rs"]
pub mod properties;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Feeds every file of a target's corpus.
fn replay(target: &str, least: usize, holds: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= least, "only {} in {}", files.len(), folder.display());
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| holds(&bytes))).is_ok(), "{}", file.display());
    }
}

#[test]
fn kept_messages_hold() {
    replay("message", 10, properties::message::holds);
}

#[test]
fn kept_answers_of_providers_hold() {
    replay("classify", 10, properties::classify::holds);
}

#[test]
fn kept_waits_hold() {
    replay("retry_after", 10, properties::retry_after::holds);
}

#[test]
fn kept_replies_of_the_limiter_hold() {
    replay("limiter_reply", 5, properties::limiter_reply::holds);
}

#[test]
fn kept_provider_rows_hold() {
    replay("provider_row", 5, properties::provider_row::holds);
}

#[test]
fn kept_templates_hold() {
    replay("template", 10, properties::template::holds);
}

#[test]
fn kept_jobs_and_rows_hold() {
    replay("job_request", 8, properties::job_request::holds);
}
