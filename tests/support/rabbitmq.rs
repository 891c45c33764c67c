//! A private RabbitMQ node with its own ports, epmd, data and cookie, for tests that need a real broker.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::process::{Host, Server, free_port, private_dir};

/// Debian's wrapper in /usr/sbin requires a system user; the programs here do not.
const BIN: &str = "/usr/lib/rabbitmq/bin";

/// Runs the broker whenever the file `up` exists. So a killed broker can restart on the same data under the same
/// [`Server`].
const LOOP: &str = r#"while :; do while [ ! -e "$HOME/up" ]; do sleep 0.05; done; "$0"; done"#;

/// epmd outlives the node that started it, and refuses to end while a node is registered.
const END_EPMD: &str = r"for try in 1 2 3 4 5 6 7 8 9 10; do epmd -kill && break; sleep 0.1; done";

pub struct RabbitNode {
    dir: PathBuf,
    port: u16,
    env: Vec<(String, String)>,
    host: Host,
    server: Server,
}

/// The broker of a deployment. To start one costs more than everything else of a deployment.
pub enum Broker {
    /// The one that all tests of a binary share.
    Shared(&'static RabbitNode),
    Own(RabbitNode),
}

impl Broker {
    pub fn node(&self) -> &RabbitNode {
        match self {
            Self::Shared(node) => node,
            Self::Own(node) => node,
        }
    }

    /// The broker that no other test uses.
    pub fn own(&self) -> &RabbitNode {
        match self {
            Self::Own(node) => node,
            Self::Shared(_) => panic!("other tests use this broker"),
        }
    }
}

impl RabbitNode {
    /// The node that all tests of a binary share, each with its own virtual host.
    pub fn shared() -> &'static Self {
        static NODE: OnceLock<RabbitNode> = OnceLock::new();
        NODE.get_or_init(Self::start)
    }

    /// Starts a node and waits until it accepts connections (5 to 10 s).
    pub fn start() -> Self {
        Self::start_with_vhost("/", "")
    }

    /// The same, with this virtual host from the start, which costs no run of `rabbitmqctl`, and with more lines in its
    /// `rabbitmq.conf`.
    pub fn start_with_vhost(vhost: &str, settings: &str) -> Self {
        Self::start_on(Host::default(), vhost, settings)
    }

    /// The same, on another host.
    pub fn start_on(host: Host, vhost: &str, settings: &str) -> Self {
        let dir = private_dir("rabbitmq");
        let port = free_port();
        let listens = format!("listeners.tcp.1 = {}:{port}\ndefault_vhost = {vhost}\n{settings}", host.address);
        let env = environment(&dir, port, &listens);
        let borrowed: Vec<(&str, &str)> = env.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let program = format!("{BIN}/rabbitmq-server");
        let (command, end_epmd) = (host.command(&["sh", "-c", LOOP, &program]), host.command(&["sh", "-c"]).join(" "));
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let end_epmd = format!("{end_epmd} '{END_EPMD}'");
        let server = Server::start(&command, &borrowed, &dir.join("node.log"), Some(&dir), &end_epmd);
        let node = Self { dir, port, env, host, server };
        node.restart();
        node
    }

    /// The URL for a client; the name of the virtual host must have no special characters.
    pub fn url(&self, vhost: &str) -> String {
        format!("amqp://guest:guest@{}:{}/{vhost}", self.host.address, self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Creates a virtual host with all rights for the default user, and returns its URL.
    pub fn create_vhost(&self, name: &str) -> String {
        self.evaluate(&format!("ok = rabbit_vhost:add(<<\"{name}\">>, <<\"test\">>), {}", permit("guest", name, ".*")));
        self.url(name)
    }

    /// Creates a user whose password is its name. It may configure, write and read everything in a virtual host that
    /// the expression matches.
    pub fn create_user(&self, name: &str, vhost: &str, rights: &str) {
        let add = format!("ok = rabbit_auth_backend_internal:add_user(<<\"{name}\">>, <<\"{name}\">>, <<\"test\">>)");
        self.evaluate(&format!("{add}, {}", permit(name, vhost, rights)));
    }

    /// Lets the node evaluate an expression whose value is `ok`. `erl_call` is a program in C: it takes milliseconds,
    /// and `rabbitmqctl` starts an Erlang virtual machine, which takes more than a second.
    fn evaluate(&self, expression: &str) {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let (name, cookie) = (node_name(self.port), cookie(self.port));
        // The node rejects a caller whose name is in use.
        let caller = format!("caller{}", CALLS.fetch_add(1, Ordering::Relaxed));
        let command = self.host.command(&["erl_call", "-sname", &name, "-c", &cookie, "-h", &caller, "-e"]);
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(format!("{expression}.\n").as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let answer = String::from_utf8_lossy(&output.stdout);
        let complaint = String::from_utf8_lossy(&output.stderr);
        // Its exit code does not tell whether the expression failed.
        assert_eq!(answer.trim(), "{ok, ok}", "{expression}: {complaint}\n{}", self.server.log_text());
    }

    /// Every queue of a virtual host with all its messages, also those that are not acknowledged.
    pub fn queues(&self, vhost: &str) -> BTreeMap<String, u64> {
        let listed = self.ctl(&["list_queues", "-p", vhost, "--no-table-headers", "name", "messages"]);
        let queues = listed.lines().filter_map(|line| line.split_once('\t'));
        queues.map(|(name, messages)| (name.to_owned(), messages.trim().parse().unwrap())).collect()
    }

    /// Kills the broker with SIGKILL, keeps its data, and waits until it is gone.
    pub fn kill(&self) {
        std::fs::remove_file(self.dir.join("up")).unwrap();
        self.signal("KILL");
        let deadline = Instant::now() + Duration::from_secs(30);
        while std::net::TcpStream::connect((self.host.address.as_str(), self.port)).is_ok() {
            assert!(Instant::now() < deadline, "the broker still runs after SIGKILL");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a signal by name to the broker's own process.
    pub fn signal(&self, name: &str) {
        let pid = std::fs::read_to_string(self.dir.join("pid")).unwrap();
        let status = Command::new("kill").args([&format!("-{name}"), pid.trim()]).status().unwrap();
        assert!(status.success(), "kill -{name} {pid}");
    }

    /// Starts the broker with its data on its port, and waits until it accepts connections.
    pub fn restart(&self) {
        std::fs::write(self.dir.join("up"), "").unwrap();
        self.server.await_port_on(&self.host, self.port);
    }

    /// Runs `rabbitmqctl` on this node and returns its output.
    pub fn ctl(&self, args: &[&str]) -> String {
        let command = self.host.command(&[&format!("{BIN}/rabbitmqctl"), "--quiet"]);
        let output = Command::new(&command[0])
            .args(&command[1..])
            .args(args)
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "rabbitmqctl {args:?}: {text}{}\n{}",
            String::from_utf8_lossy(&output.stderr),
            self.server.log_text()
        );
        text
    }
}

/// The expression that grants a user rights in a virtual host.
fn permit(user: &str, vhost: &str, rights: &str) -> String {
    let rights = rights.replace('\\', r"\\");
    let [user, vhost, rights] = [user, vhost, &rights].map(|text| format!("<<\"{text}\">>"));
    let words = [&user, &vhost, &rights, &rights, &rights, "<<\"test\">>"].join(", ");
    format!("rabbit_auth_backend_internal:set_permissions({words})")
}

fn node_name(port: u16) -> String {
    format!("sluicegate{port}@localhost")
}

fn cookie(port: u16) -> String {
    format!("SLUICEGATE{port}")
}

/// `settings`: more lines of its `rabbitmq.conf`.
fn environment(dir: &std::path::Path, port: u16, settings: &str) -> Vec<(String, String)> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let cookie_file = dir.join(".erlang.cookie");
    std::fs::write(&cookie_file, cookie(port)).unwrap();
    std::fs::set_permissions(&cookie_file, std::fs::Permissions::from_mode(0o400)).unwrap();
    std::fs::write(dir.join("plugins"), "[].").unwrap();
    let config = format!(
        "disk_free_limit.absolute = 1MB\n\
         vm_memory_high_watermark.absolute = 1GB\n\
         log.console.level = warning\n{settings}\n"
    );
    std::fs::write(dir.join("rabbitmq.conf"), config).unwrap();
    [
        ("HOME", path("")),
        ("RABBITMQ_NODENAME", node_name(port)),
        ("RABBITMQ_NODE_PORT", port.to_string()),
        ("RABBITMQ_DIST_PORT", free_port().to_string()),
        ("ERL_EPMD_PORT", free_port().to_string()),
        ("ERL_EPMD_ADDRESS", "127.0.0.1".to_owned()),
        ("RABBITMQ_MNESIA_BASE", path("data")),
        ("RABBITMQ_LOG_BASE", path("log")),
        ("RABBITMQ_LOGS", "-".to_owned()),
        ("RABBITMQ_PID_FILE", path("pid")),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", path("plugins")),
        ("RABBITMQ_CONFIG_FILE", path("rabbitmq.conf")),
        ("RABBITMQ_CONF_ENV_FILE", path("no-env.conf")),
        // One scheduler, and distribution on loopback alone.
        ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "+S 1:1 -kernel inet_dist_use_interface {127,0,0,1}".to_owned()),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}
