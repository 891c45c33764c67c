//! `run` under a service manager: its messages on a socket of the test, in the order in which systemd needs them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::process::free_port;

/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// A service manager that started one `run`.
struct Manager {
    socket: UnixDatagram,
    child: Child,
    port: u16,
    dir: tempfile::TempDir,
}

impl Manager {
    /// Starts `run` with everything embedded, or on this database. `address`: NOTIFY_SOCKET, if it is not a path.
    fn start(address: Option<&str>, database: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify").display().to_string();
        let socket = match address {
            Some(name) => UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name[1..]).unwrap()).unwrap(),
            None => UnixDatagram::bind(&path).unwrap(),
        };
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let port = free_port();
        let mut run = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
        run.arg("run").env_clear().current_dir(dir.path()).stderr(Stdio::null());
        run.env("SLUICEGATE_OPS__LISTEN", format!("127.0.0.1:{port}"));
        run.env("SLUICEGATE_DATABASE__URL", database.unwrap_or("sqlite:sluicegate.db"));
        // A queue in the database needs SQLite.
        run.envs(database.map(|_| ("SLUICEGATE_QUEUE__URL", "amqp://guest:guest@127.0.0.1:5672")));
        run.env("NOTIFY_SOCKET", address.unwrap_or(&path)).env("WATCHDOG_USEC", "900000");
        Self { socket, child: run.spawn().unwrap(), port, dir }
    }

    /// The next message.
    fn next(&self) -> String {
        let mut buffer = [0; 4096];
        let length = self.socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap().trim_end().to_owned()
    }

    /// The messages up to the first one that begins so.
    fn until(&self, start: &str) -> Vec<String> {
        let mut seen = vec![self.next()];
        while !seen.last().unwrap().starts_with(start) {
            seen.push(self.next());
        }
        seen
    }

    fn probe(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    fn stop(&mut self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(self.dir.path());
    }
}

#[test]
fn systemd_hears_of_ready_alive_and_stopping() {
    let mut manager = Manager::start(None, None);
    let seen = manager.until("READY=1");
    assert!(manager.probe("/readyz").starts_with("HTTP/1.1 200"), "{seen:?}");
    assert!(manager.until("STATUS=ready: 0 lanes, 0 active jobs").len() < 20);
    // The loops respond again and again.
    (0..4).for_each(|_| drop(manager.until("WATCHDOG=1")));
    manager.stop();
    manager.until("STOPPING=1");
    assert!(manager.child.wait().unwrap().success());
}

/// A worker that waits for its database is not ready, and says what it waits for. An abstract address works, too.
#[test]
fn a_waiting_start_is_not_ready() {
    let port = free_port();
    let url = format!("postgres://worker@127.0.0.1:{port}/sluicegate");
    let address = format!("@sluicegate-test-{port}");
    let mut manager = Manager::start(Some(&address), Some(&url));
    let seen = manager.until("STATUS=starting: ");
    assert!(seen.last().unwrap().contains("database unavailable"), "{seen:?}");
    assert!(manager.probe("/readyz").starts_with("HTTP/1.1 503"), "{seen:?}");
    manager.stop();
    assert!(manager.child.wait().unwrap().success());
    manager.socket.set_nonblocking(true).unwrap();
    let mut buffer = [0; 4096];
    while let Ok(length) = manager.socket.recv(&mut buffer) {
        assert!(!buffer[..length].starts_with(b"READY"), "{}", String::from_utf8_lossy(&buffer[..length]));
    }
}
