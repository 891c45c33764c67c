//! Crash points and seeded bugs: docs/guarantees.md lists exactly those of the code.

use std::path::Path;

use crate::page::Page;

/// Names in the tables of `src/faults/mod.rs`, selected by the type beside them.
fn names(of: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/faults/mod.rs");
    let text = std::fs::read_to_string(path).unwrap();
    let rows = text.lines().filter(|line| line.contains(&format!("\", {of}::")));
    rows.filter_map(|line| line.split('"').nth(1)).map(str::to_owned).collect()
}

#[test]
fn crash_points_and_bugs_are_documented() {
    let page = Page::read("docs/guarantees.md");
    for (heading, first, of) in [("## Crash points", "crash point", "CrashPoint"), ("## Seeded bugs", "bug", "Bug")] {
        let rows = page.table(heading, first);
        let mut documented: Vec<&str> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
        let mut names = names(of);
        documented.sort_unstable();
        names.sort_unstable();
        assert!(names.len() > 6, "{names:?}");
        assert_eq!(documented, names, "{heading}");
    }
}
