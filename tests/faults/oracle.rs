//! The oracles: checks for violations that no run may have, whatever its faults.
//!
//! They are pure functions, and `oracle_tests` shows that each finds its violation. They read the records of providers,
//! producers and subscribers. The ledger is itself under test, so it proves nothing.

use std::collections::{BTreeMap, BTreeSet};

use crate::records::{Call, FINAL, Records, Row};

/// One violation that an oracle found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub oracle: &'static str,
    pub what: String,
}

type Oracle = fn(&Records) -> Vec<String>;

/// All oracles, in the order of the reports.
pub const ORACLES: [(&str, Oracle); 8] = [
    ("O1 lost", lost),
    ("O2 double", double),
    ("O3 breach", breach),
    ("O4 wrong", wrong),
    ("O5 key misuse", key_misuse),
    ("O6 call after settled", after_finished),
    ("O7 ledger is not the provider", ledger_differs),
    ("O8 needless review", needless_review),
];

/// Reasons for which an operator has to decide, whatever the provider does with a repeated key.
const GOOD_REASONS: [&str; 4] = [
    // The faults at the provider, or on the way to it, outlasted `max_attempts` requests.
    "attempts made",
    "the outcome is unknown after",
    // A job that workers do not survive may be what kills them. In a large run the harness kills as often.
    "workers in a row were lost while they held the job",
    "its message reached the broker's delivery limit repeatedly",
];

pub fn judge(records: &Records) -> Vec<Violation> {
    let found = |(oracle, judge): &(&'static str, Oracle)| {
        let oracle = *oracle;
        judge(records).into_iter().map(move |what| Violation { oracle, what })
    };
    ORACLES.iter().flat_map(found).collect()
}

/// Confirmed messages whose job has not finished in the ledger, or has finished without an event.
fn lost(records: &Records) -> Vec<String> {
    let events: BTreeSet<&str> = records.events.iter().map(|event| event.id.as_str()).collect();
    let confirmed = records.published.iter().filter(|(_, message)| message.confirmed);
    let lost = confirmed.filter_map(|(id, message)| match records.ledger.get(id) {
        None => Some(format!("{id} ({}): not in the ledger", message.provider)),
        Some(row) if !FINAL.contains(&row.state.as_str()) => {
            Some(format!("{id}: still {} ({})", row.state, row.reason))
        }
        Some(row) if !events.contains(id.as_str()) => Some(format!("{id}: {}, without an event", row.state)),
        Some(_) => None,
    });
    lost.collect()
}

/// Payments that were charged more than once, at any provider.
fn double(records: &Records) -> Vec<String> {
    let effects = records.effects().into_iter().filter(|(_, effects)| effects.len() > 1);
    effects
        .map(|(id, effects)| {
            let each: Vec<String> = effects.iter().map(|(provider, call)| format!("{provider} {}", at(call))).collect();
            format!("{id}: {} times: {}", effects.len(), each.join("; "))
        })
        .collect()
}

/// Windows with more requests than the limit allows, by any instant of a request at which the provider may count it.
/// Rows whose slots are released at the grant are left out.
fn breach(records: &Records) -> Vec<String> {
    type Instant = fn(&Call) -> Option<u64>;
    let instants: [(&str, Instant); 4] = [
        ("first byte", |call| Some(call.first_byte_us)),
        ("receipt", |call| call.received_us),
        ("effect", |call| call.effect_us),
        ("answer", |call| call.answered_us),
    ];
    let mut found = Vec::new();
    for (name, record) in records.providers.iter().filter(|(_, record)| !record.by_grant) {
        for (allowed, window_us) in &record.limits {
            for (instant, of) in instants {
                let mut sorted: Vec<u64> = record.calls.iter().filter_map(of).collect();
                sorted.sort_unstable();
                let breaches: Vec<&[u64]> =
                    sorted.windows(allowed + 1).filter(|w| w[*allowed] - w[0] < *window_us).collect();
                if let Some(first) = breaches.first() {
                    let (from, to) = (first[0], first[*allowed]);
                    found.push(format!(
                        "{name}: {} windows of {window_us} us hold more than {allowed} by {instant}; the first from \
                         {from} us, {} us short",
                        breaches.len(),
                        window_us - (to - from)
                    ));
                }
            }
        }
    }
    found
}

/// Charges that differ from their message, or that have no message.
fn wrong(records: &Records) -> Vec<String> {
    let mut found = Vec::new();
    for (id, effects) in records.effects() {
        for (provider, call) in effects {
            let got = (provider, call.amount, call.currency.as_str(), &call.account);
            let asked = records.published.get(id);
            let asked = asked.map(|m| (m.provider.as_str(), m.amount, m.currency.as_str(), &m.account));
            if asked != Some(got) {
                found.push(format!("{id}: charged {got:?}, asked for {asked:?}"));
            }
        }
    }
    found
}

/// One key with two bodies, or two keys for one payment.
fn key_misuse(records: &Records) -> Vec<String> {
    let mut body_of: BTreeMap<(&str, &str), &[u8]> = BTreeMap::new();
    let mut key_of: BTreeMap<&str, &str> = BTreeMap::new();
    let mut found = Vec::new();
    for (provider, call) in records.charges() {
        let Some(payment) = call.payment.as_deref() else { continue };
        let Some(key) = call.key.as_deref() else {
            found.push(format!("{payment}: sent without a key, {}", at(call)));
            continue;
        };
        if *body_of.entry((provider, key)).or_insert(&call.body) != call.body.as_slice() {
            found.push(format!("{payment}: key {key} with another body than before, {}", at(call)));
        }
        let first = *key_of.entry(payment).or_insert(key);
        if first != key {
            found.push(format!("{payment}: key {key}, before {first}, {}", at(call)));
        }
    }
    found
}

/// Requests that a provider received after the job's final state was written. A request that was begun before may
/// arrive after it. So only requests beyond the number begun until then are violations.
fn after_finished(records: &Records) -> Vec<String> {
    let mut calls: BTreeMap<&str, Vec<(&str, &Call)>> = BTreeMap::new();
    for (provider, record) in &records.providers {
        for call in &record.calls {
            calls.entry(call.payment.as_deref().unwrap_or_default()).or_default().push((provider, call));
        }
    }
    let mut found = Vec::new();
    for (payment, calls) in calls {
        let Some(row) = records.ledger.get(payment) else { continue };
        let Some(finished_us) = row.finished_wall_us else { continue };
        let late: Vec<_> = calls.iter().filter(|(_, call)| call.received_wall_us > finished_us).collect();
        for (provider, call) in late.iter().take(calls.len().saturating_sub(row.requests_until_finished)) {
            let late_us = call.received_wall_us - finished_us;
            found.push(format!("{payment}: {provider} was called {late_us} us after its final state, {}", at(call)));
        }
    }
    found
}

/// Differences between the ledger or its events and the providers' records.
fn ledger_differs(records: &Records) -> Vec<String> {
    let effects = records.effects();
    let mut found = Vec::new();
    for (id, row) in &records.ledger {
        let charges = effects.get(id.as_str());
        let charged = charges.is_some();
        let in_part = charges.is_some_and(|charges| approved_in_part(charges));
        match row.state.as_str() {
            "succeeded" if !charged => found.push(format!("{id}: succeeded, but was never charged ({})", row.reason)),
            "succeeded" if in_part => found.push(format!("{id}: succeeded, but a smaller sum was charged")),
            "succeeded" | "review" | "unknown" | "sending" => {}
            state if charged => found.push(format!("{id}: charged, but the ledger has {state} ({})", row.reason)),
            _ => {}
        }
        let message = records.published.get(id);
        if message.is_some_and(|m| (m.amount, &m.currency, &m.account) != (row.amount, &row.currency, &row.account)) {
            found.push(format!("{id}: the ledger has {row:?}, but the message was {message:?}"));
        }
    }
    for id in effects.keys().filter(|id| !records.ledger.contains_key(**id)) {
        found.push(format!("{id}: charged, but not in the ledger"));
    }
    for event in &records.events {
        let row = records.ledger.get(&event.id);
        if row.is_none_or(|row| (&row.state, &row.provider) != (&event.state, &event.provider)) {
            found.push(format!("{event:?}, but the ledger has {row:?}"));
        }
    }
    found
}

/// Payments in review at a provider that deduplicates: a repeated request would have told the outcome. Those that were
/// approved for a smaller sum are left out, by the provider's record alone.
fn needless_review(records: &Records) -> Vec<String> {
    let effects = records.effects();
    let needless = |(id, row): (&String, &Row)| {
        let deduplicates = records.providers.get(&row.provider).is_some_and(|record| record.deduplicates);
        let in_part = effects.get(id.as_str()).is_some_and(|charges| approved_in_part(charges));
        let has_reason = in_part || GOOD_REASONS.iter().any(|reason| row.reason.contains(reason));
        let is_needless = row.state == "review" && deduplicates && !has_reason;
        is_needless.then(|| format!("{id}: in review at {}, which deduplicates: {}", row.provider, row.reason))
    };
    records.ledger.iter().filter_map(needless).collect()
}

fn approved_in_part(charges: &[(&str, &Call)]) -> bool {
    charges.iter().any(|(_, call)| call.approved_part.is_some())
}

fn at(call: &Call) -> String {
    let status = call.status.map_or("no answer".to_owned(), |status| status.to_string());
    format!("received at {} us, {status}", call.received_us.unwrap_or(call.first_byte_us))
}
