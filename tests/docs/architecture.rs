//! The decision table, the delay steps, the folders and the tests that the documentation names are those of the code.

use std::path::Path;
use std::time::Duration;

use sluicegate::domain::backoff::BackoffPolicy;
use sluicegate::domain::disposition::{
    Disposition, History, Next, Pause, RetryPolicy, after_outcome, before_resend, before_start,
};
use sluicegate::domain::outcome::{Outcome, UnknownCause};
use sluicegate::domain::time::format_duration;
use sluicegate::queue::DELAY_STEPS;

use crate::page::{Page, plain};

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

/// One situation, in the words of the table's columns.
struct Situation {
    outcome: &'static str,
    unknown: bool,
    deduplicates: bool,
    last: bool,
    too_old: bool,
}

const OUTCOMES: [&str; 10] = [
    "accepted",
    "declined",
    "rejected",
    "throttled",
    "busy",
    "misconfigured",
    "not sent",
    "in progress",
    "unknown",
    "unknown, wait named",
];

impl Situation {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for outcome in OUTCOMES {
            for bits in 0..16_u8 {
                let bit = |n: u8| bits & (1 << n) != 0;
                all.push(Self { outcome, unknown: bit(0), deduplicates: bit(1), last: bit(2), too_old: bit(3) });
            }
        }
        all
    }

    /// The cells of the table that match this situation, beside `·`.
    fn cells(&self) -> [&'static str; 5] {
        let word = |which: bool, yes, no| if which { yes } else { no };
        [
            self.outcome,
            word(self.unknown, "yes", "no"),
            word(self.deduplicates, "yes", "no"),
            word(self.last, "last", "not last"),
            word(self.too_old, "too old", "in time"),
        ]
    }

    fn decide(&self) -> Disposition {
        let second = Duration::from_secs(1);
        let outcome = match self.outcome {
            "accepted" => Outcome::Accepted { reference: None },
            "declined" => Outcome::Declined { reason: String::new() },
            "rejected" => Outcome::Rejected { reason: String::new() },
            "throttled" => Outcome::Throttled { retry_after: Some(second) },
            "busy" => Outcome::Busy { retry_after: Some(second) },
            "misconfigured" => Outcome::Misconfigured { status: 401 },
            "not sent" => Outcome::NotSent { cause: String::new() },
            "in progress" => Outcome::InProgress,
            "unknown" => Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None },
            _ => Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(second) },
        };
        let history = History {
            attempts: if self.last { 2 } else { 0 },
            requests: 2,
            unknown: self.unknown,
            age: if self.too_old { HOUR } else { second },
            first_sent_age: self.unknown.then_some(second),
            probe: false,
        };
        after_outcome(&outcome, &history, &policy(self.deduplicates.then_some(DAY)), 0.5)
    }
}

fn policy(idempotency_retention: Option<Duration>) -> RetryPolicy {
    let backoff = BackoffPolicy { base: Duration::from_secs(1), max: Duration::from_secs(60) };
    RetryPolicy { max_attempts: 3, max_age: HOUR, backoff, idempotency_retention }
}

/// A decision in the words of the table: what the job becomes, whether an attempt counts, who pauses.
fn words(decided: &Disposition) -> [&'static str; 3] {
    let pauses = match decided.pause {
        None => "nobody",
        Some(Pause::Quota { .. }) => "quota",
        Some(Pause::Lane { .. }) => "lane",
    };
    [becomes(&decided.next), if decided.counts_attempt { "yes" } else { "no" }, pauses]
}

fn becomes(next: &Next) -> &'static str {
    match next {
        Next::Settle { state, .. } => state.name(),
        Next::Again { unknown: true, .. } => "unknown",
        Next::Again { unknown: false, .. } => "waiting",
    }
}

/// What the table gets wrong; empty when every situation has exactly one row, and that row is what the code decides.
fn disagreements(table: &[Vec<String>]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut used = vec![false; table.len()];
    for situation in Situation::all() {
        let cells = situation.cells();
        let matches = |row: &[String]| row.iter().zip(cells).all(|(cell, word)| cell == "·" || cell == word);
        let rows: Vec<usize> = (0..table.len()).filter(|row| matches(&table[*row])).collect();
        let [row] = rows[..] else {
            wrong.push(format!("{cells:?}: {} rows", rows.len()));
            continue;
        };
        used[row] = true;
        let says: Vec<&str> = table[row][5..].iter().map(|cell| plain(cell)).collect();
        let decides = words(&situation.decide());
        if says != decides {
            wrong.push(format!("{cells:?}: the table says {says:?}, the code {decides:?}"));
        }
    }
    wrong.extend(used.iter().zip(table).filter(|(used, _)| !**used).map(|(_, row)| format!("never met: {row:?}")));
    wrong
}

fn decision_table() -> Vec<Vec<String>> {
    Page::read("docs/architecture.md").table("## The decision table", "outcome")
}

#[test]
fn the_decision_table_is_what_the_code_decides() {
    let wrong = disagreements(&decision_table());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_cell_of_the_decision_table_counts() {
    let table = decision_table();
    for row in 0..table.len() {
        for (column, other) in [(0, "accepted?"), (5, "`cancelled`"), (6, "maybe"), (7, "everybody")] {
            let mut changed = table.clone();
            changed[row][column] = other.to_owned();
            assert!(!disagreements(&changed).is_empty(), "row {row}, column {column}");
        }
        let mut fewer = table.clone();
        fewer.remove(row);
        assert!(!disagreements(&fewer).is_empty(), "row {row} is not needed");
    }
}

#[test]
fn the_second_table_is_what_is_decided_before_a_request() {
    let table = Page::read("docs/architecture.md").table("## The decision table", "situation");
    let mut met = 0;
    for unknown in [false, true] {
        let history =
            |age, first_sent_age| History { attempts: 1, requests: 1, unknown, age, first_sent_age, probe: false };
        let (young, second) = (Duration::from_secs(2), Some(Duration::from_secs(1)));
        let decided = [
            ("`expires_at` has passed", before_start(&history(young, None), &policy(None), true)),
            ("older than `max_age_s`", before_start(&history(HOUR + young, None), &policy(None), false)),
            ("sent before, the provider does not deduplicate", before_resend(&history(young, second), &policy(None))),
            (
                "sent before, half of the retention has passed",
                before_resend(&history(DAY, Some(DAY / 2)), &policy(Some(DAY))),
            ),
            ("sent before, the provider surely remembers", before_resend(&history(young, second), &policy(Some(DAY)))),
        ];
        for (situation, next) in decided {
            let word = if unknown { "yes" } else { "no" };
            let matching = |row: &&Vec<String>| row[0] == situation && (row[1] == "·" || row[1] == word);
            let rows: Vec<&Vec<String>> = table.iter().filter(matching).collect();
            assert_eq!(rows.len(), 1, "{situation}, {word}");
            assert_eq!(plain(&rows[0][2]), next.as_ref().map_or("goes on", becomes), "{situation}, {word}");
            met += 1;
        }
    }
    // The last row stands for both.
    assert_eq!(met, table.len() + 1);
}

#[test]
fn the_delay_steps_are_listed() {
    let steps: Vec<String> = DELAY_STEPS.into_iter().map(format_duration).collect();
    let list = format!("({})", steps.join(" "));
    assert!(Page::read("docs/architecture.md").text.contains(&list), "{list}");
}

#[test]
fn every_path_and_test_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    read_all(&root.join("src"), &mut sources);
    read_all(&root.join("tests"), &mut sources);
    let mut missing = Vec::new();
    for page in Page::all() {
        let links = page.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).map(str::to_owned);
        let folder = Path::new(&page.path).parent().unwrap();
        let linked =
            links.filter(|link| !link.contains("://")).map(|link| folder.join(link.split('#').next().unwrap()));
        let roots = ["src/", "tests/", "docs/", "lua/", "config/", "migrations/"];
        let spans: Vec<String> = page.spans();
        let named = spans.iter().filter(|span| roots.iter().any(|root| span.starts_with(root)));
        let paths: Vec<_> = linked.chain(named.map(|span| Path::new(span).to_owned())).collect();
        missing
            .extend(paths.into_iter().filter(|path| !root.join(path).exists()).map(|path| path.display().to_string()));
        // Names of tests are sentences.
        let is_test = |span: &&String| {
            span.matches('_').count() >= 4
                && span.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
        };
        // A test is a function, or a line of a macro that makes one of it.
        let exists =
            |name: &str| [format!("fn {name}("), format!("    {name}: ")].iter().any(|text| sources.contains(text));
        let tests = spans.iter().filter(is_test).filter(|name| !exists(name));
        missing.extend(tests.map(|name| format!("{}: no test `{name}`", page.path)));
    }
    assert!(missing.is_empty(), "{missing:?}");
}

fn read_all(folder: &Path, into: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_all(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}
