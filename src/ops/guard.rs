//! The access control of the ops server: who sends a request, and whether that role may.
//!
//! Programs send a token as Bearer, browsers as the password of HTTP Basic, with any user name. An authenticating proxy
//! may name people. Without both, only programs on this machine are served. Requests of other sites' pages are refused,
//! also those by DNS rebinding. Each refusal closes its connection.

use std::net::IpAddr;
use std::time::Duration;

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::connections::{AdmissionError, ClientInfo, RequestKind};
use super::held_body::HeldBody;
use super::json::JsonResponse;
use super::{LIVEZ, OpsState, READYZ, roles};
use identity::Credentials;
pub use identity::People;
pub use tokens::{ApiCaller, AuthenticationFailures, WrongTokens};

mod identity;
#[cfg(test)]
mod people_tests;
mod proxy;
mod token_list;
mod tokens;

/// Longest time for a response.
const HANDLER_TIMEOUT: Duration = Duration::from_secs(10);

/// Headers that the guard uses, so that a request may have each only once.
const SINGLE_VALUE_HEADERS: [HeaderName; 7] = [
    header::HOST,
    header::AUTHORIZATION,
    header::ORIGIN,
    header::CONTENT_TYPE,
    HeaderName::from_static("sec-fetch-site"),
    HeaderName::from_static("sec-fetch-mode"),
    HeaderName::from_static("sec-fetch-dest"),
];

/// For all routes: rejects ambiguous requests and those of other sites' pages, and bounds the response time.
pub async fn check_request(request: Request, next: Next) -> Response {
    if let Some(problem) = ambiguity(&request) {
        return with_security_headers(refusal_response(StatusCode::BAD_REQUEST, &problem));
    }
    let harmless = is_safe_method(request.method());
    if let Some(problem) = cross_site_problem(&request) {
        return with_security_headers(refusal_response(StatusCode::FORBIDDEN, problem));
    }
    let answer = tokio::time::timeout(HANDLER_TIMEOUT, next.run(request)).await;
    with_security_headers(answer.unwrap_or_else(|_| {
        let words = if harmless { "no answer in time" } else { "no answer in time: check whether the change was made" };
        refusal_response(StatusCode::SERVICE_UNAVAILABLE, words)
    }))
}

/// For all routes: counts the request until its response is handed over. Probes are always admitted.
pub async fn admit_request(ConnectInfo(client): ConnectInfo<ClientInfo>, request: Request, next: Next) -> Response {
    let is_probe = is_safe_method(request.method()) && matches!(request.uri().path(), LIVEZ | READYZ);
    let kind = if is_probe { RequestKind::Probe } else { RequestKind::Other };
    let problem = match client.begin_request(kind) {
        Ok(in_progress) => return next.run(request).await.map(|body| HeldBody::wrap(body, in_progress)),
        Err(AdmissionError::TooManyRequests | AdmissionError::ConnectionClosed) => {
            "too many requests are in progress: try again"
        }
        Err(AdmissionError::TooManyOfAddress) => "too many requests of your address are in progress: try again",
    };
    ([(header::RETRY_AFTER, "1")], refusal_response(StatusCode::SERVICE_UNAVAILABLE, problem)).into_response()
}

/// For all routes but the probes: needs an identity, with the role that the route needs.
pub async fn authorise(
    State(state): State<OpsState>,
    ConnectInfo(client): ConnectInfo<ClientInfo>,
    mut request: Request,
    next: Next,
) -> Response {
    let given = tokens::read_credentials(request.headers());
    let wrong_tokens = state.wrong_tokens.as_ref();
    let asked = Credentials { headers: request.headers(), given: &given, client: &client, wrong_tokens };
    let identity = match state.people.identify(&asked) {
        Ok(identity) => identity,
        Err(refusal) => return refusal.response(&request),
    };
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let needed = roles::needed_role(request.method(), path);
    if identity.role < needed {
        return identity::role_refusal(&identity, needed, &request).response(&request);
    }
    let caller = ApiCaller::new(request.headers(), &given, identity, state.people.are_configured());
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// Why a request is not served.
#[derive(Debug)]
pub struct Refusal {
    status: StatusCode,
    words: String,
    retry_after: Option<Duration>,
}

impl Refusal {
    fn new(status: StatusCode, words: impl Into<String>) -> Self {
        Self { status, words: words.into(), retry_after: None }
    }

    fn too_many(retry_after: Duration) -> Self {
        let seconds = retry_after.as_millis().div_ceil(1_000);
        let words = format!(
            "this token is wrong, and too many wrong tokens came from your address: a right one is accepted at once, \
             another wrong one is counted again in {seconds} s"
        );
        Self { retry_after: Some(retry_after), ..Self::new(StatusCode::TOO_MANY_REQUESTS, words) }
    }

    fn response(&self, request: &Request) -> Response {
        let mut response = refusal_response(self.status, &self.words);
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after.map(|wait| wait.as_millis().div_ceil(1_000).to_string())
            && let Ok(seconds) = HeaderValue::from_str(&seconds)
        {
            headers.insert(header::RETRY_AFTER, seconds);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let way = if asks_for_password(request) { "Basic realm=\"sluicegate\"" } else { "Bearer" };
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(way));
        }
        response
    }
}

/// Whether a browser should ask its user for the password: for the page, and for an address that the user entered. The
/// page's own requests must not open that dialog.
fn asks_for_password(request: &Request) -> bool {
    let path = request.uri().path();
    let of_programs = path.starts_with("/api/") || path == "/metrics";
    let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    !of_programs || accept.split(',').any(|kind| kind.trim().starts_with("text/html"))
}

/// An error response that closes its connection, so that other clients can use it.
fn refusal_response(status: StatusCode, problem: &str) -> Response {
    let ends = [(header::CONNECTION, HeaderValue::from_static("close"))];
    (status, ends, JsonResponse(json!({ "error": problem }))).into_response()
}

/// Why the head of a request is ambiguous or invalid; never contains a value. A proxy before this server may have read it
/// otherwise. <https://www.rfc-editor.org/rfc/rfc9112#section-3.2>
fn ambiguity(request: &Request) -> Option<String> {
    let headers = request.headers();
    if request.version() == Version::HTTP_11 && !headers.contains_key(header::HOST) {
        return Some("the request has no header `host`".to_owned());
    }
    if request.uri().path_and_query().is_some_and(|address| address.as_str().contains("%00")) {
        return Some("the request's address has the character U+0000, which no text here can have".to_owned());
    }
    if let Some(name) = SINGLE_VALUE_HEADERS.iter().find(|name| headers.get_all(*name).iter().nth(1).is_some()) {
        return Some(format!("the request has more than one header `{name}`: send it once"));
    }
    let target = request.uri().authority()?.as_str();
    let is_host = headers.get(header::HOST).is_some_and(|host| host.as_bytes().eq_ignore_ascii_case(target.as_bytes()));
    (!is_host).then(|| "the request's address names another host than its header `host`".to_owned())
}

/// Whether the method changes nothing, by its definition and in our routes.
fn is_safe_method(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Why a request may come from another site's page. Browsers report where a request comes from
/// (<https://www.w3.org/TR/fetch-metadata/#sec-fetch-site-header>), and a form cannot send JSON. A page that only asks
/// does harm too: each answer costs time of the database that payments need.
fn cross_site_problem(request: &Request) -> Option<&'static str> {
    let headers = request.headers();
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("unreadable"));
    let is_own = text("sec-fetch-site").is_none_or(|site| matches!(site, "same-origin" | "none"));
    // A link to the page, in a chat or a wiki.
    let opens_page = request.method() == Method::GET
        && request.uri().path() == "/"
        && text("sec-fetch-mode") == Some("navigate")
        && text("sec-fetch-dest").is_none_or(|place| place == "document");
    if !is_own && !opens_page {
        return Some("the request comes from another site");
    }
    let host = text("host").unwrap_or_default();
    let origin = text("origin").map(|origin| origin.split_once("://").map_or("unreadable", |(_, host)| host));
    if origin.is_some_and(|origin| origin != host) {
        return Some("the request comes from another origin");
    }
    if is_safe_method(request.method()) {
        return None;
    }
    let json = text("content-type").is_some_and(|kind| kind.split(';').next() == Some("application/json"));
    (!json).then_some("a change needs content-type: application/json")
}

/// `localhost` or a loopback address, with or without a port.
fn is_loopback_host(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_loopback())
}

const SECURITY_HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; \
         frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// Adds the security headers: no content of other origins, no frames, no type sniffing, no caching. A header that a
/// handler has set stays.
fn with_security_headers(mut answer: Response) -> Response {
    let headers = answer.headers_mut();
    for (name, value) in SECURITY_HEADERS {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    answer
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::super::openapi_tests::{example_address, routes};
    use super::super::tests::{client, start};
    use super::*;

    #[test]
    fn only_loopback_hosts_are_accepted() {
        for name in ["localhost", "LOCALHOST:9464", "127.0.0.1", "127.0.0.1:9464", "127.8.8.8", "[::1]", "[::1]:9464"] {
            assert!(is_loopback_host(name.as_bytes()), "{name}");
        }
        for name in ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:9464", "10.0.0.1", "0.0.0.0"]
        {
            assert!(!is_loopback_host(name.as_bytes()), "{name}");
        }
    }

    /// Sends a request and returns its status.
    async fn request_status(method: Method, url: &str, headers: &[(&str, &str)]) -> u16 {
        let mut request = client().request(method, url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap().status().as_u16()
    }

    #[tokio::test]
    async fn dns_rebinding_is_rejected() {
        let (address, _progress, stop) = start(None).await;
        let lanes = format!("{address}/api/v1/lanes");
        assert_eq!(request_status(Method::GET, &lanes, &[]).await, 200);
        assert_eq!(request_status(Method::GET, &lanes, &[("host", "localhost:9464")]).await, 200);
        assert_eq!(request_status(Method::GET, &lanes, &[("host", "evil.example:9464")]).await, 421);
        assert_eq!(request_status(Method::GET, &format!("{address}/livez"), &[("host", "probe.internal")]).await, 200);
        stop.cancel();
        // With a token any host name is allowed: another site does not have the token.
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        let headers = [("host", "ops.internal"), ("authorization", "Bearer let-me-in")];
        assert_eq!(request_status(Method::GET, &format!("{address}/api/v1/lanes"), &headers).await, 200);
        assert_eq!(request_status(Method::GET, &format!("{address}/api/v1/lanes"), &headers[..1]).await, 401);
        stop.cancel();
    }

    /// A page of another site could ask again and again, and the database would have no time for payments.
    #[tokio::test]
    async fn other_sites_pages_are_not_answered() {
        let (address, _progress, stop) = start(None).await;
        let foreign = [
            vec![("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "image")],
            vec![("sec-fetch-site", "same-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")],
            vec![("sec-fetch-site", "cross-site")],
            vec![("sec-fetch-site", "unheard-of")],
            vec![("origin", "https://evil.example")],
            vec![("origin", "null")],
        ];
        for path in routes().await.into_iter().chain(["/livez".into(), "/readyz".into(), "/nowhere".into()]) {
            let url = format!("{address}{}", example_address(&path));
            for method in [Method::GET, Method::HEAD, Method::OPTIONS] {
                for headers in &foreign {
                    assert_eq!(request_status(method.clone(), &url, headers).await, 403, "{method} {path} {headers:?}");
                }
            }
        }
        let link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
        let own = [("sec-fetch-site", "same-origin"), ("origin", address.as_str())];
        for (path, headers, status) in [
            ("/", &link[..], 200),
            ("/", &link[..2], 200),
            ("/", &link[..1], 403),
            ("/", &[link[0], link[1], ("sec-fetch-dest", "iframe")], 403),
            ("/", &[link[0], link[1], link[2], ("origin", "https://evil.example")], 403),
            ("/metrics", &link, 403),
            ("/api/v1/lanes", &link, 403),
            ("/api/v1/lanes", &own, 200),
            ("/api/v1/lanes", &[("sec-fetch-site", "none")], 200),
            ("/api/v1/lanes", &[], 200),
        ] {
            let url = format!("{address}{path}");
            assert_eq!(request_status(Method::GET, &url, headers).await, status, "{path} {headers:?}");
        }
        assert_eq!(request_status(Method::POST, &address, &link).await, 403);
        stop.cancel();
    }

    #[tokio::test]
    async fn invalid_heads_are_bad_requests() {
        let (address, _progress, stop) = start(None).await;
        for (request, status) in [
            ("GET /livez HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
            ("GET /api/v1/jobs?search=a%00b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 400),
            ("GET /api/v1/jobs/a%00b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 400),
            ("GET /livez HTTP/1.0\r\n\r\n", 200),
            ("GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 200),
        ] {
            let mut stream = TcpStream::connect(address.trim_start_matches("http://")).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert_eq!(answer.split(' ').nth(1), Some(status.to_string().as_str()), "{request}");
        }
        stop.cancel();
    }

    /// Every route, with every method that changes something.
    #[tokio::test]
    async fn cross_site_changes_are_rejected() {
        let (address, _progress, stop) = start(None).await;
        let json = ("content-type", "application/json");
        for path in routes().await {
            let url = format!("{address}{}", example_address(&path));
            for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
                for headers in [
                    vec![],
                    vec![("content-type", "text/plain")],
                    vec![("content-type", "application/x-www-form-urlencoded")],
                    vec![("content-type", "multipart/form-data; boundary=application/json")],
                    vec![json, ("origin", "https://evil.example")],
                    vec![json, ("origin", "null")],
                    vec![json, ("sec-fetch-site", "cross-site")],
                    vec![json, ("sec-fetch-site", "same-site")],
                ] {
                    assert_eq!(
                        request_status(method.clone(), &url, &headers).await,
                        403,
                        "{method} {path} {headers:?}"
                    );
                }
            }
        }
        let own = address.trim_start_matches("http://");
        let headers = [json, ("origin", address.as_str()), ("sec-fetch-site", "same-origin"), ("host", own)];
        assert_eq!(request_status(Method::POST, &format!("{address}/livez"), &headers).await, 405);
        let cancel = format!("{address}/api/v1/jobs/missing/cancel");
        let sent = client().post(cancel).headers(headers.iter().map(parse_header).collect()).body("{}").send().await;
        assert_eq!(sent.unwrap().status(), 404, "our own page is allowed");
        stop.cancel();
    }

    fn parse_header((name, value): &(&str, &str)) -> (header::HeaderName, header::HeaderValue) {
        (name.parse().unwrap(), value.parse().unwrap())
    }

    #[tokio::test]
    async fn browsers_get_basic_programs_get_bearer() {
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        let page = ("accept", "text/html,application/xhtml+xml;q=0.9");
        for (accept, way) in [(None, "Bearer"), (Some(page), "Basic realm=\"sluicegate\"")] {
            let request = client().get(format!("{address}/api/v1/lanes"));
            let answer = request.headers(accept.iter().map(parse_header).collect()).send().await.unwrap();
            assert_eq!((answer.status().as_u16(), &answer.headers()["www-authenticate"]), (401, &way.parse().unwrap()));
        }
        for (path, people) in [("/", true), ("/assets/page.js", true), ("/metrics", false), ("/api/v1/jobs", false)] {
            let request = Request::builder().uri(path).body(axum::body::Body::empty()).unwrap();
            assert_eq!(asks_for_password(&request), people, "{path}");
        }
        let lanes = format!("{address}/api/v1/lanes");
        let with = |user: &str, password: &str| client().get(&lanes).basic_auth(user, Some(password)).send();
        for (user, password, status) in
            [("alice", "let-me-in", 200), ("", "let-me-in", 200), ("let-me-in", "", 401), ("alice", "let-me-inn", 401)]
        {
            assert_eq!(with(user, password).await.unwrap().status(), status, "{user}:{password}");
        }
        stop.cancel();
    }

    #[tokio::test]
    async fn every_response_has_security_headers() {
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        let cross = ("sec-fetch-site", "cross-site");
        for (path, token, headers, status) in [
            ("/livez", "", vec![], 200),
            ("/api/v1/jobs", "let-me-in", vec![], 200),
            ("/api/v1/jobs", "let-me-out", vec![], 401),
            ("/nowhere", "", vec![], 404),
            ("/api/v1/jobs/a/cancel", "let-me-in", vec![], 405),
            ("/api/v1/jobs/a/cancel", "let-me-in", vec![cross], 403),
        ] {
            let method = if headers.is_empty() { Method::GET } else { Method::POST };
            let request = client().request(method, format!("{address}{path}")).bearer_auth(token);
            let answer = request.headers(headers.iter().map(parse_header).collect()).send().await.unwrap();
            assert_eq!(answer.status(), status, "{path}");
            let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
            let policy = header("content-security-policy");
            for rule in ["default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "object-src 'none'"] {
                assert!(policy.contains(rule) && !policy.contains("unsafe"), "{path}: {policy}");
            }
            assert_eq!(
                (header("x-content-type-options"), header("cache-control")),
                ("nosniff".into(), "no-store".into())
            );
            assert_eq!((header("referrer-policy"), header("x-frame-options")), ("no-referrer".into(), "DENY".into()));
        }
        stop.cancel();
    }
}
