//! The architecture page: its length, and every path and test name that any page gives.

use std::path::Path;

use crate::page::Page;

/// Most words of the map; more belong into decision records.
const MAP_WORDS_MAX: usize = 2_500;

#[test]
fn architecture_page_is_short() {
    let words = Page::read("docs/architecture.md").text.split_whitespace().count();
    assert!(words <= MAP_WORDS_MAX, "docs/architecture.md has {words} words: move reasons to docs/decisions");
}

#[test]
fn every_path_and_test_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    read_all(&root.join("src"), &mut sources);
    read_all(&root.join("tests"), &mut sources);
    let mut missing = Vec::new();
    for page in Page::all() {
        let links = page.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).map(str::to_owned);
        let folder = Path::new(&page.path).parent().unwrap();
        let linked =
            links.filter(|link| !link.contains("://")).map(|link| folder.join(link.split('#').next().unwrap()));
        let roots = ["src/", "tests/", "docs/", "lua/", "config/", "deploy/", "migrations/", "benches/", "fuzz/"];
        let spans: Vec<String> = page.spans();
        // What follows a blank are arguments.
        let named = spans.iter().filter_map(|span| span.split(' ').next());
        let named = named.filter(|span| roots.iter().any(|root| span.starts_with(root)));
        let paths: Vec<_> = linked.chain(named.map(|span| Path::new(span).to_owned())).collect();
        let nonexistent = paths.into_iter().filter(|path| !root.join(path).exists());
        missing.extend(nonexistent.map(|path| format!("{}: no {}", page.path, path.display())));
        // Names of tests have several words.
        let is_test = |span: &&String| {
            span.matches('_').count() >= 4
                && !span.starts_with("sluicegate_")
                && span.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
        };
        // A test is a function, or a line of a macro that generates one.
        let exists =
            |name: &str| [format!("fn {name}("), format!("    {name}: ")].iter().any(|text| sources.contains(text));
        let tests = spans.iter().filter(is_test).filter(|name| !exists(name));
        missing.extend(tests.map(|name| format!("{}: no test `{name}`", page.path)));
    }
    assert!(missing.is_empty(), "{missing:?}");
}

fn read_all(folder: &Path, into: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_all(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}
