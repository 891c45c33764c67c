//! The image build: the inputs of the compiler and of Cargo pass `.dockerignore`, and the Dockerfile copies them. Images
//! of others are named by digest.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::page::Page;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Whether a path is this folder or lies in it.
fn holds(folder: &str, path: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether a `.dockerignore` lets a path through: the last line that matches the path or a folder of it decides, see
/// <https://docs.docker.com/build/concepts/context/#dockerignore-files>.
fn passes(lines: &str, path: &str) -> bool {
    let mut passes = true;
    for line in lines.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (lets_through, named) = line.strip_prefix('!').map_or((false, line), |named| (true, named));
        assert!(named == "*" || !named.contains(['*', '?', '[']), "`{line}` is a pattern that this test cannot read");
        if named == "*" || holds(named.trim_end_matches('/'), path) {
            passes = lets_through;
        }
    }
    passes
}

/// Paths of the context that the `COPY` lines of the build stage take.
fn copied() -> Vec<String> {
    let text = Page::read("Dockerfile").text;
    let stage = text.split("\nFROM ").nth(1).unwrap();
    let lines = stage.lines().filter_map(|line| line.strip_prefix("COPY ")).filter(|line| !line.contains("--from="));
    let taken_by = |line: &str| {
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        // The last word is the target.
        words.pop();
        words
    };
    lines.flat_map(taken_by).collect()
}

/// The files of `src` that are part of the program, with their texts up to unit tests.
fn sources() -> Vec<(PathBuf, String)> {
    let (mut folders, mut found) = (vec![PathBuf::from("src")], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(Path::new(ROOT).join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let for_tests = name == "tests" || name == "tests.rs" || name.ends_with("_tests.rs");
            if for_tests {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                folders.push(folder.join(name));
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(entry.path()).unwrap();
                let program = text.split("\n#[cfg(test)]\nmod tests").next().unwrap();
                found.push((folder.join(name), program.to_owned()));
            }
        }
    }
    found
}

/// A path from the root, without `..`.
fn from_root(path: &Path) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(parts.pop().is_some(), "{} is outside", path.display()),
            Component::Normal(name) => parts.push(name.to_str().unwrap()),
            _ => {}
        }
    }
    parts.join("/")
}

/// The paths that the program includes: files, and the folder of paths that a macro composes.
fn included() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (file, text) in sources() {
        let calls = ["include_str!(", "include_bytes!("].into_iter().flat_map(|call| text.split(call).skip(1));
        for arguments in calls {
            let written = arguments.split('"').nth(1).unwrap();
            found.insert(from_root(&file.parent().unwrap().join(written)));
        }
    }
    found
}

/// The files of the targets that Cargo.toml names, by Cargo's rules:
/// <https://doc.rust-lang.org/cargo/reference/cargo-targets.html#target-auto-discovery>.
fn targets() -> BTreeSet<String> {
    let manifest: toml::Table = Page::read("Cargo.toml").text.parse().unwrap();
    let mut found = BTreeSet::from(["src/lib.rs".to_owned()]);
    // Cargo reads the manifest of each member, too, which may name its program's file.
    for member in manifest["workspace"]["members"].as_array().unwrap() {
        let member = member.as_str().unwrap();
        let targets: toml::Table = Page::read(&format!("{member}/Cargo.toml")).text.parse().unwrap();
        let named = ["bin", "bench"].into_iter().filter_map(|kind| targets.get(kind)?.as_array()).flatten();
        found.extend(named.map(|target| format!("{member}/{}", target["path"].as_str().unwrap())));
        found.insert(format!("{member}/Cargo.toml"));
    }
    for (kind, folder) in [("bin", "src/bin"), ("test", "tests"), ("bench", "benches"), ("example", "examples")] {
        for target in manifest.get(kind).into_iter().flat_map(|targets| targets.as_array().unwrap()) {
            let name = target["name"].as_str().unwrap();
            let usual = [format!("{folder}/{name}.rs"), format!("{folder}/{name}/main.rs")];
            let file = match target.get("path") {
                Some(path) => path.as_str().unwrap().to_owned(),
                None => usual.into_iter().find(|path| Path::new(ROOT).join(path).exists()).unwrap(),
            };
            found.insert(file);
        }
    }
    found
}

#[test]
fn image_contains_every_build_input() {
    let (lines, copied) = (Page::read(".dockerignore").text, copied());
    let manifest = ["Cargo.toml", "Cargo.lock"].map(str::to_owned);
    let read: BTreeSet<String> = included().into_iter().chain(targets()).chain(manifest).collect();
    let programs = ["src/main.rs", "benches/src/main.rs", "tests/otlp/main.rs"];
    let texts = ["benches/Cargo.toml", "config/default.toml", "lua/quota.lua", "migrations", "src/ops/page/assets"];
    for known in programs.into_iter().chain(texts) {
        assert!(read.contains(known), "{known} was not found: {read:?}");
    }
    for path in &read {
        assert!(Path::new(ROOT).join(path).exists(), "{path} does not exist");
        assert!(passes(&lines, path), ".dockerignore keeps {path} back");
        let brought = copied.iter().any(|source| source == "." || holds(source, path));
        assert!(brought, "no COPY line of the Dockerfile copies {path}: {copied:?}");
    }
    for kept in ["config/compose.env", "target/release/sluicegate", "sluicegate.db", ".git/config", "fuzz/Cargo.toml"] {
        assert!(!passes(&lines, kept), ".dockerignore lets {kept} through");
    }
}

#[test]
fn last_matching_ignore_line_wins() {
    let lines = "# all\n*\n!src\n!benches/reference\n\nsrc/secret\n";
    for path in ["src", "src/main.rs", "src/ops/page/assets", "benches/reference/empty.lua", "src/secrets"] {
        assert!(passes(lines, path), "{path}");
    }
    for path in ["Cargo.toml", "srcs/main.rs", "benches", "benches/limiter.rs", "src/secret", "src/secret/key"] {
        assert!(!passes(lines, path), "{path}");
    }
}

/// The images of others that a file names: base images, the Dockerfile's frontend, and the services of a compose file
/// or a manifest.
fn images_of_others(text: &str) -> Vec<&str> {
    text.lines()
        .map(|line| line.trim().trim_start_matches("- "))
        .filter_map(|line| ["FROM ", "# syntax=", "image: "].into_iter().find_map(|start| line.strip_prefix(start)))
        .filter_map(|image| image.split_whitespace().next())
        .filter(|image| !image.starts_with("sluicegate:"))
        .collect()
}

/// A tag can be moved to another image, a digest cannot.
fn is_pinned(image: &str) -> bool {
    let Some((name, digest)) = image.split_once("@sha256:") else { return false };
    name.rsplit('/').next().is_some_and(|last| last.contains(':'))
        && digest.len() == 64
        && digest.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[test]
fn images_of_others_are_pinned_by_digest() {
    let manifests = std::fs::read_dir(Path::new(ROOT).join("deploy/kubernetes")).unwrap();
    let manifests = manifests.map(|entry| format!("deploy/kubernetes/{}", entry.unwrap().file_name().display()));
    let mut found = Vec::new();
    for path in ["Dockerfile", "docker-compose.yml"].map(str::to_owned).into_iter().chain(manifests) {
        let text = Page::read(&path).text;
        found.extend(images_of_others(&text).into_iter().map(|image| (path.clone(), image.to_owned())));
    }
    assert!(found.len() >= 6, "{found:?}");
    let by_tag: Vec<_> = found.iter().filter(|(_, image)| !is_pinned(image)).collect();
    assert!(by_tag.is_empty(), "write them as NAME:TAG@sha256:DIGEST: {by_tag:?}");
    let digest = "0".repeat(64);
    assert!(is_pinned(&format!("docker.io/library/redis:7@sha256:{digest}")));
    for image in ["redis:7".to_owned(), format!("redis@sha256:{digest}"), "redis:7@sha256:abc".to_owned()] {
        assert!(!is_pinned(&image), "{image}");
    }
}
