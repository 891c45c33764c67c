//! The whole program with an independent limiter: two workers on RabbitMQ, Redis and PostgreSQL, and nginx `limit_req`
//! in front of the provider.
//!
//! nginx' access log decides. All tests share one stand, one test at a time, because its backends take longer to start
//! than a test takes.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::{Mutex, MutexGuard};

use crate::limit_req::{assert_paid_once, refused};
use crate::nginx::Nginx;
use crate::stand::Stand;

/// Payments in the test with a matching limit; `NGINX_PAYMENTS` sets another number.
const PAYMENTS: u32 = 1_000;
const PATIENCE: Duration = Duration::from_secs(300);

struct Shared {
    stand: Stand,
    workers: [usize; 2],
}

async fn shared() -> MutexGuard<'static, Shared> {
    static SHARED: OnceLock<Mutex<Shared>> = OnceLock::new();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let shared = SHARED.get_or_init(|| {
        let mut stand = Stand::start();
        let workers = [stand.add_worker(), stand.add_worker()];
        Mutex::new(Shared { stand, workers })
    });
    shared.lock().await
}

impl Shared {
    /// Applies a row that allows 100 requests a second, and releases this many payments for it at once.
    fn pay(&self, provider: &str, nginx: &Nginx, payments: u32) {
        self.stand.apply(&format!(
            "[[provider]]\nname = \"{provider}\"\nurl = \"{}\"\npaused = true\nidempotency_retention_s = 86400\n\
             [[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n",
            nginx.url()
        ));
        let message = |n| json!({ "id": format!("{provider}-{n}"), "amount": 100 + n, "currency": "EUR" });
        let lines: String = (0..payments).map(|n| format!("{}\n", message(n))).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines).unwrap();
        self.stand.sluicegate(&["enqueue", "--provider", provider, "--file", file.path().to_str().unwrap()]);
        self.stand.sluicegate(&["provider", "resume", provider]);
    }

    fn count(&self, table: &str, condition: &str) -> u64 {
        self.stand.count(&format!("SELECT count(*) FROM {table} WHERE {condition}"))
    }

    async fn await_succeeded(&self, provider: &str, payments: u32) {
        let deadline = Instant::now() + PATIENCE;
        let condition = format!("provider = '{provider}' AND state = 'succeeded'");
        while self.count("jobs", &condition) < u64::from(payments) {
            let logs = || self.workers.map(|worker| self.stand.worker_log(worker)).join("\n---\n");
            assert!(Instant::now() < deadline, "{:?}\n{}", self.stand.states(), logs());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(self.count("jobs", &format!("provider = '{provider}'")), u64::from(payments));
    }

    /// The counter's value in each worker.
    async fn counted(&self, counter: &str, provider: &str) -> [u64; 2] {
        let mut values = [0; 2];
        for (value, worker) in values.iter_mut().zip(self.workers) {
            let answer = reqwest::get(format!("{}/metrics", self.stand.ops_url(worker))).await.unwrap();
            let text = answer.text().await.unwrap();
            let of = |line: &&str| line.starts_with(counter) && line.contains(&format!("provider=\"{provider}\""));
            let counts = text.lines().filter(of).map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap());
            *value = counts.sum();
        }
        values
    }

    async fn throttled(&self, provider: &str) -> u64 {
        self.counted("sluicegate_provider_throttled_total", provider).await.iter().sum()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_with_matching_limit_cause_no_429() {
    let payments = std::env::var("NGINX_PAYMENTS").map_or(PAYMENTS, |text| text.parse().unwrap());
    let nginx = Nginx::start("100r/s", 99, 1);
    let shared = shared().await;
    shared.pay("fits", &nginx, payments);
    shared.await_succeeded("fits", payments).await;
    let served = nginx.all_served();
    assert_eq!((served.len(), refused(&served).len()), (payments as usize, 0));
    assert_paid_once(&served, payments as usize);
    assert_eq!(shared.throttled("fits").await, 0);
    let sent = shared.counted("sluicegate_provider_requests_total", "fits").await;
    assert!(sent.iter().all(|sent| *sent > 0) && sent.iter().sum::<u64>() == u64::from(payments), "{sent:?}");
}

/// Counter-test: with a bucket that is 10 % smaller and slower, the test above sees 429s.
///
/// At the full limit the bucket overflows after 9 seconds; on a busy machine that uses 93 % of it, after 30.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_ten_percent_too_high_causes_429s() {
    const BACKLOG: u32 = 9_000;
    let nginx = Nginx::start("90r/s", 89, 1);
    let shared = shared().await;
    shared.pay("near", &nginx, BACKLOG);
    let deadline = Instant::now() + PATIENCE;
    while refused(&nginx.served()).is_empty() {
        let served = nginx.served().len();
        assert!(served < BACKLOG as usize && Instant::now() < deadline, "{served} requests, and no 429");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The other jobs are not needed, and the next test needs the workers.
    shared.stand.sluicegate(&["provider", "pause", "near"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_workers_honour_429s() {
    const RETRY_AFTER_S: u32 = 2;
    const PAYMENTS: u32 = 40;
    let nginx = Nginx::start("2r/s", 5, RETRY_AFTER_S);
    let shared = shared().await;
    shared.pay("lower", &nginx, PAYMENTS);
    shared.await_succeeded("lower", PAYMENTS).await;
    let served = nginx.all_served();
    let refused = refused(&served);
    assert!(!refused.is_empty(), "{served:?}");
    assert_paid_once(&served, PAYMENTS as usize);

    // The metric and the ledger count as many 429s as nginx, and none counts for the payment.
    let refusals = refused.len() as u64;
    assert_eq!(shared.throttled("lower").await, refusals);
    // A 429 on a connection that carried a response before may be a copy of an earlier one: that outcome is unknown.
    let outcomes = ["= 'accepted'", "IN ('throttled', 'unknown')"].map(|outcomes| {
        let of = format!("outcome {outcomes} AND job_id LIKE 'lower-%'");
        shared.count("attempts", &of)
    });
    assert_eq!(outcomes, [u64::from(PAYMENTS), refusals]);
    assert_eq!(shared.count("jobs", "provider = 'lower' AND attempts <> 1"), 0);

    // Requests in flight at a 429 may still arrive. Then no request of either worker arrives until the wait is over.
    for one in &refused {
        let quiet = one.at_ms + 1_000..one.at_ms + u64::from(RETRY_AFTER_S) * 1_000 - 50;
        let early = served.iter().find(|other| quiet.contains(&other.at_ms));
        assert!(early.is_none(), "{early:?} came although {one:?} asked for {RETRY_AFTER_S} s");
    }
}
