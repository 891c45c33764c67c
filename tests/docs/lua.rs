//! The headers of the scripts say what the client sends and what it reads.

use std::time::Duration;

use sluicegate::domain::decision::{Call, Fate, LimitSpec, QuotaSpec, Refusal, Settlement};
use sluicegate::domain::provider::ProviderName;
use sluicegate::limiter::redis::keys::call_keys;
use sluicegate::limiter::redis::script::{SLIDING_LOG, SLIDING_LOG_PEEK, arguments, parse_reply};

/// The comment at the top of a script.
fn header(script: &str) -> String {
    script.lines().map_while(|line| line.strip_prefix("--")).collect::<Vec<_>>().join("\n")
}

/// The part of a header that begins with this word, up to the next part.
fn part(header: &str, name: &str) -> String {
    // Parts are set off by one blank, their continuation by more.
    let begins = |line: &str| line.starts_with(' ') && !line.starts_with("  ");
    let mut lines = header.lines().skip_while(|line| !line.trim_start().starts_with(name));
    let first = lines.next().unwrap_or_else(|| panic!("no {name}")).trim_start().trim_start_matches(name).to_owned();
    let rest = lines.take_while(|line| !begins(line));
    std::iter::once(first).chain(rest.map(str::to_owned)).collect::<Vec<_>>().join("\n")
}

fn spec(limits: usize) -> QuotaSpec {
    let limit = |n: usize| LimitSpec {
        name: if n == 0 { "per-second".to_owned() } else { format!("more-{n}") },
        max_requests: 100,
        window: Duration::from_secs(1),
    };
    QuotaSpec {
        quota: ProviderName::new("acme").unwrap(),
        version: 7,
        limits: (0..limits).map(limit).collect(),
        grant_jitter: None,
        hold_max: Duration::from_millis(10_500),
        send_budget: Duration::from_millis(500),
    }
}

fn call(wants: Vec<u32>, settlements: Vec<Settlement>) -> Call {
    Call { incarnation: 0, number: 1, wants, settlements, pause: None, warm: None, run_id: "run".to_owned() }
}

/// `(a, b, 2 × c)` as a number of arguments.
fn arity(group: &str, limits: usize) -> usize {
    let group = group.replace("(text)", "");
    let inner = group.trim().trim_start_matches('(').split(')').next().unwrap();
    inner.split(',').map(|item| if item.trim().starts_with("k ×") { limits } else { 1 }).sum()
}

#[test]
fn keys_are_those_of_the_header() {
    let keys = part(&header(SLIDING_LOG), "KEYS");
    let endings: Vec<&str> = keys
        .lines()
        .filter_map(|line| line.strip_prefix("   "))
        .filter(|line| line.starts_with(|c: char| c.is_ascii_digit()))
        .map(|line| line.split_whitespace().nth(1).unwrap().trim_end_matches(':'))
        .collect();
    assert_eq!(endings, ["meta", "leases", "log"]);
    for limits in [1, 3] {
        let sent = call_keys("p", &spec(limits));
        assert_eq!(sent.len(), 2 + limits);
        assert!(sent[0].ends_with(":meta") && sent[1].ends_with(":leases"), "{sent:?}");
        assert!(sent[2..].iter().all(|key| key.contains(":log:") && key.contains("{acme}")), "{sent:?}");
    }
    assert!(keys.contains("3..2+k") && keys.contains("{quota}"), "{keys}");
}

#[test]
fn arguments_are_as_many_as_the_header_says() {
    let argv = part(&header(SLIDING_LOG), "ARGV");
    let fixed = (1..).take_while(|n| argv.contains(&format!(" {n} "))).last().unwrap();
    let group = |after: &str| argv.split_once(after).unwrap_or_else(|| panic!("no `{after}`")).1;
    for limits in [1, 2, 5] {
        let per_limit = arity(group("10 k, then k × "), limits);
        let used = arity(group("then m × "), limits);
        let not_sent = arity(group("or  "), limits);
        let settlements = vec![
            Settlement { call: 1, cost: 1, fate: Fate::Used { age: Duration::ZERO } },
            Settlement { call: 2, cost: 1, fate: Fate::NotSent { origins: vec![0; limits] } },
        ];
        let sent = arguments(&spec(limits), &call(vec![1, 2, 3], settlements));
        assert_eq!(sent.len(), fixed + limits * per_limit + 1 + 3 + 1 + used + not_sent, "{limits} limits: {sent:?}");
    }
}

#[test]
fn the_example_is_sent_and_read() {
    let example = part(&header(SLIDING_LOG), "EXAMPLE");
    let (argv, reply) = example.split_once("ARGV ").unwrap().1.split_once('→').unwrap();
    let mut sent = arguments(&spec(1), &call(vec![1], Vec::new()));
    // The example names its incarnation instead of numbering it.
    sent[2] = "w1".to_owned();
    assert_eq!(argv.split_whitespace().collect::<Vec<_>>(), sent);
    let numbers: Vec<i64> =
        reply.split_whitespace().map(|word| word.parse().unwrap_or(1_800_000_000_000_000)).collect();
    let reply = parse_reply(&numbers, 1).unwrap();
    assert_eq!((reply.version, reply.remaining, reply.permits(), reply.refused), (7, 99, 1, None));

    let example = part(&header(SLIDING_LOG_PEEK), "EXAMPLE");
    let padded = spec(1).limits[0].padded_window_us();
    assert!(example.contains(&format!("ARGV {padded} ")), "{example}");
}

#[test]
fn refusals_have_the_codes_of_the_header() {
    let reply = part(&header(SLIDING_LOG), "REPLY");
    let list = reply.split_once("1 refusal: ").unwrap().1.lines().next().unwrap();
    let codes: Vec<(i64, &str)> = list
        .split(',')
        .map(|item| item.trim().split_once(' ').unwrap())
        .map(|(n, name)| (n.parse().unwrap(), name))
        .collect();
    let meanings = [
        ("none", None),
        ("limit", Some(Refusal::Limit { index: 0 })),
        ("cold", Some(Refusal::Cold)),
        ("paused", Some(Refusal::Paused)),
        ("stale version", Some(Refusal::StaleVersion)),
        ("stale call", Some(Refusal::StaleCall)),
    ];
    assert_eq!(codes.len(), meanings.len());
    for ((code, name), (meant, refusal)) in codes.into_iter().zip(meanings) {
        let read = parse_reply(&[code, 0, 5, 0, 1, 1, 1, 0, 0], 1).unwrap();
        assert_eq!((name, read.refused.map(|refused| refused.by)), (meant, refusal));
    }
}

#[test]
fn a_header_is_read_by_parts() {
    let header = header("-- What.\n--\n-- KEYS  two:\n--   1  a\n-- ARGV  none\n\nlocal x = 1 -- KEYS");
    assert_eq!(part(&header, "KEYS"), "  two:\n   1  a");
    assert_eq!(arity("(name (text), max, padded window)", 9), 3);
    assert_eq!(arity("(call, cost, 1, k × origin ms)", 4), 7);
}
