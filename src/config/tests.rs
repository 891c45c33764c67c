use std::fs;
use std::time::Duration;

use super::layers::variable_name;
use super::*;

/// An output of `openssl rand -hex 24`.
const TOKEN: &str = "5d1f0c9b7e3a86427790fe15cb2ad8346f70e19b28c4d5a3";

fn load_with(variables: &[(&str, &str)], sets: &[&str]) -> Result<Config, ConfigProblems> {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    load(None, variables, &sets)
}

/// The problems as `key: text`, one per line.
fn problems_of(variables: &[(&str, &str)], sets: &[&str]) -> String {
    load_with(variables, sets).unwrap_err().to_string()
}

fn load_file(text: &str) -> Result<Config, ConfigProblems> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sluicegate.toml");
    fs::write(&path, text).unwrap();
    load(Some(&path), [], &[])
}

#[test]
fn the_defaults_are_those_of_the_contract() {
    let config = load_with(&[], &[]).unwrap();
    assert_eq!(config.database.url.to_string(), "sqlite://sluicegate.db");
    assert_eq!(config.database.max_connections, 16);
    assert_eq!((&config.queue.url, config.queue.prefix.as_str()), (&QueueUrl::Embedded, "payments"));
    assert_eq!((&config.limiter.url, config.limiter.prefix.as_str()), (&LimiterUrl::Embedded, "sluicegate"));
    assert_eq!(config.outbound_allow, ["loopback"]);
    assert!(config.outbound_secrets.iter().next().is_none() && config.config_files.is_empty());
    assert_eq!(config.ops.listen, Some("127.0.0.1:9464".parse().unwrap()));
    assert!(config.ops.token.is_none() && config.plaintext_hosts.is_empty());
    assert_eq!(config.worker.drain_timeout, Duration::from_secs(30));
    assert_eq!(config.worker.card_numbers, CardNumbers::Refuse);
    assert_eq!(config.scrub_after, Duration::from_secs(90 * 86_400));
    assert_eq!(config.log, LogConfig { level: tracing::Level::INFO, format: LogFormat::Text });
}

#[test]
fn default_file_and_code_have_equal_keys() {
    // A key that the code reads and the defaults lack is a problem of each load.
    load_with(&[], &[]).unwrap();
    let code = concat!(include_str!("validated.rs"), include_str!("people.rs"));
    for (key, _) in Keys::embedded().unwrap().iter() {
        assert!(code.contains(&format!("\"{key}\"")), "the code does not read `{key}`");
    }
    let lines: Vec<&str> = DEFAULTS.lines().collect();
    for (number, line) in lines.iter().enumerate().filter(|(_, line)| line.contains(" = ") && !line.starts_with('#')) {
        assert!(lines[number - 1].starts_with('#'), "`{line}` has no comment");
    }
}

#[test]
fn later_layers_win() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.toml");
    fs::write(&path, "[queue]\nprefix = \"file\"\n[log]\nlevel = \"debug\"\n[limiter]\nprefix = \"file\"\n").unwrap();
    let variables = [
        ("SLUICEGATE_CONFIG", path.to_str().unwrap()),
        ("SLUICEGATE_QUEUE__PREFIX", "variable"),
        ("SLUICEGATE_LIMITER__PREFIX", "variable"),
        ("SLUICEGATE_OUTBOUND__ALLOW", "loopback, 10.0.0.0/8"),
        ("SLUICEGATE_WORKER__DRAIN_TIMEOUT_MS", "5000"),
    ];
    let config = load_with(&variables, &["limiter.prefix=flag", "ops.listen=none"]).unwrap();
    assert_eq!(config.log.level, tracing::Level::DEBUG);
    assert_eq!((config.queue.prefix.as_str(), config.limiter.prefix.as_str()), ("variable", "flag"));
    assert_eq!(config.outbound_allow, ["loopback", "10.0.0.0/8"]);
    assert_eq!((config.worker.drain_timeout, config.ops.listen), (Duration::from_secs(5), None));
}

#[test]
fn all_problems_name_key_origin_and_fix() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("b.toml");
    fs::write(&path, "[database]\nmax_connections = \"many\"\n\n[worker]\ndrain_timeout = 5\n").unwrap();
    let variables = [("SLUICEGATE_QUEUE__URL", "http://broker"), ("SLUICEGATE_QUEUE__PREFFIX", "x")];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let sets = ["ledger.scrub_after_days=0".to_owned(), "worker.card_numbers=allow".to_owned(), "log.level".to_owned()];
    let problems = load(Some(&path), variables, &sets).unwrap_err();
    let text = problems.to_string();
    assert_eq!(problems.0.len(), 7, "{text}");
    for expected in [
        format!("database.max_connections ({}:2): must be a whole number. The default is `16`", path.display()),
        format!(
            "worker.drain_timeout ({}:5): there is no such key. Did you mean `worker.drain_timeout_ms`?",
            path.display()
        ),
        "queue.preffix (SLUICEGATE_QUEUE__PREFFIX): there is no such key. Did you mean `SLUICEGATE_QUEUE__PREFIX`?"
            .to_owned(),
        "queue.url (SLUICEGATE_QUEUE__URL): does not begin with a scheme for this key".to_owned(),
        "ledger.scrub_after_days (--set): is 0. Use a number from 1 to 3650".to_owned(),
        "worker.card_numbers (--set): `allow` is not a valid value. Use one of: refuse, warn, off".to_owned(),
        "log.level (--set): has no value. Write --set section.key=value".to_owned(),
    ] {
        assert!(text.contains(&expected), "missing `{expected}` in:\n{text}");
    }
}

#[test]
fn invalid_toml_names_its_line_only() {
    let text = load_file("[database]\nurl = \"postgres://app:hunter2@db/pay\n").unwrap_err().to_string();
    assert!(text.contains("sluicegate.toml:2") && !text.contains("hunter2"), "{text}");
    for broken in [
        "hunter2",
        "[ops]\ntoken = hunter2",
        "[ops]\ntoken = 12hunter2",
        "[ops]\ntoken = \"\\hunter2\"",
        "a.hunter2 = {",
        "[hunter2",
        "[ops]\ntoken hunter2 = 1",
        "[ops]\ntoken = 'hunter2' hunter2",
        "[ops]\ntoken = +hunter2",
    ] {
        let text = load_file(broken).unwrap_err().to_string();
        assert!(!text.contains("hunter2"), "{broken}: {text}");
    }
    let text = load_file("url = \"x\"").unwrap_err().to_string();
    assert!(text.contains("url (") && text.contains("outside any section"), "{text}");
    let text = load(Some(Path::new("/nonexistent/x.toml")), [], &[]).unwrap_err().to_string();
    assert!(text.contains("/nonexistent/x.toml") && text.contains("cannot be read"), "{text}");
}

#[test]
fn secrets_come_from_files_and_are_never_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    fs::write(&path, format!("{TOKEN}\n")).unwrap();
    let path = path.to_str().unwrap();
    let url = "postgres://app:hunter2@localhost/pay?password=hunter3";
    let broker = "amqps://app:hunter2@mq.example.com/%2f";
    let variables = [
        ("SLUICEGATE_OPS__TOKEN_FILE", path),
        ("SLUICEGATE_DATABASE__URL", url),
        ("SLUICEGATE_QUEUE__URL", broker),
        ("SLUICEGATE_LIMITER__URL", "rediss+cluster://app:hunter2@a.example.com:7000,b.example.com:7001"),
    ];
    let config = load_with(&variables, &[]).unwrap();
    use secrecy::ExposeSecret as _;
    assert_eq!(config.ops.token.as_ref().unwrap().expose_secret(), TOKEN);
    assert_eq!(config.database.url.expose(), url);
    assert_eq!(config.database.url.to_string(), "postgres://app:***@localhost/pay?…");
    let nodes: Vec<&str> = config.limiter.url.nodes().iter().map(SecretUrl::expose).collect();
    assert_eq!(nodes, ["rediss://app:hunter2@a.example.com:7000", "rediss://app:hunter2@b.example.com:7001"]);
    let shown = format!("{config:?} {} {}", config.queue.url, config.limiter.url);
    assert!(!shown.contains("hunter") && !shown.contains(TOKEN), "{shown}");
    assert_eq!(DatabaseUrl::parse("postgres://app@localhost/pay").unwrap().to_string(), "postgres://app@localhost/pay");
    assert_eq!(
        LimiterUrl::parse("rediss://token@cache.example.com/0").unwrap().to_string(),
        "rediss://***@cache.example.com/0"
    );

    let both = [("SLUICEGATE_OPS__TOKEN_FILE", path), ("SLUICEGATE_OPS__TOKEN", TOKEN)];
    assert!(problems_of(&both, &[]).contains("ops.token (SLUICEGATE_OPS__TOKEN_FILE"), "{}", problems_of(&both, &[]));
    let empty = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(empty.path(), "\n").unwrap();
    let text = problems_of(&[("SLUICEGATE_OPS__TOKEN_FILE", empty.path().to_str().unwrap())], &[]);
    assert!(text.contains("ops.token (SLUICEGATE_OPS__TOKEN_FILE") && text.contains("the file is empty"), "{text}");
    let text = problems_of(&[("SLUICEGATE_QUEUE__URL_FILE", "/nonexistent")], &[]);
    assert!(text.contains("queue.url (SLUICEGATE_QUEUE__URL_FILE = /nonexistent)"), "{text}");
    for bad in ["postgres://app:hunter2@[db/pay", "mysql://app:hunter2@db/pay", "hunter2"] {
        let text = problems_of(&[("SLUICEGATE_DATABASE__URL", bad)], &[]);
        assert!(!text.contains("hunter2"), "{text}");
    }
}

/// Creates a file with these permission bits.
fn file_with_mode(dir: &tempfile::TempDir, mode: u32, text: &str) -> String {
    use std::os::unix::fs::PermissionsExt as _;
    let path = dir.path().join(format!("{mode:o}"));
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_secret_is_no_flag() {
    for (set, key) in [
        ("ops.token=hunter2hunter2", "ops.token"),
        ("queue.url=amqps://u:hunter2@mq.example.com", "queue.url"),
        ("limiter.url=rediss://hunter2@cache.example.com", "limiter.url"),
        ("limiter.url=rediss+cluster://:hunter2@a.example.com,b.example.com", "limiter.url"),
        ("database.url=postgres://u@localhost/pay?sslmode=verify-full&password=hunter2", "database.url"),
        ("database.url=postgres://u@localhost/pay?sslmode=verify-full&sslpassword=hunter2", "database.url"),
        ("database.url=postgres://u@localhost/pay?pasword=hunter2", "database.url"),
    ] {
        let text = problems_of(&[], &[set]);
        let variable = format!("{}_FILE", variable_name(key));
        assert!(text.contains(&format!("{key} (--set): is a secret, and process lists show flags. ")), "{set}: {text}");
        assert!(text.contains(&variable) && !text.contains("hunter2"), "{text}");
    }
    load_with(&[], &["limiter.url=rediss://cache.example.com", "ops.token="]).unwrap();
}

#[test]
fn secret_files_are_checked_by_mode() {
    let dir = tempfile::tempdir().unwrap();
    let secret_file = |mode: u32| load_with(&[("SLUICEGATE_OPS__TOKEN_FILE", &file_with_mode(&dir, mode, TOKEN))], &[]);
    let configuration = |mode: u32, text: &str| load(Some(Path::new(&file_with_mode(&dir, mode, text))), [], &[]);
    let token = format!("[ops]\ntoken = \"{TOKEN}\"\n");
    for (mode, exposed) in [(0o400, 0), (0o440, 0), (0o640, 0), (0o644, 1), (0o444, 1)] {
        let found = secret_file(mode).unwrap().exposed_secrets;
        assert_eq!(found.len(), exposed, "{mode:o}: {found:?}");
        assert!(
            found.iter().all(|problem| problem.key == "ops.token" && problem.message.contains(&format!("{mode:o}"))),
            "{found:?}"
        );
    }
    for (mode, exposed) in [(0o600, 0), (0o640, 1), (0o644, 1)] {
        assert_eq!(configuration(mode, &token).unwrap().exposed_secrets.len(), exposed, "{mode:o}");
        assert!(configuration(mode, "[limiter]\nurl = \"rediss://a.example\"\n").unwrap().exposed_secrets.is_empty());
    }
    let authorities = |mode| load_with(&[("SSL_CERT_FILE", &file_with_mode(&dir, mode, ""))], &[]);
    authorities(0o644).unwrap();
    for problems in
        [secret_file(0o666).unwrap_err(), configuration(0o602, "").unwrap_err(), authorities(0o646).unwrap_err()]
    {
        let text = problems.to_string();
        assert!(!text.contains("Check --config") && !text.contains("Check the path"), "{text}");
        assert!(text.contains("every user of this machine may write it") && text.contains("chmod o-w"), "{text}");
    }
}

#[test]
fn password_with_slash_is_not_shown() {
    for (key, bad) in [
        ("QUEUE", "amqps://u:/hunter2@h/"),
        ("QUEUE", "amqps://u:?hunter2@h/"),
        ("QUEUE", "amqps://u:#hunter2@h/"),
        ("DATABASE", "postgres://u:/hunter2@h/d"),
        ("LIMITER", "rediss://u:/hunter2@h"),
        ("LIMITER", "rediss+cluster://u:/hunter2@a,b"),
        ("LIMITER", "hunter2:x"),
    ] {
        let text = problems_of(&[(&format!("SLUICEGATE_{key}__URL"), bad)], &[]);
        assert!(!text.contains("hunter2"), "{bad}: {text}");
        assert!(!bad.contains('@') || text.contains("after the host"), "{bad}: {text}");
    }
}

/// A secret is pasted where a key, a word, an address or a path belongs.
#[test]
fn possible_secrets_are_not_repeated() {
    let url = "postgres://u:hunter2@db/pay?sslmode=verify-full";
    let dir = tempfile::tempdir().unwrap();
    let path =
        file_with_mode(&dir, 0o600, &format!("\"{url}\" = 1\n[\"{url}2\"]\nx = 1\n[ops]\n\"Hunter2 hunter2\" = 1\n"));
    let variables = [
        ("SLUICEGATE_CONFIG", path.as_str()),
        ("SLUICEGATE_DATABASE__URL_FILE", url),
        ("SLUICEGATE_OPS__TOKEN_FILE", "hunter2/hunter2"),
        ("SLUICEGATE_OPS__HUNTER2!hunter2", "x"),
        ("SLUICEGATE_LOG__LEVEL", "hunter2=hunter2"),
        ("SLUICEGATE_QUEUE__PREFIX", "hunter2@hunter2"),
    ];
    let listen = format!("ops.listen={url}");
    let allow = format!("outbound.allow={url},https://u:hunter2@x.example");
    let ca_file = format!("tls.ca_file={url}");
    let text = problems_of(&variables, &[url, &listen, &allow, &ca_file, "hunter2@hunter2"]);
    assert!(!text.to_ascii_lowercase().contains("hunter2"), "{text}");
    assert_eq!(text.matches("(a key that is not shown)").count(), 6, "{text}");
    assert!(text.contains("entry 1, ") && text.contains("entry 2, "), "{text}");
}

#[test]
fn mistyped_variables_are_rejected_foreign_ones_ignored() {
    let text = problems_of(&[("SLUICEGATE_QUEUE_URL", "amqps://mq.example.com")], &[]);
    assert!(text.contains("Write SLUICEGATE_QUEUE__URL"), "{text}");
    let kubernetes = [("SLUICEGATE_SERVICE_HOST", "10.0.0.1"), ("SLUICEGATE_PORT_9464_TCP", "tcp://10.0.0.1:9464")];
    assert!(load_with(&kubernetes, &[]).is_ok());
}

#[test]
fn unsafe_combinations_stop_the_start() {
    let verified = "database.url=postgres://app@db.example.com/pay?sslmode=verify-full";
    let broker = "queue.url=amqps://mq.example.com";
    for (sets, key, part) in [
        (vec![verified], "queue.url", "Set queue.url to database:, or to a broker"),
        (vec!["queue.url=database:"], "queue.url", "Set queue.url to embedded:, or database.url to postgres"),
        (vec!["ops.listen=0.0.0.0:9464"], "ops.listen", "neither ops.token nor ops.tokens is set"),
        (vec!["ops.listen=0.0.0.0:9464", "ops.token=hunter2"], "ops.token", "has 7 characters"),
        (vec!["ops.listen=[::]:9464", "ops.token=0123456789abcdef0123456789abcde"], "ops.token", "at least 32"),
        (vec!["database.url=sqlite:file:y.db"], "database.url", "a URI of SQLite's own"),
        (vec!["ops.token=AT-LEAST-32-RANDOM-CHARACTERS"], "ops.token", "placeholder"),
        (vec![broker, "database.url=postgres://app@db.example.com/pay"], "database.url", "not be verified"),
        (
            vec![broker, "database.url=postgres://app@db.example.com/pay?sslmode=verify-full&sslmode=prefer"],
            "database.url",
            "not be verified",
        ),
        (
            vec![broker, "database.url=postgres://app@localhost/pay?host=db.example.com"],
            "database.url",
            "db.example.com",
        ),
        (vec!["queue.url=amqp://mq.example.com"], "queue.url", "plain text"),
        (vec!["limiter.url=redis://10.1.2.3:6379"], "limiter.url", "plain text"),
        (vec!["limiter.url=redis+cluster://127.0.0.1:7000,10.1.2.3:7001"], "limiter.url", "10.1.2.3"),
        (vec!["queue.prefix=amq.payments"], "queue.prefix", "cannot begin a name"),
        (vec!["limiter.prefix=pay{1}"], "limiter.prefix", "cannot begin a name"),
        (vec!["limiter.url=rediss://cache.example.com/#insecure"], "limiter.url", "fragment"),
        (vec![broker, "database.url=postgres:///pay"], "database.url", "names no host"),
        #[cfg(not(feature = "otlp"))]
        (vec!["telemetry.otlp_endpoint=http://127.0.0.1:4318"], "telemetry.otlp_endpoint", "has no OpenTelemetry"),
        (vec!["outbound.allow=loopback,bogus"], "outbound.allow", "`bogus` is neither"),
        (vec!["outbound.allow=10.0.0.0/99"], "outbound.allow", "`10.0.0.0/99` is not a CIDR"),
        (vec!["outbound.allow=https://x.example:443"], "outbound.allow", "write host:port for https"),
        (vec!["outbound.allow=x.example:99999"], "outbound.allow", "Write each as loopback, host:port"),
        (vec!["outbound.secrets=env:KEY@x.example,env:KEY"], "outbound.secrets", "entry 2 has no `@`"),
        (vec!["outbound.secrets=env:KEY@*.com"], "outbound.secrets", "env:STRIPE_KEY@api.stripe.com"),
        (vec!["outbound.secrets=env:SLUICEGATE_OPS__TOKEN@x.example"], "outbound.secrets", "own configuration"),
        (vec!["tls.ca_file=/nowhere/authorities.pem"], "tls.ca_file", "/nowhere/authorities.pem cannot be read"),
    ] {
        let text = problems_of(&[], &sets);
        assert!(text.contains(&format!("  {key} (")) && text.contains(part), "{sets:?}: {text}");
    }
}

/// A migration has the owner's URL and nothing else.
#[test]
fn migration_checks_its_database_only() {
    let migration = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        load_for(Purpose::Migrate, None, [], &sets)
    };
    let verified = "database.url=postgres://owner@db.example.com/pay?sslmode=verify-full";
    migration(&[verified, "ops.listen=0.0.0.0:9464", "limiter.url=redis://10.1.2.3:6379"]).unwrap();
    let refused = migration(&["database.url=postgres://owner@db.example.com/pay"]).unwrap_err().to_string();
    assert!(refused.contains("would not be verified by TLS") && !refused.contains("queue.url"), "{refused}");
    // An invalid value is an error for every purpose.
    assert!(migration(&[verified, "queue.url=nowhere"]).unwrap_err().to_string().contains("queue.url"));
}

#[test]
fn safe_configurations_are_accepted() {
    let verified = "database.url=postgres://app@db.example.com/pay?sslmode=verify-full";
    for sets in [
        vec![verified, "queue.url=amqps://mq.example.com"],
        vec![verified, "queue.url=database:"],
        vec!["database.url=postgres://app@127.0.0.1/pay", "queue.url=amqp://localhost"],
        vec!["database.url=postgres://%2Fvar%2Frun%2Fpostgresql/pay", "queue.url=amqp://[::1]:5672"],
        vec!["database.url=sqlite::memory:", "limiter.url=redis://127.0.0.1"],
        vec!["limiter.url=redis://redis:6379", "tls.plaintext_hosts=redis,rabbitmq", "queue.url=amqp://rabbitmq"],
    ] {
        load_with(&[], &sets).unwrap_or_else(|problems| panic!("{sets:?}: {problems}"));
    }
    for (listen, token) in [("0.0.0.0:9464", "0123456789abcdef0123456789abcdef"), ("[::1]:9464", "short")] {
        load_with(&[("SLUICEGATE_OPS__LISTEN", listen), ("SLUICEGATE_OPS__TOKEN", token)], &[]).unwrap();
    }
}

/// The configuration files that we ship are configurations.
#[test]
fn the_production_example_is_safe() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/example.production.toml");
    let text = fs::read_to_string(&path).unwrap();
    // The URLs are in its comment, as `VARIABLE_FILE=path    url`.
    let secrets: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("#   ")?.split_once("_FILE="))
        .map(|(name, rest)| (name.to_owned(), rest.split_whitespace().nth(1).unwrap_or(TOKEN).replace('…', "x")))
        .collect();
    assert_eq!(secrets.len(), 4);
    let config = load(Some(&path), secrets.clone(), &[]).unwrap();
    assert!(config.outbound_allow.is_empty() && config.plaintext_hosts.is_empty());
    assert!(load(Some(&path), secrets[..3].to_vec(), &[]).is_err(), "the token is needed");
}

#[test]
fn the_compose_file_configures_its_workers() {
    let compose = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docker-compose.yml")).unwrap();
    let variables: Vec<(String, String)> = compose
        .lines()
        .filter_map(|line| line.trim().split_once(": ").filter(|(name, _)| name.starts_with("SLUICEGATE_")))
        .map(|(name, value)| {
            let value = value.trim_matches('"');
            // The environment file sets `${NAME:?message}`.
            let value = match (value.find("${"), value.find('}')) {
                (Some(start), Some(end)) => format!("{}{TOKEN}{}", &value[..start], &value[end + 1..]),
                _ => value.to_owned(),
            };
            (name.to_owned(), value)
        })
        .collect();
    assert_eq!(variables.len(), 8);
    let config = load(None, variables.clone(), &[]).unwrap();
    assert_eq!(config.outbound_allow, ["http://fake-acme:9000", "http://fake-bolt:9000"]);
    let without_permission = variables.into_iter().filter(|(name, _)| name != "SLUICEGATE_TLS__PLAINTEXT_HOSTS");
    assert_eq!(load(None, without_permission, &[]).unwrap_err().0.len(), 3);
}
