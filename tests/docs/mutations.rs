//! The tables of one-line faults: the text to replace occurs exactly once in the named file, and docs/guarantees.md
//! lists each fault.

use std::path::Path;

#[test]
fn every_mutation_is_found_and_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let guarantees = read("docs/guarantees.md");
    let faults = [("limiter", 20), ("backlog", 6)].into_iter().flat_map(|(name, least)| {
        let mut table: toml::Table = read(&format!("tests/mutations/{name}.toml")).parse().unwrap();
        let Some(toml::Value::Array(faults)) = table.remove("mutation") else { panic!("{name} has no faults") };
        assert!(faults.len() > least, "{name} has only {}", faults.len());
        faults
    });
    for fault in faults {
        let text = |key: &str| fault[key].as_str().unwrap();
        assert_eq!(read(text("file")).matches(text("find")).count(), 1, "{}", text("name"));
        assert_ne!(text("find"), text("replace"));
        let row = format!("| {} | `{}` |", text("name"), text("file"));
        assert!(guarantees.contains(&row), "docs/guarantees.md has no row {row}");
    }
}
