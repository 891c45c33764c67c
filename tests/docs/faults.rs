//! Crash points: docs/guarantees.md lists exactly those of the code.

use std::path::Path;

use crate::page::Page;

/// The crash points of `src/faults.rs`, in snake case as they are read.
fn names() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/faults.rs");
    let text = std::fs::read_to_string(path).unwrap();
    let body = text.split("pub enum CrashPoint {\n").nth(1).and_then(|rest| rest.split("\n}").next()).unwrap();
    let variants = body.lines().filter_map(|line| line.trim().strip_suffix(','));
    let snake = |name: &str| {
        name.chars().fold(String::new(), |mut text, c| {
            text.extend((c.is_ascii_uppercase() && !text.is_empty()).then_some('_'));
            text.push(c.to_ascii_lowercase());
            text
        })
    };
    variants.filter(|name| !name.starts_with("///")).map(snake).collect()
}

#[test]
fn crash_points_are_documented() {
    let page = Page::read("docs/guarantees.md");
    let rows = page.table("## Crash points", "crash point");
    let mut documented: Vec<&str> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
    let mut names = names();
    documented.sort_unstable();
    names.sort_unstable();
    assert!(names.len() > 6, "{names:?}");
    assert_eq!(documented, names);
}
