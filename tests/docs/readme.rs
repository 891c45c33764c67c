//! The README: it is short, job ids of its snippets differ, and its embedded part works when pasted into a shell.

use std::collections::BTreeSet;
use std::path::Path;

use crate::page::Page;
use crate::support::process::{Server, free_port, private_dir};

const LINES_MAX: usize = 220;

#[test]
fn the_readme_is_short() {
    let lines = Page::read("README.md").text.lines().count();
    assert!(lines <= LINES_MAX, "{lines} lines: move details to docs/");
}

/// The ids of the jobs that a snippet publishes.
fn published(snippet: &str) -> Vec<String> {
    let marks = ["--id ", "\"id\": \"", "\"id\":\"", "{ id: \""];
    let after = marks.iter().flat_map(|mark| snippet.split(mark).skip(1));
    after.map(|rest| rest.split(['"', ' ', '\n']).next().unwrap().to_owned()).collect()
}

/// The same id with other content would be a conflict.
#[test]
fn every_snippet_has_job_ids_of_its_own() {
    let mut seen = BTreeSet::new();
    for page in ["README.md", "docs/getting-started.md", "docs/message.md"].map(Page::read) {
        let snippets = page.blocks().into_iter().filter(|block| !block.text.contains("\"state\""));
        for id in snippets.flat_map(|block| published(&block.text)) {
            assert!(seen.insert(id.clone()), "{}: {id} is published by another snippet, too", page.path);
        }
    }
    assert!(seen.len() >= 7, "ids were not found: {seen:?}");
}

/// Only ports are replaced: the provider's, and by the environment the page's.
#[test]
fn readme_embedded_commands_work() {
    let readme = Page::read("README.md");
    let embedded = readme.text.split("\n## ").find(|section| section.starts_with("Embedded")).unwrap();
    let embedded = Page { path: readme.path.clone(), text: embedded.to_owned() };
    let (port, ops) = (free_port(), free_port());
    let dir = private_dir("docs");
    let file = embedded.blocks_of("toml")[0].replace("127.0.0.1:9000", &format!("127.0.0.1:{port}"));
    std::fs::write(dir.join("acme.toml"), file).unwrap();
    let [build, start, look] = &embedded.blocks_of("sh")[..] else { panic!("not three snippets") };
    assert!(build.starts_with("cargo build"), "{build}");
    let start = start.replace("fake-provider ", &format!("fake-provider --listen 127.0.0.1:{port} "));
    let paid = "until sluicegate jobs show readme-1 | grep -q succeeded; do sleep 0.1; done";
    let script = format!("cd {}\n{start}\n{paid}\n{look}\nkill %2 %1; wait; echo walked; sleep 60", dir.display());
    let programs = Path::new(env!("CARGO_BIN_EXE_sluicegate")).parent().unwrap().display();
    let environment = [
        ("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap())),
        ("SLUICEGATE_OPS__LISTEN", format!("127.0.0.1:{ops}")),
    ];
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let walk = Server::start(&["bash", "-ec", &script], &environment, &dir.join("log"), Some(&dir), "");
    walk.await_that("the script does not end", || walk.log_text().contains("\nwalked\n"));
    let printed = walk.log_text();
    let has_line = |words: [&str; 2]| printed.lines().any(|line| line.split_whitespace().eq(words));
    assert!(has_line(["state", "succeeded"]), "{printed}");
    assert!(has_line(["\"charges\":", "1,"]), "{printed}");
    assert!(printed.lines().any(|line| line.starts_with(" acme ") && line.contains(" 100/1s ")), "{printed}");
}
