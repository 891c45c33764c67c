//! nginx as the authenticating proxy of docs/people.md, in front of the program: its configuration is read from the page.
//!
//! nginx connects from an address of its own, so that direct requests come from an address that is not trusted.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::authority::Authority;
use crate::embedded::Embedded;
use crate::nginx;
use crate::page::Page;
use crate::support::process::{Server, free_port, private_dir};

const HOST: &str = "payments.corp.example";
const PASSWORD: &str = "correct horse";
/// nginx' address, which is trusted, and the last number of another one.
const PROXY: &str = "127.0.0.2";
const OTHER: u8 = 3;

/// The page's block of a language that has these words, with each text replaced once.
fn block(language: &str, words: &str, replaced: &[(&str, &str)]) -> String {
    let blocks = Page::read("docs/people.md").blocks_of(language);
    let block = blocks.into_iter().find(|block| block.contains(words)).unwrap();
    replaced.iter().fold(block, |block, (from, to)| {
        assert_eq!(block.matches(from).count(), 1, "{from}: {block}");
        block.replace(from, to)
    })
}

fn password_hash() -> String {
    let output = Command::new("openssl").args(["passwd", "-apr1", PASSWORD]).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The program behind nginx.
struct Stand {
    program: Embedded,
    _nginx: Server,
    port: u16,
    authority: PathBuf,
}

impl Stand {
    fn start() -> Self {
        let dir = private_dir("people");
        let file = dir.join("sluicegate.toml");
        let trusted = [("10.0.4.7", PROXY)];
        std::fs::write(&file, block("toml", "proxy_trusted", &trusted)).unwrap();
        let mut program = Embedded::new(&[("SLUICEGATE_CONFIG", file.to_str().unwrap())]);
        let row = "[[provider]]\nname = \"acme\"\nurl = \"http://127.0.0.1:9/charges\"\nidempotency_retention_s = 86400\n\
                   [[provider.limit]]\nname = \"per-second\"\nmax_requests = 1\nwindow_ms = 1000\n";
        program.apply(row);
        program.start();
        let (port, authority) = (free_port(), dir.join("ca.pem"));
        let nginx = start_nginx(&dir, port, &program.ops_url(""));
        Self { program, _nginx: nginx, port, authority }
    }

    /// A request through nginx, as this person.
    fn by_nginx(&self, person: &str, method: Method, path: &str) -> RequestBuilder {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let authority = reqwest::Certificate::from_pem(&std::fs::read(&self.authority).unwrap()).unwrap();
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([authority]).resolve(HOST, address);
        let request = client.build().unwrap().request(method, format!("https://{HOST}:{}/{path}", self.port));
        request.basic_auth(person, Some(PASSWORD))
    }

    /// A request from another address of this machine, past nginx.
    fn direct(&self, path: &str) -> RequestBuilder {
        let from = IpAddr::V4(Ipv4Addr::new(127, 0, 0, OTHER));
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).local_address(from);
        client.build().unwrap().get(self.program.ops_url(path))
    }

    /// A change of the page, as this person.
    async fn change(&self, person: &str, path: &str, body: Value) -> (u16, Value) {
        let origin = format!("https://{HOST}:{}", self.port);
        answer(self.by_nginx(person, Method::POST, path).header("origin", origin).json(&body)).await
    }
}

fn start_nginx(dir: &Path, port: u16, upstream: &str) -> Server {
    let identity = Authority::create(dir).issue("nginx", HOST);
    let passwords: String = ["alice", "bob", "carol"].map(|name| format!("{name}:{}\n", password_hash())).concat();
    let file = dir.join("htpasswd");
    std::fs::write(&file, passwords).unwrap();
    let server = block(
        "nginx",
        "auth_basic",
        &[
            ("listen 443 ssl;", &format!("listen 127.0.0.1:{port} ssl;")),
            ("/etc/nginx/payments.crt", identity.certificate.to_str().unwrap()),
            ("/etc/nginx/payments.key", identity.key.to_str().unwrap()),
            ("/etc/nginx/payments.htpasswd", file.to_str().unwrap()),
            ("http://10.0.4.8:9464", upstream.trim_end_matches('/')),
        ],
    );
    nginx::start(dir, &format!("access_log off;\nproxy_bind {PROXY};\n{server}"), port)
}

async fn answer(request: RequestBuilder) -> (u16, Value) {
    let answer = request.send().await.unwrap();
    let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

fn is(name: &str, role: &str) -> (u16, Value) {
    (200, json!({"name": name, "role": role, "path": "proxy"}))
}

#[tokio::test]
async fn nginx_names_the_person() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let stand = Stand::start();
    let whoami = "api/v1/whoami";
    let get = |person: &str, path: &str| stand.by_nginx(person, Method::GET, path);
    for (person, role) in [("alice", "admin"), ("carol", "operator"), ("bob", "viewer")] {
        assert_eq!(answer(get(person, whoami)).await, is(person, role));
    }
    assert_eq!(answer(get("mallory", whoami)).await.0, 401);
    assert_eq!(answer(get("bob", "")).await.0, 200, "the page");
    // nginx replaces headers that its client sends, whatever their case, and those of a viewer without a group too.
    for (user, groups) in [("X-Forwarded-User", "X-Forwarded-Groups"), ("x-forwarded-user", "x-forwarded-groups")] {
        let forged = get("bob", whoami).header(user, "alice").header(groups, "payments-admins");
        assert_eq!(answer(forged).await, is("bob", "viewer"));
    }
    // Past nginx, the headers are a forgery, and without them no person is named.
    for header in [("x-forwarded-user", "alice"), ("x-forwarded-groups", "payments-admins")] {
        let (status, body) = answer(stand.direct(whoami).header(header.0, header.1)).await;
        assert!(status == 403 && body["error"].as_str().unwrap().contains("ops.proxy_trusted"), "{status} {body}");
    }
    assert_eq!(answer(stand.direct(whoami)).await.0, 401);
}

#[tokio::test]
async fn person_behind_nginx_is_in_the_audit() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let stand = Stand::start();
    let (pause, limit) = ("api/v1/providers/acme/pause", "api/v1/providers/acme/limits/per-second");
    let because = json!({"because": "incident 12"});
    let rate = json!({"rate": "2/1s", "because": "ticket 4711"});
    for (person, path, body, role) in
        [("bob", pause, &because, "operator"), ("bob", limit, &rate, "admin"), ("carol", limit, &rate, "admin")]
    {
        let (status, answer) = stand.change(person, path, body.clone()).await;
        let words = answer["error"].as_str().unwrap_or_default();
        assert!(status == 403 && words.contains(&format!("role `{role}`")), "{person} {path}: {status} {answer}");
    }
    assert_eq!(stand.change("carol", pause, because).await.0, 200);
    assert_eq!(stand.change("alice", limit, rate).await.0, 200);
    let audit: Vec<(String, String)> = stand
        .program
        .rows("SELECT os_user, because FROM settings_audit WHERE os_user LIKE '%proxy%' ORDER BY id")
        .await;
    let expected = [("carol@page (operator, proxy)", "incident 12"), ("alice@page (admin, proxy)", "ticket 4711")];
    assert_eq!(audit, expected.map(|(name, because)| (name.to_owned(), because.to_owned())));
}
