//! The HTTP provider against real sockets that misbehave. Each test counts the requests that reach the socket.

mod ambiguous;
mod answers;
mod connections;
mod expansion;
mod fake;
mod header_names;
mod lenient;
mod raw;
mod secrets;
mod stray_responses;

use std::time::Duration;

use sluicegate::domain::backoff::BackoffPolicy;
use sluicegate::domain::job::{Identifier, Job};
use sluicegate::domain::limit::{Algorithm, AppliesTo, Limit, Scope};
use sluicegate::domain::outcome::{Outcome, UnknownCause};
use sluicegate::domain::provider::{
    JobOrder, Mode, Pacing, Provider, ProviderName, RequestShape, SlotRelease, StoreDown,
};
use sluicegate::domain::response::{Echo, ResponseLocation, StatusCase, StatusMeaning, SumFields, WaitField, WaitUnit};
use sluicegate::domain::sum::{AmountRules, SentSum};
use sluicegate::provider::http::{HttpProvider, OutboundPolicy};
use sluicegate::provider::{FreezeError, PaymentProvider, RequestResult};
use tokio::io::AsyncReadExt as _;

use self::raw::{RawServer, Then};
use crate::support::process::free_port;

/// A row for `url` with the contract's defaults.
fn row(url: &str) -> Provider {
    let name = ProviderName::new("acme").unwrap();
    Provider {
        quota: name.clone(),
        name,
        enabled: true,
        paused: false,
        url: url.to_owned(),
        mode: Mode::Blocking,
        slot_release: SlotRelease::Response,
        pacing: Pacing::Burst,
        reserve_percent: 0,
        store_down: StoreDown::Wait,
        timeout: Duration::from_secs(10),
        send_budget: Duration::from_millis(500),
        connection_max_age: Duration::from_secs(60),
        reuse_connections: None,
        workers: 32,
        bucket_capacity: 256,
        leak_per_second: None,
        max_wait: Duration::from_secs(5),
        max_attempts: 8,
        max_age: Duration::from_secs(3_600),
        backoff: BackoffPolicy { base: Duration::from_millis(500), max: Duration::from_secs(60) },
        idempotency_retention: Some(Duration::from_secs(86_400)),
        headers: [].into(),
        request: RequestShape::default(),
        statuses: [].into(),
        lookup: None,
        require: Default::default(),
        order: JobOrder::None,
        amounts: AmountRules::default(),
        cutoff: None,
        resumed_at: 0,
        version: 1,
        limits: vec![Limit {
            name: "per-second".to_owned(),
            algorithm: Algorithm::SlidingLog,
            rate: "100/1s".parse().unwrap(),
            offset: Duration::ZERO,
            burst: None,
            scope: Scope::Provider,
            applies_to: AppliesTo::All,
            shadow: false,
        }],
        account_rules: Vec::new(),
    }
}

fn job(id: &str) -> Job {
    Job {
        id: Identifier::new(id).unwrap(),
        provider: ProviderName::new("acme").unwrap(),
        amount: 1_299,
        currency: "EUR".into(),
        account: None,
        reference: None,
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: Some(r#"{ "card" : "tok_1", "n": 1.50 }"#.into()),
    }
}

/// The sum of [`job`].
const SUM: SentSum = SentSum { units: 1_299, decimals: 2 };

fn policy() -> OutboundPolicy {
    OutboundPolicy::parse(&["loopback".to_owned()]).unwrap()
}

fn provider(row: &Provider) -> HttpProvider {
    HttpProvider::new(row, &policy()).unwrap()
}

/// Sends a first attempt.
async fn charge(provider: &HttpProvider, job: &Job) -> RequestResult {
    provider.send(job, &provider.freeze(job, SUM).await.unwrap()).await
}

async fn send_one(row: &Provider) -> RequestResult {
    charge(&provider(row), &job("pay-1")).await
}

fn unknown(cause: UnknownCause) -> Outcome {
    Outcome::Unknown { cause, retry_after: None }
}

#[tokio::test]
async fn url_with_job_fields_is_frozen_and_called() {
    let server = RawServer::start(vec![Then::answer("200 OK", "", r#"{"id":"ch_1"}"#)]).await;
    let row = row(&format!("{}payments/${{reference}}/captures?a=${{job:account}}", server.url()));
    let provider = provider(&row);
    let account = Some(Identifier::new("a_1").unwrap());
    let paid = |reference: &str| Job { reference: Some(reference.into()), account: account.clone(), ..job("pay-1") };
    let frozen = provider.freeze(&paid("a/../b?x=1#é"), SUM).await.unwrap();
    let path = "payments/a%2F..%2Fb%3Fx%3D1%23%C3%A9/captures?a=a_1";
    assert_eq!(*frozen.url, format!("{}{path}", server.url()));
    assert_eq!(
        provider.send(&job("pay-1"), &frozen).await.outcome,
        Outcome::Accepted { reference: Some("ch_1".to_owned()) }
    );
    let requests = server.requests();
    let line = String::from_utf8_lossy(&requests[0]).lines().next().unwrap().to_owned();
    assert_eq!(line, format!("POST /{path} HTTP/1.1"));
    for (lacking, problem) in [
        (Job { reference: None, ..paid("x") }, "the job has no reference, which url needs"),
        (Job { account: None, ..paid("x") }, "the job has no account, which url needs"),
        (paid(".."), "a field of the job would change the path of url"),
    ] {
        let error = provider.freeze(&lacking, SUM).await.unwrap_err();
        assert!(matches!(&error, FreezeError::Job(problem_found) if problem_found.to_string() == problem), "{error:?}");
    }
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let server = RawServer::start(vec![Then::answer("302 Found", "location: /elsewhere\r\n", "")]).await;
    let answer = send_one(&row(&server.url())).await;
    assert_eq!(answer.outcome, Outcome::Rejected { reason: "provider answered 302".to_owned() });
    assert_eq!((answer.status, server.requests().len()), (Some(302), 1));
}

#[tokio::test]
async fn reset_is_unknown_and_not_retried() {
    for then in [Then::Reset, Then::Close, Then::Raw(b"this is not HTTP\r\n\r\n".to_vec())] {
        let server = RawServer::start(vec![then]).await;
        let answer = send_one(&row(&server.url())).await;
        assert_eq!(answer.outcome, unknown(UnknownCause::ConnectionLost));
        assert_eq!((answer.status, answer.response_age), (None, Duration::ZERO));
        assert_eq!((server.requests().len(), server.connections()), (1, 1));
    }
}

#[tokio::test]
async fn a_connection_cut_at_once_is_unknown_too() {
    let server = RawServer::start(vec![Then::ResetUnread]).await;
    let answer = send_one(&row(&server.url())).await;
    assert_eq!(answer.outcome, unknown(UnknownCause::ConnectionLost));
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn refused_connection_is_not_sent() {
    let answer = send_one(&row(&format!("http://127.0.0.1:{}/", free_port()))).await;
    assert_eq!(answer.outcome, Outcome::NotSent { cause: "connection refused".to_owned() });
}

#[tokio::test]
async fn unresolved_name_is_not_sent() {
    let allow = OutboundPolicy::parse(&["http://no-such-host.invalid:80".to_owned()]).unwrap();
    let provider = HttpProvider::new(&row("http://no-such-host.invalid/?key=hunter2"), &allow).unwrap();
    let answer = charge(&provider, &job("pay-1")).await;
    let Outcome::NotSent { cause } = answer.outcome else { panic!("{answer:?}") };
    assert!(!cause.contains("hunter2") && !cause.is_empty(), "{cause}");
}

#[tokio::test]
async fn failed_tls_handshake_is_not_sent() {
    for (then, wanted) in [(Then::Raw(b"HTTP/1.1 400 no\r\n\r\n".to_vec()), "TLS: "), (Then::Silence, "in time")] {
        let server = RawServer::start_reading_anything(then).await;
        let url = server.url().replace("http:", "https:");
        let answer = send_one(&Provider { timeout: Duration::from_secs(4), ..row(&url) }).await;
        let Outcome::NotSent { cause } = answer.outcome else { panic!("{answer:?}") };
        assert!(cause.contains(wanted), "{cause}");
        assert!(server.requests().iter().all(|bytes| !bytes.windows(4).any(|word| word == b"POST")));
    }
}

#[tokio::test]
async fn silent_and_slow_responses_time_out() {
    let quick = |server: &RawServer| Provider { timeout: Duration::from_millis(1_500), ..row(&server.url()) };
    let silent = RawServer::start(vec![Then::Silence]).await;
    let answer = send_one(&quick(&silent)).await;
    assert_eq!((answer.outcome, answer.status), (unknown(UnknownCause::Timeout), None));
    let dripping = RawServer::start(vec![Then::Drip]).await;
    let answer = send_one(&quick(&dripping)).await;
    assert_eq!((answer.outcome, answer.status), (unknown(UnknownCause::Timeout), Some(200)));
    assert_eq!((silent.requests().len(), dripping.requests().len()), (1, 1));
}

/// Without a reset, the kernel could deliver buffered bytes later than the limiter assumes.
#[tokio::test]
async fn unanswered_request_ends_with_a_reset() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let row = row(&format!("http://{}/", listener.local_addr().unwrap()));
    let timeout = Duration::from_millis(300);
    let silent = provider(&Provider { timeout, ..row.clone() });
    let patient = provider(&row);
    let job = job("pay-1");
    let frozen = patient.freeze(&job, SUM).await.unwrap();
    // First the client's own timeout, then a caller that drops the request earlier, as a worker does.
    for (provider, patience) in [(&silent, Duration::from_secs(60)), (&patient, timeout)] {
        let sending = tokio::time::timeout(patience, provider.send(&job, &frozen));
        let ending = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_to_end(&mut Vec::new()).await.unwrap_err().kind()
        };
        let (_, end) = tokio::join!(sending, ending);
        assert_eq!(end, std::io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn a_body_cut_short_is_unknown() {
    let server =
        RawServer::start(vec![Then::Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"id\"".to_vec())]).await;
    let answer = send_one(&row(&server.url())).await;
    assert_eq!((answer.outcome, answer.status), (unknown(UnknownCause::ConnectionLost), Some(200)));
}

#[tokio::test]
async fn endless_body_is_not_read_fully() {
    let server = RawServer::start(vec![Then::Flood]).await;
    let answer = send_one(&row(&server.url())).await;
    assert_eq!(answer.outcome, unknown(UnknownCause::ResponseTooLarge(200)));
    // The server writes until the client closes the connection: 256 KiB are read, the rest is in socket buffers.
    let written = server.flooded().await;
    assert!(written < 32 * 1024 * 1024, "{written} bytes");
}

#[tokio::test]
async fn closed_pooled_connection_sends_nothing_twice() {
    // Every answer promises keep-alive, and then the connection is closed. So each next send races that close.
    let server = RawServer::start(vec![Then::AnswerAndClose]).await;
    let provider = provider(&row(&server.url()));
    let (mut accepted, mut unknown) = (0, 0);
    for n in 0..300 {
        let frozen = provider.freeze(&job(&format!("pay-{n}")), SUM).await.unwrap();
        match provider.send(&job("pay-1"), &frozen).await.outcome {
            Outcome::Accepted { .. } => accepted += 1,
            Outcome::Unknown { cause: UnknownCause::ConnectionLost, .. } => unknown += 1,
            other => panic!("{other:?}"),
        }
    }
    let mut keys = server.keys();
    let received = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), received, "a key was received twice");
    assert!(received >= accepted && received <= accepted + unknown, "{received} {accepted} {unknown}");
    assert!(server.connections() > 1);
}

#[tokio::test]
async fn pooled_connection_reset_is_unknown() {
    let server = RawServer::start(vec![Then::ok(), Then::Reset, Then::ok()]).await;
    let provider = provider(&row(&server.url()));
    let mut outcomes = Vec::new();
    for n in 0..3 {
        outcomes.push(charge(&provider, &job(&format!("pay-{n}"))).await.outcome);
    }
    let accepted = Outcome::Accepted { reference: Some("ch_1".to_owned()) };
    assert_eq!(outcomes, [accepted.clone(), unknown(UnknownCause::ConnectionLost), accepted]);
    assert_eq!((server.keys(), server.connections()), (vec!["pay-0".into(), "pay-1".into(), "pay-2".into()], 2));
}

#[tokio::test]
async fn the_same_bytes_are_sent_every_time() {
    let server = RawServer::start(vec![Then::Reset, Then::ok(), Then::ok()]).await;
    let provider = provider(&row(&format!("{}v1/charges?expand=1", server.url())));
    let frozen = provider
        .freeze(&Job { idempotency_key: Some(Identifier::new("key-9").unwrap()), ..job("pay-1") }, SUM)
        .await
        .unwrap();
    for _ in 0..3 {
        provider.send(&job("pay-1"), &frozen).await;
    }
    let requests = server.requests();
    assert!(requests.len() == 3 && requests.iter().all(|bytes| *bytes == requests[0]));
    let text = String::from_utf8(requests[0].clone()).unwrap();
    let body = r#"{"id":"pay-1","amount":1299,"currency":"EUR","payload":{ "card" : "tok_1", "n": 1.50 }}"#;
    assert!(text.starts_with("POST /v1/charges?expand=1 HTTP/1.1\r\n") && text.ends_with(body), "{text}");
    for header in ["Idempotency-Key: key-9", "Content-Type: application/json"] {
        assert!(text.contains(&format!("\r\n{header}\r\n")), "{text}");
    }
}

#[tokio::test]
async fn row_defines_request_and_response_mapping() {
    let server = RawServer::start(vec![Then::answer("409 Conflict", "", r#"{"data":{"ref":77}}"#)]).await;
    let request = RequestShape {
        method: Some("PUT".to_owned()),
        key_header: Some("X-Request-Id".to_owned()),
        form_encoded: true,
        template: Some(r#"{"amount":"${amount}","source":"${payload.card}","metadata":{"job":"${id}"}}"#.to_owned()),
        reference_pointer: Some("/data/ref".to_owned()),
        wait: None,
        echo: Echo::default(),
        sum: SumFields::default(),
    };
    let row = Provider {
        request,
        statuses: [(409, vec![StatusCase::always(StatusMeaning::Accepted)])].into(),
        ..row(&server.url())
    };
    assert_eq!(send_one(&row).await.outcome, Outcome::Accepted { reference: Some("77".to_owned()) });
    let text = String::from_utf8(server.requests()[0].clone()).unwrap();
    assert!(text.starts_with("PUT / ") && text.contains("\r\nX-Request-Id: pay-1\r\n"), "{text}");
    assert!(text.ends_with("amount=1299&metadata%5Bjob%5D=pay-1&source=tok_1"), "{text}");
}

#[tokio::test]
async fn retry_after_header_is_returned() {
    let server = RawServer::start(vec![Then::answer("429 Slow", "retry-after: 7\r\nretry-after: 3\r\n", "")]).await;
    let answer = send_one(&row(&server.url())).await;
    assert_eq!(answer.outcome, Outcome::Throttled { retry_after: Some(Duration::from_secs(7)) });
}

#[tokio::test]
async fn configured_wait_field_is_returned() {
    let then = Then::answer("429 Slow", "retry-after: 0\r\n", r#"{"error":{"retry_in_ms":12500}}"#);
    let server = RawServer::start(vec![then]).await;
    let location = ResponseLocation::Body("/error/retry_in_ms".to_owned());
    let wait = Some(WaitField { location, unit: WaitUnit::Milliseconds });
    let request = RequestShape { wait, ..RequestShape::default() };
    let answer = send_one(&Provider { request, ..row(&server.url()) }).await;
    assert_eq!(answer.outcome, Outcome::Throttled { retry_after: Some(Duration::from_millis(12_500)) });
}

#[tokio::test]
async fn secrets_are_read_late_and_never_printed() {
    let server = RawServer::start(vec![Then::ok()]).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, "hunter2\n").unwrap();
    let headers = [("authorization".to_owned(), format!("Bearer ${{file:{}}}", path.display()))].into();
    let granted = secrets::granting(&[&format!("file:{}@127.0.0.1", path.display())]);
    let provider = HttpProvider::new(&Provider { headers, ..row(&server.url()) }, &granted).unwrap();
    let frozen = provider.freeze(&job("pay-1"), SUM).await.unwrap();
    let answer = provider.send(&job("pay-1"), &frozen).await;
    std::fs::write(&path, "hunter3\n").unwrap();
    let changed = provider.send(&job("pay-1"), &frozen).await;
    let fault = |answer: &RequestResult| match &answer.outcome {
        Outcome::LocalFault(fault) => fault.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(fault(&changed).contains("credential"), "{changed:?}");
    charge(&provider, &job("pay-1")).await;
    let sent: Vec<String> = server.requests().into_iter().map(|bytes| String::from_utf8(bytes).unwrap()).collect();
    assert!(sent[0].contains("Bearer hunter2\r\n") && sent[1].contains("Bearer hunter3\r\n"), "{sent:?}");
    assert_ne!(provider.credential_fingerprint(None).await.unwrap(), *frozen.credential_fingerprint);
    std::fs::remove_file(&path).unwrap();
    let unresolved = provider.send(&job("pay-1"), &frozen).await;
    assert!(fault(&unresolved).contains("authorization"), "{unresolved:?}");
    assert!(matches!(provider.freeze(&job("pay-2"), SUM).await, Err(FreezeError::Header { .. })));
    let printed = format!("{provider:?} {frozen:?} {answer:?} {unresolved:?}");
    assert!(printed.contains("authorization") && !printed.contains("hunter"), "{printed}");
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn frozen_url_survives_row_not_policy_changes() {
    let (old, new) = (RawServer::start(vec![Then::ok()]).await, RawServer::start(vec![Then::ok()]).await);
    let frozen = provider(&row(&old.url())).freeze(&job("pay-1"), SUM).await.unwrap();
    let moved = provider(&row(&new.url()));
    assert!(matches!(moved.send(&job("pay-1"), &frozen).await.outcome, Outcome::Accepted { .. }));
    let strict = OutboundPolicy::parse(&[new.url()]).unwrap();
    let strict = HttpProvider::new(&row(&new.url()), &strict).unwrap();
    assert!(matches!(strict.send(&job("pay-1"), &frozen).await.outcome, Outcome::LocalFault(_)));
    assert_eq!((old.requests().len(), new.requests().len()), (1, 0));
}

#[tokio::test]
async fn invalid_rows_are_refused() {
    let server = format!("http://127.0.0.1:{}/", free_port());
    let refused = |row: Provider| HttpProvider::new(&row, &policy()).unwrap_err();
    assert!(matches!(refused(row("http://192.168.0.1/")), FreezeError::Url { .. }));
    assert!(matches!(refused(row("http://127.0.0.1/${amount}")), FreezeError::Url { .. }));
    assert!(matches!(refused(row("http://${account}/")), FreezeError::Url { .. }));
    assert!(matches!(refused(row("http://user:hunter2@127.0.0.1/")), FreezeError::Url { .. }));
    let bad_header = [("authorization".to_owned(), "${env:X".to_owned())].into();
    assert!(matches!(refused(Provider { headers: bad_header, ..row(&server) }), FreezeError::Header { .. }));
    let pointer = RequestShape { reference_pointer: Some("id".to_owned()), ..RequestShape::default() };
    assert!(matches!(refused(Provider { request: pointer, ..row(&server) }), FreezeError::Template(_)));
}
