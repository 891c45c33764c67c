//! Dependency rules between parts: `domain` uses no other, interfaces use `domain`, implementations their interface,
//! `worker` interfaces alone.

use std::collections::{BTreeMap, BTreeSet};

use crate::Offence;
use crate::source::Source;

/// Parts with an interface in `mod.rs` and implementations below it.
const FACES: [&str; 4] = ["queue", "ledger", "limiter", "provider"];
/// Modules below an interface that implement it.
const IMPLEMENTATIONS: [&str; 9] =
    ["rabbitmq", "embedded", "sql", "postgres", "sqlite", "redis", "http", "simulated", "memory"];
/// Two implementations of one engine trait.
const SIBLINGS: [&str; 2] = ["postgres", "sqlite"];
/// Parts that no module below them may use.
const UPPER: [&str; 5] = ["worker", "ops", "cli", "app", "config"];
/// Driver crates and the folders that may name them, besides `cli` and `app`.
const DRIVERS: [(&str, &[&str]); 5] = [
    ("lapin", &["queue/rabbitmq"]),
    ("redis", &["limiter/redis"]),
    ("sqlx", &["ledger/"]),
    ("reqwest", &["provider/http", "cli/", "telemetry/otlp"]),
    ("axum", &["ops/", "provider/simulated"]),
];
/// Crates of which the named files of `domain` use a pure part. All files may derive errors by `thiserror`.
const PURE: [(&str, &str); 5] = [
    ("iso_currency", "src/domain/amount.rs"),
    ("backoff", "src/domain/backoff.rs"),
    ("base64", "src/domain/sensitive/secret.rs"),
    ("jiff", "src/domain/cutoff.rs"),
    ("jiff", "src/domain/format.rs"),
];
/// Paths that may use every implementation, because they connect the parts.
const WIRING: [&str; 3] = ["app.rs", "cli/", "main.rs"];

/// Paths from the crate's root that a file names, with their positions.
fn references(source: &Source) -> Vec<(Vec<String>, usize)> {
    let mut found = Vec::new();
    let code = &source.production;
    for (root, at) in
        ["crate::", "super::"].iter().flat_map(|root| code.match_indices(root).map(move |(at, _)| (*root, at)))
    {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let mut base = if root == "super::" { module_of(&source.path) } else { Vec::new() };
        let mut rest = &code[at..];
        while let Some(after) = rest.strip_prefix("super::") {
            base.pop();
            rest = after;
        }
        rest = rest.strip_prefix("crate::").unwrap_or(rest);
        expand(&base, rest, at, &mut found);
    }
    found
}

/// Follows one path, through its braces if it has any.
fn expand(base: &[String], rest: &str, at: usize, found: &mut Vec<(Vec<String>, usize)>) {
    let mut path = base.to_vec();
    let mut rest = rest.trim_start();
    loop {
        if let Some(group) = rest.strip_prefix('{') {
            for item in items(group) {
                expand(&path, item, at, found);
            }
            return;
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        if end > 0 {
            path.push(rest[..end].to_owned());
        }
        match rest[end..].strip_prefix("::") {
            Some(after) => rest = after,
            None => return found.push((path, at)),
        }
    }
}

/// The comma-separated items up to the closing brace.
fn items(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            '}' => {
                items.push(&group[start..at]);
                break;
            }
            ',' if depth == 0 => {
                items.push(&group[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.into_iter().filter(|item| !item.trim().is_empty()).collect()
}

/// `src/queue/rabbitmq/mod.rs` → `queue::rabbitmq`.
fn module_of(path: &str) -> Vec<String> {
    let path = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    path.split('/').map(str::to_owned).collect()
}

fn within(path: &str, folders: &[&str]) -> bool {
    path.strip_prefix("src/").is_some_and(|path| folders.iter().any(|folder| path.starts_with(folder)))
}

/// The rule that a file breaks by naming this path of the crate, if any.
fn broken(source: &Source, to: &[String]) -> Option<&'static str> {
    let from = module_of(&source.path);
    let (part, target) = (from.first()?.as_str(), to.first()?.as_str());
    let implementation = FACES.contains(&target) && to.get(1).is_some_and(|m| IMPLEMENTATIONS.contains(&m.as_str()));
    if part == "domain" && target != "domain" {
        return Some("domain uses no other part");
    }
    if target == "cli" && part != "cli" && part != "main" {
        return Some("cli uses the other parts, and only main uses cli");
    }
    if !FACES.contains(&part) {
        let wires = within(&source.path, &WIRING);
        return (implementation && !wires).then_some("only app and cli use implementations");
    }
    if UPPER.contains(&target) {
        return Some("an interface and its implementations use no part above them");
    }
    if implementation && target != part {
        return Some("an implementation does not use another part's implementation");
    }
    let own = from.last().map_or("", String::as_str);
    if SIBLINGS.contains(&own) && to.iter().any(|name| name != own && SIBLINGS.contains(&name.as_str())) {
        return Some("an implementation does not use its sibling");
    }
    let is_face = source.path == format!("src/{part}/mod.rs") || source.path == "src/ledger/settings.rs";
    let frozen = part == "ledger" && *to == ["provider", "FrozenRequest"];
    (is_face && target != part && target != "domain" && !frozen).then_some("an interface uses domain alone")
}

pub fn parts(source: &Source) -> Vec<Offence> {
    let offences = references(source).into_iter().filter_map(|(to, at)| {
        let rule = broken(source, &to)?;
        Some(format!("{}: names crate::{}: {rule}", source.place(at), to.join("::")))
    });
    offences.collect()
}

/// Modules of `domain` that use each other, also through others: those that remain when the lowest and the highest ones
/// are taken away again and again.
pub fn circles(sources: &[Source]) -> Vec<Offence> {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources {
        let path = module_of(&source.path);
        let Some(module) = path.get(1).filter(|_| path[0] == "domain") else { continue };
        let named = references(source).into_iter().filter(|(to, _)| to[0] == "domain");
        let others = named.filter_map(|(to, _)| to.get(1).filter(|other| *other != module).cloned());
        uses.entry(module.clone()).or_default().extend(others);
    }
    let is_outside = |uses: &BTreeMap<String, BTreeSet<String>>, name: &String| {
        uses[name].iter().all(|other| !uses.contains_key(other)) || !uses.values().any(|others| others.contains(name))
    };
    while let Some(outside) = uses.keys().find(|name| is_outside(&uses, name)).cloned() {
        uses.remove(&outside);
    }
    uses.keys().map(|module| format!("src/domain/{module}: uses modules that use it")).collect()
}

pub fn drivers(source: &Source) -> Vec<Offence> {
    let mut offences = Vec::new();
    for (crate_name, at) in words_before_path(&source.production) {
        let rule = match DRIVERS.iter().find(|(name, _)| *name == crate_name) {
            Some((_, allowed)) if !within(&source.path, allowed) && !within(&source.path, &WIRING) => {
                "a driver is named by its implementation alone"
            }
            None if source.path.starts_with("src/domain/") && is_foreign(crate_name) => {
                if crate_name == "thiserror" || PURE.contains(&(crate_name, source.path.as_str())) {
                    continue;
                }
                "domain uses std alone"
            }
            _ => continue,
        };
        offences.push(format!("{}: names `{crate_name}`: {rule}", source.place(at)));
    }
    offences
}

/// First words of paths: `redis` in `redis::Client`, not in `limiter::redis::Client`.
fn words_before_path(code: &str) -> Vec<(&str, usize)> {
    let mut words = Vec::new();
    for (end, _) in code.match_indices("::") {
        let start = code[..end].rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        if start < end && !code[..start].ends_with("::") {
            words.push((&code[start..end], start));
        }
    }
    words
}

/// A crate of `Cargo.toml`, dev-dependencies included.
fn is_foreign(word: &str) -> bool {
    let manifest = include_str!("../../Cargo.toml");
    let tables =
        manifest.lines().skip_while(|line| *line != "[dependencies]").take_while(|line| *line != "[lints.rust]");
    tables.filter_map(|line| line.split_once(" = ")).any(|(name, _)| name.replace('-', "_") == word)
}

#[test]
fn references_resolve_through_groups_and_super() {
    let source = Source::of(
        "src/queue/rabbitmq/wire.rs",
        "use crate::{domain::{job::Job, time}, ledger};\nuse super::super::message;\nfn f() { super::topology::g() }",
    );
    let mut found: Vec<String> = references(&source).into_iter().map(|(path, _)| path.join("::")).collect();
    found.sort();
    assert_eq!(found, ["domain::job::Job", "domain::time", "ledger", "queue::message", "queue::rabbitmq::topology::g"]);
}

#[test]
fn circles_of_imports_are_detected() {
    let circle = [
        Source::of("src/domain/job.rs", "use super::limit::Limit;"),
        Source::of("src/domain/limit.rs", "use crate::domain::{job::Job, time};"),
        Source::of("src/domain/time.rs", "use std::time::Duration;"),
        Source::of("src/domain/pace.rs", "use super::job::Job;"),
    ];
    assert_eq!(circles(&circle).len(), 2);
    assert!(circles(&circle[1..]).is_empty());
}

#[test]
fn dependency_rule_detects_violations() {
    for (path, text, broken) in [
        ("src/domain/job.rs", "use super::time::EpochMs;", false),
        ("src/domain/job.rs", "use crate::queue::Queue;", true),
        ("src/queue/mod.rs", "use crate::domain::job::Job;", false),
        ("src/queue/mod.rs", "use crate::ledger::Hold;", true),
        ("src/ledger/mod.rs", "use crate::provider::FrozenRequest;", false),
        ("src/ledger/mod.rs", "use crate::provider::Answer;", true),
        ("src/queue/message/write.rs", "use crate::ledger::OutcomeEvent;", false),
        ("src/queue/rabbitmq/mod.rs", "use crate::ledger::sql::Pool;", true),
        ("src/ledger/sql/sqlite.rs", "use super::postgres::meaning;", true),
        ("src/ledger/sql/postgres.rs", "use super::{engine::Engine, sqlite::open};", true),
        ("src/ledger/sql/sqlite.rs", "use super::meaning::away_or_corrupt;", false),
        ("src/ledger/sqlite.rs", "use super::sql::sqlite::SqliteEngine;", false),
        ("src/limiter/redis/mod.rs", "use crate::config::LimiterUrl;", true),
        ("src/worker/lane.rs", "use crate::queue::Queue;", false),
        ("src/worker/lane.rs", "use crate::queue::rabbitmq::RabbitMq;", true),
        ("src/worker/lane.rs", "#[cfg(test)]\nmod tests { use crate::queue::rabbitmq::RabbitMq; }", false),
        ("src/ops/api.rs", "use crate::ledger::sql::Sql;", true),
        ("src/cli/run.rs", "use crate::app::Services;", false),
        ("src/app.rs", "use crate::cli::CommandError;", true),
        ("src/app.rs", "use crate::ledger::sqlite::Sqlite;", false),
    ] {
        assert_eq!(!parts(&Source::of(path, text)).is_empty(), broken, "{path}: {text}");
    }
}

#[test]
fn driver_rule_detects_violations() {
    for (path, text, broken) in [
        ("src/queue/rabbitmq/wire.rs", "use lapin::Channel;", false),
        ("src/queue/mod.rs", "use lapin::Channel;", true),
        ("src/limiter/gate.rs", "use super::redis::Client;", false),
        ("src/limiter/gate.rs", "use redis::Client;", true),
        ("src/worker/lane.rs", "fn f(pool: sqlx::PgPool) {}", true),
        ("src/domain/time.rs", "use std::time::Duration;", false),
        ("src/domain/time.rs", "use jiff::Timestamp;", true),
        ("src/domain/backoff.rs", "use backoff::ExponentialBackoff;", false),
        ("src/domain/job.rs", "use backoff::ExponentialBackoff;", true),
    ] {
        assert_eq!(!drivers(&Source::of(path, text)).is_empty(), broken, "{path}: {text}");
    }
}
