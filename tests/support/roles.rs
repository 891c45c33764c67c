//! The roles of docs/security.md on a test's own PostgreSQL, made and granted by the blocks of that page as they stand there.

use super::postgres::Postgres;

/// The database that the page makes.
pub const DATABASE: &str = "sluicegate";

const PAGE: &str = include_str!("../../docs/security.md");

/// Database and roles; the owner is to migrate it next.
pub fn create(postgres: &Postgres) {
    apply(postgres, "postgres", "postgres", 0);
}

/// What each role may do, once the database is migrated.
pub fn grant(postgres: &Postgres) {
    apply(postgres, DATABASE, "sluicegate_owner", 1);
    apply(postgres, DATABASE, "postgres", 2);
}

/// The URL of the role that runs this command.
pub fn url_for(postgres: &Postgres, command: &str) -> String {
    let role = match command {
        "migrate" => "sluicegate_owner",
        "run" => "sluicegate_worker",
        _ => "sluicegate_operator",
    };
    postgres.url(DATABASE).replace("//postgres@", &format!("//{role}@"))
}

fn apply(postgres: &Postgres, database: &str, role: &str, block: usize) {
    let statements = PAGE.split("```sql\n").nth(block + 1).and_then(|rest| rest.split("\n```").next()).unwrap();
    // Each by itself: a database is made outside of a transaction.
    let mut psql = postgres.psql(database);
    psql.args(["-U", role]);
    for statement in statements.split(";\n") {
        psql.args(["-c", statement.trim_end_matches(';')]);
    }
    let output = psql.output().unwrap();
    assert!(output.status.success(), "{statements}: {}", String::from_utf8_lossy(&output.stderr));
}
