//! The ops port of a process: probes while clients hold connections, and guesses of the token.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::support::process::free_port;

const TOKEN: &str = "5f2d9c0b7a1e4836d0c4b8a29e7f1563";
/// Shorter than an idle connection may live.
const PATIENCE: Duration = Duration::from_secs(20);

/// `run` with all backends embedded; it ends with its test.
struct Worker {
    process: std::process::Child,
    port: u16,
    log: PathBuf,
}

impl Worker {
    fn start(dir: &Path) -> Self {
        let (port, log) = (free_port(), dir.join("log"));
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("sluicegate"));
        command.env_clear().current_dir(dir).env("SLUICEGATE_OPS__TOKEN", TOKEN);
        command.args(["--set", &format!("ops.listen=127.0.0.1:{port}"), "run"]);
        let process = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        let worker = Self { process, port, log };
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(("127.0.0.1", port)).is_err() || worker.ask("127.0.0.1", "/readyz", "").0 != 200 {
            assert!(Instant::now() < deadline, "the worker does not become ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        worker
    }

    /// A connection from one of this machine's addresses.
    fn connect(&self, from: &str) -> TcpStream {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&format!("{from}:0").parse::<SocketAddr>().unwrap().into()).unwrap();
        socket.connect(&SocketAddr::from(([127, 0, 0, 1], self.port)).into()).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Status and text of a response.
    fn ask(&self, from: &str, path: &str, headers: &str) -> (u16, String) {
        let mut stream = self.connect(from);
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[test]
fn probes_work_despite_held_connections() {
    let dir = tempfile::tempdir().unwrap();
    let worker = Worker::start(dir.path());
    let mut held = Vec::new();
    for _ in 0..64 {
        let mut client = worker.connect("127.0.0.1");
        client.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut first = [0; 12];
        client.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        held.push(client);
    }
    for from in ["127.0.0.1", "127.0.0.2"].repeat(8) {
        assert_eq!(worker.ask(from, "/livez", "").0, 200);
        assert_eq!(worker.ask(from, "/readyz", "").0, 200);
    }
}

#[test]
fn token_guesses_are_bounded_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let worker = Worker::start(dir.path());
    let bearer = |token: &str| format!("authorization: Bearer {token}\r\n");
    let statuses: Vec<u16> =
        (0..200).map(|guess| worker.ask("127.0.0.3", "/metrics", &bearer(&format!("hunter{guess}"))).0).collect();
    let wrong = statuses.iter().filter(|status| **status == 401).count();
    // Ten a minute, and this machine may need more than one.
    assert!(wrong < 50 && statuses.iter().all(|status| [401, 429].contains(status)), "{statuses:?}");
    let (status, metrics) = worker.ask("127.0.0.3", "/metrics", &bearer(TOKEN));
    assert_eq!(status, 200, "a right token passes");
    for (reason, count) in [("wrong_token", wrong), ("too_many", 200 - wrong)] {
        let sample = format!("sluicegate_ops_authentication_failures_total{{reason=\"{reason}\"}} {count}\n");
        assert!(metrics.contains(&sample), "{sample}{metrics}");
    }
    let log = std::fs::read_to_string(&worker.log).unwrap();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("wrong token")).collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains("127.0.0.3")), "{log}");
    // One line a minute, however slow this machine is.
    assert!(lines.len() <= 3, "{log}");
    assert!(!log.contains("hunter") && !log.contains(TOKEN), "{log}");
}
