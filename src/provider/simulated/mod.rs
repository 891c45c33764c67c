//! Strict provider for rehearsals, the demo and the tests. It counts every window, remembers every key and charge, and
//! reports them.
//!
//! Its counting shares no code with the limiter that it checks.
//!
//! Its faults and latencies are drawn from the seed, the key and the number of the try. There is no shared random
//! stream. With one, each draw would depend on the order of arrival, and no run could be repeated.

use std::str::FromStr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

pub use self::report::{FakeProviderReport, LimitReport, ResponseTimes};
pub use self::server::{FakeHandle, FakeProvider};
pub use self::strict::{Effect, StrictProvider};
use crate::domain::limit::Rate;

mod report;
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

/// Behaviour of the provider. Rates are shares of requests, 0–1. They are drawn from the seed, the key and the number
/// of the try, so a repeated run meets the same faults in any order of arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct FakeOptions {
    /// Limits, each counted over every sliding window. Without any, everything is allowed.
    pub limits: Vec<Rate>,
    /// Most requests in flight; `None`: any number.
    pub concurrency: Option<u32>,
    pub on_limit: OnLimit,
    /// Least and most time from receipt to response; uniformly distributed.
    pub latency: (Duration, Duration),
    /// Answered with 500 or 503. Nothing is charged or remembered.
    pub error_rate: f64,
    /// Processed and remembered, but the connection is dropped instead of a response.
    pub lost_answer_rate: f64,
    /// Answered with 402, and remembered.
    pub decline_rate: f64,
    /// Answered with 429 and code `lock_timeout`, as if the payment's own object were locked. Nothing is charged or
    /// remembered.
    pub busy_rate: f64,
    /// Whether `Idempotency-Key` is honoured.
    pub deduplicate: bool,
    /// How long a key is remembered; `None`: for ever.
    pub retention: Option<Duration>,
    /// Whether `GET /charges?id=` returns the state of a payment. Look-ups count like charges, and meet the same
    /// faults.
    pub lookup: bool,
    /// Statuses of all charges of an account. Nothing is charged or remembered.
    pub account_statuses: Vec<AccountStatus>,
    pub seed: u64,
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_form_are_read_invalid_ones_rejected() {
        let json = br#"{"id":"p1","amount":5,"currency":"EUR","payload":{"x":1}}"#;
        let read = ChargeRequest::parse(Some("k1"), false, json).unwrap();
        assert_eq!((read.payment.as_str(), read.amount, read.currency.as_str()), ("p1", 5, "EUR"));
        let form = ChargeRequest::parse(Some("k1"), true, b"amount=5&currency=EUR&account=a%201").unwrap();
        assert_eq!((form.payment.as_str(), form.account.as_deref()), ("k1", Some("a 1")));
        for (body, code) in [
            (r#"{"amount":5,"currency":"EUR"}"#, "missing_id"),
            (r#"{"id":"p1","currency":"EUR"}"#, "bad_amount"),
            (r#"{"id":"p1","amount":-5,"currency":"EUR"}"#, "bad_amount"),
            (r#"{"id":"p1","amount":5}"#, "missing_currency"),
            (r#"{"id":"p1","amount":1.5,"currency":"EUR"}"#, "bad_body"),
            ("", "bad_body"),
        ] {
            assert_eq!(ChargeRequest::parse(None, false, body.as_bytes()), Err(code), "{body}");
        }
    }

    #[test]
    fn draws_repeat_and_keep_their_rates() {
        let options = FakeOptions {
            latency: (Duration::from_millis(20), Duration::from_millis(80)),
            error_rate: 0.1,
            lost_answer_rate: 0.2,
            decline_rate: 0.5,
            busy_rate: 0.3,
            seed: 7,
            ..FakeOptions::default()
        };
        let draws: Vec<FaultDraw> = (0..4_000).map(|n| draw(&options, &format!("pay-{n}"), 1)).collect();
        assert_eq!(draws[17], draw(&options, "pay-17", 1));
        assert_ne!(draws[17], draw(&options, "pay-17", 2));
        assert_ne!(draws[17], draw(&FakeOptions { seed: 8, ..options.clone() }, "pay-17", 1));
        let count = |what: fn(&FaultDraw) -> bool| draws.iter().filter(|draw| what(draw)).count();
        assert!((300..500).contains(&count(|draw| draw.error_status.is_some())));
        assert!((650..950).contains(&count(|draw| draw.loses_response)));
        assert!((1_850..2_150).contains(&count(|draw| draw.declines)));
        assert!((1_050..1_350).contains(&count(|draw| draw.is_busy)));
        assert!(draws.iter().all(|draw| (20..=80).contains(&draw.latency.as_millis())));
        let statuses: std::collections::BTreeSet<_> = draws.iter().filter_map(|draw| draw.error_status).collect();
        assert_eq!(statuses, [500, 503].into());
    }

    #[test]
    fn rate_zero_never_fails_rate_one_always() {
        let calm = draw(&FakeOptions::default(), "x", 1);
        assert_eq!(
            calm,
            FaultDraw {
                latency: Duration::ZERO,
                error_status: None,
                loses_response: false,
                declines: false,
                is_busy: false
            }
        );
        let all = FakeOptions { lost_answer_rate: 1.0, ..FakeOptions::default() };
        assert!((0..100).all(|attempt| draw(&all, "x", attempt).loses_response));
    }
}
