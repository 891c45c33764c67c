//! The rules of the judge for what hinders payments though every backend answers: a provider that refuses requests, a
//! database that takes no write, a broker that blocks publishers.

use super::Truth;
use super::ask::Overview;
use super::judge::{Around, Bounds};

/// A fault of a backend that answers.
struct Fault {
    is_so: fn(&Truth) -> bool,
    /// Words of which one must be said.
    words: &'static [&'static str],
    /// No payment is sent meanwhile, so no finish time is known.
    stops_payments: bool,
}

const FAULTS: [Fault; 2] = [
    Fault {
        is_so: |truth| truth.writes_are_refused,
        words: &["the database cannot write", "the database commits nothing"],
        stops_payments: true,
    },
    Fault {
        is_so: |truth| truth.publishers_are_blocked,
        words: &["the broker blocks publishers"],
        stops_payments: false,
    },
];

/// The overview, and what `status` prints.
fn overviews<'a>(around: &Around<'a>) -> impl Iterator<Item = &'a Overview> {
    around.overview().into_iter().chain(around.sample.shown.status.as_ref())
}

pub(super) fn promises(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for name in around.throttled_providers() {
        let views = overviews(around).filter_map(|overview| overview.providers.get(name));
        let is_again = around.is_refused_again(name);
        // What has been sent is cleared, whatever was refused before.
        for shown in views.filter(|shown| shown.waiting > 0) {
            let forecast = shown.cutoff.as_ref().and_then(|cutoff| cutoff.missed);
            if shown.clears_in_ms.is_some() || forecast.is_some() || is_again && shown.state == "running" {
                found.push(format!("{name} refuses requests, shown are {shown:?}"));
            }
        }
    }
    found
}

pub(super) fn refusals(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() {
        return Vec::new();
    }
    let ever = |name: &str| {
        let counts = around.truths.iter().filter_map(|truth| Some(truth.throttled.get(name)?.ever));
        counts.map(|ever| Bounds { least: ever, most: ever }).reduce(Bounds::and)
    };
    let providers = overviews(around).flat_map(|overview| &overview.providers);
    let wrong = providers.filter_map(|(name, shown)| {
        let ever = ever(name)?;
        let is_true = shown.refused.is_some_and(|refused| ever.has(refused));
        (!is_true).then(|| format!("{name} answered 429 {ever:?} times, shown are {:?}", shown.refused))
    });
    wrong.collect()
}

pub(super) fn faults(around: &Around<'_>) -> Vec<String> {
    let mut found = Vec::new();
    for fault in lasting(around) {
        for overview in overviews(around) {
            if !overview.said.iter().any(|text| fault.words.iter().any(|words| text.contains(words))) {
                found.push(format!("none of {:?} is said, but {:?}", fault.words, overview.said));
            }
            let promised = overview.providers.iter().filter(|(_, shown)| shown.clears_in_ms.is_some_and(|ms| ms > 0));
            let promised = promised.filter(|_| fault.stops_payments);
            found.extend(promised.map(|(name, shown)| format!("{name}: nothing is written, shown are {shown:?}")));
        }
    }
    found
}

/// Number of faults that are judged around a sample.
pub(super) fn judged_faults(around: &Around<'_>) -> usize {
    lasting(around).count()
}

fn lasting(around: &Around<'_>) -> impl Iterator<Item = &'static Fault> {
    FAULTS.iter().filter(|fault| around.has_been(fault.is_so))
}
