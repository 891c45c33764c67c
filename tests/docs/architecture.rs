//! The decision table, the delay steps, the folders and the tests that the documentation names are those of the code.

use std::path::Path;
use std::time::Duration;

use sluicegate::domain::backoff::BackoffPolicy;
use sluicegate::domain::disposition::finding::after_finding;
use sluicegate::domain::disposition::{
    AskPolicy, Disposition, History, LOST_HOLDERS_MAX, Next, Pause, Resend, RetryPolicy, Step, after_outcome,
    before_request,
};
use sluicegate::domain::local_fault::LocalFault;
use sluicegate::domain::lookup::Finding;
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
    asked: bool,
    last: bool,
    too_old: bool,
}

const OUTCOMES: [&str; 11] = [
    "accepted",
    "declined",
    "rejected",
    "throttled",
    "busy",
    "misconfigured",
    "not sent",
    "local fault",
    "in progress",
    "unknown",
    "unknown, wait named",
];

impl Situation {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for outcome in OUTCOMES {
            for bits in 0..32_u8 {
                let bit = |n: u8| bits & (1 << n) != 0;
                let (unknown, deduplicates, asked, last, too_old) = (bit(0), bit(1), bit(2), bit(3), bit(4));
                all.push(Self { outcome, unknown, deduplicates, asked, last, too_old });
            }
        }
        all
    }

    /// The cells of the table that match this situation, beside `·`.
    fn cells(&self) -> [&'static str; 6] {
        let word = |which: bool, yes, no| if which { yes } else { no };
        [
            self.outcome,
            word(self.unknown, "yes", "no"),
            word(self.deduplicates, "yes", "no"),
            word(self.asked, "yes", "no"),
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
            "local fault" => Outcome::LocalFault(LocalFault::ProcessDescriptors),
            "in progress" => Outcome::InProgress,
            "unknown" => Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None },
            _ => Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(second) },
        };
        let history = History {
            attempts: if self.last { 2 } else { 0 },
            requests: 2,
            lookups: 0,
            resend: Resend::Never,
            unknown: self.unknown,
            age: if self.too_old { HOUR } else { second },
            first_sent_age: self.unknown.then_some(second),
            unknown_age: self.unknown.then_some(second),
            refusal_round: 1,
            lost_holders: 0,
            probe: false,
        };
        after_outcome(&outcome, &history, &policy(self.deduplicates.then_some(DAY), self.asked), 0.5)
    }
}

fn policy(idempotency_retention: Option<Duration>, asked: bool) -> RetryPolicy {
    let backoff = BackoffPolicy { base: Duration::from_secs(1), max: Duration::from_secs(60) };
    let lookup = asked.then_some(AskPolicy { give_up_after: HOUR / 2, resend_if_not_found: false });
    RetryPolicy { max_attempts: 3, max_age: HOUR, backoff, idempotency_retention, lookup }
}

/// A decision in the words of the table: what the job becomes, whether an attempt counts, who pauses.
fn words(decided: &Disposition) -> [&'static str; 3] {
    let pauses = match decided.pause {
        None => "nobody",
        Some(Pause::Quota { .. }) => "quota",
        Some(Pause::Lane { .. }) => "lane",
        Some(Pause::Intake { .. }) => "intake",
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
        let says: Vec<&str> = table[row][6..].iter().map(|cell| plain(cell)).collect();
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
        for (column, other) in [(0, "accepted?"), (6, "`cancelled`"), (7, "maybe"), (8, "everybody")] {
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
fn the_second_table_is_what_is_sent_next() {
    let table = Page::read("docs/architecture.md").table("## The decision table", "situation");
    let second = Duration::from_secs(1);
    let mut met = vec![false; table.len()];
    for unknown in [false, true] {
        let usual = History {
            attempts: 1,
            requests: 1,
            lookups: 0,
            resend: Resend::Never,
            unknown,
            age: 2 * second,
            first_sent_age: Some(second),
            unknown_age: unknown.then_some(second),
            refusal_round: 1,
            lost_holders: 0,
            probe: false,
        };
        let forgotten = History { first_sent_age: Some(DAY / 2), ..usual };
        let exhausted = History { attempts: 3, ..usual };
        let lost = History { lost_holders: LOST_HOLDERS_MAX, ..usual };
        let situations = [
            ("5 workers in a row were lost with it in hand, and none began a request", lost, Some(DAY), true),
            ("`expires_at` has passed", usual, Some(DAY), true),
            ("older than `max_age_s`", History { age: HOUR + second, ..usual }, Some(DAY), false),
            ("`max_attempts` made", exhausted, Some(DAY), false),
            (
                "the same, and a look-up has allowed one more request",
                History { resend: Resend::Granted, ..exhausted },
                Some(DAY),
                false,
            ),
            (
                "the same, and that request may have left",
                History { resend: Resend::Used, ..exhausted },
                Some(DAY),
                false,
            ),
            ("sent before, the provider does not deduplicate", usual, None, false),
            ("sent before, half of the retention has passed", forgotten, Some(DAY), false),
            (
                "the same, though a look-up has allowed one more request",
                History { resend: Resend::Granted, ..forgotten },
                Some(DAY),
                false,
            ),
            ("sent before, the provider surely remembers", usual, Some(DAY), false),
        ];
        for (situation, history, retention, expired) in situations {
            // Only a job of unknown outcome is ever looked up.
            if history.resend != Resend::Never && !unknown {
                continue;
            }
            let word = if unknown { "yes" } else { "no" };
            let matching = |row: &usize| table[*row][0] == situation && ["·", word].contains(&&*table[*row][1]);
            let rows: Vec<usize> = (0..table.len()).filter(matching).collect();
            let [row] = rows[..] else { panic!("{situation}, {word}: {} rows", rows.len()) };
            met[row] = true;
            for (asked, column) in [(false, 2), (true, 3)] {
                let next = match before_request(&history, &policy(retention, asked), expired) {
                    Step::Charge => "charge",
                    Step::Ask => "look-up",
                    Step::Put(next) => becomes(&next),
                };
                assert_eq!(plain(&table[row][column]), next, "{situation}, {word}, {asked}");
            }
        }
    }
    assert!(met.iter().all(|met| *met), "{met:?}");
}

#[test]
fn the_third_table_is_what_follows_from_a_lookup() {
    let table = Page::read("docs/architecture.md").table("## The decision table", "finding");
    let second = Some(Duration::from_secs(1));
    let text = String::new;
    let unknown = |retry_after| Finding::Unknown { cause: UnknownCause::Timeout, retry_after };
    let findings = [
        ("accepted", Finding::Accepted { reference: None }, Resend::Never, false),
        ("declined", Finding::Declined { reason: text() }, Resend::Never, false),
        ("differs", Finding::Differs { reason: text() }, Resend::Never, false),
        ("in progress", Finding::InProgress, Resend::Never, false),
        ("not found", Finding::NotFound, Resend::Never, false),
        ("not found, the row says `resend`", Finding::NotFound, Resend::Never, true),
        ("not found, `resend` was used", Finding::NotFound, Resend::Used, true),
        ("unclear", Finding::Unclear { reason: text() }, Resend::Never, false),
        ("unknown", unknown(None), Resend::Never, false),
        ("unknown, wait named", unknown(second), Resend::Never, false),
        ("throttled", Finding::Throttled { retry_after: second }, Resend::Never, false),
        ("busy", Finding::Busy { retry_after: second }, Resend::Never, false),
        ("misconfigured", Finding::Misconfigured { status: 401 }, Resend::Never, false),
        ("not sent", Finding::NotSent { cause: text() }, Resend::Never, false),
        ("local fault", Finding::LocalFault(LocalFault::ProcessDescriptors), Resend::Never, false),
    ];
    assert_eq!(table.len(), findings.len());
    for (row, (name, finding, resend, resend_if_not_found)) in table.iter().zip(findings) {
        let mut policy = policy(Some(DAY), true);
        policy.lookup = Some(AskPolicy { give_up_after: HOUR / 2, resend_if_not_found });
        assert_eq!(row[0], name);
        let mut pauses = Vec::new();
        for (column, unknown_age) in [(1, HOUR / 2 - Duration::from_secs(1)), (2, HOUR / 2)] {
            let history = History {
                attempts: 3,
                requests: 3,
                lookups: 1,
                resend,
                unknown: true,
                age: unknown_age,
                first_sent_age: Some(unknown_age),
                unknown_age: Some(unknown_age),
                refusal_round: 1,
                lost_holders: 0,
                probe: false,
            };
            let judged = after_finding(&finding, &history, &policy, 0.5);
            let becomes = becomes(&judged.next);
            let words =
                if judged.grants_resend { format!("`{becomes}`, one more request") } else { format!("`{becomes}`") };
            assert_eq!(row[column], words, "{name}");
            pauses.push(match judged.pause {
                None => "nobody",
                Some(Pause::Quota { .. }) => "quota",
                Some(Pause::Lane { .. }) => "lane",
                Some(Pause::Intake { .. }) => "intake",
            });
        }
        assert!(pauses.iter().all(|pauses| *pauses == row[3]), "{name}: {pauses:?}");
    }
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
        let roots = ["src/", "tests/", "docs/", "lua/", "config/", "deploy/", "migrations/"];
        let spans: Vec<String> = page.spans();
        let named = spans.iter().filter(|span| roots.iter().any(|root| span.starts_with(root)));
        let paths: Vec<_> = linked.chain(named.map(|span| Path::new(span).to_owned())).collect();
        missing
            .extend(paths.into_iter().filter(|path| !root.join(path).exists()).map(|path| path.display().to_string()));
        // Names of tests are sentences.
        let is_test = |span: &&String| {
            span.matches('_').count() >= 4
                && !span.starts_with("sluicegate_")
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
