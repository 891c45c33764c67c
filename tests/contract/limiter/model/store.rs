//! The limiter's state as worlds share it: only a call clones it, and it is parsed once for all worlds that share it.
//!
//! A state is parsed from its debug text. Fields that are not known by name stay in `rest`, where they distinguish
//! worlds.

use std::cell::RefCell;
use std::rc::Rc;

use sluicegate::domain::quota::Quota;

use super::*;

#[derive(Debug)]
pub struct Store {
    pub quota: Quota,
    pub leases: Vec<Lease>,
    /// Log entries as milliseconds and uses, oldest first.
    pub entries: Vec<(u64, u64)>,
    pub tail_ms: u64,
    /// Uses in flight and logged, less the sums over leases and entries: zero, unless a sum is wrong.
    pub beyond: [u64; 2],
    /// All other fields: the text, and the instants in it.
    pub rest: String,
    pub rest_us: Vec<u64>,
    /// Instants and requested permits of calls that released nothing and were granted nothing. The result is the same
    /// for every caller.
    refused: RefCell<Vec<(u64, u32)>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Lease {
    pub incarnation: u64,
    pub call: u64,
    pub deadline_us: u64,
    pub permits: u64,
}

impl Store {
    pub fn of(quota: Quota) -> Rc<Self> {
        let text = format!("{quota:?}");
        // Replies to repeated calls come last; they are dropped.
        let mut text = text.split(", replies:").next().unwrap().to_owned();
        let entries = numbers(&cut(&mut text, "entries: [", "], logged"));
        let leases = numbers(&cut(&mut text, "outstanding_calls: {", "}, counted_us"));
        let logged = numbers(&cut(&mut text, "logged: ", ","))[0];
        let in_flight = numbers(&cut(&mut text, "in_flight: InFlightCost { charges: ", ","))[0];
        let tail_ms = numbers(&cut(&mut text, "tail_ms: ", ","))[0];
        // These fields do not matter. The clock does not step back here, and each call computes free slots again. The
        // oldest deadline is never later than any lease's, and only saves a search.
        for (label, end) in [("last_us: ", ","), ("unused: ", ","), ("oldest_deadline_us: ", ",")] {
            cut(&mut text, label, end);
        }
        let entries: Vec<(u64, u64)> = entries.chunks_exact(2).map(|entry| (entry[0], entry[1])).collect();
        let lease = |fields: &[u64]| Lease {
            incarnation: fields[0],
            call: fields[1],
            deadline_us: fields[2],
            permits: fields[3] + fields[4],
        };
        let leases: Vec<Lease> = leases.chunks_exact(5).map(lease).collect();
        let beyond = [
            in_flight.wrapping_sub(leases.iter().map(|lease| lease.permits).sum()),
            logged.wrapping_sub(entries.iter().map(|(_, uses)| uses).sum()),
        ];
        let rest_us: Vec<u64> = numbers(&text).into_iter().filter(|number| is_instant(*number)).collect();
        for instant_us in &rest_us {
            text = text.replacen(&instant_us.to_string(), "@", 1);
        }
        Rc::new(Self { quota, leases, entries, tail_ms, beyond, rest: text, rest_us, refused: RefCell::default() })
    }

    pub fn lease(&self, incarnation: u64, call: u64) -> Option<&Lease> {
        self.leases.iter().find(|lease| lease.incarnation == incarnation && lease.call == call)
    }

    pub fn has_refused(&self, now_us: u64, wanted: u32) -> bool {
        self.refused.borrow().contains(&(now_us, wanted))
    }

    pub fn refuses(&self, now_us: u64, wanted: u32) {
        self.refused.borrow_mut().push((now_us, wanted));
    }
}

fn is_instant(number: u64) -> bool {
    number > START_US / 2
}

/// Removes the text between two markers, which must exist, and returns it.
fn cut(text: &mut String, after: &str, before: &str) -> String {
    let from = text.find(after).unwrap_or_else(|| panic!("no {after:?} in {text}")) + after.len();
    let to = from + text[from..].find(before).unwrap_or_else(|| panic!("no {before:?} after {after:?} in {text}"));
    let found = text[from..to].to_owned();
    text.replace_range(from..to, "");
    found
}

/// Parses byte by byte, because it runs millions of times.
fn numbers(text: &str) -> Vec<u64> {
    let (mut found, mut number) = (Vec::new(), None);
    for byte in text.bytes() {
        if byte.is_ascii_digit() {
            number = Some(number.unwrap_or(0) * 10 + u64::from(byte - b'0'));
        } else {
            found.extend(number.take());
        }
    }
    found.extend(number);
    found
}
