//! The seven providers of the billing day: their rows, how they behave, their payments, and what they must never see.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use crate::provider::ProviderOptions;
use crate::records::{Call, ProviderRecord, Published, Records};

/// One provider.
pub struct Script {
    pub name: &'static str,
    /// Payments of the whole day.
    pub share: u64,
    /// Requests per second, at most ever.
    per_second: Option<u64>,
    per_minute: Option<u64>,
    latency_ms: (u64, u64),
    /// Requests per second that it accepts, if those are fewer than its row allows.
    accepts_per_s: Option<usize>,
    /// Its finish time is an estimate of the limits. Where accounts have limits of their own, it depends on whose
    /// payments wait.
    pub is_estimated: bool,
}

/// Requests per second of `acme` at first. Later they are [`RAISED`].
const FIRST: u64 = 20;
pub const RAISED: u64 = 24;
/// Requests per second of one account of `cargo`.
const PER_ACCOUNT: u64 = 5;
/// Requests in flight at `golf`.
const IN_FLIGHT: usize = 2;

const PLAIN: Script = Script {
    name: "",
    share: 0,
    per_second: None,
    per_minute: None,
    latency_ms: (40, 80),
    accepts_per_s: None,
    is_estimated: true,
};

/// `acme` has a plain limit, which is raised; `bolt` a small one and a long one, and a cut-off that is missed. A
/// merchant floods `cargo`. `delta` throttles within its limit. `echo` fails, and loses responses. `fox` is paused,
/// declines, and rejects the credential for a while. `golf` limits requests in flight. `hotel` accepts half of what its
/// row allows.
pub static PROVIDERS: [Script; 8] = [
    Script { name: "acme", share: 18_000, per_second: Some(RAISED), ..PLAIN },
    Script { name: "bolt", share: 9_000, per_second: Some(20), per_minute: Some(600), ..PLAIN },
    Script { name: "cargo", share: 10_500, per_second: Some(15), is_estimated: false, ..PLAIN },
    Script { name: "delta", share: 9_500, per_second: Some(12), ..PLAIN },
    Script { name: "echo", share: 11_000, per_second: Some(14), ..PLAIN },
    Script { name: "fox", share: 9_500, per_second: Some(15), ..PLAIN },
    Script { name: "golf", share: 12_500, latency_ms: (120, 180), ..PLAIN },
    Script { name: "hotel", share: 4_000, per_second: Some(30), accepts_per_s: Some(15), is_estimated: false, ..PLAIN },
];

impl Script {
    pub fn options(&self) -> ProviderOptions {
        let of = |requests: Option<u64>, seconds: u64| {
            requests.map(|requests| (usize::try_from(requests).unwrap(), Duration::from_secs(seconds)))
        };
        let (least, most) = self.latency_ms;
        ProviderOptions {
            deduplicates: true,
            can_be_asked: false,
            limits: of(self.per_second, 1).into_iter().chain(of(self.per_minute, 60)).collect(),
            latency: (Duration::from_millis(least), Duration::from_millis(most)),
            by_grant: false,
            accepts_per_s: self.accepts_per_s,
        }
    }

    fn row(&self, cutoff: &str) -> String {
        let limit = |name: &str, requests: u64, window_ms: u64, more: &str| {
            format!("[[provider.limit]]\nname = \"{name}\"\nmax_requests = {requests}\n{more}")
                + &if window_ms > 0 { format!("window_ms = {window_ms}\n\n") } else { "\n".to_owned() }
        };
        let Self { name, per_second, per_minute, .. } = self;
        let cutoff = if *name == "bolt" { format!("cutoff = \"{cutoff}\"\n") } else { String::new() };
        let mut row = format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{name}}}\"\ntimeout_ms = 2000\nbackoff_max_ms = 4000\n\
             idempotency_retention_s = 86400\n{cutoff}\n"
        );
        let per_second = if *name == "acme" { Some(FIRST) } else { *per_second };
        row += &per_second.map(|requests| limit("per-second", requests, 1_000, "")).unwrap_or_default();
        row += &per_minute.map(|requests| limit("per-minute", requests, 60_000, "")).unwrap_or_default();
        row + &match *name {
            "cargo" => limit("per-account", PER_ACCOUNT, 1_000, "scope = \"account\"\n"),
            "golf" => limit("slots", IN_FLIGHT as u64, 0, "algorithm = \"concurrency\"\n"),
            _ => String::new(),
        }
    }
}

/// The rows of all providers.
pub fn rows(cutoff: &str) -> String {
    PROVIDERS.iter().map(|script| script.row(cutoff)).collect()
}

/// The payment with this number: id, content and message.
pub fn job(script: &Script, number: u64) -> (String, Published, String) {
    let id = format!("{}-{number}", script.name);
    let is_declined = script.name == "fox" && number.is_multiple_of(10);
    let cents = if is_declined { crate::provider::DECLINED_CENTS } else { 50 };
    let amount = 2_000 + 100 * i64::try_from(number % 500).unwrap() + cents;
    let account = (script.name == "cargo").then(|| match number % 5 {
        0 | 1 => "flood".to_owned(),
        _ => format!("merchant-{}", number % 40),
    });
    let mut body = json!({ "id": id, "amount": amount, "currency": "EUR", "payload": { "n": number } });
    if let Some(account) = &account {
        body["account"] = json!(account);
    }
    let (provider, currency) = (script.name.to_owned(), "EUR".to_owned());
    (id, Published { provider, amount, currency, account, confirmed: true }, body.to_string())
}

/// All payments, after they were published.
pub fn published(payments_of: impl Fn(&Script) -> u64) -> BTreeMap<String, Published> {
    let of = |script: &'static Script| (0..payments_of(script)).map(move |number| job(script, number));
    PROVIDERS.iter().flat_map(of).map(|(id, message, _)| (id, message)).collect()
}

/// Limits that the oracles do not know: rule, requests judged, and windows broken. `began_us`: the start of the log on
/// the clock of `acme`.
pub fn windows(records: &Records, log: &[(Duration, String)], began_us: u64) -> Vec<(&'static str, usize, usize)> {
    let raised = log.iter().find(|(_, what)| what.contains("limit of acme")).map(|(at, _)| *at);
    let acme = &records.providers["acme"];
    // The log begins later than the provider, so it says when on the provider's clock.
    let until_us = raised.map_or(u64::MAX, |at| began_us + u64::try_from(at.as_micros()).unwrap());
    let before = calls(acme, |call| call.first_byte_us < until_us);
    let per_second = 1_000_000;
    let broken_before = before.broken_windows(usize::try_from(FIRST).unwrap(), per_second);
    let cargo = &records.providers["cargo"];
    let flood = calls(cargo, |call| call.account.as_deref() == Some("flood"));
    let broken = flood.broken_windows(usize::try_from(PER_ACCOUNT).unwrap(), per_second);
    let golf = &records.providers["golf"];
    vec![
        ("windows of acme before its limit was raised", before.calls.len(), broken_before),
        ("windows of the flooding account", flood.calls.len(), broken),
        ("requests in flight at golf", golf.calls.len(), usize::from(most_in_flight(golf) > IN_FLIGHT)),
    ]
}

fn calls(record: &ProviderRecord, is_meant: impl Fn(&Call) -> bool) -> ProviderRecord {
    ProviderRecord { calls: record.calls.iter().filter(|call| is_meant(call)).cloned().collect(), ..record.clone() }
}

/// Most requests between receipt and response. One whose response was never written is left out.
fn most_in_flight(record: &ProviderRecord) -> usize {
    let spans = record.calls.iter().filter_map(|call| Some((call.received_us?, call.answered_us?)));
    let mut steps: Vec<(u64, bool)> = spans.flat_map(|(from, to)| [(from, true), (to, false)]).collect();
    // At the same microsecond, a response comes before the next request.
    steps.sort_unstable();
    let (mut now, mut most) = (0_usize, 0);
    for (_, begins) in steps {
        now = if begins { now + 1 } else { now.saturating_sub(1) };
        most = most.max(now);
    }
    most
}
