//! Rules of the architecture and of style that no compiler checks: dependencies between parts, module docs, bans.
//!
//! Every offence names file, line and rule. A test beside each rule shows on snippets that the rule can fail.
#![allow(clippy::unwrap_used, reason = "a helper of a test fails its test")]

#[path = "tidy/arrows.rs"]
mod arrows;
#[path = "tidy/bans.rs"]
mod bans;
#[path = "tidy/language.rs"]
mod language;
#[path = "tidy/reasons.rs"]
mod reasons;
#[path = "tidy/source.rs"]
mod source;

use source::Source;

/// A broken rule, as `path:line: rule`.
pub type Offence = String;

type Rule = fn(&Source) -> Vec<Offence>;

const RULES: [(&str, Rule); 13] = [
    ("arrows", arrows::parts),
    ("drivers", arrows::drivers),
    ("module docs", bans::module_docs),
    ("clocks", bans::clocks),
    ("pure core", bans::pure_core),
    ("panics", bans::panics),
    ("spawns and prints", bans::spawns_and_prints),
    ("hidden characters", bans::hidden_characters),
    ("loose ends", bans::loose_ends),
    ("length", bans::length),
    ("banned words", language::words),
    ("headers", language::headers),
    ("texts of reasons", reasons::rust),
];

#[test]
fn sources_follow_the_architecture_rules() {
    let sources = source::all();
    assert!(sources.len() > 30, "the sources were not found: {}", sources.len());
    let mut offences: Vec<Offence> = Vec::new();
    for (_, rule) in RULES {
        offences.extend(sources.iter().flat_map(rule));
    }
    offences.extend(bans::stale_exceptions(&sources));
    offences.extend(arrows::circles(&sources));
    offences.extend(reasons::others());
    for prose in language::prose() {
        offences.extend(language::words_of_prose(&prose));
        offences.extend(language::cells(&prose));
    }
    assert!(offences.is_empty(), "{} offences:\n{}", offences.len(), offences.join("\n"));
}

#[test]
fn every_rule_detects_a_violation() {
    let offender = |rule: &str| match rule {
        "arrows" => Source::of("src/domain/job.rs", "use crate::queue::Queue;"),
        "drivers" => Source::of("src/worker/lane.rs", "use redis::Client;"),
        "module docs" => Source::of("src/worker/lane.rs", "//! Lanes.\nfn f() {}"),
        "clocks" => Source::of("src/worker/lane.rs", "fn f() { let t = Instant::now(); }"),
        "pure core" => Source::of("src/limiter/gate/core.rs", "use tokio::time::Instant;\nfn f() { Instant::now(); }"),
        "panics" => Source::of("src/worker/lane.rs", "fn f() { g().unwrap(); }"),
        "spawns and prints" => Source::of("src/worker/lane.rs", "fn f() { tokio::spawn(g()); }"),
        "hidden characters" => Source::of("src/ops/mod.rs", "use axum::Json;"),
        "loose ends" => Source::of("src/worker/lane.rs", concat!("// TO", "DO: more")),
        "length" => Source::of("src/worker/lane.rs", &"\n".repeat(451)),
        "banned words" => Source::of("src/worker/lane.rs", "// Begins anew."),
        "headers" => Source::of("src/worker/lane.rs", "//! The lanes of one worker. Refuses to wait."),
        "texts of reasons" => Source::of("src/worker/lane.rs", "fn f() { job.reason.starts_with(a); }"),
        other => panic!("rule `{other}` has no snippet that breaks it"),
    };
    for (name, rule) in RULES {
        let offences = rule(&offender(name));
        assert_eq!(offences.len(), 1, "{name}: {offences:?}");
        assert!(offences[0].starts_with("src/"), "{name}: {offences:?}");
    }
}
