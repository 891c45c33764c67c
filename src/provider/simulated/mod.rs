//! Strict provider for rehearsals, the demo and the tests. It counts every window, remembers every key and charge, and
//! reports them.
//!
//! Its counting shares no code with the limiter that it checks. A window of length W that ends at t covers (t − W, t]: an
//! arrival exactly W earlier is outside. A count can only peak at an arrival, so the windows that end at an arrival are
//! enough. The report does not compare its counts with a promise. The reader knows the limits that the worker was given.
//!
//! Its faults and latencies are drawn from the seed, the key and the number of the try. There is no shared random
//! stream. With one, each draw would depend on the order of arrival, and no run could be repeated.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use self::server::{FakeHandle, FakeProvider};
pub use self::strict::{Effect, StrictProvider};
use crate::domain::limit::Rate;
use crate::domain::time::{micros_up, parse_duration};

mod server;
pub mod strict;

/// Handling of a request beyond a limit. It is counted as a breach either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLimit {
    /// Refused: 429 with `Retry-After`.
    #[default]
    Refuse,
    /// Served like any other request.
    Count,
}

impl FromStr for OnLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "refuse" => Ok(Self::Refuse),
            "count" => Ok(Self::Count),
            _ => Err(format!("`{text}`: write refuse or count")),
        }
    }
}

/// Behaviour of the provider, as the options of `fake-provider` name it. Rates are shares of requests, 0–1. They are drawn
/// from the seed, the key and the number of the try, so a repeated run meets the same faults in any order of arrival.
#[derive(clap::Args, Clone, Debug, PartialEq)]
pub struct FakeOptions {
    /// A limit such as 100/1s, counted over every sliding window; repeatable. Without one, everything is allowed.
    #[arg(long = "limit", value_name = "N/DURATION")]
    pub limits: Vec<Rate>,
    /// Most requests in flight; one more gets a 429. Without it, any number is allowed.
    #[arg(long, value_name = "N")]
    pub concurrency: Option<u32>,
    /// What happens to a request above a limit: refuse (429 with Retry-After) or count (served and reported).
    #[arg(long, value_name = "refuse|count", default_value = "refuse")]
    pub on_limit: OnLimit,
    /// Time from request to response: one duration or a range, drawn evenly.
    #[arg(long, value_name = "MIN..MAX", default_value = "20ms..80ms", value_parser = parse_latency)]
    pub latency: (Duration, Duration),
    /// Share of requests that get a 500 or 503 and have no effect, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = parse_share)]
    pub error_rate: f64,
    /// Share of requests that take effect but whose connection is closed instead of a response, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = parse_share)]
    pub lost_answer_rate: f64,
    /// Share of payments that are declined (402), 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = parse_share)]
    pub decline_rate: f64,
    /// Share of requests that get a 429 with code lock_timeout, as if only their own object were locked, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = parse_share)]
    pub busy_rate: f64,
    /// Share of charges that are approved in part: half of the amount, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = parse_share)]
    pub partial_rate: f64,
    /// Status of each charge of an account, such as acct_7=403; repeatable. Such a charge has no effect.
    #[arg(long = "account-status", value_name = "ACCOUNT=STATUS", allow_hyphen_values = true)]
    pub account_statuses: Vec<AccountStatus>,
    /// Ignore Idempotency-Key: every request charges.
    #[arg(long = "no-dedupe", action = clap::ArgAction::SetFalse)]
    pub deduplicate: bool,
    /// How long an idempotency key is remembered, for example 1h. Default: for ever.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub retention: Option<Duration>,
    /// Payments cannot be looked up: GET /charges?id= always returns 404.
    #[arg(long = "no-lookup", action = clap::ArgAction::SetFalse)]
    pub lookup: bool,
    /// Decides which requests meet a fault, and the latency of each.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Reads `MIN..MAX`, or one duration for both.
fn parse_latency(text: &str) -> Result<(Duration, Duration), String> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let parse = |text| parse_duration(text).map_err(|problem| problem.to_string());
    let (least, most) = (parse(least)?, parse(most)?);
    if least > most { Err(format!("`{text}`: write the shorter duration first")) } else { Ok((least, most)) }
}

/// Reads a share of requests.
fn parse_share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("`{text}` is not a number"))?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(format!("`{text}` is not between 0 and 1")) }
}

/// The status that each charge of an account gets: 403 as for a wrong credential, 422 as for invalid payments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountStatus {
    pub account: String,
    pub status: u16,
}

impl FromStr for AccountStatus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (account, status) = text.split_once('=').ok_or_else(|| format!("`{text}`: write ACCOUNT=STATUS"))?;
        let error_status = status.parse().ok().filter(|status| (400..=599).contains(status));
        let status = error_status.ok_or_else(|| format!("`{status}` is not a status from 400 to 599"))?;
        Ok(Self { account: account.to_owned(), status })
    }
}

impl FakeOptions {
    fn status_of_account(&self, account: Option<&str>) -> Option<u16> {
        let known = self.account_statuses.iter().find(|known| Some(known.account.as_str()) == account);
        known.map(|known| known.status)
    }
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            limits: Vec::new(),
            concurrency: None,
            on_limit: OnLimit::Refuse,
            latency: (Duration::ZERO, Duration::ZERO),
            error_rate: 0.0,
            lost_answer_rate: 0.0,
            decline_rate: 0.0,
            busy_rate: 0.0,
            partial_rate: 0.0,
            deduplicate: true,
            retention: None,
            lookup: true,
            account_statuses: Vec::new(),
            seed: 0,
        }
    }
}

/// A request to charge, as received. What a payment provider would reject is rejected: a missing or negative amount, or a
/// missing currency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargeRequest {
    /// Id of the payment: the body's `id`, or the idempotency key if the body has none.
    pub payment: String,
    pub key: Option<String>,
    pub amount: i64,
    pub currency: String,
    pub account: Option<String>,
    /// SHA-256 of the body as received.
    pub body_hash: [u8; 32],
}

#[derive(Deserialize)]
struct ChargeFields {
    id: Option<String>,
    amount: Option<i64>,
    currency: Option<String>,
    account: Option<String>,
}

impl ChargeRequest {
    /// Parses a body; a form when `is_form`, else JSON.
    pub fn parse(key: Option<&str>, is_form: bool, body: &[u8]) -> Result<Self, &'static str> {
        let fields = if is_form { form_fields(body)? } else { serde_json::from_slice(body).map_err(|_| "bad_body")? };
        let payment = fields.id.or_else(|| key.map(str::to_owned)).ok_or("missing_id")?;
        Ok(Self {
            payment,
            key: key.map(str::to_owned),
            amount: fields.amount.filter(|amount| *amount > 0).ok_or("bad_amount")?,
            currency: fields.currency.ok_or("missing_currency")?,
            account: fields.account,
            body_hash: Sha256::digest(body).into(),
        })
    }
}

fn form_fields(body: &[u8]) -> Result<ChargeFields, &'static str> {
    let field = |wanted: &str| {
        url::form_urlencoded::parse(body).find(|(name, _)| name == wanted).map(|(_, value)| value.into_owned())
    };
    let amount = field("amount").map(|text| text.parse()).transpose().map_err(|_| "bad_amount")?;
    Ok(ChargeFields { id: field("id"), amount, currency: field("currency"), account: field("account") })
}

/// Latency and faults of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
struct FaultDraw {
    latency: Duration,
    /// Status of an error response, 500 or 503.
    error_status: Option<u16>,
    loses_response: bool,
    declines: bool,
    /// The payment's object is locked by another request.
    is_busy: bool,
    is_partial: bool,
}

/// Draws for the `attempt`-th request under this key.
fn draw(options: &FakeOptions, key: &str, attempt: u32) -> FaultDraw {
    let mut hash = Sha256::new();
    hash.update(options.seed.to_le_bytes());
    hash.update(attempt.to_le_bytes());
    hash.update(key);
    let mut rng = StdRng::from_seed(hash.finalize().into());
    let (least, most) = options.latency;
    let happens = |rng: &mut StdRng, rate: f64| rng.random::<f64>() < rate;
    // Always all draws, in this order, so that a change of one rate changes none of the other draws.
    let latency = least + most.saturating_sub(least).mul_f64(rng.random::<f64>());
    let failed = happens(&mut rng, options.error_rate);
    let status = if rng.random::<bool>() { 500 } else { 503 };
    FaultDraw {
        latency,
        error_status: failed.then_some(status),
        loses_response: happens(&mut rng, options.lost_answer_rate),
        declines: happens(&mut rng, options.decline_rate),
        is_busy: happens(&mut rng, options.busy_rate),
        is_partial: happens(&mut rng, options.partial_rate),
    }
}

/// Report of all requests, as `GET /_report` returns it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FakeProviderReport {
    /// All requests that arrived, also refused and failed ones.
    pub requests: u64,
    /// Payments charged at least once.
    pub charges: u64,
    /// Payments charged more than once.
    pub doubles: u64,
    /// Ids of up to 20 of them.
    pub double_ids: Vec<String>,
    /// Payments charged or declined under more than one idempotency key.
    pub several_keys: u64,
    pub declines: u64,
    /// Charges that were approved in part.
    #[serde(default)]
    pub partials: u64,
    /// Responses repeated for a known idempotency key.
    pub replays: u64,
    /// Look-ups that were not refused, with any result.
    #[serde(default)]
    pub lookups: u64,
    /// Requests that were processed, but whose connection was dropped instead of a response.
    pub lost_answers: u64,
    pub refused_429: u64,
    /// Most requests in flight at once, with those that were refused for being too many.
    #[serde(default)]
    pub largest_in_flight: u64,
    /// Requests beyond `--concurrency`.
    #[serde(default)]
    pub in_flight_breaches: u64,
    /// Responses by HTTP status.
    pub statuses: BTreeMap<u16, u64>,
    pub limits: Vec<LimitReport>,
    /// Times from receipt to response; `None` before the first response.
    pub answer_ms: Option<ResponseTimes>,
    /// Microseconds since the provider started.
    pub first_arrival_us: Option<u64>,
    pub last_arrival_us: Option<u64>,
    /// Rate between the first arrival and the last; 0 with fewer than two.
    pub rate_per_second: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitReport {
    /// The limit as configured: `100/1s`.
    pub limit: String,
    /// Most arrivals in any window.
    pub largest: u64,
    /// Arrivals that found the window full.
    pub breaches: u64,
}

/// Response times in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResponseTimes {
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl ResponseTimes {
    /// Nearest-rank percentiles over durations in microseconds.
    fn from_durations(mut durations_us: Vec<u32>) -> Option<Self> {
        durations_us.sort_unstable();
        let max = f64::from(*durations_us.last()?) / 1_000.0;
        let total: u64 = durations_us.iter().copied().map(u64::from).sum();
        let rank = |percent: usize| {
            let index = (durations_us.len() * percent).div_ceil(100).saturating_sub(1);
            f64::from(durations_us[index]) / 1_000.0
        };
        let mean = total as f64 / durations_us.len() as f64 / 1_000.0;
        Some(Self { mean, p50: rank(50), p99: rank(99), max })
    }
}

/// All arrivals so far, and the current window of each limit.
#[derive(Debug)]
struct ArrivalWindows {
    /// Times in microseconds, ascending.
    arrivals: Vec<u64>,
    counts: Vec<LimitCount>,
}

/// Counts of one limit.
#[derive(Debug)]
struct LimitCount {
    pub limit: Rate,
    pub largest: u64,
    pub breaches: u64,
    /// Index of the oldest arrival in the current window.
    oldest: usize,
}

impl ArrivalWindows {
    pub fn new(limits: &[Rate]) -> Self {
        let counts = limits.iter().map(|limit| LimitCount { limit: *limit, largest: 0, breaches: 0, oldest: 0 });
        Self { arrivals: Vec::new(), counts: counts.collect() }
    }

    /// Records an arrival, which must not be earlier than the last. If it breached a limit, returns the wait until the
    /// next one would fit within all limits.
    pub fn record_arrival(&mut self, at_us: u64) -> Option<Duration> {
        debug_assert!(self.arrivals.last().is_none_or(|last| *last <= at_us), "arrivals must be recorded in order");
        self.arrivals.push(at_us);
        let breached_before: u64 = self.counts.iter().map(|count| count.breaches).sum();
        for count in &mut self.counts {
            count.record_arrival(&self.arrivals, at_us);
        }
        let breached: u64 = self.counts.iter().map(|count| count.breaches).sum();
        // The next arrival may have to wait for a limit that this arrival only filled.
        let free_at_us = self.counts.iter().map(|count| count.free_at_us(&self.arrivals, at_us)).max()?;
        (breached > breached_before).then(|| Duration::from_micros(free_at_us.saturating_sub(at_us)))
    }
}

impl LimitCount {
    fn record_arrival(&mut self, arrivals: &[u64], at_us: u64) {
        let window_us = micros_up(self.limit.window());
        while arrivals[self.oldest] + window_us <= at_us {
            self.oldest += 1;
        }
        let in_window = (arrivals.len() - self.oldest) as u64;
        self.largest = self.largest.max(in_window);
        self.breaches += u64::from(in_window > u64::from(self.limit.max_requests()));
    }

    /// When the arrival that is `max_requests` from the end leaves the window. A closed limit never frees a slot; its
    /// wait is one window.
    fn free_at_us(&self, arrivals: &[u64], at_us: u64) -> u64 {
        let window_us = micros_up(self.limit.window());
        match usize::try_from(self.limit.max_requests()) {
            Ok(0) | Err(_) => at_us + window_us,
            Ok(slots) => arrivals.len().checked_sub(slots).map_or(0, |index| arrivals[index] + window_us),
        }
    }
}
