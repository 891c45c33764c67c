//! The database roles of docs/security.md on a test's PostgreSQL, created and granted by the SQL blocks of that page
//! unchanged.

use super::postgres::Postgres;

/// The database that the page creates.
pub const DATABASE: &str = "sluicegate";

const PAGE: &str = include_str!("../../docs/security.md");

/// Creates database and roles; next, the owner migrates the database.
pub fn create(postgres: &Postgres) {
    apply(postgres, "postgres", "postgres", 0);
}

/// Grants each role its rights, once the database is migrated.
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
    // Each statement separately, because `CREATE DATABASE` cannot run in a transaction.
    let mut psql = postgres.psql(database);
    psql.args(["-U", role]);
    for statement in statements.split(";\n") {
        psql.args(["-c", statement.trim_end_matches(';')]);
    }
    let output = psql.output().unwrap();
    assert!(output.status.success(), "{statements}: {}", String::from_utf8_lossy(&output.stderr));
}
