//! Canaries: secrets and card numbers enter the program, and then all its outputs and stores are searched for them.

use std::process::Command;

use crate::deployment::{
    DATABASE, Deployment, INVALID, PASSWORDS, PROVIDER, PROVIDER_FILE, PROVIDER_KEY, VHOST, port_of, text,
};
use crate::search::Places;
use crate::support::postgres;

/// Canaries in rejected messages.
const IN_MESSAGES: [&str; 8] = [
    "4242 4242 4242 4242",
    "4000056655665556",
    "sk_live_canaryOfAPayload77",
    "canary.bearer.4f1e",
    "sk_live_canaryAsAnId42",
    "5555555555554444",
    "378282246310005",
    "6011111111111117",
];

#[test]
fn canaries_appear_only_where_allowed() {
    let deployment = Deployment::shared();
    mistakes(deployment);
    let mut places = Places::new();
    for log in ["worker.log", "commands.log"] {
        places.add("logs", std::fs::read(deployment.dir.join(log)).unwrap());
    }
    places.add("database", dump(deployment));
    // Decoded, so that no escape hides a secret.
    let bodies = deployment.sql("SELECT encode(body, 'escape') FROM rejected_messages");
    assert_eq!(bodies.lines().count(), INVALID.len(), "{bodies}");
    places.add("database", bodies);
    queues(deployment, &mut places);
    redis(deployment, &mut places);

    // The search must be able to find something: the provider's name is in every place.
    assert_eq!(places.with(PROVIDER), ["database", "logs", "queues", "redis"]);
    // The secrets were used: the provider was called with them and quoted them in its response.
    let requests = deployment.provider.requests();
    let with_both = |request: &&String| request.contains(PROVIDER_KEY) && request.contains(PROVIDER_FILE);
    assert_eq!(requests.iter().filter(with_both).count(), 5, "{requests:?}");
    assert_eq!(requests.iter().filter(|request| request.starts_with("GET")).count(), 1, "one was looked up");
    assert!(!deployment.proxy_was_used());

    let passwords = PASSWORDS.map(|(_, password)| password.trim_matches('\''));
    let secrets = passwords.into_iter().chain([PROVIDER_KEY, PROVIDER_FILE]).chain(IN_MESSAGES).chain(MISTAKES);
    let found: Vec<_> = secrets.map(|secret| (secret, places.with(secret))).filter(|(_, at)| !at.is_empty()).collect();
    assert!(found.is_empty(), "{found:?}");
}

/// Secrets in commands that fail.
const MISTAKES: [&str; 4] =
    ["canary-wrong-password-1", "canary-broken-url-2", "canary-wrong-amqp-3", "canary-wrong-redis-4"];

fn mistakes(deployment: &Deployment) {
    let good = deployment.environment("sluicegate_operator", "none");
    let with = |name: &str, value: String| -> Vec<(String, String)> {
        let others = good.iter().filter(|(known, _)| !known.starts_with(name)).cloned();
        others.chain([(name.to_owned(), value)]).collect()
    };
    let port = port_of(&deployment.postgres);
    let url = format!("postgres://sluicegate_worker:{}@localhost:{port}/{DATABASE}?sslmode=verify-full", MISTAKES[0]);
    let amqp = format!("amqps://sluicegate:{}@localhost:{}/{VHOST}", MISTAKES[2], deployment.amqps);
    let redis = format!("rediss://sluicegate:{}@localhost:{}", MISTAKES[3], deployment.redis_tls);
    let bad = deployment.dir.join("bad.jsonl");
    let lines: String = INVALID.iter().map(|(body, _)| format!("{body}\n")).collect();
    std::fs::write(&bad, lines).unwrap();
    let bad = bad.to_str().unwrap();
    let worker = deployment.environment("sluicegate_worker", "none");
    for (environment, args) in [
        (with("SLUICEGATE_DATABASE__URL", url), &["check"][..]),
        (with("SLUICEGATE_DATABASE__URL", format!("postgres://u:{}@[::/x", MISTAKES[1])), &["check"]),
        (with("SLUICEGATE_QUEUE__URL", amqp), &["check"]),
        (with("SLUICEGATE_LIMITER__URL", redis), &["check"]),
        (good.clone(), &["enqueue", "--provider", PROVIDER, "--file", bad]),
        // The worker's role lacks this right.
        (worker, &["jobs", "erase", "--account", "shop", "--because", "ticket 4711"]),
    ] {
        let output = deployment.run(&environment, args);
        assert!(!output.status.success(), "{args:?}: {}", text(&output.stdout));
    }
}

/// Every table of every schema of this database, as text.
fn dump(deployment: &Deployment) -> Vec<u8> {
    let sockets = deployment.sql("SHOW unix_socket_directories");
    let mut pg_dump = Command::new(postgres::program("pg_dump"));
    pg_dump.args(["-h", sockets.trim(), "-p", &port_of(&deployment.postgres), "-U", "postgres", DATABASE]);
    let output = pg_dump.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    output.stdout
}

/// Consumes every message of every queue.
fn queues(deployment: &Deployment, places: &mut Places) {
    let names = deployment.rabbit.ctl(&["list_queues", "-p", VHOST, "--no-table-headers", "name"]);
    for name in names.lines().map(str::trim).filter(|name| !name.is_empty()) {
        let messages = deployment.python("broker.py", &["drain", &deployment.amqp("guest"), name], "");
        for line in messages.lines() {
            let message: serde_json::Value = serde_json::from_str(line).unwrap();
            // Decoded, so that no escape hides a secret.
            places.add("queues", format!("{name} {} {message}", message["body"].as_str().unwrap_or_default()));
        }
    }
}

/// Every key as Redis would write it to disk, uncompressed, and the functions.
fn redis(deployment: &Deployment, places: &mut Places) {
    deployment.redis.command::<()>("CONFIG SET rdbcompression no");
    let keys: Vec<Vec<u8>> = deployment.redis.command("KEYS *");
    let mut connection = deployment.redis.connection();
    for key in &keys {
        places.add("redis", key);
        let value: Option<Vec<u8>> = redis::cmd("DUMP").arg(key).query(&mut connection).unwrap();
        places.add("redis", value.unwrap_or_default());
    }
    let functions: Vec<u8> = deployment.redis.command("FUNCTION DUMP");
    assert!(!keys.is_empty() && text(&functions).contains("redis.call"), "{} keys", keys.len());
    places.add("redis", functions);
}
