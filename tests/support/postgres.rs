//! A private PostgreSQL cluster: durable as in production (fsync on), with trust authentication on its loopback port.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::process::{Host, Server, free_port, private_dir};

/// Debian's folder of versions, by number.
const VERSIONS: &str = "/usr/lib/postgresql";
/// The text order of a database: that of a language, in which `a-b`, `aB` and `ab` are not in the order of their bytes.
const OF_A_LANGUAGE: [&str; 3] = ["--no-locale", "--locale-provider=icu", "--icu-locale=en-US"];
/// A locale that the system's C library reads from a folder of the cluster.
const LOCALE: &str = "en_US.UTF-8";

pub struct Postgres {
    port: u16,
    dir: PathBuf,
    host: Host,
    /// The folder of its own locale.
    locales: Option<PathBuf>,
    // Dropped before the keeper of its directory.
    server: Mutex<Option<Server>>,
    _keeper: Server,
}

impl Postgres {
    /// The cluster that the tests of a binary share; each test creates its own database.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Postgres> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// A separate cluster, for tests that kill it.
    pub fn start() -> Self {
        Self::start_on(Host::default())
    }

    /// The same, on another host.
    pub fn start_on(host: Host) -> Self {
        let dir = private_dir("postgres");
        Self::start_in(dir, host, None)
    }

    /// A separate cluster in a locale whose text order is at first that of bytes.
    pub fn start_in_a_locale() -> Self {
        let dir = private_dir("postgres");
        let locales = dir.join("locales");
        std::fs::create_dir(&locales).unwrap();
        make_locale("C", &locales);
        Self::start_in(dir, Host::default(), Some(locales))
    }

    fn start_in(dir: PathBuf, host: Host, locales: Option<PathBuf>) -> Self {
        let data = dir.join("data");
        if is_root() {
            run(Command::new("chown").arg("postgres:").arg(&dir));
        }
        let mut initdb = as_postgres(&program("initdb"));
        initdb.extend(["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-sync"].map(Into::into));
        match &locales {
            Some(_) => initdb.push(format!("--locale={LOCALE}")),
            None => initdb.extend(OF_A_LANGUAGE.map(Into::into)),
        }
        initdb.push(format!("--pgdata={}", data.display()));
        run(Command::new(&initdb[0]).args(&initdb[1..]).envs(environment(locales.as_deref())));
        if host.namespace.is_some() {
            run(Command::new("sh")
                .args(["-c", "echo 'host all all all trust' >> \"$0\""])
                .arg(data.join("pg_hba.conf")));
        }
        Self::serve_in(dir, host, locales)
    }

    fn serve_in(dir: PathBuf, host: Host, locales: Option<PathBuf>) -> Self {
        // Removes the directory after the postmaster that uses it has ended.
        let wait = format!(
            "for i in $(seq 100); do kill -0 $(head -1 {}/data/postmaster.pid) || break; sleep 0.05; done",
            dir.display()
        );
        let keeper = Server::start(&["sleep", "infinity"], &[], &dir.join("keeper.log"), Some(&dir), &wait);
        let port = free_port();
        let server = Mutex::new(Some(serve(&host, &dir, port, locales.as_deref())));
        Self { port, dir, host, locales, server, _keeper: keeper }
    }

    /// Starts an asynchronous standby of this cluster. It takes reads.
    pub fn start_standby(&self) -> Self {
        let dir = private_dir("postgres-standby");
        if is_root() {
            run(Command::new("chown").arg("postgres:").arg(&dir));
        }
        let mut copy = as_postgres(&program("pg_basebackup"));
        copy.extend(["--write-recovery-conf", "--no-sync", "--checkpoint=fast", "--username=postgres"].map(Into::into));
        copy.push(format!("--host={}", self.dir.display()));
        copy.push(format!("--port={}", self.port));
        copy.push(format!("--pgdata={}", dir.join("data").display()));
        run(Command::new(&copy[0]).args(&copy[1..]));
        Self::serve_in(dir, Host::default(), None)
    }

    /// Lets a standby receive nothing more from its primary.
    pub fn stop_receiving(&self) {
        self.query("postgres", "ALTER SYSTEM SET primary_conninfo = ''");
        self.query("postgres", "SELECT pg_reload_conf()");
        self.await_answer("postgres", "SELECT count(*) FROM pg_stat_wal_receiver", "0");
    }

    /// Promotes a standby, and starts it again in the place of its killed primary.
    pub fn take_over(&mut self, primary: &Self) {
        self.query("postgres", "SELECT pg_promote()");
        self.await_answer("postgres", "SELECT pg_is_in_recovery()", "f");
        self.kill();
        self.port = primary.port;
        self.restart();
    }

    /// Waits until a query has this answer.
    pub fn await_answer(&self, database: &str, sql: &str, answer: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.query(database, sql) != answer {
            assert!(Instant::now() < deadline, "{sql}: {}", self.query(database, sql));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn query(&self, database: &str, sql: &str) -> String {
        let output = self.psql(database).args(["-c", sql]).output().unwrap();
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@{}:{}/{database}", self.host.address, self.port)
    }

    /// Creates an empty database and returns its URL.
    pub fn create_database(&self, name: &str) -> String {
        run(self.psql("postgres").args(["-c", &format!("CREATE DATABASE \"{name}\"")]));
        self.url(name)
    }

    /// Copies a database that has no connections, and returns the copy's URL.
    pub fn copy_database(&self, template: &str, name: &str) -> String {
        run(self.psql("postgres").args(["-c", &format!("CREATE DATABASE \"{name}\" TEMPLATE \"{template}\"")]));
        self.url(name)
    }

    /// The server's log from this byte on; each message begins with time, process and database.
    pub fn log_since(&self, bytes: u64) -> Vec<u8> {
        self.server.lock().unwrap().as_ref().expect("the cluster runs").log_since(bytes)
    }

    pub fn log_bytes(&self) -> u64 {
        self.server.lock().unwrap().as_ref().expect("the cluster runs").log_bytes()
    }

    /// `psql` on a database; it stops at the first error.
    pub fn psql(&self, database: &str) -> Command {
        let mut psql = Command::new(program("psql"));
        psql.args(["-XqAt", "-v", "ON_ERROR_STOP=1", "-h"]).arg(&self.dir);
        psql.args(["-p", &self.port.to_string(), "-U", "postgres", "-d", database]);
        psql
    }

    /// Kills every process of the cluster with SIGKILL and waits until they are gone.
    pub fn kill(&self) {
        let server = self.server.lock().unwrap().take().expect("the cluster runs");
        let group = format!("-{}", server.pid);
        // Each backend has its own process group. The postmaster is stopped first, so that it starts no more of them.
        server.signal("STOP");
        let backends = children(server.pid);
        server.kill();
        backends.iter().for_each(|pid| signal("KILL", &pid.to_string()));
        let alive = |process: &str| Command::new("kill").args(["-0", "--", process]).output().unwrap().status.success();
        let deadline = Instant::now() + Duration::from_secs(30);
        while alive(&group) || backends.iter().any(|pid| alive(&pid.to_string())) {
            assert!(Instant::now() < deadline, "a process of the killed cluster still runs");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops every process of the cluster (SIGSTOP), or resumes all.
    pub fn freeze(&self, frozen: bool) {
        let server = self.server.lock().unwrap();
        let postmaster = server.as_ref().expect("the cluster runs").pid;
        let name = if frozen { "STOP" } else { "CONT" };
        if frozen {
            signal(name, &postmaster.to_string());
        }
        children(postmaster).iter().for_each(|pid| signal(name, &pid.to_string()));
        if !frozen {
            signal(name, &postmaster.to_string());
        }
    }

    /// Gives the locale of the killed cluster the text order of a language, as an upgrade of the operating system does.
    pub fn change_text_order(&self) {
        make_locale("en_US", self.locales.as_ref().expect("the cluster has its own locale"));
    }

    /// Starts the killed cluster again, with its data, on its port.
    pub fn restart(&self) {
        let mut server = self.server.lock().unwrap();
        assert!(server.is_none(), "the cluster already runs");
        *server = Some(serve(&self.host, &self.dir, self.port, self.locales.as_deref()));
    }
}

/// A program of the newest version whose server is installed.
pub fn program(name: &str) -> String {
    let number = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().to_str()?.parse().ok();
    let has_server = |number: &u32| Path::new(&format!("{VERSIONS}/{number}/bin/initdb")).exists();
    let numbers = std::fs::read_dir(VERSIONS).into_iter().flatten().filter_map(number);
    let newest = numbers.filter(has_server).max().expect("PostgreSQL is installed (tests/run does it)");
    format!("{VERSIONS}/{newest}/bin/{name}")
}

/// Compiles [`LOCALE`] from one of the system's sources.
fn make_locale(source: &str, folder: &Path) {
    run(Command::new("localedef").args(["-i", source, "-f", "UTF-8"]).arg(folder.join(LOCALE)));
}

fn environment(locales: Option<&Path>) -> Vec<(&'static str, String)> {
    locales.map(|folder| ("LOCPATH", folder.display().to_string())).into_iter().collect()
}

fn serve(host: &Host, dir: &Path, port: u16, locales: Option<&Path>) -> Server {
    let (data, port_text, sockets) = (dir.join("data"), port.to_string(), dir.display().to_string());
    let mut command = as_postgres(&program("postgres"));
    command.extend(["-D", &data.display().to_string(), "-p", &port_text, "-k", &sockets].map(Into::into));
    let listens = format!("listen_addresses={}", host.address);
    let settings = ["fsync=on", "max_connections=300", "shared_buffers=64MB", "log_line_prefix=%m [%p] %d "];
    for setting in [listens.as_str()].iter().chain(&settings) {
        command.extend(["-c", *setting].map(Into::into));
    }
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let command = host.command(&command);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let environment = environment(locales);
    let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let server = Server::start(&command, &environment, &dir.join("postgres.log"), None, "");
    let pg_isready = program("pg_isready");
    let ready = || Command::new(&pg_isready).args(["-q", "-h", &sockets, "-p", &port_text]).status();
    server.await_that("PostgreSQL is not ready", || ready().unwrap().success());
    server
}

/// Child processes that still run.
fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// A process that has ended meanwhile is no error.
fn signal(name: &str, process: &str) {
    Command::new("kill").args([&format!("-{name}"), "--", process]).output().unwrap();
}

/// PostgreSQL refuses to run as root.
fn as_postgres(program: &str) -> Vec<String> {
    let user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"];
    let prefix: &[&str] = if is_root() { &user } else { &[] };
    prefix.iter().copied().chain([program]).map(str::to_owned).collect()
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    String::from_utf8_lossy(&id.stdout).trim() == "0"
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
