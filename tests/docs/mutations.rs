//! The table of one-line faults: the text to replace occurs exactly once in the named file, and docs/guarantees.md
//! lists each fault.

use std::path::Path;

#[test]
fn every_mutation_is_found_and_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let table: toml::Table = read("tests/mutations/limiter.toml").parse().unwrap();
    let faults = table["mutation"].as_array().unwrap();
    assert!(faults.len() > 20, "only {}", faults.len());
    let guarantees = read("docs/guarantees.md");
    for fault in faults {
        let text = |key: &str| fault[key].as_str().unwrap();
        assert_eq!(read(text("file")).matches(text("find")).count(), 1, "{}", text("name"));
        assert_ne!(text("find"), text("replace"));
        let row = format!("| {} | `{}` |", text("name"), text("file"));
        assert!(guarantees.contains(&row), "docs/guarantees.md has no row {row}");
    }
}
