//! Every crash point with every kind of provider: the worker dies there, another one finishes.

use std::fmt::Write as _;

use futures_util::{StreamExt as _, stream};

use super::cell::{Cell, Kind, Setup, Verdict};

/// Cells under way at once: two processors, and most of a cell is waiting for its limit.
const AT_ONCE: usize = 8;
/// Above the limit, so that the second worker meets what the first had in flight.
const JOBS: u64 = 14;

/// Whether a job on its way at the crash may have been charged, as far as the next worker can know.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doubt {
    No,
    /// It must be asked or judged by a person, though nothing happened.
    Surely,
    /// The provider has charged it.
    Charged,
    /// Depends on who was faster.
    Perhaps,
}

struct Place {
    name: &'static str,
    nth: u32,
    row: &'static str,
    doubt: Doubt,
}

const fn place(name: &'static str, nth: u32, doubt: Doubt) -> Place {
    Place { name, nth, row: "workers = 1", doubt }
}

/// One job at a time is beyond its claim, so at most one is in doubt.
const PLACES: [Place; 13] = [
    place("after_delivery", 3, Doubt::No),
    place("after_claim", 3, Doubt::No),
    place("after_permit", 3, Doubt::No),
    place("after_sending", 3, Doubt::Surely),
    place("request_half_written", 3, Doubt::Surely),
    place("request_unanswered", 3, Doubt::Charged),
    place("after_answer", 3, Doubt::Charged),
    place("after_settle", 2, Doubt::Perhaps),
    place("outcome_commit_unacknowledged", 3, Doubt::Perhaps),
    place("after_outcome", 3, Doubt::No),
    Place { row: "workers = 1\nmode = \"requeue\"", ..place("after_delay_copy", 1, Doubt::Perhaps) },
    place("after_ack", 3, Doubt::Perhaps),
    place("after_event", 1, Doubt::Perhaps),
];

const KINDS: [(&str, Kind); 3] = [("A", Kind::Deduplicates), ("B", Kind::LooksUp), ("C", Kind::Neither)];

const UNKNOWN: &str = "SELECT count(*) FROM attempts WHERE outcome = 'unknown'";

struct Line {
    place: &'static str,
    kind: &'static str,
    review: u64,
    replays: u64,
    verdict: Verdict,
    seconds: f64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_crash_point_with_every_kind_of_provider() {
    let cells = PLACES.iter().flat_map(|place| KINDS.map(|(name, kind)| cell(place, name, kind)));
    let mut lines: Vec<Line> = stream::iter(cells).buffer_unordered(AT_ONCE).collect().await;
    lines.sort_by_key(|line| (PLACES.iter().position(|place| place.name == line.place), line.kind));
    let mut table = String::from("crash point | provider | review | replays | found | s\n");
    for Line { place, kind, review, replays, verdict, seconds } in &lines {
        writeln!(table, "{place} | {kind} | {review} | {replays} | {verdict} | {seconds:.1}").unwrap();
    }
    println!("{table}");
    assert!(lines.iter().all(|line| line.verdict == Verdict::default()), "{table}");
}

async fn cell(place: &'static Place, name: &'static str, kind: Kind) -> Line {
    let begun = std::time::Instant::now();
    let what = place.name;
    let mut cell = Cell::open(what, Setup { row: place.row, ..Setup::of(kind) }).await;
    cell.publish(JOBS).await;
    let doomed = cell.worker(&[("CRASH_AT", &format!("{what}:{}", place.nth))]).await;
    doomed.dies().await;
    assert!(doomed.log().contains(what), "{}", doomed.log());
    cell.leases_run_out().await;
    let heir = cell.worker(&[]).await;
    cell.settled(&heir).await;
    let log = heir.stop().await;
    assert!(log.contains("redelivered=true"), "{what} {name}: nothing came back\n{log}");
    let states = cell.states().await;
    let review = states.get("review").copied().unwrap_or(0);
    let report = cell.fake.report();
    match (kind, place.doubt) {
        (Kind::Neither, Doubt::Surely | Doubt::Charged) => assert_eq!(review, 1, "{what} {name}"),
        (Kind::Neither, Doubt::Perhaps) => assert!(review <= 1, "{what} {name}: {review} in review"),
        _ => assert_eq!(review, 0, "{what} {name}"),
    }
    if (kind, place.doubt) == (Kind::Deduplicates, Doubt::Charged) {
        assert_eq!(report.replays, 1, "{what} {name}: the same key again");
    }
    if matches!(place.doubt, Doubt::Surely | Doubt::Charged) {
        assert_eq!(cell.count(UNKNOWN).await, 1, "{what} {name}: unknown attempts");
    }
    // Half a request is one that the provider counts; it is made again.
    let seen_twice = u64::from(place.doubt != Doubt::No) + u64::from(what == "request_half_written");
    assert!(report.requests <= JOBS + seen_twice, "{what} {name}: {} requests", report.requests);
    let verdict = cell.verdict().await;
    Line { place: what, kind: name, review, replays: report.replays, verdict, seconds: begun.elapsed().as_secs_f64() }
}
