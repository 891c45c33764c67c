//! A private redis-server.

use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::process::{Server, free_port, private_dir};

/// One redis-server with append-only persistence, on its own port and in its own directory.
pub struct Redis {
    pub port: u16,
    dir: PathBuf,
    /// Lives as long as the test binary, which drops no statics: its warden removes the directory.
    is_shared: bool,
    server: Mutex<Option<Server>>,
}

impl Redis {
    pub fn start() -> Self {
        Self::begin(false)
    }

    fn begin(is_shared: bool) -> Self {
        let redis = Self { port: free_port(), dir: private_dir("redis"), is_shared, server: Mutex::new(None) };
        redis.restart();
        redis
    }

    /// The server that the tests of one binary share, each under its own key prefix.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Redis> = OnceLock::new();
        SHARED.get_or_init(|| Self::begin(true))
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// SIGKILL; data and port stay for a restart.
    pub fn kill(&self) {
        if let Some(server) = self.slot().take() {
            server.kill();
        }
    }

    pub fn restart(&self) {
        let (port, dir) = (self.port.to_string(), self.dir.display().to_string());
        let command = [
            "redis-server",
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--dir",
            &dir,
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "everysec",
            "--maxmemory-policy",
            "noeviction",
            "--daemonize",
            "no",
        ];
        let server =
            Server::start(&command, &[], &self.dir.join("log"), self.is_shared.then_some(self.dir.as_path()), "");
        server.await_port(self.port);
        *self.slot() = Some(server);
    }

    pub fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).unwrap().get_connection().unwrap()
    }

    pub fn signal(&self, name: &str) {
        self.slot().as_ref().unwrap().signal(name);
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
