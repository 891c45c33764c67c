//! The headers of the library's parts: they describe arguments, replies and stored state to the byte.

mod codes;
mod header;
mod numbers;
mod server;

use std::path::Path;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use sluicegate::domain::limit::{Algorithm, Scope};
use sluicegate::domain::permit_protocol::{
    CallKind, CostByKind, CounterSeeds, LimiterCall, LimiterRefusal, LimiterReply, PastUse, PermitGrant, PermitRelease,
    PermitRequest, RebuildData, RefusalReason, ReleaseKind, Shortage, SkippedRequest, Subject, SubjectHistory,
    UsageHistory,
};
use sluicegate::domain::provider::{BOOKING_HORIZON, Pacing, ProviderName, StoreDown};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::domain::time::Micros;
use sluicegate::limiter::redis::decode::decode_reply;
use sluicegate::limiter::redis::encode::encode_call;
use sluicegate::limiter::redis::keys::call_keys;
use sluicegate::limiter::redis::library::SOURCE;

use header::{Group, Header};

const QUOTA: &str = include_str!("../../lua/quota.lua");
const PEEK: &str = include_str!("../../lua/peek.lua");
const PARTS: [(&str, &str); 7] = [
    ("first", include_str!("../../lua/log.lua")),
    ("second", include_str!("../../lua/cells.lua")),
    ("third", include_str!("../../lua/tallies.lua")),
    ("fourth", include_str!("../../lua/grants.lua")),
    ("fifth", include_str!("../../lua/known.lua")),
    ("sixth", QUOTA),
    ("seventh", PEEK),
];

/// A quota with one limit: 100 per second for the provider.
fn spec() -> QuotaSpec {
    QuotaSpec {
        quota: ProviderName::new("quota").unwrap(),
        version: 7,
        limits: vec![LimitSpec::sliding_log("per-second", 100, Duration::from_secs(1))],
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_millis(10_500),
        send_budget: Duration::from_millis(500),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::from_millis(40),
    }
}

/// The same with a calendar minute from its 5th second, ten per account and hour, and even pacing.
fn spec_of_all_kinds() -> QuotaSpec {
    let minute = LimitSpec::sliding_log("minute", 600, Duration::from_secs(60));
    let minute = LimitSpec { algorithm: Algorithm::FixedWindow, offset: Duration::from_secs(5), ..minute };
    let mine = LimitSpec::sliding_log("mine", 10, Duration::from_secs(3_600));
    let mine = LimitSpec { scope: Scope::Account, algorithm: Algorithm::SlidingWindow, ..mine };
    let limits = [vec![mine, minute], spec().limits].concat();
    let members = ["one", "two"].map(|name| ProviderName::new(name).unwrap()).to_vec();
    QuotaSpec { members, limits, pacing: Some(Pacing::Even), grant_jitter: Some(Duration::from_millis(50)), ..spec() }
}

fn call(wants: Vec<PermitRequest>, releases: Vec<PermitRelease>) -> LimiterCall {
    LimiterCall {
        incarnation: 5,
        number: 3,
        requests: wants,
        releases,
        pause: None,
        rebuild: None,
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: "run".to_owned(),
    }
}

fn digest(text: &[u8]) -> u64 {
    Sha256::digest(text).iter().take(8).rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// An argument, parsed by the header: every field except the digests, which are compared.
struct Reading<'a> {
    groups: Vec<Group>,
    left: &'a [u8],
    lines: Vec<String>,
}

impl Reading<'_> {
    fn take(&mut self, name: &str) -> Vec<(String, u64)> {
        let group = self.groups.iter().find(|group| group.name == name).unwrap_or_else(|| panic!("no {name}"));
        let values = group.read(&mut self.left);
        let shown = values.iter().filter(|(field, _)| !field.ends_with("digest"));
        let shown: Vec<String> = shown.map(|(field, value)| format!("{field} {value}")).collect();
        self.lines.push(format!("{name}: {}", shown.join(", ")));
        values
    }

    fn names_and_cells(&mut self, names: u64, cells: u64) {
        let (names, rest) = self.left.split_at(usize::try_from(names).unwrap());
        self.lines.push(format!("names {}", String::from_utf8_lossy(names)));
        self.left = rest;
        (0..cells).for_each(|_| drop(self.take("cell")));
    }
}

fn field(values: &[(String, u64)], name: &str) -> u64 {
    values.iter().find(|(field, _)| field == name).unwrap_or_else(|| panic!("no {name}")).1
}

/// The fields of an argument, by the header.
fn read(argument: &[u8], run_id: &str) -> Vec<String> {
    let mut reading = Reading { groups: Header::of(QUOTA).groups("ARGV"), left: argument, lines: Vec::new() };
    let head = reading.take("head");
    let before = reading.left;
    let terms = reading.take("terms");
    let (members, rest) = reading.left.split_at(usize::try_from(8 * field(&terms, "members")).unwrap());
    reading.lines.push(format!("{} members", members.len() / 8));
    reading.left = rest;
    reading.names_and_cells(field(&terms, "bytes of names"), field(&terms, "cells"));
    let bytes = before.len() - reading.left.len();
    assert_eq!(field(&head, "bytes of terms"), u64::try_from(bytes).unwrap());
    assert_eq!(field(&head, "terms digest"), digest(&before[..bytes]));
    assert_eq!(field(&head, "run id digest"), digest(format!("{run_id}/layout3").as_bytes()));
    let more = if field(&head, "more") == 1 { reading.take("more") } else { Vec::new() };
    let of_more = |name: &str| if more.is_empty() { 0 } else { field(&more, name) };
    (0..field(&head, "wants")).for_each(|_| drop(reading.take("want")));
    let unused = *Header::of(QUOTA).codes("CODES", "release kind").get("unused").unwrap();
    let mut returned = 0;
    for _ in 0..field(&head, "releases") {
        if field(&reading.take("release"), "release kind") == unused {
            (0..field(&terms, "cells")).for_each(|_| drop(reading.take("origin")));
            returned += 1;
        }
    }
    assert_eq!(field(&head, "of them unused"), returned);
    (0..of_more("past uses")).for_each(|_| drop(reading.take("past use")));
    let before = reading.left.len();
    for _ in 0..of_more("seeds") {
        let uses = field(&reading.take("seed"), "past uses");
        (0..uses).for_each(|_| drop(reading.take("past use")));
    }
    assert_eq!(of_more("bytes of seeds"), u64::try_from(before - reading.left.len()).unwrap());
    for _ in 0..field(&head, "subjects") {
        let subject = reading.take("subject");
        let before = reading.left;
        reading.names_and_cells(field(&subject, "bytes of names"), field(&subject, "cells"));
        let of_scope = ["longest of accounts", "longest of references"][usize::from(field(&subject, "scope") == 2)];
        let longest = ["longest hold", of_scope].map(|name| field(&terms, name).to_le_bytes());
        let limits = [&before[..before.len() - reading.left.len()], &longest[0][..6], &longest[1][..6]].concat();
        assert_eq!(field(&subject, "limits digest"), digest(&limits));
    }
    assert!(reading.left.is_empty(), "{} bytes are not in the header", reading.left.len());
    reading.lines
}

#[test]
fn call_packing_matches_the_header() {
    let want = PermitRequest { permits: 2, cost: 3, ..PermitRequest::charges(1, 1) };
    let used = PermitRelease {
        call: 2,
        cost: 4,
        kind: CallKind::Lookup,
        subjects: Vec::new(),
        release_kind: ReleaseKind::Used { age: Duration::from_micros(900) },
    };
    let unused = PermitRelease {
        call: 1,
        release_kind: ReleaseKind::Unused { origins: vec![1_700_000_000_001] },
        ..used.clone()
    };
    assert_eq!(
        read(&encode_call(&spec(), &call(vec![want], vec![used, unused])), "run"),
        [
            "head: incarnation 5, number 3, bytes of terms 109, wants 1, releases 2, of them unused 1, subjects 0, booked ahead at most 250000, more 0",
            // Cold start: a padded window, the longest hold, the booking horizon and the handover.
            "terms: version 7, grant jitter 0, longest hold 10500000, booking horizon 250000, send budget 500000, \
             longest window 1002500, cold after a loss 11792500, until all have noticed 40000, resumed at 0, longest of accounts 0, \
             longest of references 0, members 0, cells 1, bytes of names 10",
            "0 members",
            "names per-second",
            "cell: kind 0, applies 0, mode 1, window 1002500, offset or interval 0, granule in ms 1, max 100, \
             index in the spec 0",
            "want: permits 2, cost 3, kind 1, subjects 0, first subject 0, second subject 0",
            "release: call 2, cost 4, kind 2, release kind 0, subjects 0, first subject 0, second subject 0, age 900",
            "release: call 1, cost 4, kind 2, release kind 1, subjects 0, first subject 0, second subject 0, age 0",
            "origin: instant in ms 1700000000001",
        ]
    );
}

#[test]
fn full_call_packing_matches_the_header() {
    let spec = spec_of_all_kinds();
    let [a, b] = ["a", "b"].map(|account| spec.subjects(Some(account), None).unwrap());
    let want = |subjects: &[Subject]| PermitRequest { subjects: subjects.to_vec(), ..PermitRequest::charges(1, 1) };
    let past = |millis, charges, lookups| PastUse {
        age: Duration::from_millis(millis),
        cost: CostByKind { charges, lookups },
    };
    let rebuild = RebuildData {
        state_epoch: Micros(9),
        ended: vec![past(5, 1, 4), past(70, 2, 0)],
        in_flight: CostByKind { charges: 8, lookups: 6 },
    };
    let history = |ended| UsageHistory {
        as_of: Micros(7),
        within: Duration::from_secs(3),
        ended,
        in_flight: CostByKind::charges(5),
    };
    let subjects = vec![SubjectHistory { subject: a[0].clone(), history: history(vec![past(5, 1, 4)]) }];
    let seeds = CounterSeeds { state_epoch: Micros(9), provider: Some(history(Vec::new())), subjects };
    let release = PermitRelease {
        call: 2,
        cost: 1,
        kind: CallKind::Charge,
        subjects: b.clone(),
        release_kind: ReleaseKind::Used { age: Duration::ZERO },
    };
    let call = LimiterCall {
        pause: Some(Duration::from_secs(2)),
        seeds: Some(seeds),
        invalidate_epoch: Some(Micros(11)),
        rebuild: Some(rebuild),
        ..call(vec![want(&a), want(&[]), want(&b)], vec![release])
    };
    let sent = read(&encode_call(&spec, &call), "run");
    let mine = "cell: kind 0, applies 0, mode 0, window 3601802000, offset or interval 0, granule in ms 14063, max 10, \
                index in the spec 0";
    assert_eq!(
        sent[1..],
        [
            "terms: version 7, grant jitter 50000, longest hold 10500000, booking horizon 250000, send budget 500000, \
             longest window 3601802000, cold after a loss 3612592000, until all have noticed 40000, resumed at 0, \
             longest of accounts 3601802000, longest of references 0, members 2, cells 3, bytes of names 31",
            "2 members",
            "names minute|per-second|start spacing",
            "cell: kind 1, applies 0, mode 0, window 60000000, offset or interval 5000000, granule in ms 0, max 600, \
             index in the spec 1",
            "cell: kind 0, applies 0, mode 0, window 1002500, offset or interval 0, granule in ms 1, max 100, \
             index in the spec 2",
            // Starts 100 ms apart, in 1/1024 microseconds.
            "cell: kind 2, applies 0, mode 3, window 100000, offset or interval 102400000, granule in ms 0, max 1, \
             index in the spec 3",
            "more: pause 2000000, distrusted born 11, rebuilt born 9, past uses 2, open charges 8, open lookups 6, \
             seeded born 9, seeds 2, bytes of seeds 66",
            "want: permits 1, cost 1, kind 1, subjects 1, first subject 1, second subject 0",
            "want: permits 1, cost 1, kind 1, subjects 0, first subject 0, second subject 0",
            "want: permits 1, cost 1, kind 1, subjects 1, first subject 2, second subject 0",
            "release: call 2, cost 1, kind 1, release kind 0, subjects 1, first subject 2, second subject 0, age 0",
            "past use: age 70000, cost of charges 2, of lookups 0",
            "past use: age 5000, cost of charges 1, of lookups 4",
            "seed: subject 0, as of 7, within 3000000, open charges 5, open lookups 0, past uses 0",
            "seed: subject 1, as of 7, within 3000000, open charges 5, open lookups 0, past uses 1",
            "past use: age 5000, cost of charges 1, of lookups 4",
            "subject: scope 1, bytes of names 4, cells 1",
            "names mine",
            mine,
            "subject: scope 1, bytes of names 4, cells 1",
            "names mine",
            mine,
        ]
    );
}

#[test]
fn reply_parsing_matches_the_header() {
    let groups = Header::of(QUOTA).groups("REPLY");
    let write = |name: &str, values: &[(&str, u64)]| {
        let group = groups.iter().find(|group| group.name == name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(group.fields.len(), values.len(), "{name}");
        group.write(|field| values.iter().find(|(known, _)| *known == field).unwrap_or_else(|| panic!("{field}?")).1)
    };
    let origin = |ms: u64| {
        let groups = Header::of(QUOTA).groups("ARGV");
        groups.into_iter().find(|group| group.name == "origin").unwrap().write(|_| ms)
    };
    let answer = [
        write(
            "reply",
            &[
                ("refusal", 1),
                ("exact", 1),
                ("index of the limit", 2),
                ("wait", 900),
                ("now", 50),
                ("newest version", 7),
                ("born", 3),
                ("calls", 6),
                ("previous call", 5),
                ("remaining", 4),
                ("deciding limit", 1),
                ("reset", 8),
                ("readable", 0),
                ("runs", 1),
                ("passed over", 1),
            ],
        ),
        write("run", &[("want", 1), ("permits", 6), ("wait", 12)]),
        origin(21),
        origin(22),
        write("passed over", &[("want", 0), ("limit", 1), ("wait", 13), ("exact", 1), ("readable", 15)]),
    ]
    .concat();
    let reply = LimiterReply {
        now: Micros(50),
        version: 7,
        state_epoch: Micros(3),
        calls: 6,
        previous_call: 5,
        grants: vec![PermitGrant { request_index: 1, permits: 6, wait_us: 12, origins: vec![21, 22] }],
        skipped: vec![SkippedRequest {
            request_index: 0,
            limit: 1,
            wait_us: 13,
            exact: true,
            shortage: Shortage::NeedsHistory { readable_in_us: 14 },
        }],
        remaining: 4,
        deciding_limit: 1,
        reset_us: 8,
        refused: Some(LimiterRefusal { reason: RefusalReason::Limit { index: 2 }, wait_us: 900, exact: true }),
    };
    assert_eq!(decode_reply(&answer, 2, 2, 2), Ok(reply));
    assert!(decode_reply(&answer[..answer.len() - 1], 2, 2, 2).is_err());
}

#[test]
fn keys_match_the_header() {
    let spec = spec_of_all_kinds();
    let subjects = spec.subjects(Some("a_1"), None).unwrap();
    let cells: Vec<String> = spec.provider_counters().into_iter().map(|cell| cell.name).collect();
    let own: Vec<String> = subjects.iter().map(|subject| subject.key.clone()).collect();
    let keys = Header::of(QUOTA).part("KEYS");
    let patterns = keys.lines().filter_map(|line| line.strip_prefix("   ")?.split_whitespace().next());
    let expected: Vec<String> = patterns
        .flat_map(|pattern| match (pattern.contains("CELL"), pattern.contains("SUBJECT")) {
            (true, _) => cells.iter().map(|cell| pattern.replace("CELL", cell)).collect(),
            (_, true) => own.iter().map(|key| pattern.replace("SUBJECT", key)).collect(),
            _ => vec![pattern.to_owned()],
        })
        .collect();
    let want = PermitRequest { subjects, ..PermitRequest::charges(1, 1) };
    assert_eq!(call_keys("prefix", &spec, &call(vec![want], Vec::new())), expected);
    assert!(expected.len() > 4 && keys.contains("{quota}"), "{keys}");
}

#[test]
fn every_header_layout_exists_in_the_code() {
    let code: Vec<&str> = SOURCE.lines().filter(|line| !line.starts_with("--")).collect();
    let code = code.join("\n");
    let mut layouts = 0;
    for (_, part) in PARTS {
        let header = Header::of(part);
        let with = ["ARGV", "REPLY", "HASH", "FORMAT"].into_iter().filter(|name| {
            part.contains(&format!("\n-- {name}  packed"))
                || (*name == "ARGV" && header.text.contains("ARGV  one argument"))
        });
        for group in with.flat_map(|name| header.groups(name)) {
            assert!(code.contains(&format!("'{}'", group.format())), "{}: {}", group.name, group.format());
            layouts += 1;
        }
    }
    assert_eq!(layouts, 10 + 3 + 11 + 2);
}

#[test]
fn headers_name_existing_parts_and_files() {
    let mut before = 0;
    for (place, part) in PARTS {
        let header = Header::of(part).text.replace("\n ", " ").replace("\n", " ");
        assert!(header.contains(&format!("the {place} part of the")), "{place}: {header}");
        let at = SOURCE.find(part).unwrap_or_else(|| panic!("the {place} part is not in the library"));
        assert!(at >= before, "{place}");
        before = at;
        let paths: Vec<String> = header
            .split([' ', ';'])
            .filter(|word| word.starts_with("src/") || word.starts_with("tests/"))
            .flat_map(|word| spelled_out(word.trim_end_matches(['.', ','])))
            .collect();
        let missing: Vec<&String> =
            paths.iter().filter(|path| !Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists()).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}

/// Expands `a/{b,c}.rs` to two paths.
fn spelled_out(path: &str) -> Vec<String> {
    let parts = path.split_once('{').and_then(|(folder, rest)| Some((folder, rest.split_once('}')?)));
    let Some((folder, (names, ending))) = parts else { return vec![path.to_owned()] };
    names.split(',').map(|name| format!("{folder}{name}{ending}")).collect()
}
