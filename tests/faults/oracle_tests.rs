//! Tests of the oracles: each finds a planted violation, and none finds a violation in records without one.

use std::collections::BTreeMap;

use crate::oracle::{ORACLES, judge};
use crate::records::{Call, Event, ProviderRecord, Published, Records, Row};

const SECOND_US: u64 = 1_000_000;

/// Three payments: one charged, one declined, one in review after a charge whose response was lost.
fn honest() -> Records {
    let call = |id: &str, at_us: u64, charged: bool| Call {
        payment: Some(id.to_owned()),
        key: Some(id.to_owned()),
        body: format!("body of {id}").into_bytes(),
        amount: 100,
        currency: "EUR".to_owned(),
        first_byte_us: at_us,
        received_us: Some(at_us),
        received_wall_us: 10 * SECOND_US + at_us,
        effect_us: charged.then_some(at_us),
        answered_us: Some(at_us + 5),
        status: Some(if charged { 200 } else { 402 }),
        ..Call::default()
    };
    let calls = vec![call("p1", 0, true), call("p2", 10, false), call("p3", SECOND_US, true)];
    let mut records = Records::default();
    let limits = vec![(2, SECOND_US)];
    records.providers.insert("acme".to_owned(), ProviderRecord { calls, limits, ..ProviderRecord::default() });
    for (id, state) in [("p1", "succeeded"), ("p2", "declined"), ("p3", "review")] {
        let (provider, currency) = ("acme".to_owned(), "EUR".to_owned());
        let message = Published {
            provider: provider.clone(),
            amount: 100,
            currency: currency.clone(),
            account: None,
            confirmed: true,
        };
        records.published.insert(id.to_owned(), message);
        let row = Row {
            provider: provider.clone(),
            state: state.to_owned(),
            reason: String::new(),
            amount: 100,
            currency,
            account: None,
            finished_wall_us: Some(20 * SECOND_US),
            requests_until_finished: 1,
        };
        records.ledger.insert(id.to_owned(), row);
        records.events.push(Event { id: id.to_owned(), provider, state: state.to_owned() });
    }
    records
}

fn row<'r>(records: &'r mut Records, id: &str) -> &'r mut Row {
    records.ledger.get_mut(id).unwrap()
}

fn calls(records: &mut Records) -> &mut Vec<Call> {
    &mut records.providers.get_mut("acme").unwrap().calls
}

/// Violations per oracle after a change of the sound records.
fn planted(change: impl FnOnce(&mut Records)) -> BTreeMap<&'static str, usize> {
    let mut records = honest();
    change(&mut records);
    let mut found = BTreeMap::new();
    for violation in judge(&records) {
        *found.entry(&violation.oracle[..2]).or_default() += 1;
    }
    found
}

fn only(oracle: &'static str, violations: usize) -> BTreeMap<&'static str, usize> {
    BTreeMap::from([(oracle, violations)])
}

#[test]
fn correct_record_has_no_findings() {
    assert_eq!(judge(&honest()), []);
    assert_eq!(ORACLES.len(), 8);
}

#[test]
fn lost_jobs_are_found() {
    let unrecorded = |records: &mut Records| {
        records.ledger.remove("p2");
        records.events.remove(1);
    };
    assert_eq!(planted(unrecorded), only("O1", 1));
    let open = |records: &mut Records| {
        row(records, "p3").state = "unknown".to_owned();
        records.events.pop();
    };
    assert_eq!(planted(open), only("O1", 1));
    assert_eq!(planted(|records| drop(records.events.pop())), only("O1", 1));
    let unconfirmed = |records: &mut Records| {
        unrecorded(records);
        records.published.get_mut("p2").unwrap().confirmed = false;
    };
    assert_eq!(planted(unconfirmed), BTreeMap::new(), "an unconfirmed message may be lost");
}

#[test]
fn double_charges_are_found_across_providers() {
    let again = |records: &mut Records| {
        let mut again = calls(records)[2].clone();
        let later = |us: &mut u64| *us += SECOND_US;
        later(&mut again.first_byte_us);
        again.received_us.as_mut().map(later);
        again.effect_us.as_mut().map(later);
        again.answered_us.as_mut().map(later);
        again.received_wall_us += SECOND_US;
        calls(records).push(again);
    };
    assert_eq!(planted(again), only("O2", 1));
    let elsewhere = |records: &mut Records| {
        let calls = vec![calls(records)[0].clone()];
        records.providers.insert("bolt".to_owned(), ProviderRecord { calls, ..ProviderRecord::default() });
    };
    assert_eq!(planted(elsewhere), BTreeMap::from([("O2", 1), ("O4", 1)]));
}

#[test]
fn breaches_are_found_at_every_instant() {
    // A shift that puts the third call a microsecond too early for the window.
    let shifts: [fn(&mut Call); 4] = [
        |call| call.first_byte_us -= 1,
        |call| call.received_us = Some(SECOND_US - 1),
        |call| call.effect_us = Some(SECOND_US - 1),
        |call| call.answered_us = Some(SECOND_US + 4),
    ];
    let found = shifts.map(|shift| planted(|records| shift(&mut calls(records)[2])));
    // One of the three calls was no charge, so no window counts more than two by effect.
    assert_eq!(found, [only("O3", 1), only("O3", 1), BTreeMap::new(), only("O3", 1)]);
    let charged = |records: &mut Records| {
        calls(records)[1].effect_us = Some(SECOND_US - 1);
        row(records, "p2").state = "review".to_owned();
        records.events[1].state = "review".to_owned();
        calls(records)[2].effect_us = Some(SECOND_US - 1);
    };
    assert_eq!(planted(charged), only("O3", 1));
    let by_grant = |records: &mut Records| {
        calls(records)[2].received_us = Some(SECOND_US - 1);
        let record = records.providers.get_mut("acme").unwrap();
        record.by_grant = true;
        let (allowed, window_us) = record.limits[0];
        assert_eq!((record.broken_windows(allowed, window_us), record.largest_window(window_us)), (1, 3));
    };
    assert_eq!(planted(by_grant), BTreeMap::new(), "lanes that release slots at the grant are reported, not judged");
}

#[test]
fn wrong_amounts_and_accounts_are_found() {
    assert_eq!(planted(|records| calls(records)[0].amount = 101), only("O4", 1));
    assert_eq!(planted(|records| calls(records)[0].currency = "USD".to_owned()), only("O4", 1));
    assert_eq!(planted(|records| calls(records)[0].account = Some("a".to_owned())), only("O4", 1));
    assert_eq!(planted(|records| drop(records.published.remove("p1"))), only("O4", 1));
}

#[test]
fn misused_keys_are_found() {
    let again = |change: fn(&mut Call)| {
        planted(|records| {
            let mut again = calls(records)[2].clone();
            (again.first_byte_us, again.received_us, again.answered_us) = (3 * SECOND_US, Some(3 * SECOND_US), None);
            (again.effect_us, again.replayed) = (None, true);
            change(&mut again);
            calls(records).push(again);
        })
    };
    assert_eq!(again(|_| {}), BTreeMap::new(), "the same bytes may be sent again");
    assert_eq!(again(|call| call.body.push(b' ')), only("O5", 1));
    assert_eq!(again(|call| call.key = Some("other".to_owned())), only("O5", 1));
    assert_eq!(again(|call| call.key = None), only("O5", 1));
}

#[test]
fn calls_after_a_final_state_are_found() {
    let again = |requests_until_finished: usize, is_look_up: bool| {
        planted(|records| {
            let mut again = calls(records)[1].clone();
            (again.first_byte_us, again.received_us, again.answered_us) = (30 * SECOND_US, Some(30 * SECOND_US), None);
            (again.received_wall_us, again.is_look_up) = (40 * SECOND_US, is_look_up);
            calls(records).push(again);
            row(records, "p2").requests_until_finished = requests_until_finished;
        })
    };
    assert_eq!(again(1, false), only("O6", 1));
    assert_eq!(again(1, true), only("O6", 1));
    assert_eq!(again(2, false), BTreeMap::new(), "the request was begun before and arrived late");
    assert_eq!(planted(|records| calls(records)[1].received_wall_us = 40 * SECOND_US), BTreeMap::new());
}

#[test]
fn ledger_and_event_mismatches_are_found() {
    let with_state = |id: &'static str, state: &'static str| {
        planted(|records| {
            row(records, id).state = state.to_owned();
            let event = records.events.iter_mut().find(|event| event.id == id).unwrap();
            event.state = state.to_owned();
        })
    };
    assert_eq!(with_state("p2", "succeeded"), only("O7", 1), "succeeded without an effect");
    for state in ["declined", "dead", "expired", "cancelled"] {
        assert_eq!(with_state("p1", state), only("O7", 1), "charged and {state}");
    }
    assert_eq!(with_state("p1", "review"), BTreeMap::new(), "an operator resolves a job in review");
    assert_eq!(planted(|records| records.events[0].state = "declined".to_owned()), only("O7", 1));
    assert_eq!(planted(|records| row(records, "p1").amount = 7), only("O7", 1));
    let in_part = |records: &mut Records| calls(records)[0].approved_part = Some(50);
    assert_eq!(planted(in_part), only("O7", 1), "succeeded with a smaller sum");
    assert_eq!(planted(|records| calls(records)[2].approved_part = Some(50)), BTreeMap::new(), "it is in review");
    let unknown_to_us = |records: &mut Records| {
        records.ledger.remove("p1");
        records.published.get_mut("p1").unwrap().confirmed = false;
        records.events.remove(0);
    };
    assert_eq!(planted(unknown_to_us), only("O7", 1));
}

#[test]
fn needless_reviews_are_found() {
    let at_one_that_deduplicates = |change: fn(&mut Records)| {
        planted(|records| {
            records.providers.get_mut("acme").unwrap().deduplicates = true;
            row(records, "p3").reason = "connection lost after the request was begun".to_owned();
            change(records);
        })
    };
    assert_eq!(at_one_that_deduplicates(|_| {}), only("O8", 1));
    let differs = |records: &mut Records| row(records, "p3").reason = "amount_differs: check the payment".to_owned();
    assert_eq!(at_one_that_deduplicates(differs), only("O8", 1), "the whole sum was approved");
    let in_part = |records: &mut Records| calls(records)[2].approved_part = Some(50);
    assert_eq!(at_one_that_deduplicates(in_part), BTreeMap::new());
    let used_up = |records: &mut Records| row(records, "p3").reason = "no answer in time; 8 attempts made".to_owned();
    assert_eq!(at_one_that_deduplicates(used_up), BTreeMap::new());
}

#[test]
fn longest_request_transit_is_reported() {
    let mut records = honest();
    assert_eq!(records.longest_way_ms(), 0, "the begin is unknown");
    // Two begins of one request: the last begin before its receipt counts.
    records.started_wall_us.insert("p3".to_owned(), vec![SECOND_US, 9 * SECOND_US, 12 * SECOND_US]);
    assert_eq!(records.longest_way_ms(), 2_000);
}
