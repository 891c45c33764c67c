//! A private redis-server of the benchmark: a free port on loopback, a private directory, no persistence.
//!
//! It is killed by its process id at the end of the benchmark, also after an error; only SIGKILL leaves it behind.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::BenchError;

const START_TIME_MAX: Duration = Duration::from_secs(10);
/// Attempts to start: another process may take the free port before the server does.
const STARTS_MAX: usize = 3;

/// Where a private server runs, to check afterwards that it is gone.
#[derive(Clone, Debug, Serialize)]
pub struct PrivateServerInfo {
    pub port: u16,
    pub pid: u32,
    pub directory: PathBuf,
    /// The core that only the server uses.
    pub core: Option<usize>,
}

pub struct PrivateServer {
    pub info: PrivateServerInfo,
    child: Child,
}

impl PrivateServer {
    /// Starts one, and waits until it listens.
    ///
    /// # Errors
    /// When redis-server is not installed, or does not start.
    pub async fn start(core: Option<usize>) -> Result<Self, BenchError> {
        require_redis().await?;
        let mut failure = String::new();
        for _ in 0..STARTS_MAX {
            let mut server = Self::launch(core)?;
            match server.wait_until_ready().await {
                Ok(()) => return Ok(server),
                Err(problem) => failure = problem,
            }
            server.stop().await?;
        }
        Err(BenchError::Server(failure))
    }

    fn launch(core: Option<usize>) -> Result<Self, BenchError> {
        let directory = std::env::temp_dir().join(format!("sluicegate-bench-{}", uuid::Uuid::now_v7()));
        DirBuilder::new().mode(0o700).create(&directory)?;
        let launched = free_port().and_then(|port| Ok((port, spawn(core, port, &directory)?)));
        match launched {
            Ok((port, child)) => {
                let place = PrivateServerInfo { port, pid: child.id().unwrap_or(0), directory, core };
                Ok(Self { info: place, child })
            }
            Err(error) => {
                std::fs::remove_dir_all(&directory)?;
                Err(error.into())
            }
        }
    }

    async fn wait_until_ready(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + START_TIME_MAX;
        while Instant::now() < deadline {
            let ended = self.child.try_wait().map_err(|error| error.to_string())?;
            if let Some(status) = ended {
                return Err(format!("redis-server ended at once ({status}): {}", self.log_tail()));
            }
            if TcpStream::connect(("127.0.0.1", self.info.port)).await.is_ok() {
                return Ok(());
            }
            sleep(Duration::from_millis(20)).await;
        }
        Err(format!("redis-server does not listen: {}", self.log_tail()))
    }

    fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(self.info.directory.join("log")).unwrap_or_default();
        log.lines().last().unwrap_or("it wrote no log").to_owned()
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.info.port)
    }

    /// Kills the server, waits for its end and removes its directory.
    ///
    /// # Errors
    /// When the server cannot be killed, or its directory cannot be removed.
    pub async fn stop(mut self) -> Result<(), BenchError> {
        self.child.kill().await?;
        std::fs::remove_dir_all(&self.info.directory)?;
        Ok(())
    }
}

impl Drop for PrivateServer {
    /// For exits without `stop`; the child's own drop kills it.
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.info.directory)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::error!(%error, directory = %self.info.directory.display(), "directory not removed");
        }
    }
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn spawn(core: Option<usize>, port: u16, directory: &Path) -> std::io::Result<Child> {
    let mut command = match core {
        Some(core) => {
            let mut command = Command::new("taskset");
            command.args(["--cpu-list", &core.to_string(), "redis-server"]);
            command
        }
        None => Command::new("redis-server"),
    };
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--daemonize", "no"]);
    command.args(["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]);
    command.arg("--dir").arg(directory).arg("--logfile").arg(directory.join("log"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // In its own process group, so that Ctrl-C reaches only us and we stop the server.
    command.process_group(0).kill_on_drop(true).spawn()
}

async fn require_redis() -> Result<(), BenchError> {
    let found = Command::new("redis-server").arg("--version").stdin(Stdio::null()).output().await;
    match found {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(BenchError::Server(format!("redis-server --version failed with {}", output.status))),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(BenchError::Server(
            "redis-server is not on the PATH. Install it (Debian, Ubuntu: apt-get install redis-server; Fedora: dnf \
             install redis; macOS: brew install redis), or name a server with --redis URL"
                .to_owned(),
        )),
        Err(error) => Err(error.into()),
    }
}
