//! nginx as a server of its own: with `limit_req` in front of a plain upstream, as a provider with a rate limit whose
//! access log decides, or with another `http` block.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::support::process::{Server, free_port, private_dir};

/// Debian's path, which is not in every user's PATH.
const NGINX: &str = "/usr/sbin/nginx";

pub struct Nginx {
    server: Server,
    dir: PathBuf,
    port: u16,
}

/// One request in nginx' access log.
#[derive(Clone, Debug)]
pub struct Served {
    /// Time of the response by nginx' clock.
    pub at_ms: u64,
    pub status: u16,
    pub key: String,
}

/// Starts nginx in this directory with the content of its `http` block, and waits for its port.
pub fn start(dir: &Path, http: &str, port: u16) -> Server {
    let place = dir.display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|part| format!("{part}_temp_path {place}/{part};\n"))
        .concat();
    let configuration = format!(
        "daemon off;\nmaster_process off;\npid {place}/pid;\nerror_log {place}/error.log;\n\
         events {{ worker_connections 1024; }}\nhttp {{\n{temporary}{http}\n}}\n"
    );
    let file = dir.join("nginx.conf");
    std::fs::write(&file, configuration).unwrap();
    let command = [NGINX, "-p", dir.to_str().unwrap(), "-c", file.to_str().unwrap()];
    let server = Server::start(&command, &[], &dir.join("nginx.log"), Some(dir), "");
    server.await_port(port);
    server
}

impl Nginx {
    /// `rate` is the value of `limit_req_zone`, `burst` that of `limit_req`. Requests beyond them get a 429 with a
    /// Retry-After of `retry_after_s`.
    pub fn start(rate: &str, burst: u32, retry_after_s: u32) -> Self {
        let (dir, port, upstream) = (private_dir("nginx"), free_port(), free_port());
        let place = dir.display();
        // `return` is evaluated before the limit, so the responses come from a second server.
        let http = format!(
            r#"
    log_format judge '$msec $status $http_idempotency_key';
    limit_req_zone $binary_remote_addr zone=payments:1m rate={rate};
    keepalive_requests 1000000;
    upstream plain {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port};
        access_log {place}/access.log judge;
        location / {{
            limit_req zone=payments burst={burst} nodelay;
            limit_req_status 429;
            error_page 429 @slower;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_pass http://plain;
        }}
        location @slower {{
            add_header Retry-After {retry_after_s} always;
            return 429;
        }}
    }}
    server {{
        listen 127.0.0.1:{upstream};
        access_log off;
        default_type application/json;
        location / {{ return 200 '{{"id": "ch_$http_idempotency_key"}}'; }}
    }}
"#
        );
        Self { server: start(&dir, &http, port), dir, port }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/charges", self.port)
    }

    /// Stops nginx and returns all requests in the order of their responses. Only after its end is the log certainly
    /// complete.
    pub fn all_served(&self) -> Vec<Served> {
        self.server.signal("QUIT");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.server.has_ended() {
            assert!(Instant::now() < deadline, "nginx does not end:\n{}", self.server.log_text());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.served()
    }

    /// Requests in the log so far; the latest ones may be missing.
    pub fn served(&self) -> Vec<Served> {
        let log = std::fs::read_to_string(self.dir.join("access.log")).unwrap_or_default();
        log.lines().map(served).collect()
    }
}

fn served(line: &str) -> Served {
    let mut words = line.split(' ');
    let mut word = || words.next().unwrap_or_else(|| panic!("{line}"));
    let (seconds, millis) = word().split_once('.').unwrap();
    let at_ms = seconds.parse::<u64>().unwrap() * 1_000 + millis.parse::<u64>().unwrap();
    Served { at_ms, status: word().parse().unwrap(), key: word().to_owned() }
}
