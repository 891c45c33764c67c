//! The tables of one-line faults: the text to replace occurs exactly once in the named file, and docs/guarantees.md
//! lists each fault.

use std::path::Path;

#[test]
fn every_mutation_is_found_and_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let guarantees = read("docs/guarantees.md");
    let tables = root.join("tests/mutations").read_dir().unwrap().map(|entry| entry.unwrap().path());
    let tables = tables.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let faults: Vec<toml::Value> = tables
        .flat_map(|path| {
            let mut table: toml::Table = std::fs::read_to_string(&path).unwrap().parse().unwrap();
            let Some(toml::Value::Array(faults)) = table.remove("mutation") else { panic!("{path:?} has no faults") };
            faults
        })
        .collect();
    assert!(faults.len() > 50, "only {} faults", faults.len());
    for fault in faults {
        let text = |key: &str| fault[key].as_str().unwrap();
        assert_eq!(read(text("file")).matches(text("find")).count(), 1, "{}", text("name"));
        assert_ne!(text("find"), text("replace"));
        let row = format!("| {} | `{}` |", text("name"), text("file"));
        assert!(guarantees.contains(&row), "docs/guarantees.md has no row {row}");
    }
}
