//! State machine of the strict provider. The caller passes the time, in microseconds.
//!
//! It has no I/O and reads no clock. [`StrictProvider::record_arrival`] counts every request, refused ones too.
//! [`StrictProvider::process`] decides its outcome, and [`StrictProvider::record_response`] records its end.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    ArrivalWindows, ChargeRequest, FakeOptions, FakeProviderReport, FaultDraw, LimitReport, OnLimit, ResponseTimes,
    draw,
};
use crate::domain::time::micros_up;

/// Largest number of ids in a report.
const IDS_LISTED: usize = 20;

/// A request whose arrival is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Arrival {
    pub at_us: u64,
    /// The request is refused with 429 and this wait.
    pub refused_for: Option<Duration>,
}

/// Response to send, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Reply {
    pub status: u16,
    /// JSON.
    pub body: String,
    pub replayed: bool,
    /// The connection is dropped instead of a response.
    pub lost: bool,
    /// When the response is due, by the provider's clock.
    pub due_us: u64,
}

/// Effect of all requests for one payment: an element of `GET /_effects`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effect {
    pub id: String,
    pub amount: i64,
    /// Amount of its first charge; `None` for a payment that was only declined.
    #[serde(default)]
    pub charged: Option<i64>,
    pub currency: String,
    pub account: Option<String>,
    /// The key of the first charge.
    pub key: Option<String>,
    /// Number of charges; 0 for a payment that was only declined.
    pub count: u64,
    /// Charged or declined under a second key as well.
    pub several_keys: bool,
    /// Arrival of the first request that charged or declined it, in microseconds since the provider started.
    #[serde(default)]
    pub first_us: u64,
}

/// The first request under an idempotency key.
#[derive(Debug)]
struct IdempotencyRecord {
    body_hash: [u8; 32],
    status: u16,
    body: String,
    first_us: u64,
    /// The first request under the key is in progress until then.
    due_us: u64,
}

/// State of a payment by its first charge, or else its first decline, for look-ups.
#[derive(Debug)]
struct PaymentRecord {
    effect: usize,
    /// `None` if it was declined.
    reference: Option<String>,
    /// The request is in progress until then.
    due_us: u64,
}

/// A provider that counts every request, and remembers every key and charge.
#[derive(Debug)]
pub struct StrictProvider {
    pub(super) options: FakeOptions,
    windows: ArrivalWindows,
    idempotency_records: HashMap<String, IdempotencyRecord>,
    /// Requests so far under a key, or for a payment without one. The next draw depends on it.
    tries_by_key: HashMap<String, u32>,
    effects: Vec<Effect>,
    payment_records: HashMap<String, PaymentRecord>,
    last_reference: u64,
    /// Requests that were not refused and have no response yet.
    in_flight: u64,
    /// Counts of the report that grow with each request.
    totals: FakeProviderReport,
    /// Times from receipt to response, in the order of the responses.
    durations_us: Vec<u32>,
}

impl StrictProvider {
    pub fn new(options: FakeOptions) -> Self {
        Self {
            windows: ArrivalWindows::new(&options.limits),
            options,
            idempotency_records: HashMap::new(),
            tries_by_key: HashMap::new(),
            effects: Vec::new(),
            payment_records: HashMap::new(),
            last_reference: 0,
            in_flight: 0,
            totals: FakeProviderReport::default(),
            durations_us: Vec::new(),
        }
    }

    /// Records a request when it arrives, before anything else is known about it. A time before the last arrival counts
    /// as the last arrival's.
    pub fn record_arrival(&mut self, now_us: u64) -> Arrival {
        let at_us = now_us.max(self.windows.arrivals.last().copied().unwrap_or(0));
        let breached = self.windows.record_arrival(at_us);
        let refused_for = breached.filter(|_| self.options.on_limit == OnLimit::Refuse);
        self.totals.refused_429 += u64::from(refused_for.is_some());
        Arrival { at_us, refused_for }
    }

    /// Counts a request in flight, until [`Self::end_flight`]. One too many is refused, like one too many in a window.
    pub fn begin_flight(&mut self, arrival: Arrival) -> Arrival {
        if arrival.refused_for.is_some() {
            return arrival;
        }
        let is_breach = self.options.concurrency.is_some_and(|most| self.in_flight >= u64::from(most));
        self.totals.in_flight_breaches += u64::from(is_breach);
        self.totals.largest_in_flight = self.totals.largest_in_flight.max(self.in_flight + 1);
        if is_breach && self.options.on_limit == OnLimit::Refuse {
            self.totals.refused_429 += 1;
            return Arrival { refused_for: Some(Duration::ZERO), ..arrival };
        }
        self.in_flight += 1;
        arrival
    }

    /// Ends what [`Self::begin_flight`] began, just before the response is sent.
    pub fn end_flight(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Decides the outcome of a request that was not refused. The charge happens now, the response follows.
    pub fn process(&mut self, arrival: Arrival, request: &ChargeRequest) -> Reply {
        let now_us = arrival.at_us;
        let key = request.key.as_deref().filter(|_| self.options.deduplicate);
        if let Some(record) = key.and_then(|key| self.find_record(key, now_us)) {
            if record.body_hash != request.body_hash {
                return error_reply(422, "key_reused_with_other_body", now_us);
            }
            if now_us < record.due_us {
                return error_reply(409, "in_progress", now_us);
            }
        }
        let draw = self.draw(request.key.as_deref().unwrap_or(&request.payment));
        let due_us = now_us.saturating_add(micros_up(draw.latency));
        if let Some(status) = self.options.status_of_account(request.account.as_deref()) {
            return error_reply(status, "account_fault", due_us);
        }
        if let Some(status) = draw.error_status {
            return error_reply(status, "fault", due_us);
        }
        if draw.is_busy {
            return error_reply(429, "lock_timeout", due_us);
        }
        let mut reply = match key.and_then(|key| self.find_record(key, now_us)) {
            Some(record) => {
                let (status, body) = (record.status, record.body.clone());
                self.totals.replays += 1;
                Reply { status, body, replayed: true, lost: false, due_us }
            }
            None => self.execute_charge(request, draw, now_us, due_us),
        };
        reply.lost = draw.loses_response;
        self.totals.lost_answers += u64::from(reply.lost);
        reply
    }

    /// Decides the response to a look-up that was not refused.
    pub fn look_up(&mut self, arrival: Arrival, payment: &str) -> Reply {
        let now_us = arrival.at_us;
        self.totals.lookups += 1;
        // Look-ups have their own count, so that they change none of the draws of charges.
        let draw = self.draw(&format!("look-up {payment}"));
        let due_us = now_us.saturating_add(micros_up(draw.latency));
        if let Some(status) = draw.error_status {
            return error_reply(status, "fault", due_us);
        }
        if draw.is_busy {
            return error_reply(429, "lock_timeout", due_us);
        }
        let known = self.payment_records.get(payment);
        let Some((known, effect)) = known.and_then(|known| Some((known, self.effects.get(known.effect)?))) else {
            return error_reply(404, "no_such_payment", due_us);
        };
        let state = match known.reference {
            _ if now_us < known.due_us => "processing",
            Some(_) => "succeeded",
            None => "declined",
        };
        let body = serde_json::json!({
            "id": known.reference,
            "state": state,
            "amount": effect.charged.unwrap_or(effect.amount),
            "currency": effect.currency,
        });
        self.totals.lost_answers += u64::from(draw.loses_response);
        Reply { status: 200, body: body.to_string(), replayed: false, lost: draw.loses_response, due_us }
    }

    /// Records a response that is being sent.
    pub fn record_response(&mut self, arrival: Arrival, now_us: u64, status: u16) {
        *self.totals.statuses.entry(status).or_default() += 1;
        let duration_us = now_us.saturating_sub(arrival.at_us);
        self.durations_us.push(u32::try_from(duration_us).unwrap_or(u32::MAX));
    }

    /// Report of all requests so far.
    pub fn report(&self) -> FakeProviderReport {
        FakeProviderReport {
            answer_ms: ResponseTimes::from_durations(self.durations_us()),
            ..self.report_without_times()
        }
    }

    /// Times from receipt to response, in microseconds, in the order of the responses.
    pub(super) fn durations_us(&self) -> Vec<u32> {
        self.durations_us.clone()
    }

    /// The report without response times. Its cost does not grow with the number of requests.
    pub(super) fn report_without_times(&self) -> FakeProviderReport {
        let limits = self.windows.counts.iter().map(|count| LimitReport {
            limit: count.limit.to_string(),
            largest: count.largest,
            breaches: count.breaches,
        });
        let arrivals = &self.windows.arrivals;
        let (first, last) = (arrivals.first().copied(), arrivals.last().copied());
        let span_us = last.zip(first).map_or(0, |(last, first)| last - first);
        let gaps = arrivals.len().saturating_sub(1) as f64;
        FakeProviderReport {
            requests: arrivals.len() as u64,
            limits: limits.collect(),
            first_arrival_us: first,
            last_arrival_us: last,
            rate_per_second: if span_us == 0 { 0.0 } else { gaps / (span_us as f64 / 1e6) },
            ..self.totals.clone()
        }
    }

    /// Effects of all payments, in the order of their first charge or decline.
    pub fn effects(&self) -> &[Effect] {
        &self.effects
    }

    /// Times of all arrivals, in microseconds, ascending.
    pub fn arrivals(&self) -> &[u64] {
        &self.windows.arrivals
    }

    /// Resets everything except the options.
    pub fn reset(&mut self) {
        // Requests in flight end after the reset.
        *self = Self { in_flight: self.in_flight, ..Self::new(self.options.clone()) };
    }

    fn find_record(&self, key: &str, now_us: u64) -> Option<&IdempotencyRecord> {
        let retention_us = self.options.retention.map_or(u64::MAX, micros_up);
        // Bodies may be read in another order than their requests arrived. So an earlier request can find a record that
        // is younger than itself.
        self.idempotency_records.get(key).filter(|record| now_us.saturating_sub(record.first_us) < retention_us)
    }

    fn draw(&mut self, key: &str) -> FaultDraw {
        let tries = self.tries_by_key.entry(key.to_owned()).or_default();
        *tries += 1;
        draw(&self.options, key, *tries)
    }

    fn execute_charge(&mut self, request: &ChargeRequest, draw: FaultDraw, now_us: u64, due_us: u64) -> Reply {
        let mut charge_reference = None;
        // Half of one minor unit is nothing.
        let is_partial = draw.is_partial && request.amount > 1;
        let charged = if is_partial { request.amount / 2 } else { request.amount };
        let (status, body) = if draw.declines {
            self.totals.declines += 1;
            (402, r#"{"error":{"type":"card_error","code":"card_declined"}}"#.to_owned())
        } else {
            self.last_reference += 1;
            self.totals.partials += u64::from(is_partial);
            let reference = format!("ch_{}", self.last_reference);
            let body = serde_json::json!({
                "id": reference,
                "status": "succeeded",
                "amount": charged,
                "currency": request.currency,
            });
            charge_reference = Some(reference);
            (200, body.to_string())
        };
        let next = self.effects.len();
        let new = || PaymentRecord { effect: next, reference: None, due_us };
        let known = self.payment_records.entry(request.payment.clone()).or_insert_with(new);
        // The first charge decides the state of a payment; without a charge, the first decline does.
        if known.reference.is_none() {
            (known.reference, known.due_us) = (charge_reference, due_us);
        }
        let index = known.effect;
        self.record_effect(request, index, (!draw.declines).then_some(charged), now_us);
        if let Some(key) = &request.key {
            let record = IdempotencyRecord {
                body_hash: request.body_hash,
                status,
                body: body.clone(),
                first_us: now_us,
                due_us,
            };
            self.idempotency_records.insert(key.clone(), record);
        }
        Reply { status, body, replayed: false, lost: false, due_us }
    }

    /// Counts a request of the payment with this index among the effects, with the amount that it charged.
    fn record_effect(&mut self, request: &ChargeRequest, index: usize, charged: Option<i64>, now_us: u64) {
        let charges = u64::from(charged.is_some());
        if index == self.effects.len() {
            self.effects.push(Effect {
                id: request.payment.clone(),
                amount: request.amount,
                charged: None,
                currency: request.currency.clone(),
                account: request.account.clone(),
                key: request.key.clone(),
                count: 0,
                several_keys: false,
                first_us: now_us,
            });
        }
        let (effect, totals) = (&mut self.effects[index], &mut self.totals);
        if effect.key != request.key && !effect.several_keys {
            effect.several_keys = true;
            totals.several_keys += 1;
        }
        effect.count += charges;
        effect.charged = effect.charged.or(charged);
        match effect.count {
            1 if charges > 0 => totals.charges += 1,
            2 if charges > 0 => {
                totals.doubles += 1;
                if totals.double_ids.len() < IDS_LISTED {
                    totals.double_ids.push(effect.id.clone());
                }
            }
            _ => {}
        }
    }
}

fn error_reply(status: u16, code: &str, due_us: u64) -> Reply {
    Reply { status, body: error_body(code), replayed: false, lost: false, due_us }
}

pub(super) fn error_body(code: &str) -> String {
    serde_json::json!({ "error": { "code": code } }).to_string()
}

#[cfg(test)]
#[path = "strict_tests.rs"]
mod tests;
