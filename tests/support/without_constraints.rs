//! Changes with the database's own rules switched off within one transaction, for tests of rows that violate them.

use sqlx::{AssertSqlSafe, Executor as _, PgPool, SqlitePool};

/// The triggers that refuse a change; those that write an audit stay.
const RULES: &str = "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger' \
     AND (name LIKE '%never\\_%' ESCAPE '\\' OR name IN ('final_states_are_for_good', 'settings_version_rises'))";

/// # Errors
/// As the database's; nothing is changed then.
pub async fn on_sqlite(pool: &SqlitePool, sql: &str) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    let rules: Vec<(String, String)> = sqlx::query_as(RULES).fetch_all(&mut *transaction).await?;
    for (name, _) in &rules {
        transaction.execute(sqlx::raw_sql(AssertSqlSafe(format!("DROP TRIGGER {name}")))).await?;
    }
    transaction.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await?;
    for (_, rule) in rules {
        transaction.execute(sqlx::raw_sql(AssertSqlSafe(rule))).await?;
    }
    transaction.commit().await
}

/// As a superuser can; no audit is written.
///
/// # Errors
/// As the database's; nothing is changed then.
pub async fn on_postgres(pool: &PgPool, sql: &str) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    transaction.execute("SET LOCAL session_replication_role = replica").await?;
    transaction.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await?;
    transaction.commit().await
}
