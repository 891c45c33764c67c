//! The strict provider over its socket: its report against an independent recount, and charges through the real client.

use std::time::Duration;

use sluicegate::domain::limit::Rate;
use sluicegate::domain::outcome::{LookupResult, Outcome, Refusal, UnknownCause};
use sluicegate::domain::provider::{LookupConfig, LookupMethod, LookupUrl, Provider, WhenNotFound};
use sluicegate::domain::response::{CodeCondition, Echo, PaymentIdentity, StatusCase, StatusMeaning, SumFields};
use sluicegate::domain::sum::SentSum;
use sluicegate::provider::http::HttpProvider;
use sluicegate::provider::simulated::{Effect, FakeHandle, FakeOptions, FakeProvider, FakeProviderReport, OnLimit};
use sluicegate::provider::{LookupRequest, PaymentProvider};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::raw::{RawServer, Then};
use super::{SUM, charge, job, policy, provider, row};

struct Fake {
    url: String,
    handle: FakeHandle,
    cancel: CancellationToken,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
    client: reqwest::Client,
}

impl Fake {
    async fn start(options: FakeOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let (fake, cancel) = (FakeProvider::new(options), CancellationToken::new());
        let handle = fake.handle();
        let served = tokio::spawn(fake.serve(listener, cancel.clone()));
        let client = reqwest::Client::builder().tls_certs_only([]).build().unwrap();
        Self { url, handle, cancel, served, client }
    }

    async fn get<T: serde::de::DeserializeOwned>(&self, page: &str) -> T {
        self.client.get(format!("{}{page}", self.url)).send().await.unwrap().json().await.unwrap()
    }

    async fn stop(self) {
        self.cancel.cancel();
        self.served.await.unwrap().unwrap();
    }
}

/// Largest count and number of breaches, from a comparison of every arrival with every other.
fn recount(arrivals_us: &[u64], limit: Rate) -> (u64, u64) {
    let window_us = limit.window().as_micros() as u64;
    let counts = arrivals_us
        .iter()
        .enumerate()
        .map(|(end, at)| arrivals_us[..=end].iter().filter(|arrival| at - **arrival < window_us).count() as u64);
    counts.fold((0, 0), |(largest, breaches), count| {
        (largest.max(count), breaches + u64::from(count > u64::from(limit.max_requests())))
    })
}

fn install_tls_provider() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// A row with `echo` compares that key: a refusal that repeats it is certain on any connection.
#[tokio::test]
async fn each_response_repeats_its_key() {
    install_tls_provider();
    let limits = vec!["1/1m".parse().unwrap()];
    let fake = Fake::start(FakeOptions { limits, ..FakeOptions::default() }).await;
    for (key, status) in [("key-1", 200), ("key-2", 429)] {
        let body = r#"{"id":"pay-1","amount":5,"currency":"EUR"}"#;
        let response = fake.client.post(&fake.url).header("Idempotency-Key", key).body(body).send().await.unwrap();
        assert_eq!(response.status(), status);
        assert_eq!(response.headers()["idempotency-key"], key);
    }
    fake.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_report_agrees_with_an_independent_recount() {
    install_tls_provider();
    for on_limit in [OnLimit::Refuse, OnLimit::Count] {
        let limits: Vec<Rate> = ["20/50ms", "100/1s"].map(|limit| limit.parse().unwrap()).into();
        let latency = (Duration::ZERO, Duration::from_millis(5));
        let fake =
            Fake::start(FakeOptions { limits: limits.clone(), on_limit, latency, ..FakeOptions::default() }).await;
        let provider = std::sync::Arc::new(provider(&row(&fake.url)));
        let mut lanes = JoinSet::new();
        for lane in 0..8 {
            let provider = provider.clone();
            lanes.spawn(async move {
                let mut outcomes = Vec::new();
                for n in 0..50 {
                    let frozen = provider.freeze(&job(&format!("pay-{lane}-{n}")), SUM).await.unwrap();
                    outcomes.push(provider.send(&job("pay-1"), &frozen).await.outcome);
                }
                outcomes
            });
        }
        let outcomes: Vec<Outcome> = lanes.join_all().await.into_iter().flatten().collect();
        let arrivals: Vec<u64> = fake.get("_arrivals").await;
        let report: FakeProviderReport = fake.get("_report").await;
        assert!(arrivals.len() == 400 && arrivals.is_sorted());
        for (limit, counted) in limits.iter().zip(&report.limits) {
            let (largest, breaches) = recount(&arrivals, *limit);
            assert_eq!(
                (counted.limit.as_str(), counted.largest, counted.breaches),
                (limit.to_string().as_str(), largest, breaches)
            );
        }
        assert!(report.limits[1].breaches >= 1, "{report:?}");
        let throttled = outcomes
            .iter()
            .filter(|o| matches!(o.refusal(), Some(Refusal::Throttled { retry_after: Some(_) })))
            .count() as u64;
        let accepted = outcomes.iter().filter(|o| matches!(o, Outcome::Accepted { .. })).count() as u64;
        assert_eq!((report.refused_429, report.charges, throttled + accepted), (throttled, accepted, 400));
        assert_eq!(throttled > 0, on_limit == OnLimit::Refuse);
        let answered: u64 = report.statuses.values().sum();
        assert_eq!((report.requests, answered, report.doubles), (400, 400, 0));
        assert_eq!(
            (report.first_arrival_us, report.last_arrival_us),
            (arrivals.first().copied(), arrivals.last().copied())
        );
        let times = report.answer_ms.unwrap();
        assert!(times.p50 <= times.p99 && times.p99 <= times.max && times.max > 0.0);
        fake.stop().await;
    }
}

#[tokio::test]
async fn deduplication_can_be_disabled() {
    install_tls_provider();
    for (deduplicate, charges) in [(true, 1), (false, 3)] {
        let fake = Fake::start(FakeOptions { deduplicate, ..FakeOptions::default() }).await;
        let provider = provider(&row(&fake.url));
        let frozen = provider.freeze(&job("pay-1"), SUM).await.unwrap();
        let mut references = Vec::new();
        for _ in 0..3 {
            let Outcome::Accepted { reference } = provider.send(&job("pay-1"), &frozen).await.outcome else { panic!() };
            references.push(reference.unwrap());
        }
        references.dedup();
        assert_eq!(references.len(), charges);
        let effects: Vec<Effect> = fake.get("_effects").await;
        assert_eq!((effects.len(), effects[0].count, effects[0].amount), (1, charges as u64, 1_299));
        assert_eq!((effects[0].id.as_str(), effects[0].key.as_deref()), ("pay-1", Some("pay-1")));
        let report = fake.handle.report();
        let doubles = u64::from(!deduplicate);
        assert_eq!((report.doubles, report.double_ids.len() as u64, report.charges), (doubles, doubles, 1));
        fake.stop().await;
    }
}

#[tokio::test]
async fn lost_response_still_charges() {
    install_tls_provider();
    let fake = Fake::start(FakeOptions { lost_answer_rate: 1.0, ..FakeOptions::default() }).await;
    let provider = provider(&row(&fake.url));
    let frozen = provider.freeze(&job("pay-1"), SUM).await.unwrap();
    for _ in 0..2 {
        let answer = provider.send(&job("pay-1"), &frozen).await;
        let lost = Outcome::Unknown { cause: UnknownCause::ConnectionLost, retry_after: None };
        assert_eq!((answer.outcome, answer.status), (lost, None));
    }
    let report: FakeProviderReport = fake.get("_report").await;
    assert_eq!((report.requests, report.charges, report.doubles, report.lost_answers), (2, 1, 0, 2));
    assert!(report.statuses.is_empty(), "{report:?}");
    fake.stop().await;
}

#[tokio::test]
async fn declines_faults_and_refusals_map_to_outcomes() {
    install_tls_provider();
    type Case = (FakeOptions, fn(&Outcome) -> bool);
    let cases: [Case; 3] = [
        (FakeOptions { decline_rate: 1.0, ..FakeOptions::default() }, |outcome| {
            *outcome == Outcome::Declined { reason: "provider answered 402: card_declined".to_owned() }
        }),
        (FakeOptions { error_rate: 1.0, ..FakeOptions::default() }, |outcome| {
            matches!(outcome, Outcome::Unknown { cause: UnknownCause::ServerError(500 | 503), .. })
        }),
        (FakeOptions { limits: vec!["0/5s".parse().unwrap()], ..FakeOptions::default() }, |outcome| {
            *outcome == Outcome::Throttled { retry_after: Some(Duration::from_secs(5)) }
        }),
    ];
    for (options, meant) in cases {
        let fake = Fake::start(options).await;
        let provider = provider(&row(&fake.url));
        let outcome = charge(&provider, &job("pay-1")).await.outcome;
        assert!(meant(&outcome), "{outcome:?}");
        assert_eq!(fake.handle.report().charges, 0);
        fake.stop().await;
    }
}

/// The row distinguishes a lock on one object from the provider's own limit, though both come as 429.
#[tokio::test]
async fn lock_and_rate_limit_are_distinguished() {
    install_tls_provider();
    let locked = StatusCase {
        header: None,
        code: Some(CodeCondition { code: "lock_timeout".to_owned(), pointer: Some("/error/code".to_owned()) }),
        means: StatusMeaning::Busy,
    };
    let options = |busy_rate| FakeOptions { busy_rate, ..FakeOptions::default() };
    let limits = vec!["0/5s".parse().unwrap()];
    for (options, wanted) in [
        (options(1.0), Outcome::Busy { retry_after: None }),
        (FakeOptions { limits, ..options(0.0) }, Outcome::Throttled { retry_after: Some(Duration::from_secs(5)) }),
    ] {
        let fake = Fake::start(options).await;
        let row = Provider { statuses: [(429, vec![locked.clone()])].into(), ..row(&fake.url) };
        let provider = provider(&row);
        let outcome = charge(&provider, &job("pay-1")).await.outcome;
        assert_eq!(outcome, wanted);
        assert_eq!(fake.handle.report().charges, 0);
        fake.stop().await;
    }
}

#[tokio::test]
async fn its_pages_are_not_charges() {
    install_tls_provider();
    let fake = Fake::start(FakeOptions::default()).await;
    let post =
        |page: &str| fake.client.post(format!("{}{page}", fake.url)).body(r#"{"id":"p1","amount":5,"currency":"EUR"}"#);
    assert_eq!(post("charges").send().await.unwrap().status(), 200);
    assert_eq!(post("_nothing").send().await.unwrap().status(), 404);
    assert_eq!(fake.client.get(format!("{}pay", fake.url)).send().await.unwrap().status(), 405);
    assert_eq!(post("charges").body("{}").send().await.unwrap().status(), 400);
    assert_eq!(post("charges").body(vec![b' '; 300 * 1024]).send().await.unwrap().status(), 413);
    let report: FakeProviderReport = fake.get("_report").await;
    assert_eq!((report.requests, report.charges), (4, 1));
    assert_eq!(report.statuses, [(200, 1), (400, 1), (405, 1), (413, 1)].into());
    assert_eq!(post("_reset").send().await.unwrap().status(), 200);
    assert_eq!(fake.handle.report().requests, 0);
    fake.stop().await;
}

pub(super) fn lookup(url: &str) -> LookupConfig {
    LookupConfig {
        url: LookupUrl::parse(&format!("{url}charges?id=${{job:id}}")).unwrap(),
        method: LookupMethod::Get,
        state: "/state".to_owned(),
        accepted: vec!["succeeded".to_owned()],
        declined: vec!["declined".to_owned()],
        in_progress: vec!["processing".to_owned()],
        reference: "/id".to_owned(),
        sum: SumFields {
            amount: Some("/amount".to_owned()),
            currency: Some("/currency".to_owned()),
            ..SumFields::default()
        },
        echo: Echo::default(),
        not_found: WhenNotFound::Review,
        give_up_after: Duration::from_secs(60),
    }
}

/// A look-up returns the charge's own reference. It is one request without key or body, and never charges.
#[tokio::test]
async fn charge_can_be_looked_up() {
    install_tls_provider();
    let fake = Fake::start(FakeOptions::default()).await;
    let row = Provider { lookup: Some(lookup(&fake.url)), ..row(&fake.url) };
    let provider = provider(&row);
    let question = provider.lookup_request(&job("pay-1"), SUM).unwrap();
    assert_eq!(provider.look_up(&question).await.outcome, LookupResult::NotFound);
    let Outcome::Accepted { reference } = charge(&provider, &job("pay-1")).await.outcome else {
        panic!("not accepted")
    };
    assert!(reference.is_some());
    let answer = provider.look_up(&question).await;
    assert_eq!((answer.outcome, answer.status), (LookupResult::Accepted { reference }, Some(200)));
    let other = LookupRequest {
        payment: PaymentIdentity { sum: SentSum { units: 1, decimals: 2 }, ..question.payment.clone() },
        ..question
    };
    assert!(matches!(provider.look_up(&other).await.outcome, LookupResult::Differs { .. }));
    let report: FakeProviderReport = fake.get("_report").await;
    assert_eq!((report.requests, report.lookups, report.charges), (4, 3, 1));
    fake.stop().await;
    assert!(matches!(provider.look_up(&other).await.outcome, LookupResult::NotSent { .. }), "no server listens");
}

/// The request carries the row's headers, no key, and no body unless the row asks for one. No response is no answer.
#[tokio::test]
async fn lookup_is_one_request_without_key() {
    let body = r#"{"id":"ch_1","state":"succeeded","amount":1299,"currency":"EUR"}"#;
    for (method, line) in [(LookupMethod::Get, "GET"), (LookupMethod::Post, "POST")] {
        let server = RawServer::start(vec![Then::answer("200 OK", "", body), Then::Reset]).await;
        let lookup = LookupConfig { method, ..lookup(&server.url()) };
        let headers = [("X-Of".to_owned(), "me".to_owned())].into();
        let provider = provider(&Provider { lookup: Some(lookup), headers, ..row(&server.url()) });
        let question = provider.lookup_request(&job("pay-1"), SUM).unwrap();
        let accepted = LookupResult::Accepted { reference: Some("ch_1".to_owned()) };
        assert_eq!(provider.look_up(&question).await.outcome, accepted);
        let lost = LookupResult::Unknown { cause: UnknownCause::ConnectionLost, retry_after: None };
        assert_eq!(provider.look_up(&question).await.outcome, lost);
        let requests = server.requests();
        assert_eq!(requests.len(), 2);
        let sent = String::from_utf8(requests[0].clone()).unwrap().to_lowercase();
        assert!(sent.starts_with(&format!("{} /charges?id=pay-1 ", line.to_lowercase())), "{sent}");
        assert!(sent.contains("x-of: me") && sent.ends_with("\r\n\r\n"), "{sent}");
        assert!(!sent.contains("idempotency-key") && !sent.contains("content-type"), "{sent}");
    }
}

#[tokio::test]
async fn unsupported_lookup_is_reported() {
    install_tls_provider();
    let fake = Fake::start(FakeOptions { lookup: false, ..FakeOptions::default() }).await;
    let asked = provider(&Provider { lookup: Some(lookup(&fake.url)), ..row(&fake.url) });
    assert_eq!(asked.look_up(&asked.lookup_request(&job("pay-1"), SUM).unwrap()).await.outcome, LookupResult::NotFound);
    assert_eq!(fake.handle.report().lookups, 0);
    fake.stop().await;
    let without = provider(&row("http://127.0.0.1:1/"));
    assert!(without.lookup_request(&job("pay-1"), SUM).unwrap_err().contains("no longer has a look-up"));
    let elsewhere = lookup("https://10.0.0.1/");
    let refused = HttpProvider::new(&Provider { lookup: Some(elsewhere), ..row("http://127.0.0.1:1/") }, &policy());
    assert!(refused.is_err_and(|error| error.to_string().contains("not on the public internet")));
}
