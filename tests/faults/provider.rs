//! A payment provider that keeps a record of every request, and that can be told to fail.
//!
//! It shares no code with the program that it judges, nor with the program's simulated provider.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use crate::records::{Call, ProviderRecord};

/// Amounts with these last digits are declined.
pub const DECLINED_CENTS: i64 = 13;

/// The provider's behaviour.
#[derive(Clone, Debug)]
pub struct ProviderOptions {
    pub deduplicates: bool,
    pub can_be_asked: bool,
    /// Requests per window.
    pub limits: Vec<(usize, Duration)>,
    pub latency: (Duration, Duration),
    /// Its row releases slots after the grant.
    pub by_grant: bool,
    /// Charges that it accepts in a second, if those are fewer than the row allows. To others it responds 429, and asks
    /// for a pause of [`REFUSED_S`].
    pub accepts_per_s: Option<usize>,
}

/// The pause that it asks for after a request beyond `accepts_per_s`.
pub const REFUSED_S: u64 = 2;

/// Fault that the provider has now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    None,
    /// Resets the connection instead of a response, without a charge.
    ResetBefore,
    /// Charges, then resets the connection.
    ResetAfter,
    /// Charges and never responds.
    Silent,
    /// Responds 500, without a charge.
    Error,
    /// Responds 503 with `Retry-After: 1`, without a charge.
    Unavailable,
    /// Responds 401, without a charge: the credential has expired. The billing day alone does so.
    #[cfg(feature = "faults")]
    Unauthorized,
    /// Responds 404, without a charge: its address has moved.
    NotFound,
    /// Responds 429 with `Retry-After`, without a charge.
    Throttle {
        seconds: u64,
    },
    /// Charges and responds 200 with half a body.
    Garbled,
    /// Approves and charges half of the sum, and says so.
    Partial,
}

struct Memory {
    body: Vec<u8>,
    answer: (u16, String),
    due: Instant,
}

struct Books {
    calls: Vec<Call>,
    memory: HashMap<String, Memory>,
    /// The amount that was approved, currency and reference of each payment charged.
    charged: BTreeMap<String, (i64, String, String)>,
    declined: BTreeMap<String, (i64, String)>,
    trouble: Trouble,
}

/// A provider that is serving requests.
#[derive(Clone)]
pub struct Provider {
    options: Arc<ProviderOptions>,
    books: Arc<Mutex<Books>>,
    started: Instant,
    pub port: u16,
}

/// A parsed request.
struct Request {
    method: String,
    target: String,
    key: Option<String>,
    body: Vec<u8>,
}

enum Reply {
    Answer(u16, String, Vec<(&'static str, String)>),
    Reset,
    Never,
    Half,
}

impl Provider {
    /// Serves on a free port until the runtime ends.
    pub async fn start(options: ProviderOptions) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST, options).await
    }

    /// Serves at this address of the host.
    pub async fn start_at(address: Ipv4Addr, options: ProviderOptions) -> Self {
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let books = Books {
            calls: Vec::new(),
            memory: HashMap::new(),
            charged: BTreeMap::new(),
            declined: BTreeMap::new(),
            trouble: Trouble::None,
        };
        let port = listener.local_addr().unwrap().port();
        let (options, books) = (Arc::new(options), Arc::new(Mutex::new(books)));
        let provider = Self { options, books, started: Instant::now(), port };
        let serving = provider.clone();
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                tokio::spawn(serving.clone().serve(stream));
            }
        });
        provider
    }

    pub fn trouble(&self, trouble: Trouble) {
        self.books().trouble = trouble;
    }

    /// Charges that this trouble may have met until now. A replay of an earlier response is approved as that was.
    pub fn charges_met(&self, trouble: Trouble) -> usize {
        let met = |call: &&Call| match trouble {
            Trouble::Partial => call.approved_part.is_some(),
            _ => call.payment.is_some(),
        };
        self.books().calls.iter().filter(met).count()
    }

    pub fn record(&self) -> ProviderRecord {
        let micros = |window: Duration| u64::try_from(window.as_micros()).unwrap();
        let limits = self.options.limits.iter().map(|(requests, window)| (*requests, micros(*window)));
        ProviderRecord {
            calls: self.books().calls.clone(),
            limits: limits.collect(),
            deduplicates: self.options.deduplicates,
            by_grant: self.options.by_grant,
        }
    }

    /// An instant of the monotonic clock as microseconds of the records.
    pub fn micros_at(&self, at: std::time::Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.started.into_std()).as_micros()).unwrap()
    }

    /// Requests that were answered with 429, since an instant of the monotonic clock, or ever.
    pub fn throttled_since(&self, from: Option<std::time::Instant>) -> u64 {
        let from_us = from.map_or(0, |from| self.micros_at(from));
        let books = self.books();
        let throttled = books.calls.iter().filter(|call| call.status == Some(429) && call.answered_us >= Some(from_us));
        u64::try_from(throttled.count()).unwrap()
    }

    /// Requests that were received between two instants of the monotonic clock.
    pub fn received_between(&self, from: std::time::Instant, to: std::time::Instant) -> u64 {
        let (from_us, to_us) = (self.micros_at(from), self.micros_at(to));
        let received = self
            .books()
            .calls
            .iter()
            .filter_map(|call| call.received_us)
            .filter(|at| (from_us..to_us).contains(at))
            .count();
        u64::try_from(received).unwrap()
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap()
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap()
    }

    async fn serve(self, mut stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut read = Vec::new();
        loop {
            // Waits for the first byte of the next request on this connection.
            if read.is_empty() && !more(&mut stream, &mut read).await {
                return;
            }
            let number = {
                // The lock is held while the clock is read, so that calls are in the order of their instants.
                let mut books = self.books();
                books.calls.push(Call { first_byte_us: self.now_us(), ..Call::default() });
                books.calls.len() - 1
            };
            let Some(request) = read_request(&mut stream, &mut read).await else { return };
            let (reply, due) = self.decide(number, &request);
            tokio::time::sleep_until(due).await;
            if !self.answer(&mut stream, number, reply).await {
                return;
            }
        }
    }

    async fn answer(&self, stream: &mut TcpStream, number: usize, reply: Reply) -> bool {
        let (status, body, headers) = match reply {
            Reply::Answer(status, body, headers) => (status, body, headers),
            Reply::Half => {
                let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"id\":";
                let _ = stream.write_all(head.as_bytes()).await;
                return false;
            }
            Reply::Reset => {
                let _ = stream.set_zero_linger();
                return false;
            }
            Reply::Never => {
                // Waits until the client closes the connection.
                while more(stream, &mut Vec::new()).await {}
                return false;
            }
        };
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        );
        // Read before the write: on a busy machine the worker can have the response before this task runs again. One
        // window later the worker may use the slot again.
        let answered_us = self.now_us();
        let written = stream.write_all(answer.as_bytes()).await.is_ok();
        if written {
            let call = &mut self.books().calls[number];
            (call.answered_us, call.status) = (Some(answered_us), Some(status));
        }
        written
    }

    /// Records the request and its result. The charge happens now; the response follows at the returned instant.
    fn decide(&self, number: usize, request: &Request) -> (Reply, Instant) {
        let (least, most) = self.options.latency;
        let latency = least + (most - least).mul_f64(rand::random::<f64>());
        let mut books = self.books();
        let now_us = self.now_us();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let call = &mut books.calls[number];
        call.received_us = Some(now_us);
        call.received_wall_us = u64::try_from(wall.as_micros()).unwrap();
        call.key.clone_from(&request.key);
        call.body.clone_from(&request.body);
        let due = Instant::now() + latency;
        let reply = if request.method == "GET" {
            self.look_up(&mut books, number, &request.target)
        } else {
            self.charge(&mut books, number, now_us, due)
        };
        (reply, due)
    }

    fn charge(&self, books: &mut Books, number: usize, now_us: u64, due: Instant) -> Reply {
        let call = books.calls[number].clone();
        let Ok(body) = serde_json::from_slice::<Value>(&call.body) else { return plain(400, "bad_body") };
        let text = |name: &str| body[name].as_str().map(str::to_owned);
        let (Some(payment), Some(currency), Some(amount)) = (text("id"), text("currency"), body["amount"].as_i64())
        else {
            return plain(400, "bad_field");
        };
        let noted = &mut books.calls[number];
        noted.payment = Some(payment.clone());
        (noted.amount, noted.currency, noted.account) = (amount, currency.clone(), text("account"));
        match books.trouble {
            Trouble::ResetBefore => return Reply::Reset,
            Trouble::Error => return plain(500, "fault"),
            #[cfg(feature = "faults")]
            Trouble::Unauthorized => return plain(401, "expired_key"),
            Trouble::NotFound => return plain(404, "no_such_page"),
            Trouble::Unavailable => return later(503, 1),
            Trouble::Throttle { seconds } => return later(429, seconds),
            Trouble::None | Trouble::ResetAfter | Trouble::Silent | Trouble::Garbled | Trouble::Partial => {}
        }
        if self.options.accepts_per_s.is_some_and(|most| accepted_lately(&books.calls[..number], now_us) >= most) {
            return later(429, REFUSED_S);
        }
        let key = call.key.clone().filter(|_| self.options.deduplicates);
        if let Some(known) = key.as_ref().and_then(|key| books.memory.get(key)) {
            if known.body != call.body {
                return plain(422, "key_reused_with_other_body");
            }
            if Instant::now() < known.due {
                return plain(409, "in_progress");
            }
            let (status, body) = known.answer.clone();
            books.calls[number].replayed = true;
            return faulty_reply(books.trouble, status, body);
        }
        let (status, answer) = if amount % 100 == DECLINED_CENTS {
            books.declined.insert(payment, (amount, currency));
            (402, json!({ "error": { "type": "card_error", "code": "card_declined" } }))
        } else {
            let reference = format!("ch_{}", number + 1);
            let approved = if books.trouble == Trouble::Partial { amount / 2 } else { amount };
            let noted = &mut books.calls[number];
            noted.effect_us = Some(now_us);
            noted.approved_part = (approved < amount).then_some(approved);
            books.charged.insert(payment, (approved, currency.clone(), reference.clone()));
            (200, json!({ "id": reference, "amount": approved, "currency": currency }))
        };
        let answer = answer.to_string();
        if let Some(key) = key {
            books.memory.insert(key, Memory { body: call.body, answer: (status, answer.clone()), due });
        }
        faulty_reply(books.trouble, status, answer)
    }

    fn look_up(&self, books: &mut Books, number: usize, target: &str) -> Reply {
        books.calls[number].is_look_up = true;
        let Some((_, payment)) = target.split_once("?id=").filter(|_| self.options.can_be_asked) else {
            return plain(404, "no_such_page");
        };
        books.calls[number].payment = Some(payment.to_owned());
        if books.trouble != Trouble::None {
            return plain(500, "fault");
        }
        let found = |state: &str, reference: &str, amount: i64, currency: &str| {
            let body = json!({ "id": reference, "state": state, "amount": amount, "currency": currency });
            Reply::Answer(200, body.to_string(), Vec::new())
        };
        match (books.charged.get(payment), books.declined.get(payment)) {
            (Some((amount, currency, reference)), _) => found("succeeded", reference, *amount, currency),
            (None, Some((amount, currency))) => found("declined", payment, *amount, currency),
            (None, None) => plain(404, "no_such_payment"),
        }
    }
}

/// The response that a provider with this fault sends.
fn faulty_reply(trouble: Trouble, status: u16, body: String) -> Reply {
    match trouble {
        Trouble::ResetAfter => Reply::Reset,
        Trouble::Silent => Reply::Never,
        Trouble::Garbled => Reply::Half,
        _ => Reply::Answer(status, body, Vec::new()),
    }
}

fn plain(status: u16, code: &str) -> Reply {
    Reply::Answer(status, json!({ "error": { "code": code } }).to_string(), Vec::new())
}

/// Charges of the last second before this instant.
fn accepted_lately(before: &[Call], now_us: u64) -> usize {
    let lately = before.iter().rev().take_while(|call| call.first_byte_us + 3_000_000 > now_us);
    lately.filter_map(|call| call.effect_us).filter(|effect_us| effect_us + 1_000_000 > now_us).count()
}

fn later(status: u16, seconds: u64) -> Reply {
    let body = json!({ "error": { "code": "later" } }).to_string();
    Reply::Answer(status, body, vec![("Retry-After", seconds.to_string())])
}

/// Reads once; returns false at the end of the stream.
async fn more(stream: &mut TcpStream, into: &mut Vec<u8>) -> bool {
    stream.read_buf(into).await.is_ok_and(|read| read > 0)
}

/// Reads one whole request; bytes after it stay in `read`.
async fn read_request(stream: &mut TcpStream, read: &mut Vec<u8>) -> Option<Request> {
    let head_end = loop {
        if let Some(at) = read.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break at + 4;
        }
        if !more(stream, read).await {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&read[..head_end]).into_owned();
    let mut lines = head.split("\r\n");
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
    let header = |name: &str| {
        let line = head.lines().find_map(|line| line.split_once(':').filter(|(key, _)| key.eq_ignore_ascii_case(name)));
        line.map(|(_, value)| value.trim().to_owned())
    };
    let length: usize = header("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    while read.len() < head_end + length {
        if !more(stream, read).await {
            return None;
        }
    }
    let body = read[head_end..head_end + length].to_vec();
    read.drain(..head_end + length);
    Some(Request { method, target, key: header("idempotency-key"), body })
}
