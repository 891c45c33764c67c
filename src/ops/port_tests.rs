//! Tests of every route and of the ops port on real sockets: hidden characters, repeated keys, ambiguous requests,
//! refusals, and probes beside clients that hold connections.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use super::api::tests::TestApi;
use super::openapi_tests::{example_address, routes};
use super::tests::{client, start};
use crate::domain::printable::is_hidden;

#[path = "../../tests/support/hostile.rs"]
mod hostile;

/// Needs a limiter that knows the providers; this test's limiter does not.
const ROUTES_WITHOUT_DATA: [&str; 2] = ["/api/v1/limits/{provider}", "/api/v1/limits/{provider}/backlog"];

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// Far below the lifetime of an idle connection, so that no connection is admitted by waiting.
const TIMEOUT: Duration = Duration::from_secs(15);

/// A connection from one of this machine's loopback addresses.
async fn connect(from: &str, server: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    socket.connect(server.trim_start_matches("http://").parse().unwrap()).await.unwrap()
}

/// All bytes until the server closes the connection; `None` if it does not.
async fn until_closed(stream: &mut TcpStream) -> Option<String> {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await.ok()?;
    read.ok().map(|_| String::from_utf8_lossy(&answer).into_owned())
}

/// The response on a connection that the server closes afterwards.
async fn exchange(from: &str, server: &str, request: &str) -> Option<String> {
    let mut stream = connect(from, server).await;
    stream.write_all(request.as_bytes()).await.unwrap();
    until_closed(&mut stream).await
}

fn get(path: &str, rest: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{rest}\r\n")
}

fn bearer(token: &str) -> String {
    format!("authorization: Bearer {token}\r\nconnection: close\r\n")
}

/// The status of a response.
fn status(answer: Option<String>) -> u16 {
    let answer = answer.expect("no answer, or a connection that was not closed");
    answer.split(' ').nth(1).unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
}

#[tokio::test]
async fn held_connections_do_not_block_probes() {
    let (server, _progress, stop) = start(Some(TOKEN)).await;
    let mut held = Vec::new();
    for head in [get("/livez", ""), "GET /livez HTTP/1.1\r\nhost:".to_owned(), String::new()] {
        for _ in 0..100 {
            let mut stream = connect("127.0.0.1", &server).await;
            stream.write_all(head.as_bytes()).await.unwrap();
            held.push(stream);
        }
        for from in ["127.0.0.1", "127.0.0.2"] {
            for path in ["/livez", "/readyz"] {
                for _ in 0..8 {
                    let answered = exchange(from, &server, &get(path, "connection: close\r\n")).await;
                    let wanted = if path == "/livez" { 200 } else { 503 };
                    assert_eq!(status(answered), wanted, "{from} {path} {head}");
                }
            }
        }
        let lanes = exchange("127.0.0.2", &server, &get("/api/v1/lanes", &bearer(TOKEN))).await;
        assert_eq!(status(lanes), 200, "{head}");
    }
    drop(held);
    stop.cancel();
}

#[tokio::test]
async fn guard_refusal_closes_its_connection() {
    let json = "content-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    let (server, _progress, stop) = start(Some(TOKEN)).await;
    for (request, wanted) in [
        (get("/metrics", ""), 401),
        (get("/", "authorization: Bearer hunter2\r\n"), 401),
        (format!("POST /api/v1/jobs/a/cancel HTTP/1.1\r\nhost: localhost\r\n{json}"), 401),
        (
            format!("POST /api/v1/jobs/a/cancel HTTP/1.1\r\nhost: localhost\r\nsec-fetch-site: cross-site\r\n{json}"),
            403,
        ),
    ] {
        let answer = exchange("127.0.0.1", &server, &request).await;
        assert!(
            answer.as_ref().is_some_and(|answer| answer.contains("\r\nconnection: close\r\n")),
            "{request}: {answer:?}"
        );
        assert_eq!(status(answer), wanted, "{request}");
    }
    stop.cancel();
    let (server, _progress, stop) = start(None).await;
    let foreign = "GET /metrics HTTP/1.1\r\nhost: evil.example\r\n\r\n";
    assert_eq!(status(exchange("127.0.0.1", &server, foreign).await), 421);
    stop.cancel();
}

/// The guard reads one of the values, and a proxy may have read the other.
#[tokio::test]
async fn ambiguous_head_is_rejected_on_every_route() {
    let (server, _progress, stop) = start(None).await;
    let own = server.trim_start_matches("http://");
    for path in routes().await.into_iter().chain(["/nowhere".to_owned()]) {
        let path = example_address(&path);
        for (target, headers) in [
            (path.clone(), "host: localhost\r\nhost: evil.example\r\n"),
            (path.clone(), "host: evil.example\r\nhost: localhost\r\n"),
            (path.clone(), "host: localhost\r\nhost: localhost\r\n"),
            (path.clone(), "host: localhost\r\norigin: http://localhost\r\norigin: https://evil.example\r\n"),
            (path.clone(), "host: localhost\r\nsec-fetch-site: none\r\nsec-fetch-site: cross-site\r\n"),
            (path.clone(), "host: localhost\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\n"),
            (path.clone(), "host: localhost\r\ncontent-type: application/json\r\ncontent-type: text/plain\r\n"),
            (format!("http://evil.example{path}"), "host: localhost\r\n"),
        ] {
            for method in ["GET", "POST"] {
                let request = format!("{method} {target} HTTP/1.1\r\n{headers}connection: close\r\n\r\n");
                assert_eq!(status(exchange("127.0.0.1", &server, &request).await), 400, "{request}");
            }
        }
    }
    for plain in [
        get("/livez", "connection: close\r\n"),
        format!("GET http://{own}/livez HTTP/1.1\r\nhost: {own}\r\nconnection: close\r\n\r\n"),
    ] {
        assert_eq!(status(exchange("127.0.0.1", &server, &plain).await), 200, "{plain}");
    }
    // As in the health check of docker-compose.yml.
    assert_eq!(status(exchange("127.0.0.1", &server, "GET /livez HTTP/1.0\r\n\r\n").await), 200);
    stop.cancel();
}
#[tokio::test]
async fn wrong_tokens_are_refused_for_a_minute() {
    let (server, _progress, stop) = start(Some(TOKEN)).await;
    let guess = |token: String| get("/metrics", &bearer(&token));
    let mut statuses = Vec::new();
    while statuses.last() != Some(&429) {
        let wrong = guess(format!("hunter{}", statuses.len()));
        statuses.push(status(exchange("127.0.0.3", &server, &wrong).await));
    }
    assert!(statuses.len() > 10 && statuses[..10].iter().all(|status| *status == 401), "{statuses:?}");
    let waits = exchange("127.0.0.3", &server, &guess("hunter2".to_owned())).await.unwrap();
    assert!(waits.starts_with("HTTP/1.1 429 ") && waits.contains("\r\nretry-after: "), "{waits}");
    assert!(waits.contains("wrong tokens") && !waits.contains("hunter2"), "{waits}");
    // Other addresses and the probes are not affected, and a request without a token is asked for one.
    assert_eq!(status(exchange("127.0.0.4", &server, &guess(TOKEN.to_owned())).await), 200);
    assert_eq!(status(exchange("127.0.0.3", &server, &get("/livez", "connection: close\r\n")).await), 200);
    assert_eq!(status(exchange("127.0.0.3", &server, &get("/metrics", "connection: close\r\n")).await), 401);
    assert_eq!(status(exchange("127.0.0.3", &server, &guess(TOKEN.to_owned())).await), 200);
    stop.cancel();
}

#[tokio::test]
async fn no_route_shows_hidden_characters() {
    let stand = TestApi::new().await;
    for (id, state) in [("pay-1", "dead"), ("pay-2", "review"), ("pay-3", "waiting")] {
        stand.add_job(id, "x", state).await;
    }
    let bolt = "INSERT INTO providers (name, url) VALUES ('bolt', 'https://pay.example/'); \
        INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('bolt', 'all', 1, 1000)";
    let pool = stand.database.sqlite_pool().unwrap();
    sqlx::raw_sql(bolt).execute(&pool).await.unwrap();
    hostile::fill(&pool, hostile::HOSTILE).await;
    // After the others: what is rejected changes by a decision alone.
    let rejected = "INSERT INTO rejected_messages (at, lane, job_id, reason, detail, body_sha256, body_bytes, head) \
        VALUES (1, 'acme', ?1, 'malformed', ?1, zeroblob(32), 1, ?1)";
    sqlx::query(rejected).bind(hostile::HOSTILE).execute(&pool).await.unwrap();
    let mut hostile_answers = 0;
    for path in routes().await.iter().filter(|path| !path.starts_with("/assets/") && !path.starts_with("/{")) {
        for address in [example_address(path), path.replace("{name}", "bolt").replace("{id}", "pay-2")] {
            let answer = client().get(format!("{}{address}", stand.address)).send().await.unwrap();
            let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
            let hidden: Vec<char> = text.chars().filter(|c| is_hidden(*c) && *c != '\n').collect();
            assert!(hidden.is_empty(), "{address}: {hidden:?}: {text}");
            assert!(!text.contains(hostile::SIGNATURE), "{address}: {text}");
            hostile_answers += usize::from(text.contains("\\u202e"));
            let exists = address == example_address(path) && !ROUTES_WITHOUT_DATA.contains(&path.as_str());
            assert!(!exists || status < 400 || matches!(status, 405 | 503), "{address}: {status} {text}");
        }
    }
    assert!(hostile_answers >= 6, "hostile texts were in only {hostile_answers} answers");
    let refused = client().post(format!("{}/api/v1/jobs/pay-1/resolve", stand.address));
    let refused = refused.json(&serde_json::json!({ "as": hostile::HOSTILE })).send().await.unwrap();
    let text = refused.text().await.unwrap();
    assert!(text.contains("\\u202e") && !text.chars().any(is_hidden), "{text}");
}

/// A proxy may have read the other value.
#[tokio::test]
async fn a_repeated_key_changes_nothing_on_any_route() {
    let stand = TestApi::new().await;
    stand.add_job("pay-1", "x", "review").await;
    stand.add_job("pay-2", "x", "dead").await;
    let before = stand.database_content().await;
    for (path, body, key) in [
        ("providers/acme/limits/second", r#"{"rate": "1/1s", "rate": "900/1s"}"#, "rate"),
        ("providers/acme/limits/second", r#"{"rate": "900/1s", "dry_run": true, "dry_run": false}"#, "dry_run"),
        ("providers/acme/limits/second", r#"{"rate": "900/1s", "because": {"a": 1, "a": 2}}"#, "because"),
        ("providers/acme/pause", r#"{"because": "a", "because": "b"}"#, "because"),
        ("providers/acme/resume", r#"{"because": "a", "because": "a"}"#, "because"),
        ("jobs/pay-1/resolve", r#"{"as": "declined", "as": "succeeded"}"#, "as"),
        ("jobs/pay-1/resolve", r#"{"as": "declined", "\u0061s": "succeeded"}"#, "as"),
        ("jobs/pay-1/cancel", r#"{"because": "a", "because": "b"}"#, "because"),
        ("dlq/pay-2/replay", r#"{"because": "a", "because": "b"}"#, "because"),
        ("dlq/pay-2/discard", r#"{"because": "a", "because": "b"}"#, "because"),
    ] {
        let request = client().post(format!("{}/api/v1/{path}", stand.address));
        let answer = request.header("content-type", "application/json").body(body).send().await.unwrap();
        let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
        assert!(status == 400 && text.contains(&format!("`{key}`")), "{path} {body}: {status} {text}");
    }
    for query in ["limit=5&limit=6", "provider=acme&provider=bolt", "state=dead&state=review"] {
        let answer = client().get(format!("{}/api/v1/jobs?{query}", stand.address)).send().await.unwrap();
        assert_eq!(answer.status(), 400, "{query}");
    }
    assert_eq!(stand.database_content().await, before);
}
