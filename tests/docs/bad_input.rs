//! The tables of docs/bad-input.md: each row names the tests that hold it, and every named test exists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::page::{Page, plain};

/// Names of all functions in `src` and `tests`.
fn functions() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<PathBuf> = vec![root.join("src"), root.join("tests")];
    let mut names = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(path).unwrap();
                let lines = text.lines().map(|line| line.trim_start().trim_start_matches("async "));
                let name = |line: &str| Some(line.strip_prefix("fn ")?.split_once('(')?.0.to_owned());
                names.extend(lines.filter_map(name));
            }
        }
    }
    names
}

#[test]
fn every_row_names_tests_that_exist() {
    let page = Page::read("docs/bad-input.md");
    let functions = functions();
    let mut rows = 0;
    for section in page.text.split("\n## ").skip(1) {
        for row in section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| input |")) {
            let Some((_, held_by)) = row.trim_end_matches(" |").rsplit_once(" | ") else { continue };
            if !section.contains("| input | response | held by |") {
                continue;
            }
            rows += 1;
            for name in held_by.split(", ").map(plain) {
                assert!(functions.contains(name), "there is no test `{name}`: {row}");
            }
        }
    }
    assert!(rows > 60, "only {rows}");
}
