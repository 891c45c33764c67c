//! docs/decision-tables.md against the code: every situation has one row, and the row states the code's decision.

use std::time::Duration;

use sluicegate::domain::backoff::{BackoffPolicy, LookupPolicy, RetryPolicy};
use sluicegate::domain::disposition::lookup::after_lookup;
use sluicegate::domain::disposition::{
    AttemptHistory, Disposition, LOST_HOLDERS_MAX, PauseRequest, PreSend, REFUSED_ALONE_MAX, Refusals, Resend,
    SendObstacle, Transition, after_outcome, before_request,
};
use sluicegate::domain::local_fault::LocalFault;
use sluicegate::domain::outcome::{LookupResult, Outcome, PartialCharge, Refusal, UnknownCause};
use sluicegate::domain::sum::UnsupportedSum;
use sluicegate::domain::unconfirmed::{ConnectionEvidence, judge};

use crate::page::{Page, plain};

const PAGE: &str = "docs/decision-tables.md";
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);
const UNSUPPORTED: Option<UnsupportedSum> = Some(UnsupportedSum::Currency);

/// One situation, in the terms of the table's columns.
struct Situation {
    outcome: &'static str,
    unknown: bool,
    deduplicates: bool,
    asked: bool,
    last: bool,
    too_old: bool,
}

const OUTCOMES: [&str; 18] = [
    "accepted",
    "accepted in part",
    "differs",
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
    "throttled, unconfirmed",
    "busy, unconfirmed",
    "misconfigured, unconfirmed",
    "misconfigured, alone",
    "unbuildable",
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

    /// The cells that match this situation, besides `·`.
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
            "accepted in part" => Outcome::PartlyAccepted(PartialCharge { reference: None, amount: 1 }),
            "differs" => Outcome::Differs { reason: String::new(), reference: None },
            "declined" => Outcome::Declined { reason: String::new() },
            "rejected" => Outcome::Rejected { reason: String::new() },
            "throttled" => Outcome::Throttled { retry_after: Some(second) },
            "busy" => Outcome::Busy { retry_after: Some(second) },
            "misconfigured" | "misconfigured, alone" => Outcome::Misconfigured { status: 401 },
            "unbuildable" => Outcome::LocalFault(LocalFault::Unbuildable(String::new())),
            "not sent" => Outcome::NotSent { cause: String::new() },
            "local fault" => Outcome::LocalFault(LocalFault::ProcessDescriptors),
            "in progress" => Outcome::InProgress { retry_after: None },
            "unknown" => Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None },
            "throttled, unconfirmed" => unconfirmed(Refusal::Throttled { retry_after: Some(second) }),
            "busy, unconfirmed" => unconfirmed(Refusal::Busy { retry_after: Some(second) }),
            "misconfigured, unconfirmed" => unconfirmed(Refusal::Misconfigured { status: 401 }),
            _ => Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(second) },
        };
        let history = AttemptHistory {
            attempts: if self.last { 2 } else { 0 },
            requests: 2,
            lookups: 0,
            resend: Resend::Never,
            unknown: self.unknown,
            age: if self.too_old { HOUR } else { second },
            first_sent_age: self.unknown.then_some(second),
            unknown_age: self.unknown.then_some(second),
            throttle_generation: 1,
            lost_holders: 0,
            probe: false,
            refusals: match self.outcome {
                "misconfigured, alone" => Refusals { all: 3, alone: REFUSED_ALONE_MAX },
                _ => Refusals { all: 1, alone: 1 },
            },
        };
        after_outcome(&outcome, &history, &policy(self.deduplicates.then_some(DAY), self.asked), 0.5)
    }
}

fn unconfirmed(refusal: Refusal) -> Outcome {
    Outcome::Unconfirmed { refusal, status: 401 }
}

fn policy(idempotency_retention: Option<Duration>, asked: bool) -> RetryPolicy {
    let backoff = BackoffPolicy { base: Duration::from_secs(1), max: Duration::from_secs(60) };
    let lookup = asked.then_some(LookupPolicy { give_up_after: HOUR / 2, resend_if_not_found: false });
    RetryPolicy { max_attempts: 3, max_age: HOUR, backoff, idempotency_retention, lookup }
}

/// A decision in the terms of the table: the job's next state, whether an attempt counts, and the scope of a pause.
fn words(decided: &Disposition) -> [&'static str; 3] {
    let pauses = match decided.pause {
        None => "none",
        Some(PauseRequest::Quota { .. }) => "quota",
        Some(PauseRequest::Lane { .. }) => "lane",
        Some(PauseRequest::Claims { .. }) => "claims",
    };
    [becomes(&decided.transition), if decided.counts_attempt { "yes" } else { "no" }, pauses]
}

fn becomes(next: &Transition) -> &'static str {
    match next {
        Transition::Finalize { state, .. } => state.name(),
        Transition::SucceedInPart(_) => "succeeded",
        Transition::Retry { unknown: true, .. } => "unknown",
        Transition::Retry { unknown: false, .. } => "waiting",
    }
}

/// Differences between table and code. Empty if every situation has exactly one row, and that row is the code's
/// decision.
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
        let documented: Vec<&str> = table[row][6..].iter().map(|cell| plain(cell)).collect();
        let decides = words(&situation.decide());
        if documented != decides {
            wrong.push(format!("{cells:?}: the table says {documented:?}, the code {decides:?}"));
        }
    }
    wrong.extend(
        used.iter().zip(table).filter(|(used, _)| !**used).map(|(_, row)| format!("no situation matches: {row:?}")),
    );
    wrong
}

fn decision_table() -> Vec<Vec<String>> {
    Page::read(PAGE).table("## After a charge", "outcome")
}

#[test]
fn decision_table_matches_the_code() {
    let wrong = disagreements(&decision_table());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unconfirmed_table_matches_the_code() {
    let table = Page::read(PAGE).table("### Unconfirmed refusals", "deduplicates");
    let refusal = Refusal::Throttled { retry_after: None };
    let mut met = vec![false; table.len()];
    for deduplicates in [false, true] {
        for (followed, evidence) in [
            ("nothing, or its end", ConnectionEvidence::Silence),
            ("another response", ConnectionEvidence::OtherResponse),
            ("not known: the refusal was cut off", ConnectionEvidence::Unread),
        ] {
            let word = if deduplicates { "yes" } else { "no" };
            let matching = |row: &usize| ["·", word].contains(&&*table[*row][0]) && table[*row][1] == followed;
            let rows: Vec<usize> = (0..table.len()).filter(matching).collect();
            let [row] = rows[..] else { panic!("{followed}, {word}: {} rows", rows.len()) };
            met[row] = true;
            let counts_as = match judge(refusal, 429, deduplicates, evidence) {
                Outcome::Throttled { .. } => "the refusal itself",
                Outcome::Unconfirmed { .. } => "the refusal, unconfirmed",
                Outcome::Unknown { .. } => "unknown",
                other => panic!("{other:?}"),
            };
            assert_eq!(table[row][2], counts_as, "{followed}, {word}");
        }
    }
    assert!(met.iter().all(|met| *met), "{met:?}");
}

#[test]
fn every_cell_of_the_decision_table_counts() {
    let table = decision_table();
    for row in 0..table.len() {
        for (column, other) in [(0, "accepted?"), (6, "`cancelled`"), (7, "maybe"), (8, "all")] {
            let mut changed = table.clone();
            changed[row][column] = other.to_owned();
            assert!(!disagreements(&changed).is_empty(), "row {row}, column {column}");
        }
        let mut fewer = table.clone();
        fewer.remove(row);
        assert!(!disagreements(&fewer).is_empty(), "the table matches without row {row}");
    }
}

#[test]
fn before_request_table_matches_the_code() {
    let table = Page::read(PAGE).table("## Before a request", "situation");
    let second = Duration::from_secs(1);
    let mut met = vec![false; table.len()];
    for unknown in [false, true] {
        let usual = AttemptHistory {
            attempts: 1,
            requests: 1,
            unknown,
            age: 2 * second,
            first_sent_age: Some(second),
            unknown_age: unknown.then_some(second),
            throttle_generation: 1,
            ..AttemptHistory::default()
        };
        let forgotten = AttemptHistory { first_sent_age: Some(DAY / 2), ..usual };
        let exhausted = AttemptHistory { attempts: 3, ..usual };
        let lost = AttemptHistory { lost_holders: LOST_HOLDERS_MAX, ..usual };
        let refused = SendObstacle::of(true, true, UNSUPPORTED);
        let situations = [
            ("5 workers in a row lost the job before a request began", lost, Some(DAY), refused),
            ("a rule `refuse` is set for its account", usual, Some(DAY), refused),
            ("`expires_at` has passed", usual, Some(DAY), SendObstacle::of(false, true, UNSUPPORTED)),
            ("its row cannot express its sum any more", usual, Some(DAY), SendObstacle::of(false, false, UNSUPPORTED)),
            ("older than `max_age_s`", AttemptHistory { age: HOUR + second, ..usual }, Some(DAY), None),
            ("`max_attempts` made", exhausted, Some(DAY), None),
            (
                "`max_attempts` made, and a look-up allowed one more request",
                AttemptHistory { resend: Resend::Granted, ..exhausted },
                Some(DAY),
                None,
            ),
            (
                "`max_attempts` made, and that one more request may have left",
                AttemptHistory { resend: Resend::Used, ..exhausted },
                Some(DAY),
                None,
            ),
            ("sent before, the provider does not deduplicate", usual, None, None),
            ("sent before, half of the retention has passed", forgotten, Some(DAY), None),
            (
                "half of the retention has passed, and a look-up allowed one more request",
                AttemptHistory { resend: Resend::Granted, ..forgotten },
                Some(DAY),
                None,
            ),
            ("sent before, less than half of the retention has passed", usual, Some(DAY), None),
        ];
        for (situation, history, retention, obstacle) in situations {
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
                let next = match before_request(&history, &policy(retention, asked), obstacle) {
                    PreSend::Charge => "charge",
                    PreSend::LookUp => "look-up",
                    PreSend::Transition(next) => becomes(&next),
                };
                assert_eq!(plain(&table[row][column]), next, "{situation}, {word}, {asked}");
            }
        }
    }
    assert!(met.iter().all(|met| *met), "{met:?}");
}

#[test]
fn lookup_table_matches_the_code() {
    let table = Page::read(PAGE).table("## After a look-up", "finding");
    let second = Some(Duration::from_secs(1));
    let text = String::new;
    let part = PartialCharge { reference: None, amount: 1 };
    let unknown = |retry_after| LookupResult::Unknown { cause: UnknownCause::Timeout, retry_after };
    let findings = [
        ("accepted", LookupResult::Accepted { reference: None }, Resend::Never, false),
        ("accepted in part", LookupResult::PartlyAccepted(part), Resend::Never, false),
        ("declined", LookupResult::Declined { reason: text() }, Resend::Never, false),
        ("differs", LookupResult::Differs { reason: text() }, Resend::Never, false),
        ("in progress", LookupResult::InProgress { retry_after: None }, Resend::Never, false),
        ("not found", LookupResult::NotFound, Resend::Never, false),
        ("not found, the row says `resend`", LookupResult::NotFound, Resend::Never, true),
        ("not found, `resend` was used", LookupResult::NotFound, Resend::Used, true),
        ("unclear", LookupResult::Unclear { reason: text() }, Resend::Never, false),
        ("unknown", unknown(None), Resend::Never, false),
        ("unknown, wait named", unknown(second), Resend::Never, false),
        ("throttled", LookupResult::Throttled { retry_after: second }, Resend::Never, false),
        ("busy", LookupResult::Busy { retry_after: second }, Resend::Never, false),
        ("misconfigured", LookupResult::Misconfigured { status: 401 }, Resend::Never, false),
        ("not sent", LookupResult::NotSent { cause: text() }, Resend::Never, false),
        ("local fault", LookupResult::LocalFault(LocalFault::ProcessDescriptors), Resend::Never, false),
    ];
    assert_eq!(table.len(), findings.len());
    for (row, (name, finding, resend, resend_if_not_found)) in table.iter().zip(findings) {
        let mut policy = policy(Some(DAY), true);
        policy.lookup = Some(LookupPolicy { give_up_after: HOUR / 2, resend_if_not_found });
        assert_eq!(row[0], name);
        let mut pauses = Vec::new();
        for (column, unknown_age) in [(1, HOUR / 2 - Duration::from_secs(1)), (2, HOUR / 2)] {
            let history = AttemptHistory {
                attempts: 3,
                requests: 3,
                lookups: 1,
                resend,
                unknown: true,
                age: unknown_age,
                first_sent_age: Some(unknown_age),
                unknown_age: Some(unknown_age),
                throttle_generation: 1,
                lost_holders: 0,
                probe: false,
                refusals: Refusals::default(),
            };
            let judged = after_lookup(&finding, &history, &policy, 0.5);
            let becomes = becomes(&judged.transition);
            let words =
                if judged.grants_resend { format!("`{becomes}`, one more request") } else { format!("`{becomes}`") };
            assert_eq!(row[column], words, "{name}");
            pauses.push(match judged.pause {
                None => "none",
                Some(PauseRequest::Quota { .. }) => "quota",
                Some(PauseRequest::Lane { .. }) => "lane",
                Some(PauseRequest::Claims { .. }) => "claims",
            });
        }
        assert!(pauses.iter().all(|pauses| *pauses == row[3]), "{name}: {pauses:?}");
    }
}
