//! Reason texts are for human readers: no SQL statement, and no code outside one module, compares or parses them.
//!
//! The code in `src/domain/wait_reason.rs` states why a job waits. A sentence that a program parses could not be
//! reworded.

use std::ops::Range;
use std::path::Path;

use crate::Offence;
use crate::source::Source;

/// The module that composes the sentences.
const MODULE: &str = "src/domain/wait_reason.rs";
/// Folders of files that are no Rust.
const FOLDERS: [&str; 4] = ["src/ops/page/assets/js", "lua", "migrations/postgres", "migrations/sqlite"];
/// A success by a response has its outcome's code as reason.
const CODE: &str = "'accepted'";

/// SQL functions that cut their argument.
const CUTS: [&str; 14] = [
    "substr(",
    "substring(",
    "left(",
    "right(",
    "split_part(",
    "strpos(",
    "instr(",
    "starts_with(",
    "length(",
    "lower(",
    "upper(",
    "regexp_match(",
    "regexp_like(",
    "replace(",
];
/// SQL that compares the text before it.
const COMPARISONS: [&str; 11] =
    ["like ", "ilike ", "not like ", "~", "similar to", "glob ", "in (", "not in (", "<>", "!=", "between "];
/// Words before a comparison, which never precede an assignment.
const CONDITIONS: [&str; 7] = ["where", "and", "or", "when", "not", "on", "("];
/// Rust and JavaScript that search or parse a text.
const PARSERS: [&str; 15] = [
    ".strip_prefix(",
    ".strip_suffix(",
    ".starts_with(",
    ".ends_with(",
    ".contains(",
    ".split",
    ".find(",
    ".parse",
    ".match(",
    ".startsWith(",
    ".endsWith(",
    ".includes(",
    ".indexOf(",
    ".slice(",
    " == \"",
];

/// The rule for Rust, with the SQL in its literals.
pub fn rust(source: &Source) -> Vec<Offence> {
    if !source.path.starts_with("src/") || source.path == MODULE {
        return Vec::new();
    }
    let parsed = words(&source.production).filter(|word| parses(&source.text[word.end..]));
    let parsed = parsed.map(|word| format!("{}: parses the text of a reason", source.place(word.start)));
    let is_literal = |word: &Range<usize>| {
        source.code[word.clone()] != source.text[word.clone()] && !is_comment(&source.text, word.start)
    };
    let of_sql = words(&source.text).filter(is_literal).filter(|word| compares(&source.text, word));
    let of_sql = of_sql.map(|word| format!("{}: SQL compares or cuts the text of a reason", source.place(word.start)));
    parsed.chain(of_sql).collect()
}

/// The rule for the page's scripts, the limiter's functions and the migrations.
pub fn others() -> Vec<Offence> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut offences = Vec::new();
    let mut folders: Vec<_> = FOLDERS.iter().map(|folder| root.join(folder)).collect();
    let mut read = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let relative = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                folders.push(path);
            } else {
                read += 1;
                offences.extend(script(&relative, &std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(read > 20, "the scripts were not found: {read}");
    offences
}

/// The rule for one file.
pub fn script(path: &str, text: &str) -> Vec<Offence> {
    let is_sql = path.ends_with(".sql");
    let bad = words(text).filter(|word| !is_comment(text, word.start)).filter(|word| match is_sql {
        true => compares(text, word) && !is_code(&text[..word.start]),
        false => parses(&text[word.end..]) || is_matched(&text[..word.start]),
    });
    let line = |word: Range<usize>| text[..word.start].matches('\n').count() + 1;
    bad.map(|word| format!("{path}:{}: compares or parses the text of a reason", line(word))).collect()
}

/// Whether the table that is created here has a code as reason.
fn is_code(before: &str) -> bool {
    before.rfind("CREATE ").is_some_and(|at| before[at..].starts_with("CREATE TABLE rejected_messages "))
}

/// The columns and fields with such a text.
const TEXTS: [&str; 2] = ["reason", "wait_detail"];

/// Positions of these names as whole words.
fn words(text: &str) -> impl Iterator<Item = Range<usize>> {
    let in_word = |character: Option<char>| character.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    let is_alone = move |word: &Range<usize>| {
        !in_word(text[..word.start].chars().next_back()) && !in_word(text[word.end..].chars().next())
    };
    TEXTS.into_iter().flat_map(|name| text.match_indices(name)).map(|(at, name)| at..at + name.len()).filter(is_alone)
}

fn is_comment(text: &str, at: usize) -> bool {
    let line = text[..at].rsplit('\n').next().unwrap_or_default().trim_start();
    line.starts_with("//") || line.starts_with("--") || line.starts_with('*') || line.starts_with("/*")
}

fn parses(after: &str) -> bool {
    let mut after = after;
    for step in ["()", "?", ".as_str()", ".as_deref()", ".to_string()"] {
        after = after.strip_prefix(step).unwrap_or(after);
    }
    PARSERS.iter().any(|parser| after.starts_with(parser)) || closure_parses(after)
}

/// Whether it is `.is_some_and(|text| text.ends_with(…` or the like, for any name.
fn closure_parses(after: &str) -> bool {
    let Some((method, rest)) = after.split_once("(|") else { return false };
    let is_method =
        method.strip_prefix('.').is_some_and(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'));
    let Some((name, body)) = rest.split_once("| ") else { return false };
    let parsed = body.strip_prefix(name).is_some_and(|body| PARSERS.iter().any(|parser| body.starts_with(parser)));
    is_method && parsed
}

/// Whether it is `/…/.exec(waited.reason` or the like.
fn is_matched(before: &str) -> bool {
    let owner = before.trim_end_matches(|c: char| c.is_ascii_alphanumeric() || "._?".contains(c));
    owner.ends_with(".exec(") || owner.ends_with(".test(")
}

fn compares(text: &str, word: &Range<usize>) -> bool {
    let at = word.start;
    let before = text[..at].trim_end_matches(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.');
    // A table's name before the column belongs to it.
    let before = if text[..at].ends_with('.') { before } else { &text[..at] };
    let before = before.trim_end_matches(|c: char| c.is_whitespace() || c == '\\').to_lowercase();
    let after = text[word.end..].trim_start_matches(|c: char| c.is_whitespace() || c == '\\').to_lowercase();
    if CUTS.iter().any(|cut| before.ends_with(cut)) || COMPARISONS.iter().any(|with| after.starts_with(with)) {
        return true;
    }
    let Some(other) = after.strip_prefix('=').map(str::trim_start) else { return false };
    let is_condition = CONDITIONS.iter().any(|word| before.ends_with(word));
    is_condition && !other.starts_with(CODE)
}

#[test]
fn texts_of_reasons_are_not_read() {
    let sql = |text: &str| script("migrations/postgres/0099_more.sql", text).len();
    for bad in [
        "CREATE INDEX i ON jobs (provider) WHERE substr(reason, 1, 16) = 'waits for limit ';",
        "SELECT 1 FROM jobs WHERE jobs.reason LIKE 'waits for %';",
        "SELECT 1 FROM jobs WHERE state = 'waiting' AND reason IN ('a', 'b');",
        "SELECT 1 FROM jobs WHERE reason = 'throttled by the provider';",
        "SELECT CASE WHEN reason = $1 THEN 1 END FROM jobs;",
        "SELECT 1 FROM jobs WHERE reason <> ''",
        "SELECT 1 FROM jobs WHERE wait_detail LIKE '%refused'",
    ] {
        assert_eq!(sql(bad), 1, "{bad}");
        let rust_file = Source::of("src/ledger/sql/claim.rs", &format!("fn f() {{ g(\"{bad}\"); }}"));
        assert_eq!(rust(&rust_file).len(), 1, "{bad}");
    }
    for good in [
        "UPDATE jobs SET state = $4, reason = $5, updated_at = now() WHERE id = $1;",
        "SELECT 1 FROM jobs WHERE wait_reason IN ('limit', 'cost_exceeds_limit') AND wait_reason = $1;",
        "UPDATE jobs SET reason = CASE WHEN reason = 'accepted' THEN reason ELSE 'erased' END;",
        "-- WHERE reason = 'a'",
        "SELECT 1 FROM jobs WHERE reason IS NULL;",
    ] {
        assert_eq!(sql(good), 0, "{good}");
    }
    let code = |text: &str| rust(&Source::of("src/worker/lane.rs", &format!("fn f() {{ let x = {text}; }}"))).len();
    for bad in [
        "job.reason.starts_with(\"waits\")",
        "line.reason.as_deref().strip_prefix(a)",
        "a.reason == \"b\"",
        "job.reason.as_deref().is_some_and(|told| told.ends_with(a))",
    ] {
        assert_eq!(code(bad), 1, "{bad}");
    }
    assert_eq!(code("refusal.reason == RefusalReason::Cold"), 0);
    for bad in ["/^waits for (.*)$/.exec(waited.reason)", "/limit/.test(job.reason)", "job.reason?.startsWith(\"w\")"] {
        assert_eq!(script("src/ops/page/assets/js/a.js", bad).len(), 1, "{bad}");
    }
    assert_eq!(script("src/ops/page/assets/js/a.js", "const text = sentence(job.reason);").len(), 0);
}
