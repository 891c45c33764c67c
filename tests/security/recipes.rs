//! The recipes of docs/security.md, applied word for word: their rights suffice for the main path and allow nothing
//! else.

use std::path::Path;
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::deployment::{DATABASE, Deployment, PASSWORDS, PAUSED, PROVIDER, VHOST, password, text};
use crate::page::Page;
use crate::support::redis::RedisOptions;

fn page() -> Page {
    Page::read("docs/security.md")
}

/// A block of the page, with the passwords or their digests in place of their placeholders.
fn block(language: &str, number: usize) -> String {
    let mut block = page().blocks_of(language).swap_remove(number);
    for (word, password) in PASSWORDS {
        let digest = || format!("#{}", hex::encode(Sha256::digest(password)));
        block = block.replace(word, &if word.starts_with('#') { digest() } else { password.to_owned() });
    }
    block
}

/// Splits a line of the page as a shell does, including words in single quotes.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut quoted, mut started) = (vec![String::new()], false, false);
    for c in line.chars() {
        match c {
            '\'' => (quoted, started) = (!quoted, true),
            ' ' if !quoted => {
                if started || !words.last().unwrap().is_empty() {
                    words.push(String::new());
                }
                started = false;
            }
            c => words.last_mut().unwrap().push(c),
        }
    }
    words
}

pub fn apply_rabbitmq(deployment: &Deployment) {
    let lines = block("sh", 0);
    assert_eq!(lines.trim().lines().count(), 7);
    for line in lines.trim().lines() {
        let words = words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert_eq!(words[0], "rabbitmqctl", "{line}");
        deployment.rabbit.ctl(&words[1..]);
    }
    // Rights for the tests themselves.
    deployment.rabbit.ctl(&["set_permissions", "-p", VHOST, "guest", ".*", ".*", ".*"]);
}

/// A Redis with the file of users; the tests administer it.
pub fn with_users(dir: &Path, mut options: RedisOptions) -> RedisOptions {
    let setting = block("text", 1);
    let (directive, path) = setting.trim().split_once(' ').unwrap();
    let file = dir.join(Path::new(path).file_name().unwrap());
    std::fs::write(&file, block("text", 0)).unwrap();
    options.arguments.extend([format!("--{directive}"), file.to_str().unwrap().to_owned()]);
    RedisOptions { credentials: format!("admin:{}@", password("#ADMIN-PASSWORD-SHA256")), ..options }
}

pub fn apply_postgres_roles(deployment: &Deployment) {
    apply(deployment, "postgres", "postgres", &block("sql", 0));
}

pub fn apply_postgres_grants(deployment: &Deployment) {
    let grants = block("sql", 1);
    for _ in 0..2 {
        apply(deployment, DATABASE, "sluicegate_owner", &grants);
    }
    apply(deployment, DATABASE, "postgres", &block("sql", 2));
}

fn apply(deployment: &Deployment, database: &str, role: &str, statements: &str) {
    let file = deployment.dir.join("statements.sql");
    std::fs::write(&file, statements).unwrap();
    let mut psql = deployment.postgres.psql(database);
    let output = psql.args(["-U", role, "-f", file.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{statements}: {}", text(&output.stderr));
}

#[test]
fn recipe_lines_are_split_like_shell() {
    assert_eq!(words("a '^b c$' '' d"), ["a", "^b c$", "", "d"]);
}

#[test]
fn recipes_grant_exactly_the_needed_rights() {
    let deployment = Deployment::shared();
    // The rights suffice: the worker has finished the whole path as these users.
    assert_eq!(deployment.sql("SELECT state FROM jobs WHERE id = 'pay-1'").trim(), "succeeded");
    let users = "SELECT DISTINCT who FROM settings_audit";
    assert_eq!(deployment.sql(users).trim(), "sluicegate_operator");
    refused_by_postgres(deployment);
    refused_by_redis(deployment);
    refused_by_rabbitmq(deployment);
}

/// Statements on finished jobs, jobs in review and waiting jobs: a worker may not reopen them, and no role may change
/// them.
const OF_A_WORKER: [&str; 25] = [
    "SELECT * FROM jobs_erase('acct_1', 5)",
    "UPDATE providers SET url = 'https://evil.example/'",
    "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('control-acme', 'x', 1, 1)",
    "DELETE FROM provider_limits",
    "DELETE FROM attempts",
    "TRUNCATE jobs CASCADE",
    "DROP TABLE events",
    "UPDATE jobs SET state = 'waiting', fence = fence + 1, holder = 'w' WHERE id = 'pay-1'",
    "UPDATE jobs SET state = 'waiting', fence = fence + 1 WHERE state = 'review'",
    "UPDATE jobs SET state = 'waiting', maybe_charged = false WHERE state = 'review'",
    "UPDATE jobs SET maybe_charged = false WHERE maybe_charged",
    "UPDATE jobs SET state = 'succeeded' WHERE state = 'review'",
    "UPDATE jobs SET amount = 1",
    "UPDATE jobs SET currency = 'USD'",
    "UPDATE jobs SET account = 'other'",
    "UPDATE jobs SET provider = 'other'",
    "UPDATE jobs SET idempotency_key = 'other'",
    "UPDATE jobs SET content_hash = ''",
    "UPDATE jobs SET created_at = now()",
    "UPDATE attempts SET began_at = now()",
    "UPDATE events SET state = 'succeeded'",
    "UPDATE rejected_messages SET detail = 'x'",
    "SELECT jobs_cancel_ahead('pay-9', 'control-acme', 'x')",
    "SELECT pg_advisory_lock(1)",
    "SET SESSION AUTHORIZATION sluicegate_owner",
];
const OF_AN_OPERATOR: [&str; 10] = [
    "UPDATE jobs SET account = NULL",
    "UPDATE jobs SET state = 'waiting' WHERE id = 'pay-1'",
    "UPDATE jobs SET maybe_charged = false",
    "UPDATE jobs SET reason = 'x'",
    "INSERT INTO jobs OVERRIDING SYSTEM VALUE SELECT * FROM jobs",
    "INSERT INTO events (job_id, n, provider, state, attempts, at) VALUES ('pay-1', 1, 'control-acme', 'declined', 1, now())",
    "UPDATE event_cursors SET position = 0",
    "INSERT INTO attempts (job_id, number, provider, began_at) VALUES ('pay-1', 9, 'control-acme', now())",
    "UPDATE limiter_authority SET term = term + 1",
    "SELECT settings_raise_version(version, version + 1) FROM settings_version",
];
const OF_A_READER: [&str; 11] = [
    "SELECT * FROM jobs_erase('acct_1', 5)",
    "SELECT * FROM jobs",
    "SELECT payload FROM jobs",
    "SELECT frozen_body FROM jobs",
    "SELECT frozen_url FROM jobs",
    "SELECT headers FROM providers",
    "SELECT new_row FROM settings_audit",
    "COPY jobs (payload) TO STDOUT",
    "SELECT jobs FROM jobs",
    "UPDATE providers SET paused = true",
    "SELECT jobs_decide('pay-4', 'review', 'declined', 'x')",
];
const OF_ANYBODY: [&str; 23] = [
    "INSERT INTO settings_audit (who, table_name, row_key) VALUES ('x', 'x', 'x')",
    "UPDATE settings_audit SET who = 'x'",
    "DELETE FROM settings_audit",
    "INSERT INTO job_audit (job_id, who, old_state, cleared_maybe_charged) VALUES ('pay-1', 'x', 'review', false)",
    "UPDATE job_audit SET who = 'x'",
    "UPDATE job_audit SET because = 'x'",
    "DELETE FROM job_audit",
    "DELETE FROM jobs",
    "UPDATE settings_version SET version = 9223372036854775807",
    "UPDATE settings_version SET version = version + 1",
    "SET session_replication_role = replica",
    "ALTER TABLE jobs DISABLE TRIGGER ALL",
    "CREATE TABLE own (a int)",
    "CREATE TEMP TABLE own (a int)",
    "CREATE ROLE other",
    "INSERT INTO decision_batches (id, decision, jobs, rate, digest, sums, created_at, person, because, next_at) \
         VALUES (repeat('a', 32), 'resend', 1, '1/1s', repeat('a', 64), '[]', now(), 'bob@desk', 'x', now())",
    "INSERT INTO decision_batch_jobs (batch, number, job_id) VALUES (repeat('a', 32), 1, 'pay-1')",
    "UPDATE decision_batches SET person = 'bob@desk', database_user = 'bob'",
    "UPDATE _sqlx_migrations SET checksum = ''",
    "UPDATE deployment SET id = gen_random_uuid()",
    "COPY jobs (id) TO PROGRAM 'cat'",
    "SELECT lo_create(0)",
    "SELECT pg_try_advisory_xact_lock(1)",
];

fn refused_by_postgres(deployment: &Deployment) {
    let attempt = |role: &str, statement: &str| -> String {
        let mut psql: Command = deployment.postgres.psql(DATABASE);
        let statement = format!("BEGIN; {statement}; ROLLBACK");
        let output = psql.args(["-U", role, "-c", &statement]).output().unwrap();
        if output.status.success() { "allowed".to_owned() } else { text(&output.stderr) }
    };
    for (role, statements) in [
        ("sluicegate_worker", &OF_A_WORKER[..]),
        ("sluicegate_operator", &OF_AN_OPERATOR),
        ("sluicegate_reader", &OF_A_READER),
    ] {
        for statement in statements.iter().chain(&OF_ANYBODY) {
            let result = attempt(role, statement);
            let words = ["permission denied", "must be owner", "must be superuser", "jobs_decide() alone", "stays so"];
            assert!(words.iter().any(|words| result.contains(words)), "{role}: {statement}: {result}");
        }
    }
    // With TEMP rights, which the recipe does not grant, a role could make a temporary table of that name. The audit
    // must not write into it.
    let misdirect_audit = "CREATE TEMP TABLE settings_audit (LIKE settings_audit INCLUDING ALL); \
         SELECT settings_raise_version(version, version + 1) FROM settings_version; \
         SELECT 1 / (1 - count(*)) FROM pg_temp.settings_audit";
    deployment.sql(&format!("GRANT TEMP ON DATABASE {DATABASE} TO sluicegate_worker"));
    assert_eq!(attempt("sluicegate_worker", misdirect_audit), "allowed", "the audit wrote into the temporary table");
    deployment.sql(&format!("REVOKE TEMP ON DATABASE {DATABASE} FROM sluicegate_worker"));
    // The attempt itself works: these statements are allowed.
    for (role, statement) in [
        ("sluicegate_worker", "UPDATE jobs SET updated_at = updated_at"),
        // The worker does this after a restore from a backup; a trigger writes the audit.
        ("sluicegate_worker", "SELECT settings_raise_version(version, version + 1) FROM settings_version"),
        ("sluicegate_worker", "UPDATE providers SET paused = true"),
        ("sluicegate_operator", "UPDATE providers SET paused = true"),
        (
            "sluicegate_operator",
            "SELECT 1 / count(*) FROM jobs, jobs_decide(id, 'review', 'declined', 'a person says so') WHERE state = 'review'",
        ),
        ("sluicegate_operator", "UPDATE event_retries SET next_try_at = now()"),
        ("sluicegate_operator", "SELECT * FROM jobs_erase('acct_1', 5, 'ticket 4711')"),
        ("sluicegate_reader", "SELECT id, state, reason, amount, account FROM jobs"),
    ] {
        assert_eq!(attempt(role, statement), "allowed", "{role}: {statement}");
    }
}

fn refused_by_redis(deployment: &Deployment) {
    // After its restart, too, the administrator can administer, and no one can do anything without a password.
    let users: Vec<String> = deployment.redis.command("ACL USERS");
    assert_eq!(users, ["admin", "default", "sluicegate"]);
    deployment.redis.command::<()>("ACL SAVE");
    let port = deployment.redis.port;
    let stranger = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
    let refused = redis::cmd("PING").query::<String>(&mut stranger.get_connection().unwrap()).unwrap_err();
    assert_eq!(refused.code(), Some("NOAUTH"), "{refused}");
    let url = format!("redis://sluicegate:{}@127.0.0.1:{port}", password("#PASSWORD-SHA256"));
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    let mut attempt = |line: &str| {
        let mut words = line.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        words.for_each(|word| {
            command.arg(word);
        });
        command.query::<redis::Value>(&mut connection).map_err(|error| error.code().unwrap_or_default().to_owned())
    };
    for line in [
        "FLUSHALL",
        "CONFIG GET *",
        "KEYS *",
        "SET sluicegate:x 1",
        "HGETALL other:x",
        "FUNCTION DELETE x",
        "FUNCTION FLUSH",
        "EVAL return 0",
        "ACL LIST",
        "SHUTDOWN",
        "SUBSCRIBE x",
        "REPLICAOF NO ONE",
    ] {
        assert_eq!(attempt(line).unwrap_err(), "NOPERM", "{line}");
    }
    assert!(attempt("HGETALL sluicegate:x").is_ok());
}

fn refused_by_rabbitmq(deployment: &Deployment) {
    let lane = format!("payments.{PROVIDER}");
    let attempts = [
        ("sluicegate", vec!["declare:other".to_owned(), "get:books.all".into(), "delete:books.all".into()]),
        (
            "shop",
            vec![
                format!("get:{lane}"),
                format!("declare:{lane}"),
                format!("delete:{lane}"),
                format!("publish::{lane}"),
                "publish:payments.outcomes:x.succeeded".into(),
            ],
        ),
        (
            "books",
            vec![
                format!("get:{lane}"),
                "get:payments.invalid".into(),
                format!("publish:payments:{PAUSED}"),
                "publish:payments.outcomes:x.succeeded".into(),
                "bind:books.all:payments".into(),
                "delete:payments.invalid".into(),
            ],
        ),
    ];
    for (user, attempts) in attempts {
        let mut args = vec![deployment.amqp(user)];
        args.extend(attempts.iter().cloned());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let lines = deployment.python("refused.py", &args, "");
        let lines: Vec<&str> = lines.lines().collect();
        assert_eq!(lines, vec!["refused"; attempts.len()], "{user}: {attempts:?}");
    }
    let allowed = deployment.python("refused.py", &[&deployment.amqp("books"), "bind:books.all:payments.outcomes"], "");
    assert_eq!(allowed.trim(), "allowed");
}
