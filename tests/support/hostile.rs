//! A ledger with hostile texts: each text from outside holds characters that forge lines, steer a terminal or hide.

use sqlx::{AssertSqlSafe, Executor as _, SqlitePool};

/// Line ends, escape sequences of both kinds, direction marks, invisible characters.
pub const HOSTILE: &str =
    "x\ny 0\r\u{1b}[2J\u{9b}1m\u{85}\u{202e}\u{2066}\u{200b}\u{feff}\u{ad}\u{2028}\t\u{7f}\u{e0041}z";
/// The value of a parameter in every address.
pub const SIGNATURE: &str = "hunter2";

/// Columns by which the program finds rows or decides, and JSON.
const KEPT: [&str; 28] = [
    "batch",
    "id",
    "name",
    "provider",
    "job_id",
    "quota",
    "queue",
    "dead_of",
    "duty",
    "lane",
    "row_key",
    "table_name",
    "description",
    "state",
    "kind",
    "currency",
    "resend",
    "mode",
    "url",
    "slot_release",
    "order",
    "pacing",
    "store_down",
    "algorithm",
    "scope",
    "applies_to",
    "rule",
    "limit_name",
];

/// Appends `text` to all texts except those of [`KEPT`], and a signature to every address, with constraints off. The
/// row `bolt` gets it in every column. No trigger fires.
pub async fn fill(pool: &SqlitePool, text: &str) {
    let columns: Vec<(String, String)> = sqlx::query_as(
        "SELECT tables.name, columns.name FROM sqlite_schema AS tables JOIN pragma_table_info(tables.name) AS columns \
         WHERE tables.type = 'table' AND tables.name NOT LIKE 'sqlite%' AND columns.type = 'TEXT'",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    let json = [
        "headers",
        "request",
        "lookup",
        "statuses",
        "require",
        "properties",
        "report",
        "old_row",
        "new_row",
        "payload",
        "sums",
    ];
    let open =
        columns.iter().filter(|(_, column)| !KEPT.contains(&column.as_str()) && !json.contains(&column.as_str()));
    let append = |table: &str, column: &str, text: &str, which: &str| {
        format!(
            "UPDATE {table} SET \"{column}\" = \"{column}\" || '{text}' WHERE instr(\"{column}\", '{text}') = 0{which}"
        )
    };
    let mut changes: Vec<String> = open.map(|(table, column)| append(table, column, text, "")).collect();
    let signed = format!("?sig={SIGNATURE}");
    changes.extend([append("providers", "url", &signed, ""), append("jobs", "frozen_url", &signed, "")]);
    for column in ["url", "mode", "slot_release", "pacing", "store_down", "quota", "order"] {
        changes.push(append("providers", column, text, " AND name = 'bolt'"));
    }
    for column in ["name", "algorithm", "scope", "applies_to"] {
        changes.push(append("provider_limits", column, text, " AND provider = 'bolt'"));
    }
    changes.push(format!("UPDATE providers SET headers = json_object('{text}', 'v') WHERE name = 'bolt'"));
    changes.push(format!(
        "UPDATE settings_audit SET new_row = json_set(new_row, '$.mode', '{text}') WHERE json_valid(new_row)"
    ));
    let held = format!("json_object('by', 'setup', 'words', '{text}')");
    let lane = format!(
        "json_object('does', 'resting', 'pause', {held}, 'gate', {held}, \
         'decisions', json_array(json_object('at_ms', 1, 'kind', '{text}', 'reason', '{text}')))"
    );
    let engine =
        format!("json_object('ok', json('false'), 'kind', '{text}', 'version', '{text}', 'problem', '{text}')");
    changes.push(format!(
        "INSERT OR REPLACE INTO worker_reports (id, host, pid, version, started_at, reported_at, format, report) \
         VALUES ('w', '{text}', 1, '{text}', 1, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), 1, json_object('ready', json('true'), \
         'lanes', json_object('acme', {lane}), 'backends', json_object('database', {engine}), \
         'warnings', json_array('{text}')))"
    ));
    changes.push(format!(
        "INSERT OR REPLACE INTO history_marks (provider, at, kind, worker, detail) \
         VALUES ('', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), '{text}', 'w', '{text}')"
    ));
    changes.extend(batch_rows(text));
    unchecked(pool, &changes).await;
}

/// A batch, a payment of it and a refusal with hostile texts.
fn batch_rows(text: &str) -> [String; 3] {
    let batch = "01937f2c5b0e7c3a9d4e5f60718293a4";
    [
        format!(
            "INSERT OR REPLACE INTO decision_batches \
                 (id, decision, state, jobs, rate, digest, sums, created_at, person, because, stopped_by, worker, next_at) \
             VALUES ('{batch}', '{text}', '{text}', 1, '{text}', '{text}', \
                 json_array(json_object('currency', '{text}', 'jobs', 1, 'amount', 1)), 1, '{text}', '{text}', '{text}', '{text}', 1)"
        ),
        format!(
            "INSERT OR REPLACE INTO decision_batch_jobs (batch, number, job_id, outcome, refusal, detail, at) \
             VALUES ('{batch}', 1, '{text}', '{text}', '{text}', '{text}', 1)"
        ),
        format!(
            "INSERT OR REPLACE INTO decision_batch_refusals (batch, refusal, jobs, example, detail) \
             VALUES ('{batch}', '{text}', 1, '{text}', '{text}')"
        ),
    ]
}

async fn unchecked(pool: &SqlitePool, changes: &[String]) {
    let mut connection = pool.acquire().await.unwrap();
    connection
        .execute("PRAGMA ignore_check_constraints = ON; PRAGMA foreign_keys = OFF; BEGIN IMMEDIATE")
        .await
        .unwrap();
    let triggers: Vec<(String, String)> = sqlx::query_as("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'")
        .fetch_all(&mut *connection)
        .await
        .unwrap();
    let drops = triggers.iter().map(|(name, _)| format!("DROP TRIGGER {name}"));
    let restored = triggers.iter().map(|(_, sql)| sql.clone());
    for sql in drops.chain(changes.iter().cloned()).chain(restored) {
        let done = connection.execute(sqlx::raw_sql(AssertSqlSafe(sql.clone()))).await;
        done.unwrap_or_else(|error| panic!("{error}: {sql}"));
    }
    connection.execute("COMMIT; PRAGMA ignore_check_constraints = OFF; PRAGMA foreign_keys = ON").await.unwrap();
}
