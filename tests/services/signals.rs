//! Signals that by default end a process, sent to `run`: each one either drains the worker or is ignored.

use crate::program::Program;

/// Signals that drain the worker.
const DRAIN: [&str; 6] = ["TERM", "INT", "HUP", "QUIT", "PWR", "XCPU"];
/// Ignored signals, by their names in the log.
const GO_ON: [(&str, &str); 10] = [
    ("USR1", "SIGUSR1"),
    ("USR2", "SIGUSR2"),
    ("ALRM", "SIGALRM"),
    ("IO", "SIGIO"),
    ("VTALRM", "SIGVTALRM"),
    ("PROF", "SIGPROF"),
    ("STKFLT", "SIGSTKFLT"),
    ("XFSZ", "SIGXFSZ"),
    ("34", "real-time signal 34"),
    ("64", "real-time signal 64"),
];
/// Its first log line, which comes after the signal handlers are installed.
const STARTED: &str = "ops server on http";
const DRAINED: &str = "stopped: all requests finished, unsent jobs returned to the backlog";

struct Embedded {
    dir: tempfile::TempDir,
    environment: Vec<(String, String)>,
}

impl Embedded {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let environment =
            [("SLUICEGATE_DATABASE__URL", database), ("SLUICEGATE_OPS__LISTEN", "127.0.0.1:0".to_owned())];
        Self { dir, environment: environment.map(|(name, value)| (name.to_owned(), value)).to_vec() }
    }

    /// Starts a worker and waits until its signal handlers are installed.
    fn run(&self) -> Program {
        let mut program = Program::start(&["run"], &self.environment, &self.dir.path().join("run.log"));
        program.await_log(STARTED);
        program
    }
}

#[test]
fn termination_signal_drains() {
    for signal in DRAIN {
        let embedded = Embedded::new();
        let program = embedded.run();
        program.signal(signal);
        let (code, log) = program.ended();
        assert_eq!(code, Some(0), "SIG{signal}: {log}");
        assert!(log.contains(DRAINED) && log.contains(&format!("signal=\"SIG{signal}\"")), "SIG{signal}: {log}");
    }
}

#[test]
fn any_other_signal_is_logged_and_changes_nothing() {
    let embedded = Embedded::new();
    let mut program = embedded.run();
    for (signal, name) in GO_ON {
        program.signal(signal);
        program.await_log(&format!("signal ignored; SIGTERM stops this process signal=\"{name}\""));
    }
    // Rust's runtime ignores SIGPIPE, so there is no log line.
    program.signal("PIPE");
    program.signal("TERM");
    let (code, log) = program.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains(DRAINED), "{log}");
}

#[test]
fn a_hangup_that_nohup_ignores_stays_ignored() {
    let embedded = Embedded::new();
    let log = embedded.dir.path().join("run.log");
    let nohup = ["nohup", env!("CARGO_BIN_EXE_sluicegate"), "run"];
    let mut program = Program::start_words(&nohup, &embedded.environment, &log);
    program.await_log(STARTED);
    program.signal("HUP");
    program.signal("USR1");
    program.await_log("signal ignored");
    assert!(program.running() && !program.log_text().contains("stopping"), "{}", program.log_text());
    program.signal("TERM");
    assert_eq!(program.ended().0, Some(0));
}
