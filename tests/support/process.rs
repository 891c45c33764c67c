//! A server process that cannot outlive the tests: a small shell watches it and kills it.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// `$0` is the clean-up command, the rest is the server's command. The script prints the server's process id, then
/// waits until its input closes. A server that is killed in its first moment has no process group yet.
const WARDEN: &str = r#"
setsid "$@" </dev/null >"$LOG" 2>&1 &
pid=$!
echo $pid
cat >/dev/null
kill -9 -$pid 2>/dev/null || kill -9 $pid 2>/dev/null
wait $pid 2>/dev/null
sh -c "$0" >/dev/null 2>&1
[ -z "$OWNED_DIR" ] || rm -rf "$OWNED_DIR"
"#;

/// A port that is free. It lies outside the range from which the system assigns ports, so it is still free when its
/// server has started.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let ports = nobodys_ports();
    // Test binaries that run at the same time begin at different ports.
    let begin = std::process::id().wrapping_mul(97);
    let next = || ports.start + begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % (ports.end - ports.start);
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut tried = ports.clone().map(|_| u16::try_from(next()).unwrap());
    tried.find(is_free).expect("a port is free")
}

/// Ports below the range that the system assigns to listeners and connections without a chosen port.
fn nobodys_ports() -> Range<u32> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let end = text.split_whitespace().next().and_then(|first| first.parse().ok());
    // If that range covers almost all ports, no others are safer.
    10_000..end.filter(|end| *end > 20_000).unwrap_or(32_768)
}

/// Where a server runs: on this machine's loopback, or on a separate host.
#[derive(Clone, Debug)]
pub struct Host {
    pub address: String,
    /// A process in the host's network namespace.
    pub namespace: Option<u32>,
}

impl Default for Host {
    fn default() -> Self {
        Self { address: "127.0.0.1".to_owned(), namespace: None }
    }
}

impl Host {
    /// The command line that runs `command` there.
    pub fn command(&self, command: &[&str]) -> Vec<String> {
        let enter =
            self.namespace.map(|pid| ["nsenter".to_owned(), format!("--net=/proc/{pid}/ns/net"), "--".to_owned()]);
        enter.into_iter().flatten().chain(command.iter().map(|word| (*word).to_owned())).collect()
    }
}

/// A new directory for one server; its [`Server`] removes it.
pub fn private_dir(name: &str) -> PathBuf {
    tempfile::Builder::new().prefix(&format!("sluicegate-{name}-")).tempdir().unwrap().keep()
}

/// One running server. Dropping it kills it and removes its directory.
pub struct Server {
    pub pid: u32,
    pub log: PathBuf,
    warden: Child,
    /// Closing it makes the warden clean up.
    lifeline: Option<ChildStdin>,
}

impl Server {
    /// Starts `command` with its output in `log`. At the end `owned_dir` is removed, and the shell command `clean_up`
    /// runs (may be empty).
    pub fn start(command: &[&str], env: &[(&str, &str)], log: &Path, owned_dir: Option<&Path>, clean_up: &str) -> Self {
        let clean_up = if clean_up.is_empty() { "true" } else { clean_up };
        let mut warden = Command::new("sh")
            .args(["-c", WARDEN, clean_up])
            .args(command)
            .envs(env.iter().copied())
            .env("LOG", log)
            .env("OWNED_DIR", owned_dir.unwrap_or(Path::new("")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(warden.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = line.trim().parse().unwrap_or_else(|_| panic!("{command:?} did not start: {line:?}"));
        let lifeline = warden.stdin.take();
        Self { pid, log: log.to_owned(), warden, lifeline }
    }

    /// Kills the server with SIGKILL, with all processes that it started, and waits until it is gone.
    pub fn kill(mut self) {
        self.stop();
    }

    /// Sends a signal by name (`TERM`, `STOP`, `CONT`, `KILL`) to the server alone.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.pid.to_string()]).status().unwrap();
        assert!(status.success(), "kill -{name} {}", self.pid);
    }

    /// Whether the server has ended by itself. It stays a zombie until its warden ends.
    pub fn has_ended(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit(") ").next().is_none_or(|rest| rest.is_empty() || rest.starts_with('Z'))
    }

    /// Blocks until the server accepts connections on the port; panics with its log after 60 s.
    pub fn await_port(&self, port: u16) {
        self.await_port_on(&Host::default(), port);
    }

    /// The same, on another host.
    pub fn await_port_on(&self, host: &Host, port: u16) {
        let listens = || std::net::TcpStream::connect((host.address.as_str(), port)).is_ok();
        self.await_that(&format!("no server listens on port {port}"), listens);
    }

    /// Blocks until a worker answers API requests on its port: it listens before its database is open.
    pub fn await_open(&self, port: u16) {
        self.await_port(port);
        self.await_that("the worker does not answer API requests", || has_started(port).unwrap_or(false));
    }

    /// Blocks until the condition holds. Panics with this complaint after 60 s. Panics too if the server has ended,
    /// because then another process could make the condition true.
    pub fn await_that(&self, complaint: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let so = is_so();
            assert!(!self.has_ended(), "the server has ended:\n{}", self.log_text());
            if so {
                return;
            }
            assert!(Instant::now() < deadline, "{complaint}:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The server's log from this byte on.
    pub fn log_since(&self, bytes: u64) -> Vec<u8> {
        let mut log = std::fs::File::open(&self.log).unwrap();
        log.seek(SeekFrom::Start(bytes)).unwrap();
        let mut written = Vec::new();
        log.read_to_end(&mut written).unwrap();
        written
    }

    pub fn log_bytes(&self) -> u64 {
        std::fs::metadata(&self.log).unwrap().len()
    }

    fn stop(&mut self) {
        drop(self.lifeline.take());
        let _ = self.warden.wait();
    }
}

fn has_started(port: u16) -> std::io::Result<bool> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
    let request = format!("GET /api/v1/lanes HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(!answer.starts_with("HTTP/1.1 503"))
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
