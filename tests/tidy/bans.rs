//! Banned calls and texts in the code, and the files that are exempt, with the reason.

use crate::Offence;
use crate::source::Source;

/// Longest file, in lines.
const LINES_MAX: usize = 450;
/// Least text of a module's documentation, in characters: two lines' worth.
const DOC_CHARS_MIN: usize = 80;

/// Files that read a clock. All other code is passed instants, so that tests need not wait.
const CLOCK_READERS: [(&str, &str); 9] = [
    ("src/cli/check/backends.rs", "compares the wall clock with the limiter store's clock, to warn of skew"),
    ("src/ops/overview/collector.rs", "stamps an overview with its time, and compares the database's clock"),
    ("src/limiter/embedded.rs", "fixed windows are the calendar's; read once, so that no step is seen"),
    ("src/provider/http/mod.rs", "reads a Retry-After date when the answer has no Date of its own"),
    ("src/cli/simulate/mod.rs", "computes when a backlog of now is cleared"),
    ("src/cli/check/mod.rs", "shows how long the database takes to answer"),
    ("src/worker/start_timer.rs", "wakes starts by the system's monotonic clock, which tokio's timer rounds up"),
    ("src/worker/meter/decisions.rs", "stamps displayed decisions with the time of day"),
    ("src/queue/rabbitmq/supervisor.rs", "measures how long the broker blocks publishers, for the log"),
];
/// Files that start tasks outside a tracker, and what ends those tasks.
const SPAWNERS: [(&str, &str); 12] = [
    ("src/cli/demo/mod.rs", "awaits the two tasks that it starts: its provider and its worker"),
    ("src/cli/run.rs", "probes and signals must not hold up the drain, so no code waits for their tasks"),
    ("src/ledger/database.rs", "a migration runs to its end though its caller is dropped"),
    ("src/ledger/sql/engine.rs", "database work runs to its end though its caller is dropped or times out"),
    (
        "src/ops/selections.rs",
        "a selection holds its slot to its end, though its client is gone; each statement is bounded",
    ),
    ("src/provider/http/connection.rs", "waits a second at most for the other side to close, holding nothing else"),
    ("src/provider/http/client.rs", "the closing of idle connections ends with the last of them, or with the pool"),
    ("src/provider/simulated/server.rs", "a request stays in flight though its client is gone; its latency ends it"),
    ("src/queue/rabbitmq/mod.rs", "a declaration or a check ends with its calls to the broker, 5 s each at most"),
    ("src/queue/rabbitmq/pipeline.rs", "ends with its channel, or when its last publisher is dropped"),
    ("src/queue/rabbitmq/receipt.rs", "the writing of receipts ends when their lane is dropped"),
    ("src/queue/rabbitmq/supervisor.rs", "the supervisor ends when its owner is dropped"),
];

/// Files that write without `Console::line` and its like, which escape hidden characters.
const WRITERS: [(&str, &str); 5] = [
    ("src/cli/console.rs", "is where texts are escaped"),
    ("src/cli/fake_provider.rs", "prints its report from a thread, as printable JSON"),
    ("src/cli/status/mod.rs", "controls the terminal, and writes printable lines there"),
    ("src/cli/jobs/filter.rs", "writes an export, whose texts are escaped where it is made"),
    ("src/cli/generated.rs", "writes the manual or a script, which hold no text from outside"),
];

/// Files of the cores of gate and dispatcher, and their folders: pure state machines, which the simulation drives, too.
const CORE: [&str; 13] = [
    "src/limiter/gate/core.rs",
    "src/limiter/gate/core/",
    "src/limiter/gate/wait_queue",
    "src/limiter/gate/block.rs",
    "src/limiter/gate/egress.rs",
    "src/limiter/gate/pending_call.rs",
    "src/limiter/gate/history_stock.rs",
    "src/limiter/gate/unpersisted.rs",
    "src/limiter/gate/call_sequence.rs",
    "src/worker/backlog/core.rs",
    "src/worker/backlog/core/",
    "src/worker/backlog/claimed_ahead.rs",
    "src/worker/backlog/permit_waits.rs",
];
/// Clocks, tasks, channels and logs.
const IMPURE: [&str; 6] = ["Instant::now(", ".elapsed()", "async ", ".await", "tokio::sync", "tracing::"];

/// The wall clocks, and the monotonic clock that a test cannot pause.
const CLOCKS: [&str; 4] = ["Instant::now(", "SystemTime::now(", "Timestamp::now(", "Zoned::now("];
/// Tokio's clock is the process's one monotonic clock. Tests pause and move it, so code outside `domain` may read it.
const TOKIO_CLOCK: [&str; 2] = ["tokio::time::Instant::now(", "Instant::now("];
const WRITES: [&str; 5] = ["io::stdout(", "io::stderr(", "print!(", ".raw(", ".data()"];
const SPAWNS: [&str; 2] = ["tokio::spawn(", "task::spawn("];

fn excepted(source: &Source, list: &[(&str, &str)]) -> bool {
    list.iter().any(|(path, _)| *path == source.path)
}

/// One offence per line and needle.
fn ban(source: &Source, text: &str, needles: &[&str], rule: &str) -> Vec<Offence> {
    let hits = needles.iter().flat_map(|needle| text.match_indices(needle));
    hits.map(|(at, needle)| format!("{}: `{needle}`: {rule}", source.place(at))).collect()
}

pub fn module_docs(source: &Source) -> Vec<Offence> {
    // A file without production code needs no module documentation.
    if source.production.trim().is_empty() {
        return Vec::new();
    }
    let docs = source.text.lines().take_while(|line| line.starts_with("//!"));
    let chars: usize = docs.map(|line| line.trim_start_matches("//!").trim().chars().count()).sum();
    if chars >= DOC_CHARS_MIN {
        return Vec::new();
    }
    let rule = "opens with `//!` that says what the module is and why it exists";
    vec![format!("{}: every module {rule} (at least {DOC_CHARS_MIN} characters, has {chars})", source.place(0))]
}

pub fn clocks(source: &Source) -> Vec<Offence> {
    if excepted(source, &CLOCK_READERS) {
        return Vec::new();
    }
    let may_read_tokios = !source.path.starts_with("src/domain/") && reads_tokios(source);
    let banned = CLOCKS.iter().copied().filter(|clock| !(may_read_tokios && TOKIO_CLOCK.contains(clock)));
    let banned: Vec<&str> = banned.collect();
    ban(source, &source.production, &banned, "clocks are read by the files of CLOCK_READERS alone")
}

/// Whether `Instant` means Tokio's in this file.
fn reads_tokios(source: &Source) -> bool {
    let mut uses = source.production.split("use tokio::time::").skip(1);
    uses.any(|rest| rest.split(';').next().is_some_and(|names| names.contains("Instant")))
}

pub fn pure_core(source: &Source) -> Vec<Offence> {
    if !CORE.iter().any(|path| source.path.starts_with(path)) {
        return Vec::new();
    }
    ban(
        source,
        &source.production,
        &IMPURE,
        "the gate's core is a pure state machine: events and the time are arguments",
    )
}

pub fn panics(source: &Source) -> Vec<Offence> {
    ban(source, &source.production, &[".unwrap()", ".expect("], "errors are typed; no code panics outside tests")
}

pub fn spawns_and_prints(source: &Source) -> Vec<Offence> {
    let mut offences = Vec::new();
    if !excepted(source, &SPAWNERS) {
        let rule = "tasks are tracked (TaskTracker, JoinSet), or their file is among SPAWNERS";
        offences.extend(ban(source, &source.production, &SPAWNS, rule));
    }
    if !source.path.starts_with("src/cli/") {
        let rule = "only commands print; everything else logs";
        offences.extend(ban(source, &source.production, &["print!(", "println!("], rule));
    }
    offences
}

pub fn hidden_characters(source: &Source) -> Vec<Offence> {
    let mut offences = Vec::new();
    if source.path.starts_with("src/cli/") && !excepted(source, &WRITERS) {
        let rule = "texts go through the console, which escapes hidden characters, or the file is among WRITERS";
        offences.extend(ban(source, &source.production, &WRITES, rule));
    }
    if source.path.starts_with("src/ops/") {
        let rule = "answers go through ops::json::Json, which escapes hidden characters";
        offences.extend(ban(source, &source.production, &["axum::Json", "Json};", "{Json,"], rule));
    }
    offences
}

pub fn loose_ends(source: &Source) -> Vec<Offence> {
    let words = [concat!("TO", "DO"), concat!("FIX", "ME")];
    let macros = [concat!("unimpl", "emented!"), concat!("to", "do!(")];
    let mut offences = ban(source, &source.text, &words, "finish it, or move the note to the plan");
    offences.extend(ban(source, &source.code, &macros, "no part is left unwritten"));
    offences.extend(ban(source, &source.code, &[concat!("#[ig", "nore")], "every test runs"));
    offences
}

pub fn length(source: &Source) -> Vec<Offence> {
    let lines = source.text.lines().count();
    if lines <= LINES_MAX {
        return Vec::new();
    }
    vec![format!("{}:{lines}: has {lines} lines: split it (at most {LINES_MAX})", source.path)]
}

/// Exceptions that are no longer needed.
pub fn stale_exceptions(sources: &[Source]) -> Vec<Offence> {
    let lists = [
        (CLOCK_READERS.as_slice(), CLOCKS.as_slice()),
        (SPAWNERS.as_slice(), SPAWNS.as_slice()),
        (WRITERS.as_slice(), WRITES.as_slice()),
    ];
    let mut stale = Vec::new();
    for (list, needles) in lists {
        for (path, reason) in list {
            let source = sources.iter().find(|source| source.path == *path);
            let used = source.is_some_and(|source| needles.iter().any(|needle| source.production.contains(needle)));
            if !used || reason.len() < 10 {
                stale.push(format!("{path}:0: is excepted in tests/tidy/bans.rs and needs no exception"));
            }
        }
    }
    stale
}

#[test]
fn bans_apply_to_code_only() {
    for (path, text, rule, count) in [
        ("src/a.rs", "fn f() { x.unwrap(); y.expect(\"z\"); }", panics as fn(&Source) -> Vec<Offence>, 2),
        ("src/a.rs", "// x.unwrap()\nfn f() { \".unwrap()\"; x.unwrap_or(1); }", panics, 0),
        ("src/a.rs", "#[cfg(test)]\nmod tests { fn f() { x.unwrap() } }", panics, 0),
        ("src/tests.rs", "fn f() { x.unwrap() }", panics, 0),
        ("src/a.rs", "fn f() { SystemTime::now(); }\nfn g() { tokio::time::Instant::now(); }", clocks, 2),
        ("src/cli/check/mod.rs", "fn f() { Instant::now(); }", clocks, 0),
        ("src/worker/a.rs", "use tokio::time::{Instant, sleep};\nfn f() { Instant::now(); }", clocks, 0),
        ("src/worker/a.rs", "use tokio::time::Instant;\nfn f() { SystemTime::now(); }", clocks, 1),
        ("src/domain/a.rs", "use tokio::time::Instant;\nfn f() { Instant::now(); }", clocks, 1),
        ("src/a.rs", "fn f() { println!(\"x\"); }", spawns_and_prints, 1),
        ("src/a.rs", "fn f() { eprintln!(\"x\"); tokio::task::spawn(g()); }", spawns_and_prints, 2),
        ("src/cli/a.rs", "fn f() { println!(\"x\"); }", spawns_and_prints, 0),
        ("src/cli/a.rs", "fn f() { print!(\"x\"); console.raw(x); io::stdout(); }", hidden_characters, 3),
        ("src/ops/a.rs", "use axum::Json;\nuse axum::{Extension, Json};", hidden_characters, 2),
        ("src/ops/a.rs", "use super::json::Json;", hidden_characters, 0),
        ("src/a.rs", "fn f() { tracker.spawn(g()); }", spawns_and_prints, 0),
        ("tests/a.rs", concat!("#[ig", "nore = \"slow\"]\nfn f() { unimpl", "emented!() }"), loose_ends, 2),
        (
            "src/a.rs",
            "//! What this is for, in a sentence that says it. Refuses what it refuses,\n//! and says so in a second line.\nfn f() {}",
            module_docs,
            0,
        ),
        ("src/a.rs", "//! app\n", module_docs, 0),
    ] {
        let offences = rule(&Source::of(path, text));
        assert_eq!(offences.len(), count, "{path}: {text}: {offences:?}");
    }
    let placed = panics(&Source::of("src/a.rs", "\n\nfn f() { x.unwrap() }"));
    assert!(placed[0].starts_with("src/a.rs:3: "), "{placed:?}");
    assert_eq!(stale_exceptions(&[]).len(), CLOCK_READERS.len() + SPAWNERS.len() + WRITERS.len());
}
