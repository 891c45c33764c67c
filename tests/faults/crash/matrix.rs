//! The crash matrix: every crash point with every kind of provider. One worker crashes there, and another one finishes
//! the jobs.

use std::fmt::Write as _;

use futures_util::{StreamExt as _, stream};
use sluicegate::provider::simulated::FakeOptions;

use super::cell::{Cell, Kind, Setup};
use super::verdict::Verdict;

/// Concurrent cells. There are two processors, and a cell mostly waits for its limit.
const AT_ONCE: usize = 8;
/// More jobs than the limit allows at once, so that the second worker meets requests of the first in the window.
const JOBS: u64 = 14;

/// Whether the job in progress at the crash may have been charged, as far as the next worker can know.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doubt {
    No,
    /// The provider has not charged it. Only a provider that deduplicates may be sent the request again.
    Uncharged,
    /// The provider has charged it.
    Charged,
    /// Depends on timing.
    Perhaps,
}

struct Place {
    name: &'static str,
    nth: u32,
    row: &'static str,
    doubt: Doubt,
    /// Share of charges whose response is dropped.
    lost_answers: f64,
}

const fn place(name: &'static str, nth: u32, doubt: Doubt) -> Place {
    Place { name, nth, row: "workers = 1", doubt, lost_answers: 0.0 }
}

/// All payments are of one account.
const ACCOUNT_AT_ITS_LIMIT: &str = "workers = 1\n[[provider.limit]]\nname = \"per-account\"\nscope = \"account\"\n\
                                    max_requests = 2\nwindow_ms = 400";

/// With one worker slot, one job at a time is past its claim. So at most one outcome is unknown.
const PLACES: [Place; 16] = [
    place("after_delivery", 3, Doubt::No),
    Place { row: ACCOUNT_AT_ITS_LIMIT, ..place("after_backlog_record", 1, Doubt::Perhaps) },
    Place { row: ACCOUNT_AT_ITS_LIMIT, ..place("after_backlog_return", 1, Doubt::Perhaps) },
    Place { row: ACCOUNT_AT_ITS_LIMIT, ..place("after_backlog_claim", 2, Doubt::Perhaps) },
    place("after_permit", 3, Doubt::No),
    place("after_sending", 3, Doubt::Uncharged),
    place("request_half_written", 3, Doubt::Uncharged),
    place("request_unanswered", 3, Doubt::Charged),
    place("after_answer", 3, Doubt::Charged),
    Place { lost_answers: 0.4, ..place("after_lookup", 1, Doubt::No) },
    place("after_settle", 2, Doubt::Perhaps),
    place("outcome_commit_unacknowledged", 3, Doubt::Perhaps),
    place("after_outcome", 3, Doubt::No),
    Place { lost_answers: 0.4, ..place("after_wake", 1, Doubt::Perhaps) },
    place("after_ack", 3, Doubt::Perhaps),
    place("after_event", 1, Doubt::Perhaps),
];

const KINDS: [(&str, Kind); 3] = [("A", Kind::Deduplicates), ("B", Kind::LooksUp), ("C", Kind::Neither)];

impl Place {
    /// Kinds of providers with which a worker reaches this point.
    fn kinds(&'static self) -> impl Iterator<Item = (&'static str, Kind)> {
        KINDS.into_iter().filter(|(_, kind)| match self.name {
            // Payments whose response is lost sleep until their look-up.
            "after_lookup" | "after_wake" => *kind == Kind::LooksUp,
            _ => true,
        })
    }

    /// Payments that go to manual review: least and most.
    fn review(&self, kind: Kind) -> (u64, u64) {
        match (kind, self.doubt) {
            (Kind::Deduplicates, _) | (_, Doubt::No) | (Kind::LooksUp, Doubt::Charged) => (0, 0),
            (_, Doubt::Perhaps) => (0, 1),
            (_, Doubt::Uncharged | Doubt::Charged) => (1, 1),
        }
    }
}

const REVIEWED: &str = "SELECT reason FROM jobs WHERE state = 'review'";
const UNKNOWN: &str = "SELECT count(*) FROM attempts WHERE outcome = 'unknown'";

struct Line {
    place: &'static str,
    kind: &'static str,
    review: u64,
    replays: u64,
    lookups: u64,
    verdict: Verdict,
    seconds: f64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_crash_point_with_every_kind_of_provider() {
    let cells = PLACES.iter().flat_map(|place| place.kinds().map(move |(name, kind)| cell(place, name, kind)));
    let mut lines: Vec<Line> = stream::iter(cells).buffer_unordered(AT_ONCE).collect().await;
    lines.sort_by_key(|line| (PLACES.iter().position(|place| place.name == line.place), line.kind));
    let mut table = String::from("crash point | provider | review | replays | look-ups | found | s\n");
    for Line { place, kind, review, replays, lookups, verdict, seconds } in &lines {
        writeln!(table, "{place} | {kind} | {review} | {replays} | {lookups} | {verdict} | {seconds:.1}").unwrap();
    }
    println!("{table}");
    assert!(lines.iter().all(|line| line.verdict == Verdict::default()), "{table}");
}

async fn cell(place: &'static Place, name: &'static str, kind: Kind) -> Line {
    let begun = std::time::Instant::now();
    let what = place.name;
    let setup = Setup::of(kind);
    let fake = FakeOptions { lost_answer_rate: place.lost_answers, ..setup.fake };
    let mut cell = Cell::open(what, Setup { row: place.row, fake, ..setup }).await;
    cell.publish(JOBS).await;
    let crash_at = format!("{what}:{}", place.nth);
    let doomed = cell.worker(Some(&crash_at)).await;
    cell.crashes(&doomed, &crash_at).await;
    assert!(doomed.log().contains(what), "{}", doomed.log());
    cell.leases_run_out().await;
    let heir = cell.worker(None).await;
    cell.until_finished(&heir).await;
    let log = heir.stop().await;
    // The message of a recorded job is acknowledged.
    let is_unrecorded = ["after_delivery", "after_backlog_record"].contains(&what);
    assert!(!is_unrecorded || log.contains("redelivered=true"), "{what} {name}: no message was redelivered\n{log}");
    let reasons: Vec<String> = sqlx::query_scalar(REVIEWED).fetch_all(&cell.ledger).await.unwrap();
    let (review, (least, most)) = (reasons.len() as u64, place.review(kind));
    assert!((least..=most).contains(&review), "{what} {name}: {reasons:?}");
    let report = cell.fake.report();
    let charged = place.doubt == Doubt::Charged;
    assert!(!charged || kind != Kind::Deduplicates || report.replays == 1, "{what} {name}: replays of the same key");
    assert!(!charged || kind != Kind::LooksUp || report.lookups >= 1, "{what} {name}: no look-up");
    if matches!(place.doubt, Doubt::Uncharged | Doubt::Charged) {
        assert_eq!(cell.count(UNKNOWN).await, 1, "{what} {name}: unknown attempts");
    }
    // The provider counts half a request too, and the worker sends the request again.
    let seen_twice = u64::from(place.doubt != Doubt::No) + u64::from(what == "request_half_written");
    let charges = report.requests - report.lookups;
    assert!(charges <= JOBS + seen_twice, "{what} {name}: {charges} requests");
    let (replays, lookups) = (report.replays, report.lookups);
    let (verdict, seconds) = (cell.verdict().await, begun.elapsed().as_secs_f64());
    Line { place: what, kind: name, review, replays, lookups, verdict, seconds }
}
