//! Files that block or never end, at every place where the program takes a path: it exits or continues, and SIGTERM
//! ends it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::program::Program;
use crate::support::process::free_port;

const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"https://x.example/\"\n\
                    [[provider.limit]]\nname = \"all\"\nmax_requests = 5\nwindow_ms = 1000\n";

struct Place {
    dir: tempfile::TempDir,
    environment: Vec<(String, String)>,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let environment = [("SLUICEGATE_DATABASE__URL", database), ("SLUICEGATE_OPS__LISTEN", "none".to_owned())];
        Self { dir, environment: environment.map(|(name, value)| (name.to_owned(), value)).to_vec() }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn fifo(&self) -> String {
        let path = self.path("fifo");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    /// Starts a command line; an assignment is added to its environment.
    fn start(&self, assignment: &str, args: &[&str]) -> Program {
        let mut environment = self.environment.clone();
        if let Some((name, value)) = assignment.split_once('=') {
            environment.push((name.to_owned(), value.to_owned()));
        }
        Program::start(args, &environment, Path::new(&self.path("log")))
    }

    fn provider(&self) {
        let rows = self.path("rows.toml");
        std::fs::write(&rows, ROWS).unwrap();
        let (code, log) = self.start("", &["provider", "apply", &rows]).ended();
        assert_eq!(code, Some(0), "{log}");
    }
}

#[test]
fn setting_must_name_a_regular_file() {
    let place = Place::new();
    let fifo = place.fifo();
    for hostile in [fifo.as_str(), "/dev/ptmx", "/dev/zero", place.dir.path().to_str().unwrap()] {
        for (assignment, code) in [
            (format!("SLUICEGATE_CONFIG={hostile}"), 78),
            (format!("SLUICEGATE_OPS__TOKEN_FILE={hostile}"), 78),
            (format!("SLUICEGATE_TLS__CA_FILE={hostile}"), 78),
            (format!("SSL_CERT_FILE={hostile}"), 78),
            (format!("SLUICEGATE_QUEUE__URL=amqp://127.0.0.1:1/?cacertfile={hostile}"), 1),
            (format!("SLUICEGATE_DATABASE__URL=postgres://u@127.0.0.1:1/d?sslrootcert={hostile}"), 1),
        ] {
            let queue = ["--set", "queue.url=amqp://127.0.0.1:1/"];
            let queue = if assignment.contains("postgres") { &queue[..] } else { &[] };
            let commands = if hostile == fifo { &["run", "check"][..] } else { &["run"] };
            for command in commands {
                let (ended, log) = place.start(&assignment, &[queue, &[*command]].concat()).ended();
                assert_eq!(ended, Some(code), "{assignment} {command:?}: {log}");
                let log: String = log.split_whitespace().collect::<Vec<_>>().join(" ");
                assert!(log.contains("not a regular file"), "{assignment} {command:?}: {log}");
            }
        }
    }
}

#[test]
fn a_command_refuses_folders_and_devices_as_input() {
    let place = Place::new();
    place.provider();
    for hostile in ["/dev/ptmx", "/dev/zero", place.dir.path().to_str().unwrap()] {
        for args in [
            ["provider", "apply", hostile].as_slice(),
            &["check", "--no-connect", "--providers", hostile],
            &["simulate", "--burst", "1", "--providers", hostile],
            &["simulate", "--trace", hostile],
            &["enqueue", "--file", hostile],
            &["jobs", "cancel", "--file", hostile],
        ] {
            let (code, log) = place.start("", args).ended();
            assert!(matches!(code, Some(1 | 78)), "{args:?}: {code:?} {log}");
            let log: String = log.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(log.contains("neither a file nor a pipe"), "{args:?}: {log}");
        }
    }
}

/// Opens a FIFO for writing once the program reads it.
fn writer(fifo: &str, program: &mut Program) -> std::fs::File {
    loop {
        // ENXIO until there is a reader.
        let opened =
            std::fs::File::options().write(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32).open(fifo);
        if let Ok(file) = opened {
            return file;
        }
        assert!(program.running(), "the program does not read the pipe:\n{}", program.log_text());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn command_reading_a_pipe_stops_on_signal() {
    let place = Place::new();
    place.provider();
    let fifo = place.fifo();
    for args in [
        ["provider", "apply", fifo.as_str()].as_slice(),
        &["check", "--no-connect", "--providers", &fifo],
        &["simulate", "--burst", "1", "--providers", &fifo],
        &["enqueue", "--file", &fifo],
        &["jobs", "cancel", "--file", &fifo],
    ] {
        for signal in ["TERM", "INT"] {
            let mut program = place.start("", args);
            let _written_to = writer(&fifo, &mut program);
            program.signal(signal);
            let (code, log) = program.ended();
            assert_eq!(code, None, "{args:?}: {log}");
        }
    }
    let mut program = place.start("", &["provider", "apply", &fifo]);
    writer(&fifo, &mut program).write_all(ROWS.as_bytes()).unwrap();
    let (code, log) = program.ended();
    assert!(code == Some(0) && log.contains("nothing to change"), "{log}");
}

#[test]
fn endless_stdin_is_bounded() {
    let place = Place::new();
    place.provider();
    for args in [["provider", "apply", "-"].as_slice(), &["enqueue", "--file", "-"], &["jobs", "cancel", "--file", "-"]]
    {
        let words: Vec<&str> = ["sh", "-c", "exec \"$@\" < /dev/zero", "sh", env!("CARGO_BIN_EXE_sluicegate")]
            .into_iter()
            .chain(args.iter().copied())
            .collect();
        let (code, log) = Program::start_words(&words, &place.environment, &PathBuf::from(place.path("log"))).ended();
        assert!(matches!(code, Some(1 | 78)), "{args:?}: {code:?} {log}");
        assert!(log.contains("longer than"), "{args:?}: {log}");
    }
}

/// Runs as a container's first process, which has no default reaction to signals. The read from standard input blocks a
/// thread until the end.
#[test]
fn pid_1_stops_during_a_stuck_read() {
    let place = Place::new();
    let fifo = place.fifo();
    let apply = [env!("CARGO_BIN_EXE_sluicegate"), "provider", "apply", "-"];
    let alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"];
    let words = [&alone[..], &["sh", "-c", "exec \"$@\" < \"$0\"", &fifo], &apply].concat();
    let program = Program::start_words(&words, &place.environment, Path::new(&place.path("log")));
    let mut written_to = std::fs::File::options().write(true).open(&fifo).unwrap();
    // More than a pipe holds, so the program has read some of it when this returns.
    written_to.write_all(&[b'#'; 1 << 17]).unwrap();
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", program.pid())).unwrap();
    assert!(Command::new("kill").args(["-TERM", children.trim()]).status().unwrap().success());
    let (code, log) = program.ended();
    assert!(code == Some(1) && log.contains("stopped by SIGTERM"), "{code:?}: {log}");
    drop(written_to);
}

/// The database driver itself reads this file.
#[test]
fn hanging_file_does_not_block_the_worker() {
    let place = Place::new();
    let fifo = place.fifo();
    std::fs::set_permissions(&fifo, std::fs::Permissions::from_mode(0o600)).unwrap();
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let environment = [
        ("SLUICEGATE_DATABASE__URL", "postgres://u@127.0.0.1:1/d"),
        ("SLUICEGATE_QUEUE__URL", "amqp://127.0.0.1:1/"),
        ("SLUICEGATE_OPS__LISTEN", &listen),
        ("PGPASSFILE", &fifo),
    ];
    let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut program = Program::start(&["run"], &environment, Path::new(&place.path("log")));
    let _written_to = writer(&fifo, &mut program);
    let mut stream = TcpStream::connect(&listen).unwrap();
    write!(stream, "GET /livez HTTP/1.1\r\nhost: {listen}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    program.signal("TERM");
    let (code, log) = program.ended();
    // On a slow machine, the time limit of the read comes first.
    assert!(code == Some(0) || log.contains("not read within"), "{code:?}: {log}");
}
