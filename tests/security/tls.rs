//! TLS handshakes with each backend and a provider: with the right authority, and with each possible fault.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use secrecy::SecretString;
use sluicegate::domain::account_faults::SetupSign;
use sluicegate::domain::job::{Identifier, Job};
use sluicegate::domain::outcome::Outcome;
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::sum::SentSum;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::limiter::Limiter as _;
use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::provider::PaymentProvider as _;
use sluicegate::provider::http::{HttpProvider, OutboundPolicy};
use sluicegate::queue::Queue as _;
use sluicegate::queue::rabbitmq::{RabbitMq, RabbitSettings};
use sluicegate::tls::Authorities;

use crate::authority::Authority;
use crate::deployment::{
    DATABASE, Deployment, VHOST, amqps_listener, password, port_of, rediss_listener, serve_tls, tls_options,
};
use crate::https::HttpsProvider;
use crate::page::{Page, plain};
use crate::support::postgres::Postgres;
use crate::support::redis::Redis;

/// Result of an attempt to use the connection.
type Attempt = Result<(), String>;

async fn postgres(port: &str, trusted: &Authorities) -> Attempt {
    let user = format!("sluicegate_worker:{}", password("'WORKER-PASSWORD'"));
    let url = format!("postgres://{user}@localhost:{port}/{DATABASE}?sslmode=verify-full");
    let database = Database::open_with_authorities(&url, 1, trusted).unwrap();
    let state = database.schema_state().await;
    database.close().await;
    state.map(drop).map_err(|error| error.to_string())
}

async fn rabbitmq(port: u16, trusted: &Authorities) -> Attempt {
    let url = format!("amqps://sluicegate:{}@localhost:{port}/{VHOST}", password("WORKER-PASSWORD"));
    let settings = RabbitSettings::new(&SecretString::from(url), "payments").unwrap().with_authorities(trusted);
    RabbitMq::connect(settings).ping().await.map(drop).map_err(|error| error.to_string())
}

async fn redis(port: u16, trusted: &Authorities) -> Attempt {
    let url = format!("rediss://sluicegate:{}@localhost:{port}", password("#PASSWORD-SHA256"));
    let limiter = RedisLimiter::new(&url, "sluicegate").unwrap().with_authorities(trusted).unwrap();
    limiter.ping().await.map(drop).map_err(|error| error.to_string())
}

async fn provider(port: u16, allow: &str, trusted: &Authorities) -> Attempt {
    match charge(port, allow, trusted).await {
        Outcome::Accepted { .. } => Ok(()),
        Outcome::NotSent { cause } => Err(cause),
        other => panic!("{other:?}"),
    }
}

async fn charge(port: u16, allow: &str, trusted: &Authorities) -> Outcome {
    let policy = OutboundPolicy::parse(&[allow.replace("PORT", &port.to_string())]).unwrap().with_authorities(trusted);
    let limit = LimitRow { name: "all".to_owned(), max_requests: 1, window_ms: 1_000, ..LimitRow::default() };
    let url = format!("https://localhost:{port}/charges");
    let row = ProviderRow { name: "acme".to_owned(), url, limits: vec![limit], ..ProviderRow::default() };
    let provider = HttpProvider::new(&row.validate(1).unwrap(), &policy).unwrap();
    let job = job();
    provider.send(&job, &provider.freeze(&job, SentSum { units: 1, decimals: 2 }).await.unwrap()).await.outcome
}

/// With TLS 1.3 the alert comes when the request is written already, and no server reads a request behind such a
/// handshake.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demanded_client_certificate_is_a_wrong_setup() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path());
    let identity = authority.issue("provider", "localhost");
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let demanding = HttpsProvider::start_demanding(&identity, &authority, version);
        for _ in 0..20 {
            let outcome = charge(demanding.port, "localhost:PORT", &authority.authorities()).await;
            assert_eq!(outcome.code(), "not_sent", "{version:?} {outcome:?}");
            // TLS 1.2 has no such alert, and its server may end the handshake before this side has read why.
            if *version == rustls::version::TLS13 {
                assert_eq!(SetupSign::from_outcome(&outcome), Some(SetupSign::Misconfigured), "{outcome:?}");
                assert!(outcome.detail().contains("demands a client certificate"), "{}", outcome.detail());
            }
        }
        assert!(demanding.requests().is_empty());
    }
}

fn job() -> Job {
    Job {
        id: Identifier::new("tls-1").unwrap(),
        provider: ProviderName::new("acme").unwrap(),
        amount: 1,
        currency: "EUR".into(),
        account: None,
        reference: None,
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: None,
    }
}

/// A server that speaks HTTP where HTTPS is expected; returns its port.
fn plain_http() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, mut buffer) = (stream.unwrap(), [0; 4_096]);
            let read = stream.read(&mut buffer).unwrap_or(0);
            // No part of a payment may arrive here.
            assert!(!String::from_utf8_lossy(&buffer[..read]).contains("amount"));
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        }
    });
    port
}

/// The error texts that the page promises, in the order of its table.
fn promised() -> [String; 4] {
    let rows = Page::read("docs/security.md").table("## TLS", "what is wrong");
    let texts: Vec<String> = rows.iter().map(|row| plain(&row[1]).to_owned()).collect();
    texts.try_into().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_backend_certificate_is_verified() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let deployment = tokio::task::spawn_blocking(Deployment::shared).await.unwrap();
    let [unknown, other_host, expired, no_tls] = promised();
    let ours = deployment.authority.authorities();
    let dir = tempfile::tempdir().unwrap();
    let foreign = Authority::create(dir.path()).authorities();
    let elsewhere = deployment.authority.issue("elsewhere", "elsewhere.example");
    let old = deployment.authority.issue_expired("old", "localhost");
    let (good, none) = (port_of(&deployment.postgres), Authorities::default());

    // With correct certificates, every connection works. A provider needs a listed address besides.
    let (paid, port) = ("localhost:PORT", deployment.provider.port);
    assert_eq!(postgres(&good, &ours).await, Ok(()));
    assert_eq!(rabbitmq(deployment.amqps, &ours).await, Ok(()));
    assert_eq!(redis(deployment.redis_tls, &ours).await, Ok(()));
    assert_eq!(provider(port, paid, &ours).await, Ok(()));

    // A separate cluster, because a cluster has one certificate at a time.
    let cluster = tokio::task::spawn_blocking(Postgres::start).await.unwrap();
    let bad = port_of(&cluster);
    let mut results = vec![("postgres without TLS", &no_tls, postgres(&bad, &ours).await)];
    serve_tls(&cluster, &elsewhere);
    results.push(("postgres of another name", &other_host, postgres(&bad, &ours).await));
    serve_tls(&cluster, &old);
    results.push(("postgres expired", &expired, postgres(&bad, &ours).await));

    let redis_with = |identity| {
        let redis = Redis::start_with(tls_options(identity, &deployment.authority));
        (rediss_listener(&redis), redis)
    };
    let ((redis_elsewhere, _one), (redis_old, _other)) = (redis_with(&elsewhere), redis_with(&old));
    let amqps_elsewhere = amqps_listener(&deployment.rabbit, &elsewhere);
    let amqps_old = amqps_listener(&deployment.rabbit, &old);
    let (https_elsewhere, https_old) = (HttpsProvider::start(&elsewhere), HttpsProvider::start(&old));
    let answers = tokio::join!(
        rabbitmq(deployment.amqps, &none),
        rabbitmq(deployment.amqps, &foreign),
        rabbitmq(amqps_elsewhere, &ours),
        rabbitmq(amqps_old, &ours),
        rabbitmq(deployment.rabbit.port(), &ours),
    );
    results.push(("rabbitmq, no authority", &unknown, answers.0));
    results.push(("rabbitmq, another authority", &unknown, answers.1));
    results.push(("rabbitmq of another name", &other_host, answers.2));
    results.push(("rabbitmq expired", &expired, answers.3));
    results.push(("rabbitmq without TLS", &no_tls, answers.4));
    results.push(("postgres, no authority", &unknown, postgres(&good, &none).await));
    results.push(("postgres, another authority", &unknown, postgres(&good, &foreign).await));
    results.push(("redis, no authority", &unknown, redis(deployment.redis_tls, &none).await));
    results.push(("redis, another authority", &unknown, redis(deployment.redis_tls, &foreign).await));
    results.push(("redis of another name", &other_host, redis(redis_elsewhere, &ours).await));
    results.push(("redis expired", &expired, redis(redis_old, &ours).await));
    results.push(("provider, no authority", &unknown, provider(port, paid, &none).await));
    results.push(("provider, another authority", &unknown, provider(port, paid, &foreign).await));
    results.push(("provider that the list does not name", &unknown, provider(port, "loopback", &ours).await));
    results.push(("provider of another name", &other_host, provider(https_elsewhere.port, paid, &ours).await));
    results.push(("provider expired", &expired, provider(https_old.port, paid, &ours).await));
    results.push(("provider without TLS", &no_tls, provider(plain_http(), paid, &ours).await));
    let wrong =
        |(_, words, result): &&(&str, &String, Attempt)| !result.as_ref().is_err_and(|error| error.contains(*words));
    let wrong: Vec<_> = results.iter().filter(wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");

    // A plain Redis reads a TLS greeting as the start of a line, and may wait for its end.
    let silent = redis(deployment.redis.port, &ours).await.unwrap_err();
    assert!([&no_tls[..], "no connection in time"].iter().any(|words| silent.contains(words)), "{silent}");
    assert!(
        https_elsewhere.requests().is_empty() && https_old.requests().is_empty(),
        "a request was sent to an untrusted server"
    );
}
