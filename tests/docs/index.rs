//! The index docs/README.md: it links every page, and each link of every page has a target.

use std::path::Path;

use crate::page::Page;

/// Targets of the links to files: without anchors, the web and code.
fn links(text: &str) -> Vec<String> {
    let prose = text.split("```").step_by(2);
    let targets = prose.flat_map(|part| part.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    let files = targets.map(|target| target.split('#').next().unwrap_or_default());
    files.filter(|file| !file.is_empty() && !file.contains("://")).map(str::to_owned).collect()
}

/// Each folder of `docs` with pages has an index, and the page above it links that index.
#[test]
fn every_page_is_in_the_index() {
    let pages: Vec<String> = Page::all().into_iter().map(|page| page.path).collect();
    let missing = |index: &str, folder: &str| {
        let linked = links(&Page::read(index).text);
        let (in_folder, index) = (format!("{folder}/"), index.to_owned());
        let own = pages.iter().filter(move |page| **page != index).filter_map(move |page| {
            let name = page.strip_prefix(&in_folder)?.to_owned();
            (!name.contains('/') || name.ends_with("/README.md")).then_some(name)
        });
        own.filter(|name| !linked.contains(name)).map(|name| format!("{folder}/{name}")).collect::<Vec<_>>()
    };
    let unlisted = [missing("docs/README.md", "docs"), missing("docs/decisions/README.md", "docs/decisions")].concat();
    assert!(unlisted.is_empty(), "not in the index: {unlisted:?}");
    assert!(pages.len() > 50, "the pages were not found: {pages:?}");
}

#[test]
fn every_link_has_a_target() {
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
