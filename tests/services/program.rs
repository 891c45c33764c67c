//! One run of the program whose exit code matters. It is killed with its test, and its output goes to a file.

use std::fs::File;
use std::io::PipeWriter;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Program {
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts `sluicegate` with these arguments; output goes to `log`.
    pub fn start(args: &[&str], environment: &[(String, String)], log: &Path) -> Self {
        let words: Vec<&str> = [PROGRAM].iter().chain(args).copied().collect();
        Self::start_words(&words, environment, log)
    }

    /// Starts a whole command line, whose process becomes the program.
    pub fn start_words(words: &[&str], environment: &[(String, String)], log: &Path) -> Self {
        let output = File::create(log).unwrap();
        let stderr = output.try_clone().unwrap();
        Self { child: spawn(words, environment, output.into(), stderr.into()), log: log.to_owned() }
    }

    /// Starts it with messages and log lines to this pipe instead of `log`.
    pub fn start_with_stderr(args: &[&str], environment: &[(String, String)], stderr: PipeWriter) -> Self {
        let words: Vec<&str> = [PROGRAM].iter().chain(args).copied().collect();
        Self { child: spawn(&words, environment, Stdio::null(), stderr.into()), log: PathBuf::new() }
    }

    /// Waits until the log contains this text.
    pub fn await_log(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.log_text().contains(text) {
            let running = self.child.try_wait().unwrap().is_none();
            assert!(running && Instant::now() < deadline, "`{text}` is not in the log:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap();
        assert!(status.success(), "kill -{name}");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end. Returns the exit code and the whole output.
    pub fn ended(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), self.log_text());
            }
            assert!(Instant::now() < deadline, "the program does not end:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

fn spawn(words: &[&str], environment: &[(String, String)], stdout: Stdio, stderr: Stdio) -> Child {
    let mut command = Command::new("setpriv");
    // The kernel kills it when this test's thread ends for any reason. The process id stays the program's.
    command.args(["--pdeathsig", "KILL"]);
    // A test run that ignores a signal (under `nohup`, or in the background) passes that on to its children.
    command.args(["env", "--default-signal"]).args(words);
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn().unwrap()
}

impl Drop for Program {
    fn drop(&mut self) {
        // An error here means that it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
