//! Replay of the inputs that fuzzing kept, so that their properties are tested without the fuzzing toolchain, too.

#[path = "../../fuzz/properties/mod.rs"]
pub mod properties;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Feeds every file of a target's corpus to `holds`.
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
fn message_corpus_passes() {
    replay("message", 10, properties::message::holds);
}

#[test]
fn response_corpus_passes() {
    replay("classify", 10, properties::classify::holds);
}

#[test]
fn retry_after_corpus_passes() {
    replay("retry_after", 10, properties::retry_after::holds);
}

#[test]
fn limiter_reply_corpus_passes() {
    replay("limiter_reply", 5, properties::limiter_reply::holds);
}

#[test]
fn provider_row_corpus_passes() {
    replay("provider_row", 5, properties::provider_row::holds);
}

#[test]
fn template_corpus_passes() {
    replay("template", 10, properties::template::holds);
}

#[test]
fn job_request_corpus_passes() {
    replay("job_request", 8, properties::job_request::holds);
}
