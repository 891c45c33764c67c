//! docs/README.md leads to every page, and no link of any page leads nowhere.

use std::path::Path;

use crate::page::Page;

/// Targets of the links to files: without anchors, the web and code.
fn links(text: &str) -> Vec<String> {
    let prose = text.split("```").step_by(2);
    let targets = prose.flat_map(|part| part.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    let files = targets.map(|target| target.split('#').next().unwrap_or_default());
    files.filter(|file| !file.is_empty() && !file.contains("://")).map(str::to_owned).collect()
}

#[test]
fn every_page_is_in_the_index() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let linked = links(&Page::read("docs/README.md").text);
    let pages = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut missing: Vec<String> = pages
        .map(|name| name.into_string().unwrap())
        .filter(|name| name.ends_with(".md") && name != "README.md" && !linked.contains(name))
        .collect();
    missing.sort();
    assert!(missing.is_empty(), "not in docs/README.md: {missing:?}");
}

#[test]
fn no_link_leads_nowhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = 0;
    for page in Page::all() {
        let folder = root.join(&page.path).parent().unwrap().to_owned();
        for link in links(&page.text) {
            assert!(folder.join(&link).exists(), "{}: {link}", page.path);
            found += 1;
        }
    }
    assert!(found > 60, "links were not found: {found}");
}

#[test]
fn links_are_found() {
    let text = "a [b](c.md) and [d](e.md#f), [g](https://h), [i](#j)\n```sh\nx[1](2)\n```\n[k](../l)";
    assert_eq!(links(text), ["c.md", "e.md", "../l"]);
}
