//! Tests of tokens, proxy and roles over HTTP: each route with each role, forged headers, and the name in the audit.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use axum::http::Method;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::People;
use super::token_list::tests::{entry, ops, secret};
use crate::config::people::{GroupRole, PeopleConfig, ProxyConfig, TokenRole};
use crate::domain::person::Role;
use crate::ops::openapi_tests::{PublishedApi, example_address, routes};
use crate::ops::roles::{CHANGES, needed_role};
use crate::ops::tests::{spawn_server, state};

/// `ops.token`.
const TOKEN: &str = "fedcba9876543210fedcba9876543210";
/// The proxy's address, and that of another host.
const PROXY: u8 = 9;
const OTHER: u8 = 8;

/// A named token of each role, the proxy, and an `ops.token` that may only read.
fn people() -> PeopleConfig {
    PeopleConfig {
        tokens: Role::ALL.map(|role| entry(&format!("{role}-1"), role, &format!("env:{role}"))).to_vec(),
        proxy: Some(ProxyConfig {
            user_header: "x-forwarded-user".to_owned(),
            role_header: Some("x-forwarded-groups".to_owned()),
            roles: Role::ALL.map(|role| GroupRole { group: format!("{role}s"), role }).to_vec(),
            trusted: vec![IpAddr::V4(Ipv4Addr::new(127, 0, 0, PROXY)).into()],
        }),
        token_role: TokenRole(Role::Viewer),
    }
}

/// The secret of the named token of this role.
fn of(role: Role) -> String {
    secret(role as usize)
}

fn secret_of_variable(name: &str) -> Option<String> {
    Role::from_name(name).map(of)
}

struct Server {
    address: String,
    database: crate::ledger::database::Database,
    stop: CancellationToken,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Server {
    async fn new(config: PeopleConfig, token: Option<&str>) -> Self {
        let (mut state, _progress, database) = state(None).await;
        state.people = Arc::new(People::load(&ops(token, config), secret_of_variable).unwrap());
        let (address, stop) = spawn_server(state).await;
        Self { address, database, stop }
    }

    /// A request from one of this machine's loopback addresses.
    fn request(&self, from: u8, method: Method, path: &str) -> reqwest::RequestBuilder {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().local_address(IpAddr::V4(Ipv4Addr::new(127, 0, 0, from)));
        let request = client.build().unwrap().request(method, format!("{}{path}", self.address));
        request.header("content-type", "application/json").header("user-agent", "curl/8.5.0")
    }

    async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
        let answer = request.send().await.unwrap();
        let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    async fn whoami(
        &self,
        from: u8,
        change: impl FnOnce(reqwest::RequestBuilder) -> reqwest::RequestBuilder,
    ) -> (u16, Value) {
        let (status, body) = Self::answer(change(self.request(from, Method::GET, "/api/v1/whoami"))).await;
        let faults = PublishedApi::current().response_faults("get", "/api/v1/whoami", 200, &body);
        assert!(status != 200 || faults.is_empty(), "{faults:?}");
        (status, body)
    }
}

#[tokio::test]
async fn each_route_needs_its_role() {
    let server = Server::new(people(), Some(TOKEN)).await;
    let published = PublishedApi::current();
    let mut changes = 0;
    let guarded = |path: &String| !matches!(path.as_str(), "/livez" | "/readyz") && !path.starts_with("/{");
    for path in routes().await.into_iter().filter(guarded) {
        let in_table = CHANGES.iter().find(|route| route.path == path);
        let is_change = !published.0["paths"][&path]["post"].is_null();
        assert_eq!(in_table.is_some(), is_change, "{path}: each POST has a line in src/ops/roles.rs");
        changes += usize::from(is_change);
        for method in [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            for role in Role::ALL {
                let request = server.request(1, method.clone(), &example_address(&path)).body("{}");
                let (status, body) = Server::answer(request.bearer_auth(of(role))).await;
                let is_safe = matches!(method, Method::GET | Method::HEAD);
                let needed = if is_safe { Role::Viewer } else { in_table.map_or(Role::Admin, |route| route.role) };
                assert_eq!(needed_role(&method, Some(&path)), needed, "{method} {path}");
                assert_eq!(status == 403, role < needed, "{method} {path} as {role}: {status} {body}");
                assert_ne!(status, 401, "{method} {path}");
                if status == 403 && method == Method::POST && path.starts_with("/api/") {
                    let words = body["error"].as_str().unwrap();
                    let named = words.contains(&format!("role `{needed}`")) && words.contains(&format!("{role}-1"));
                    assert!(named, "{path}: {words}");
                }
            }
        }
    }
    assert_eq!(changes, CHANGES.len(), "the table names a route that does not exist");
}

#[tokio::test]
async fn each_caller_has_one_identity() {
    let server = Server::new(people(), Some(TOKEN)).await;
    let is = |name: &str, role: &str, path: &str| (200, json!({"name": name, "role": role, "path": path}));
    let basic = |user: &'static str, password: &str| {
        let password = password.to_owned();
        move |request: reqwest::RequestBuilder| request.basic_auth(user, Some(password))
    };
    let operator = of(Role::Operator);
    assert_eq!(server.whoami(1, |request| request.bearer_auth(&operator)).await, is("operator-1", "operator", "token"));
    assert_eq!(server.whoami(1, |request| request.bearer_auth(TOKEN)).await, is("token", "viewer", "token"));
    // A name that is typed beside a token is no identity.
    assert_eq!(server.whoami(1, basic("root", TOKEN)).await, is("token", "viewer", "token"));
    assert_eq!(server.whoami(1, basic("admin-1", &operator)).await, is("operator-1", "operator", "token"));
    let by_proxy = |user: &'static str, groups: &'static str| {
        move |request: reqwest::RequestBuilder| {
            request.header("x-forwarded-user", user).header("x-forwarded-groups", groups)
        }
    };
    assert_eq!(server.whoami(PROXY, by_proxy("dora", "staff,operators")).await, is("dora", "operator", "proxy"));
    assert_eq!(server.whoami(PROXY, |request| request.bearer_auth(TOKEN)).await, is("token", "viewer", "token"));
    let refused = [
        (server.whoami(1, basic("admin-1", "wrong")).await, 401),
        (server.whoami(1, basic(TOKEN, "")).await, 401),
        (server.whoami(1, |request| request.bearer_auth("admin-1")).await, 401),
        (server.whoami(1, |request| request.bearer_auth(secret(9))).await, 401),
        (server.whoami(1, |request| request).await, 401),
        (server.whoami(PROXY, |request| request).await, 401),
        (server.whoami(PROXY, by_proxy("dora", "staff")).await, 403),
        (server.whoami(PROXY, by_proxy("dora, eve", "admins")).await, 400),
        (server.whoami(PROXY, |request| by_proxy("dora", "admins")(request).bearer_auth(TOKEN)).await, 400),
    ];
    for (number, (given, wanted)) in refused.iter().enumerate() {
        assert_eq!(given.0, *wanted, "{number}: {given:?}");
    }
}

#[tokio::test]
async fn forged_proxy_headers_are_refused() {
    let server = Server::new(people(), Some(TOKEN)).await;
    for header in [&["x-forwarded-user"][..], &["x-forwarded-groups"], &["X-Forwarded-User", "x-forwarded-groups"]] {
        let forged = |mut request: reqwest::RequestBuilder| {
            for name in header {
                request = request.header(*name, "admins");
            }
            request
        };
        let (status, body) = server.whoami(OTHER, forged).await;
        assert!(status == 403 && body["error"].as_str().unwrap().contains("ops.proxy_trusted"), "{status} {body}");
        // No right token makes the header count.
        assert_eq!(server.whoami(OTHER, |request| forged(request).bearer_auth(of(Role::Admin))).await.0, 403);
    }
}

/// Behind one proxy address, a stranger who guesses must not lock operators out.
#[tokio::test]
async fn right_token_passes_whatever_its_address_failed() {
    let server = Server::new(people(), Some(TOKEN)).await;
    let try_token =
        async |from: u8, token: String| server.whoami(from, move |request| request.bearer_auth(token)).await;
    while try_token(3, "hunter2".to_owned()).await.0 != 429 {}
    for right in [TOKEN.to_owned(), of(Role::Viewer), of(Role::Admin)] {
        assert_eq!(try_token(3, right).await.0, 200);
    }
    assert_ne!(try_token(3, "hunter2".to_owned()).await.0, 200);
    assert_eq!(try_token(4, "hunter2".to_owned()).await.0, 401, "no other address waits");
}

/// On loopback too: with people, no caller is an administrator by being on this machine.
#[tokio::test]
async fn with_people_every_caller_is_identified() {
    let tokens = PeopleConfig { proxy: None, token_role: TokenRole::default(), ..people() };
    let proxy = PeopleConfig { tokens: Vec::new(), ..people() };
    for config in [tokens, proxy] {
        let server = Server::new(config, None).await;
        assert_eq!(server.whoami(1, |request| request).await.0, 401);
        assert_eq!(server.whoami(1, |request| request.bearer_auth("")).await.0, 401);
    }
    let server = Server::new(PeopleConfig::default(), None).await;
    let open = json!({"name": "", "role": "admin", "path": "open"});
    assert_eq!(server.whoami(1, |request| request).await, (200, open));
}

#[tokio::test]
async fn audit_names_person_role_and_path() {
    let server = Server::new(people(), Some(TOKEN)).await;
    let sql = "INSERT INTO providers (name, url) VALUES ('acme', 'https://pay.example/'); \
        INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('acme', 'all', 1, 1000)";
    sqlx::raw_sql(sql).execute(&server.database.sqlite_pool().unwrap()).await.unwrap();
    let pause =
        |from: u8, verb: &str| server.request(from, Method::POST, &format!("/api/v1/providers/acme/{verb}")).body("{}");
    let by_token = pause(1, "pause").bearer_auth(of(Role::Operator)).header("sec-fetch-site", "same-origin");
    assert_eq!(Server::answer(by_token).await.0, 200);
    let by_proxy = pause(PROXY, "resume").header("x-forwarded-user", "dora").header("x-forwarded-groups", "admins");
    assert_eq!(Server::answer(by_proxy).await.0, 200);
    assert_eq!(Server::answer(pause(1, "pause").bearer_auth(TOKEN)).await.0, 403);
    let names = "SELECT group_concat(os_user, '; ') FROM settings_audit WHERE os_user IS NOT NULL";
    let names: String = sqlx::query_scalar(names).fetch_one(&server.database.sqlite_pool().unwrap()).await.unwrap();
    assert_eq!(names, "operator-1@page (operator, token); dora@curl/8.5.0 (admin, proxy)");
}
