//! The recipes of docs/security.md: applied word for word, enough for the main path, and not enough for anything else.

use std::process::Command;

use crate::deployment::{DATABASE, Deployment, PASSWORDS, PAUSED, PROVIDER, VHOST, password, text};
use crate::page::Page;

fn page() -> Page {
    Page::read("docs/security.md")
}

/// A block of the page with the passwords in the place of its words.
fn block(language: &str, number: usize) -> String {
    let mut block = page().blocks_of(language).swap_remove(number);
    for (word, password) in PASSWORDS {
        block = block.replace(word, password);
    }
    block
}

/// Splits a line of the page as a shell would: words, some of them in single quotes.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut quoted, mut begun) = (vec![String::new()], false, false);
    for c in line.chars() {
        match c {
            '\'' => (quoted, begun) = (!quoted, true),
            ' ' if !quoted => {
                if begun || !words.last().unwrap().is_empty() {
                    words.push(String::new());
                }
                begun = false;
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
    // For the tests' own eyes.
    deployment.rabbit.ctl(&["set_permissions", "-p", VHOST, "guest", ".*", ".*", ".*"]);
}

pub fn apply_redis(deployment: &Deployment) {
    deployment.redis.command::<()>(block("text", 0).trim());
}

pub fn apply_postgres_roles(deployment: &Deployment) {
    apply(deployment, "postgres", "postgres", &block("sql", 0));
}

pub fn apply_postgres_grants(deployment: &Deployment) {
    let grants = block("sql", 1);
    for _ in 0..2 {
        apply(deployment, DATABASE, "sluicegate_owner", &grants);
    }
}

fn apply(deployment: &Deployment, database: &str, role: &str, statements: &str) {
    let file = deployment.dir.join("statements.sql");
    std::fs::write(&file, statements).unwrap();
    let mut psql = deployment.postgres.psql(database);
    let output = psql.args(["-U", role, "-f", file.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{statements}: {}", text(&output.stderr));
}

#[test]
fn a_line_of_the_page_is_split_as_a_shell_would() {
    assert_eq!(words("a '^b c$' '' d"), ["a", "^b c$", "", "d"]);
}

#[test]
fn the_recipes_suffice_and_nothing_beyond_them_is_allowed() {
    let deployment = Deployment::shared();
    // Enough: the worker has been through the whole path as these users.
    assert_eq!(deployment.sql("SELECT state FROM jobs WHERE id = 'pay-1'").trim(), "succeeded");
    let users = "SELECT DISTINCT who FROM settings_audit";
    assert_eq!(deployment.sql(users).trim(), "sluicegate_operator");
    refused_by_postgres(deployment);
    refused_by_redis(deployment);
    refused_by_rabbitmq(deployment);
}

fn refused_by_postgres(deployment: &Deployment) {
    let attempt = |role: &str, statement: &str| -> String {
        let mut psql: Command = deployment.postgres.psql(DATABASE);
        let statement = format!("BEGIN; {statement}; ROLLBACK");
        let output = psql.args(["-U", role, "-c", &statement]).output().unwrap();
        if output.status.success() { "allowed".to_owned() } else { text(&output.stderr) }
    };
    let worker = [
        "UPDATE providers SET url = 'https://evil.example/'",
        "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('control-acme', 'x', 1, 1)",
        "DELETE FROM provider_limits",
        "INSERT INTO settings_audit (who, table_name, row_key) VALUES ('x', 'x', 'x')",
        "DELETE FROM jobs",
        "DELETE FROM attempts",
        "DELETE FROM job_audit",
        "UPDATE job_audit SET who = 'x'",
        "TRUNCATE jobs CASCADE",
        "ALTER TABLE jobs DISABLE TRIGGER ALL",
        "CREATE TABLE own (a int)",
        "CREATE ROLE other",
        "DROP TABLE outcome_events",
        "UPDATE _sqlx_migrations SET checksum = ''",
        "COPY jobs TO PROGRAM 'cat'",
    ];
    let operator = [
        "DELETE FROM jobs",
        "DELETE FROM settings_audit",
        "UPDATE settings_audit SET who = 'x'",
        "DELETE FROM job_audit",
        "UPDATE job_audit SET who = 'x'",
    ];
    let reader = ["UPDATE jobs SET reason = 'x'", "UPDATE providers SET paused = true", "DELETE FROM jobs"];
    for (role, statements) in
        [("sluicegate_worker", &worker[..]), ("sluicegate_operator", &operator), ("sluicegate_reader", &reader)]
    {
        for statement in statements {
            let said = attempt(role, statement);
            let words = ["permission denied", "must be owner", "must be superuser"];
            assert!(words.iter().any(|words| said.contains(words)), "{role}: {statement}: {said}");
        }
    }
    // Who may make temporary tables, which the recipe does not allow, cannot lead the audit into one of them.
    let led_astray = "CREATE TEMP TABLE settings_audit (LIKE settings_audit INCLUDING ALL); \
         UPDATE settings_version SET version = version + 1; SELECT 1 / (1 - count(*)) FROM pg_temp.settings_audit";
    deployment.sql(&format!("GRANT TEMP ON DATABASE {DATABASE} TO sluicegate_worker"));
    assert_eq!(attempt("sluicegate_worker", led_astray), "allowed", "nothing is in the temporary table");
    deployment.sql(&format!("REVOKE TEMP ON DATABASE {DATABASE} FROM sluicegate_worker"));
    // The same question can be answered otherwise.
    for (role, statement) in [
        ("sluicegate_worker", "UPDATE jobs SET updated_at = updated_at"),
        // What it does after a restore from a backup; a trigger writes the audit.
        ("sluicegate_worker", "UPDATE settings_version SET version = version + 1"),
        ("sluicegate_operator", "UPDATE providers SET paused = true"),
        ("sluicegate_operator", "UPDATE job_audit SET because = 'a person says so'"),
        ("sluicegate_reader", "SELECT * FROM jobs"),
    ] {
        assert_eq!(attempt(role, statement), "allowed", "{role}: {statement}");
    }
}

fn refused_by_redis(deployment: &Deployment) {
    let url = format!("redis://sluicegate:{}@127.0.0.1:{}", password(">PASSWORD"), deployment.redis.port);
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
                "publish:payments.delay.250:x".into(),
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
        let said = deployment.python("refused.py", &args, "");
        let said: Vec<&str> = said.lines().collect();
        assert_eq!(said, vec!["refused"; attempts.len()], "{user}: {attempts:?}");
    }
    let allowed = deployment.python("refused.py", &[&deployment.amqp("books"), "bind:books.all:payments.outcomes"], "");
    assert_eq!(allowed.trim(), "allowed");
}
