//! A strict provider for rehearsals, the demo and the tests: it counts every window, remembers every key and charge,
//! and says at the end what it saw.
//!
//! Refuses to be lenient, and refuses to share code with the limiter that it judges: its counting is its own.

use std::str::FromStr;
use std::time::Duration;

use crate::domain::limit::Rate;

pub use self::report::{FakeProviderReport, LimitReport, ResponseTimes};
pub use self::server::{FakeHandle, FakeProvider};
pub use self::strict::{Effect, StrictProvider};

pub mod charge;
mod faults;
mod listener;
mod report;
mod server;
pub mod strict;
mod windows;

/// What happens to a request beyond a limit. It is counted as a breach either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLimit {
    /// 429 with `Retry-After`, nothing else.
    #[default]
    Refuse,
    /// Served like any other.
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

/// How the provider behaves. Rates are shares of requests, 0–1, drawn from the seed, the key and the number of the try,
/// so that the same run meets the same faults whatever the order of arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct FakeOptions {
    /// Each counted over every sliding window. None: everything is allowed.
    pub limits: Vec<Rate>,
    pub on_limit: OnLimit,
    /// From receipt to answer, uniform between the two.
    pub latency: (Duration, Duration),
    /// Answered 500 or 503; nothing is charged and nothing remembered.
    pub error_rate: f64,
    /// Carried out and remembered, but the connection is dropped instead of an answer.
    pub lost_answer_rate: f64,
    /// Answered 402, and remembered.
    pub decline_rate: f64,
    /// Answered 429 with code `lock_timeout`, as if the payment's own object were locked; nothing is charged and nothing
    /// remembered.
    pub busy_rate: f64,
    /// Whether `Idempotency-Key` is honoured.
    pub deduplicate: bool,
    /// How long a key is remembered; `None`: for ever.
    pub retention: Option<Duration>,
    /// Whether `GET /charges?id=` tells what became of a payment. Look-ups count like charges, and meet the same faults.
    pub lookup: bool,
    pub seed: u64,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            limits: Vec::new(),
            on_limit: OnLimit::Refuse,
            latency: (Duration::ZERO, Duration::ZERO),
            error_rate: 0.0,
            lost_answer_rate: 0.0,
            decline_rate: 0.0,
            busy_rate: 0.0,
            deduplicate: true,
            retention: None,
            lookup: true,
            seed: 0,
        }
    }
}
