//! A deployment by docs/security.md: TLS everywhere, a user with minimal rights in each backend, secrets by reference.
//!
//! All tests that only look share it. When they see it, its worker has finished all jobs and ended.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::authority::{Authority, Identity};
use crate::https::HttpsProvider;
use crate::recipes;
use crate::support::UNPUBLISHED;
use crate::support::postgres::Postgres;
use crate::support::process::{Server, free_port, private_dir};
use crate::support::rabbitmq::RabbitNode;
use crate::support::redis::{Redis, RedisOptions};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
pub const PYTHON: &str = "/usr/bin/python3";
pub const DATABASE: &str = "sluicegate";
pub const VHOST: &str = "payments";
/// Charges jobs. Every search must find this name in every place, which proves that the search works.
pub const PROVIDER: &str = "control-acme";
/// Does not deduplicate and answers look-ups; a payment with a lost response is looked up.
pub const ASKED: &str = "control-crate";
/// Paused, so its messages stay in the queue.
pub const PAUSED: &str = "control-bolt";

/// Placeholder in the recipes → the password that replaces it.
pub const PASSWORDS: [(&str, &str); 10] = [
    ("'OWNER-PASSWORD'", "'canary-db-owner-71c0'"),
    ("'WORKER-PASSWORD'", "'canary-db-worker-52ab'"),
    ("'OPERATOR-PASSWORD'", "'canary-db-operator-90fe'"),
    ("'READER-PASSWORD'", "'canary-db-reader-1d37'"),
    // The same placeholder without quotes is the broker's.
    ("WORKER-PASSWORD", "canary-amqp-worker-c83e"),
    ("PRODUCER-PASSWORD", "canary-amqp-producer-b1f2"),
    ("LISTENER-PASSWORD", "canary-amqp-listener-4a99"),
    // Redis' file of users has their digests.
    ("#ADMIN-PASSWORD-SHA256", "canary-redis-admin-35b8"),
    ("#PASSWORD-SHA256", "canary-redis-e7d5"),
    ("(the ops token)", "canary-ops-token-66b0-9d27c1f48a3e5b60"),
];
pub const PROVIDER_KEY: &str = "sk_live_canaryProviderKeyOfTheEnvironment1";
pub const PROVIDER_FILE: &str = "canary-provider-file-93d1";

/// The password for a placeholder of the recipes.
pub fn password(word: &str) -> &'static str {
    let (_, password) = PASSWORDS.iter().find(|(known, _)| *known == word).unwrap();
    password.trim_matches('\'')
}

/// Invalid messages with their reasons; each contains a canary.
pub const INVALID: [(&str, &str); 8] = [
    (r#"{"id":"i-1","amount":1,"currency":"EUR","payload":{"card":"4242 4242 4242 4242"}}"#, "card_number"),
    (r#"{"id":"i-2","amount":1,"currency":"EUR","payload":{"a":[{"4000056655665556":1}]}}"#, "card_number"),
    (r#"{"id":"i-3","amount":1,"currency":"EUR","payload":{"key":"sk_live_canaryOfAPayload77"}}"#, "secret"),
    (r#"{"id":"i-4","amount":1,"currency":"EUR","payload":{"auth":"Bearer canary.bearer.4f1e"}}"#, "secret"),
    (r#"{"id":"sk_live_canaryAsAnId42","amount":1,"currency":"EUR"}"#, "secret"),
    (r#"{"id":"i-6","amount":1,"currency":"EUR","colour":"5555555555554444"}"#, "unknown_field"),
    (r#"{"id":"i-7","amount":"378282246310005","currency":"EUR"}"#, "bad_amount"),
    (r#"{"id":"i-8","amount":1,"currency":"EUR","payload":{"card":"6011111111111117""#, "malformed"),
];

pub struct Deployment {
    pub authority: Authority,
    pub postgres: Postgres,
    pub redis: Redis,
    pub redis_tls: u16,
    pub rabbit: RabbitNode,
    pub amqps: u16,
    pub provider: HttpsProvider,
    pub dir: PathBuf,
    /// Listens like a proxy; a connection means that the program used the environment's proxy.
    proxy: std::net::TcpListener,
    /// Removes the directory.
    _keeper: Server,
}

impl Deployment {
    /// The deployment that all tests share.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Deployment> = OnceLock::new();
        SHARED.get_or_init(|| {
            let deployment = Self::prepared();
            deployment.work();
            deployment
        })
    }

    /// A deployment of its own, with recipes, schema and providers, and without messages.
    pub fn prepared() -> Self {
        let deployment = Self::start();
        recipes::apply_rabbitmq(&deployment);
        recipes::apply_postgres_roles(&deployment);
        deployment.succeed("sluicegate_owner", &["migrate"]);
        recipes::apply_postgres_grants(&deployment);
        let file = deployment.dir.join("providers.toml");
        std::fs::write(&file, deployment.rows()).unwrap();
        deployment.succeed("sluicegate_operator", &["provider", "apply", file.to_str().unwrap()]);
        deployment
    }

    fn start() -> Self {
        let dir = private_dir("security");
        let keeper = Server::start(&["sleep", "infinity"], &[], &dir.join("keeper.log"), Some(&dir), "");
        for name in ["ca", "redis"] {
            std::fs::create_dir(dir.join(name)).unwrap();
        }
        let authority = Authority::create(&dir.join("ca"));
        let own = authority.issue("own", "localhost");
        let (postgres, rabbit) = std::thread::scope(|threads| {
            let postgres = threads.spawn(Postgres::start);
            let rabbit = threads.spawn(RabbitNode::start);
            (postgres.join().unwrap(), rabbit.join().unwrap())
        });
        serve_tls(&postgres, &own);
        let amqps = amqps_listener(&rabbit, &own);
        let redis = Redis::start_in(&dir.join("redis"), recipes::with_users(&dir, tls_options(&own, &authority)));
        let redis_tls = rediss_listener(&redis);
        let provider = HttpsProvider::start(&own);
        let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        proxy.set_nonblocking(true).unwrap();
        std::fs::write(dir.join("provider-secret"), format!("{PROVIDER_FILE}\n")).unwrap();
        std::fs::write(dir.join("ops-token"), password("(the ops token)")).unwrap();
        Self { authority, postgres, redis, redis_tls, rabbit, amqps, provider, dir, proxy, _keeper: keeper }
    }

    /// Publishes messages, and runs a worker until all jobs have finished.
    fn work(&self) {
        self.python("broker.py", &["bind", &self.amqp("books"), "books.all", "payments.outcomes", "#"], "");
        self.publish();
        let worker = self.start_worker();
        self.await_jobs(2);
        self.restart_redis();
        self.publish_all(&[message(PROVIDER, job("pay-5", "after the restart"))]);
        self.await_jobs(3);
        self.stop(worker);
    }

    /// Redis forgets everything but what its files hold.
    fn restart_redis(&self) {
        self.redis.kill();
        self.redis.restart_with(&["--tls-port", &self.redis_tls.to_string()]);
    }

    /// Waits until so many jobs have succeeded and nothing is left to do.
    fn await_jobs(&self, succeeded: u32) {
        let invalid = INVALID.len();
        // The messages of the paused provider wait.
        let wanted = format!("review|1\nsucceeded|{succeeded}\nwaiting|1\nrejected|{invalid}\n");
        let counted = "SELECT state, count(*) FROM jobs GROUP BY state UNION ALL \
                       SELECT 'rejected', count(*) FROM rejected_messages ORDER BY 1";
        let sorted = |text: &str| -> Vec<String> {
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let deadline = Instant::now() + Duration::from_secs(90);
        while sorted(&self.sql(counted)) != sorted(&wanted) || self.sql(UNPUBLISHED).trim() != "0" {
            let log = std::fs::read_to_string(self.dir.join("worker.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "{}\n{log}", self.sql(counted));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn rows(&self) -> String {
        let (port, secret) = (self.provider.port, self.dir.join("provider-secret"));
        let row = |name: &str, paused: bool| {
            format!(
                "[[provider]]\nname = \"{name}\"\npaused = {paused}\nurl = \"https://localhost:{port}/charges\"\n\
                 idempotency_retention_s = 86400\n\
                 headers = {{ Authorization = \"Bearer ${{env:CANARY_PROVIDER_KEY}}\", X-Own = \"${{file:{}}}\" }}\n\
                 [[provider.limit]]\nname = \"all\"\nmax_requests = 100\nwindow_ms = 1000\n",
                secret.display()
            )
        };
        let lookup =
            format!("[provider.lookup]\nurl = \"https://localhost:{port}/charges?id=${{job:id}}\"\n[[provider.limit]]");
        let asked = row(ASKED, false).replace("idempotency_retention_s = 86400\n", "");
        row(PROVIDER, false) + &row(PAUSED, true) + &asked.replace("[[provider.limit]]", &lookup)
    }

    fn publish(&self) {
        let mut lines: Vec<Value> = INVALID.iter().map(|(body, _)| message(PROVIDER, (*body).to_owned())).collect();
        lines.push(message(PROVIDER, job("pay-1", "fine")));
        lines.push(message(PROVIDER, job("pay-2", "echo-me")));
        lines.push(message(ASKED, job("pay-4", "forget-me")));
        lines.push(message(PAUSED, job("pay-3", "stays")));
        self.publish_all(&lines);
    }

    fn publish_all(&self, messages: &[Value]) {
        let input: String = messages.iter().map(|message| format!("{message}\n")).collect();
        self.python("broker.py", &["publish", &self.amqp("shop")], &input);
    }

    /// A URL of the broker's plain port for the tests; the program uses the TLS port.
    pub fn amqp(&self, user: &str) -> String {
        let word = match user {
            "shop" => "PRODUCER-PASSWORD",
            "books" => "LISTENER-PASSWORD",
            "sluicegate" => "WORKER-PASSWORD",
            _ => return self.rabbit.url(VHOST),
        };
        format!("amqp://{user}:{}@127.0.0.1:{}/{VHOST}", password(word), self.rabbit.port())
    }

    /// Environment of the program, with a database role and the most verbose logging.
    pub fn environment(&self, role: &str, ops: &str) -> Vec<(String, String)> {
        let word = role.trim_start_matches("sluicegate_").to_uppercase();
        let database = password(&format!("'{word}-PASSWORD'"));
        let port = port_of(&self.postgres);
        let url = format!("postgres://{role}:{database}@localhost:{port}/{DATABASE}?sslmode=verify-full");
        let file = self.dir.join(format!("{role}.url"));
        // Replaced in one step, because other tests read the same role's file.
        static WRITTEN: AtomicU32 = AtomicU32::new(0);
        let written = self.dir.join(format!("{role}.url.{}", WRITTEN.fetch_add(1, Ordering::Relaxed)));
        std::fs::write(&written, url).unwrap();
        std::fs::rename(&written, &file).unwrap();
        let proxy = format!("http://{}", self.proxy.local_addr().unwrap());
        let path = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (amqp, redis) = (password("WORKER-PASSWORD"), password("#PASSWORD-SHA256"));
        [
            ("SLUICEGATE_DATABASE__URL_FILE", path(file)),
            ("SLUICEGATE_QUEUE__URL", format!("amqps://sluicegate:{amqp}@localhost:{}/{VHOST}", self.amqps)),
            ("SLUICEGATE_LIMITER__URL", format!("rediss://sluicegate:{redis}@localhost:{}", self.redis_tls)),
            ("SLUICEGATE_TLS__CA_FILE", path(self.authority.file())),
            ("SLUICEGATE_OUTBOUND__ALLOW", format!("localhost:{}", self.provider.port)),
            (
                "SLUICEGATE_OUTBOUND__SECRETS",
                format!("env:CANARY_PROVIDER_KEY@localhost,file:{}@localhost", path(self.dir.join("provider-secret"))),
            ),
            ("SLUICEGATE_OPS__LISTEN", ops.to_owned()),
            ("SLUICEGATE_OPS__TOKEN_FILE", path(self.dir.join("ops-token"))),
            ("SLUICEGATE_LOG__LEVEL", "trace".to_owned()),
            ("RUST_LOG", "trace".to_owned()),
            ("RUST_BACKTRACE", "full".to_owned()),
            ("CANARY_PROVIDER_KEY", PROVIDER_KEY.to_owned()),
            ("http_proxy", proxy.clone()),
            ("https_proxy", proxy.clone()),
            ("HTTPS_PROXY", proxy.clone()),
            ("ALL_PROXY", proxy),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    /// Runs a command to its end and keeps its output for the search.
    pub fn run(&self, environment: &[(String, String)], args: &[&str]) -> Output {
        let variables = environment.iter().map(|(name, value)| (name, value));
        let output = Command::new(PROGRAM).args(args).envs(variables).output().unwrap();
        let mut kept = File::options().create(true).append(true).open(self.dir.join("commands.log")).unwrap();
        kept.write_all(&[&output.stdout[..], b"\n", &output.stderr].concat()).unwrap();
        output
    }

    fn succeed(&self, role: &str, args: &[&str]) {
        let output = self.run(&self.environment(role, "none"), args);
        assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    }

    pub fn start_worker(&self) -> (Server, u16) {
        let ops = free_port();
        let environment = self.environment("sluicegate_worker", &format!("127.0.0.1:{ops}"));
        let environment: Vec<(&str, &str)> =
            environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let server = Server::start(&[PROGRAM, "run"], &environment, &self.dir.join("worker.log"), None, "");
        server.await_port(ops);
        // Every user of the machine can read its command line.
        let arguments = std::fs::read_to_string(format!("/proc/{}/cmdline", server.pid)).unwrap();
        assert!(!arguments.contains("canary"), "{arguments}");
        (server, ops)
    }

    /// Runs commands that read its ops server, then sends SIGTERM.
    fn stop(&self, (worker, ops): (Server, u16)) {
        let operator = self.environment("sluicegate_operator", &format!("127.0.0.1:{ops}"));
        for args in [
            &["check", "--json"][..],
            &["provider", "list"],
            &["provider", "show", PROVIDER],
            &["limits", "list", "--json"],
            &["limits", "peek", PROVIDER],
        ] {
            let output = self.run(&operator, args);
            assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
        }
        worker.signal("TERM");
        let deadline = Instant::now() + Duration::from_secs(40);
        while !worker.log_text().contains("all requests finished, unsent jobs returned to the backlog") {
            assert!(Instant::now() < deadline, "the worker does not stop:\n{}", worker.log_text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn sql(&self, statement: &str) -> String {
        let output = self.postgres.psql(DATABASE).args(["-c", statement]).output().unwrap();
        assert!(output.status.success(), "{statement}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs a script that speaks AMQP with pika.
    pub fn python(&self, script: &str, args: &[&str], input: &str) -> String {
        let folder = if script == "broker.py" { "services" } else { "security" };
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder).join(script);
        let lines = self.dir.join(format!("input-{:?}", std::thread::current().id()));
        std::fs::write(&lines, input).unwrap();
        let stdin = std::fs::File::open(&lines).unwrap();
        let output = Command::new(PYTHON).arg(path).args(args).stdin(stdin).output().unwrap();
        assert!(output.status.success(), "{script} {}: {}", args[0], text(&output.stderr));
        text(&output.stdout)
    }

    /// Whether the program connected to the proxy that the environment names.
    pub fn proxy_was_used(&self) -> bool {
        self.proxy.accept().is_ok()
    }
}

fn job(id: &str, note: &str) -> String {
    let payload = json!({ "note": note });
    json!({ "id": id, "amount": 1299, "currency": "EUR", "reference": PROVIDER, "payload": payload }).to_string()
}

/// A message as the script that publishes reads it.
fn message(key: &str, body: String) -> Value {
    json!({ "key": key, "body": body })
}

/// Makes PostgreSQL require TLS and passwords on its port, with this certificate; the tests' own socket stays open.
pub fn serve_tls(postgres: &Postgres, identity: &Identity) {
    let ask = |sql: &str| {
        let output = postgres.psql("postgres").args(["-c", sql]).output().unwrap();
        assert!(output.status.success(), "{sql}: {}", text(&output.stderr));
        text(&output.stdout).trim().to_owned()
    };
    let data = PathBuf::from(ask("SHOW data_directory"));
    let rules = "local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\nhostnossl all all all reject\n";
    std::fs::write(ask("SHOW hba_file"), rules).unwrap();
    let name = identity.certificate.file_stem().unwrap().to_str().unwrap();
    for (from, ending) in [(&identity.certificate, "pem"), (&identity.key, "key")] {
        let to = data.join(format!("{name}.{ending}"));
        std::fs::copy(from, &to).unwrap();
        let same_owner = ["--reference", data.join("PG_VERSION").to_str().unwrap()].map(str::to_owned);
        assert!(Command::new("chown").args(same_owner).arg(&to).status().unwrap().success());
        assert!(Command::new("chmod").arg("600").arg(&to).status().unwrap().success());
    }
    for (setting, value) in
        [("ssl_cert_file", format!("{name}.pem")), ("ssl_key_file", format!("{name}.key")), ("ssl", "on".to_owned())]
    {
        ask(&format!("ALTER SYSTEM SET {setting} = '{value}'"));
    }
    ask("SELECT pg_reload_conf()");
    let deadline = Instant::now() + Duration::from_secs(20);
    while ask("SHOW ssl_cert_file") != format!("{name}.pem") || ask("SHOW ssl") != "on" {
        assert!(Instant::now() < deadline, "PostgreSQL does not load the certificate");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn port_of(postgres: &Postgres) -> String {
    let url = postgres.url("x");
    url.rsplit(':').next().unwrap().split('/').next().unwrap().to_owned()
}

/// Adds a TLS listener with this certificate to the broker.
pub fn amqps_listener(rabbit: &RabbitNode, identity: &Identity) -> u16 {
    let port = free_port();
    let (certificate, key) = (identity.certificate.display(), identity.key.display());
    let program = format!(
        "application:ensure_all_started(ssl), rabbit_networking:start_ssl_listener({{\"127.0.0.1\", {port}}}, \
         [{{certfile, \"{certificate}\"}}, {{keyfile, \"{key}\"}}], 1)."
    );
    let result = rabbit.ctl(&["eval", &program]);
    assert!(result.contains("ok"), "{result}");
    port
}

/// Opens the TLS port of a server that has a certificate. The port is chosen last, so it is none of the server's
/// others.
pub fn rediss_listener(redis: &Redis) -> u16 {
    let port = free_port();
    redis.command::<()>(&format!("CONFIG SET tls-port {port}"));
    port
}

pub fn tls_options(identity: &Identity, authority: &Authority) -> RedisOptions {
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let arguments = [
        ["--tls-cert-file".to_owned(), path(&identity.certificate)],
        ["--tls-key-file".to_owned(), path(&identity.key)],
        ["--tls-ca-cert-file".to_owned(), path(&authority.file())],
        ["--tls-auth-clients".to_owned(), "no".to_owned()],
    ];
    RedisOptions { is_forgetful: true, arguments: arguments.concat(), ..RedisOptions::default() }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
