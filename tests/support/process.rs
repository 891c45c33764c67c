//! A server process that cannot outlive the tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// `$0` is the clean-up command, the rest the server's. Prints the server's process id, then waits for end of input.
/// A server that is killed in its first moment leads no group yet.
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

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
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
    /// Closing it tells the warden to clean up.
    lifeline: Option<ChildStdin>,
}

impl Server {
    /// Starts `command` with its output in `log`. `owned_dir` is removed at the end, `clean_up` is a shell command to
    /// run then (may be empty).
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

    /// Kills the server with SIGKILL, with everything it started, and waits until it is gone.
    pub fn kill(mut self) {
        self.stop();
    }

    /// Sends a signal by name (`TERM`, `STOP`, `CONT`, `KILL`) to the server alone.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.pid.to_string()]).status().unwrap();
        assert!(status.success(), "kill -{name} {}", self.pid);
    }

    /// Whether it has ended by itself. (Its warden lets it be a zombie until then.)
    pub fn has_ended(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit(") ").next().is_none_or(|rest| rest.is_empty() || rest.starts_with('Z'))
    }

    /// Blocks until the server accepts connections on the port; panics with its log after 60 s.
    pub fn await_port(&self, port: u16) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "nothing on port {port}:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Blocks until a worker answers questions on its port: it listens before its database is open.
    pub fn await_open(&self, port: u16) {
        self.await_port(port);
        let deadline = Instant::now() + Duration::from_secs(60);
        while starts(port) {
            assert!(Instant::now() < deadline, "it does not begin:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn stop(&mut self) {
        drop(self.lifeline.take());
        let _ = self.warden.wait();
    }
}

fn starts(port: u16) -> bool {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request = format!("GET /api/v1/lanes HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.starts_with("HTTP/1.1 503")
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
