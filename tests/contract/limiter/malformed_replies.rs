//! A store that answers unlike the expected one: another program, a proxy, or a newer version. No such answer is taken
//! as a permit, and a gate calls this store no more often than an unavailable one.

use std::io::{BufRead, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::limiter::gate::{AcquireResult, BlockReason, Gate, GateContext};
use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::limiter::{LimitStatus, RecentAttempts};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::*;

const INFO: &str = "# Server\r\nrun_id:0123456789abcdef\r\n";

/// A server that knows enough of the protocol for a handshake. It answers function calls with the bytes of `lie`.
struct Liar {
    port: u16,
    lie: Arc<Mutex<Vec<u8>>>,
}

impl Liar {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, lie) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<u8>>>::default());
        let shared = lie.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let lie = shared.clone();
                std::thread::spawn(move || serve(connection.unwrap(), &lie));
            }
        });
        Self { port, lie }
    }
}

/// Serves a connection until the client closes it.
fn serve(stream: TcpStream, lie: &Mutex<Vec<u8>>) -> Option<()> {
    let mut output = stream.try_clone().ok()?;
    let mut input = BufReader::new(stream);
    loop {
        let command = read_command(&mut input)?;
        let answer = match command.as_str() {
            "INFO" => format!("${}\r\n{INFO}\r\n", INFO.len()).into_bytes(),
            "FCALL" => lie.lock().unwrap().clone(),
            _ => b"+OK\r\n".to_vec(),
        };
        output.write_all(&answer).ok()?;
    }
}

/// The first word of the next command.
fn read_command(input: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    let mut number = |input: &mut dyn BufRead| -> Option<usize> {
        line.clear();
        input.read_line(&mut line).ok()?;
        line.get(1..)?.trim().parse().ok()
    };
    let words = number(input)?;
    let mut first = None;
    for _ in 0..words {
        let length = number(input)?;
        let mut word = vec![0; length + 2];
        input.read_exact(&mut word).ok()?;
        word.truncate(length);
        first.get_or_insert(word);
    }
    Some(String::from_utf8_lossy(&first?).to_uppercase())
}

/// A bulk reply, as the function returns it.
fn bulk(answer: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", answer.len()).as_bytes(), answer, b"\r\n"].concat()
}

/// One permit that starts at once, from one limit with 8 remaining.
fn granted() -> Vec<u8> {
    let now: u64 = 1_800_000_000_000_000;
    let head = [
        (0, 1),
        (0, 1),
        (0, 2),
        (0, 6),
        (now, 7),
        (1, 6),
        (1, 7),
        (1, 6),
        (0, 6),
        (8, 4),
        (0, 2),
        (0, 6),
        (0, 4),
        (1, 4),
        (0, 2),
    ];
    let run = [(0, 2), (1, 4), (0, 6), (0, 6)];
    let bytes = |(value, width): &(u64, usize)| value.to_le_bytes()[..*width].to_vec();
    head.iter().chain(&run).flat_map(bytes).collect()
}

#[tokio::test]
async fn malformed_reply_grants_no_permit() {
    let liar = Liar::start();
    let limiter: Arc<dyn Limiter> =
        Arc::new(RedisLimiter::new(&format!("redis://127.0.0.1:{}", liar.port), "lies").unwrap());
    let mut caller = Caller::new(&limiter, spec(&[("all", 9, 20_000)]));
    let granted = granted();
    let with = |at: usize, byte: u8| {
        let mut changed = granted.clone();
        changed[at] = byte;
        bulk(&changed)
    };
    let lies: Vec<Vec<u8>> = [
        "+OK\r\n".to_owned(),
        "$-1\r\n".to_owned(),
        "*-1\r\n".to_owned(),
        "*0\r\n".to_owned(),
        ":1\r\n".to_owned(),
        "$5\r\nhello\r\n".to_owned(),
        "*1\r\n*1\r\n:1\r\n".to_owned(),
        "*2\r\n:0\r\n:0\r\n".to_owned(),
        "HTTP/1.1 400 Bad Request\r\n\r\n".to_owned(),
        "-\r\n".to_owned(),
        // Numbers and lengths beyond any range, types of RESP3, endless nesting.
        ":99999999999999999999999\r\n".to_owned(),
        "$9223372036854775807\r\nx".to_owned(),
        "$-5\r\n".to_owned(),
        "*2147483647\r\n:1\r\n".to_owned(),
        "*9223372036854775807\r\n:1\r\n".to_owned(),
        "%9223372036854775807\r\n+a\r\n+b\r\n".to_owned(),
        "%1\r\n+a\r\n+b\r\n".to_owned(),
        "#t\r\n".to_owned(),
        "_\r\n".to_owned(),
        ",1e999\r\n".to_owned(),
        "(99999999999999999999\r\n".to_owned(),
        ">1\r\n+x\r\n".to_owned(),
        "*1\r\n".repeat(100_000),
        "\r\n".to_owned(),
        String::new(),
    ]
    .into_iter()
    .map(String::into_bytes)
    .chain([
        bulk(b"\0\0"),
        bulk(&granted[..granted.len() - 1]),
        bulk(&[granted.as_slice(), &[7]].concat()),
        // An unknown refusal, more runs than follow, an index of a request that was not made.
        with(0, 99),
        with(58, 2),
        with(64, 1),
        // More permits than requested, none at all, a start eight years ahead.
        with(66, 2),
        with(69, 255),
        with(66, 0),
        with(75, 255),
        // Half an answer, and nothing after it.
        bulk(&granted)[..20].to_vec(),
    ])
    .collect();
    for lie in lies {
        *liar.lie.lock().unwrap() = lie.clone();
        let outcome = caller.try_call(&[1]).await;
        let error = outcome.err().unwrap_or_else(|| panic!("{lie:?} was taken for a reply"));
        assert!(error.to_string().starts_with("limiter store "), "{lie:?}: {error}");
    }
    // The correct reply is accepted at once.
    *liar.lie.lock().unwrap() = bulk(&granted);
    assert_eq!(caller.call(&[1]).await.permits(), 1);
}

/// A limiter that refuses every call, and counts them.
#[derive(Default)]
struct Refusing(AtomicU32);

#[async_trait]
impl Limiter for Refusing {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok("run".to_owned())
    }

    async fn call(&self, _: &QuotaSpec, _: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err(LimiterError::Refused("NOPERM; allow it".to_owned()))
    }

    async fn peek(&self, _: &QuotaSpec, _: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        Ok(Vec::new())
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        Ok(None)
    }
}

struct Nobody;

#[async_trait]
impl RecentAttempts for Nobody {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        Ok((Vec::new(), CostByKind::default()))
    }
}

#[tokio::test(start_paused = true)]
async fn refusing_store_is_retried_once_a_second() {
    let limiter = Arc::new(Refusing::default());
    let (_spec, spec) = watch::channel(Arc::new(spec(&[("all", 9, 1_000)])));
    let stop = CancellationToken::new();
    let parts = GateContext {
        limiter: limiter.clone(),
        recent: Arc::new(Nobody),
        spec,
        incarnation: 1,
        stop: stop.clone(),
        on_newer_version: Arc::new(|_| {}),
    };
    let (gate, run) = Gate::new(parts);
    let running = tokio::spawn(run);
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let gate = gate.clone();
        crowd.spawn(async move { gate.acquire(ask(tokio::time::Instant::now() + 60 * SECOND)).await });
    }
    while let Some(outcome) = crowd.join_next().await {
        let AcquireResult::Refused(refusal) = outcome.unwrap() else { panic!("granted") };
        let BlockReason::StoreUnavailable(why) = refusal.reason else { panic!("{refusal:?}") };
        assert!(why.contains("NOPERM; allow it"), "{why}");
        assert!(refusal.retry_after > Duration::ZERO);
    }
    let calls = limiter.0.load(Ordering::Relaxed);
    assert!((30..=70).contains(&calls), "{calls} calls in a minute for a hundred waiters");
    stop.cancel();
    running.await.unwrap();
}
