//! Plans that PostgreSQL reports: `auto_explain` writes the plan of every statement into the server's log as it ends.

use serde_json::Value;

use super::super::*;
use super::backlog::{FLOWS, claim_reads_no_blocked_flow, claim_reads_one_job};
use super::work::{IN_HAND, Working};
use super::{Access, Explained, LARGE, filling, judge};
use sluicegate::ledger::database::Database;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::upkeep::CheckScope;

/// The last line of a plan.
const END_OF_PLAN: &str = "\n\t}\n";

/// One database's part of the server's log, read from this position on.
struct DatabaseLog {
    database: String,
    read_bytes: u64,
}

impl DatabaseLog {
    fn from_now(fixture: &Fixture) -> Self {
        Self { database: database_name(fixture).to_owned(), read_bytes: Postgres::shared().log_bytes() }
    }
}

impl Explained for DatabaseLog {
    async fn accesses(&mut self, _: &Fixture, during: &'static str) -> Vec<Access> {
        let log = Postgres::shared().log_since(self.read_bytes);
        // The server writes a plan before it sends the response. A plan that is still being written is left for the
        // next call.
        let end = log.windows(END_OF_PLAN.len()).rposition(|text| text == END_OF_PLAN.as_bytes());
        let whole = end.map_or(0, |at| at + END_OF_PLAN.len());
        self.read_bytes += whole as u64;
        let mut found = Vec::new();
        for plan in plans(&String::from_utf8_lossy(&log[..whole]), &self.database) {
            let sql = plan["Query Text"].as_str().unwrap_or_default();
            walk(&plan["Plan"], &mut |node| found.extend(access(node, during, sql)));
        }
        found
    }
}

fn database_name(fixture: &Fixture) -> &str {
    fixture.url.rsplit('/').next().unwrap()
}

/// The JSON documents behind `plan:` of one database; further lines of a message begin with a tab.
fn plans(log: &str, database: &str) -> Vec<Value> {
    let begin = format!(" {database} LOG:");
    let mut plans = Vec::new();
    let mut lines = log.lines().peekable();
    while let Some(line) = lines.next() {
        if !(line.contains(&begin) && line.trim_end().ends_with("plan:")) {
            continue;
        }
        let mut text = String::new();
        while let Some(more) = lines.next_if(|line| line.starts_with('\t')) {
            text.push_str(more);
        }
        plans.push(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")));
    }
    plans
}

fn walk(node: &Value, visit: &mut impl FnMut(&Value)) {
    visit(node);
    for child in node["Plans"].as_array().into_iter().flatten() {
        walk(child, visit);
    }
}

fn access(node: &Value, during: &'static str, sql: &str) -> Option<Access> {
    let kind = node["Node Type"].as_str()?;
    let index = node["Index Name"].as_str();
    // A bitmap heap scan reads the rows that the index scan beneath it has found, and that index scan names no table.
    let table = match (node["Relation Name"].as_str(), index) {
        (Some(table), _) => table,
        (None, Some(index)) => LARGE.iter().find(|table| index.starts_with(*table))?,
        (None, None) => return None,
    };
    let reads = matches!(kind, "Seq Scan" | "Index Scan" | "Index Only Scan" | "Bitmap Index Scan" | "Sample Scan");
    if !reads || !LARGE.contains(&table) {
        return None;
    }
    let sum = |name: &str| node[name].as_f64().unwrap_or(0.0);
    let each = sum("Actual Rows") + sum("Rows Removed by Filter") + sum("Rows Removed by Index Recheck");
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of rows")]
    let rows = (each * sum("Actual Loops")).round() as u64;
    Some(Access {
        during,
        sql: sql.to_owned(),
        table: table.to_owned(),
        index: index.map(str::to_owned),
        sought: node["Index Cond"].is_string(),
        rows: Some(rows),
    })
}

/// Sessions that begin from now on log their plans. They are few, so that each reaches a generic plan where that is no
/// worse.
async fn explain(fixture: &mut Fixture) {
    let database = database_name(fixture).to_owned();
    // A session that begins in between logs nothing, or everything.
    let settings = [
        ("auto_explain.log_format", "json"),
        ("auto_explain.log_nested_statements", "on"),
        ("auto_explain.log_timing", "off"),
        ("auto_explain.log_analyze", "on"),
        ("auto_explain.log_min_duration", "0"),
        ("session_preload_libraries", "auto_explain"),
    ];
    for (name, value) in settings {
        fixture.sql(&format!("ALTER DATABASE {database} SET {name} = '{value}'")).await.unwrap();
    }
    fixture.database.close().await;
    fixture.database = Database::open(&fixture.url, 2).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_statement_uses_an_index() {
    let mut fixture = Fixture::migrated(Kind::Postgres).await;
    fixture.fill(Kind::Postgres).await;
    fixture.sql("VACUUM ANALYZE").await.unwrap();
    explain(&mut fixture).await;
    let mut log = DatabaseLog::from_now(&fixture);
    let mut working = Working { fixture: &fixture, explained: &mut log, run: "work", accesses: Vec::new() };
    working.all().await;
    fixture.fill_backlog(Kind::Postgres).await;
    fixture.sql("VACUUM ANALYZE").await.unwrap();
    working.backlog().await;
    judge("PostgreSQL", &working.accesses);
}

/// However many flows are blocked, and whatever is known of the tables.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claim_reads_no_job_of_a_blocked_flow() {
    let mut fixture = Fixture::migrated(Kind::Postgres).await;
    explain(&mut fixture).await;
    fixture.fill_backlog(Kind::Postgres).await;
    for (analyse, flows_read_max) in [("SELECT 1", FLOWS / 2 + 140), ("VACUUM ANALYZE", 140)] {
        fixture.sql(analyse).await.unwrap();
        let mut log = DatabaseLog::from_now(&fixture);
        let mut working = Working { fixture: &fixture, explained: &mut log, run: "work", accesses: Vec::new() };
        claim_reads_no_blocked_flow(&mut working, flows_read_max.into()).await;
    }
}

/// Several indexes seem equally good in a ledger of some hundred jobs of which nothing is known, and a connection keeps
/// its first plan.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claim_of_a_young_ledger_reads_what_it_claims() {
    let mut fixture = Fixture::migrated(Kind::Postgres).await;
    for table in ["jobs", "flows"] {
        fixture.sql(&format!("ALTER TABLE {table} SET (autovacuum_enabled = off)")).await.unwrap();
    }
    for recorded in (0..450).step_by(10) {
        explain(&mut fixture).await;
        let mut log = DatabaseLog::from_now(&fixture);
        let mut working = Working { fixture: &fixture, explained: &mut log, run: "work", accesses: Vec::new() };
        claim_reads_one_job(&mut working, recorded).await;
    }
}

/// A plan made while PostgreSQL knows nothing of a table is kept as long as the connection lives. Even then it finds a
/// claimed job by its id, and by no index that would be read in full once it is long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_ledger_finds_jobs_by_primary_key() {
    let mut fixture = Fixture::migrated(Kind::Postgres).await;
    // On a slow machine the statistics would be gathered meanwhile.
    fixture.sql("ALTER TABLE jobs SET (autovacuum_enabled = off)").await.unwrap();
    fixture.sql("ALTER TABLE attempts SET (autovacuum_enabled = off)").await.unwrap();
    explain(&mut fixture).await;
    let mut log = DatabaseLog::from_now(&fixture);
    let mut working = Working { fixture: &fixture, explained: &mut log, run: "work", accesses: Vec::new() };
    working.way_of_a_job().await;
    let by_key = ["jobs_pkey", "jobs_one_payment_per_charge", "attempts_pkey", "jobs_one_payment_per_provider_and_key"];
    let of_the_way =
        |access: &&Access| IN_HAND.contains(&access.during) && ["jobs", "attempts"].contains(&access.table.as_str());
    let seen: Vec<&Access> = working.accesses.iter().filter(of_the_way).collect();
    let others: Vec<_> = seen
        .iter()
        .filter(|access| !access.sought || !access.index.as_ref().is_some_and(|index| by_key.contains(&index.as_str())))
        .collect();
    assert!(others.is_empty(), "{} of {}: {others:#?}", others.len(), seen.len());
    for during in IN_HAND {
        assert!(seen.iter().any(|access| access.during == during), "no plan was seen of: {during}");
    }
}

/// The reconciliation of each minute reads jobs that may change their state, and jobs that finished lately, by index.
/// This holds in a young and in an old ledger, however many jobs have finished.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconciliation_does_not_read_old_jobs() {
    let mut fixture = Fixture::migrated(Kind::Postgres).await;
    explain(&mut fixture).await;
    let mut log = DatabaseLog::from_now(&fixture);
    accounts(&fixture, &mut log).await;
    fixture.fill(Kind::Postgres).await;
    for round in 0..4 {
        let accesses = accounts(&fixture, &mut log).await;
        if round == 1 {
            fixture.sql("VACUUM ANALYZE").await.unwrap();
        }
        // The first round adds the history to its totals.
        if round == 0 {
            continue;
        }
        let of_jobs: Vec<_> = accesses.iter().filter(|access| access.table == "jobs").collect();
        let by_index = |access: &&&Access| access.index.as_ref().is_some_and(|index| OF_AN_ACCOUNT.contains(&&**index));
        let others: Vec<_> = of_jobs.iter().filter(|access| !by_index(access)).collect();
        assert!(others.is_empty(), "{round}: {others:#?}");
        let rows: u64 = of_jobs.iter().filter_map(|access| access.rows).sum();
        // A quarter of the jobs are open, a tenth are in review, and both are read twice.
        let most = u64::from(filling::JOBS) * 7 / 10 + 500;
        assert!(rows > 1_000 && rows < most, "{round}: {rows} rows: {of_jobs:#?}");
    }
}

/// Indexes by which the reconciliation finds jobs.
const OF_AN_ACCOUNT: [&str; 5] = [
    "jobs_one_payment_per_provider_and_key",
    "jobs_by_state_and_time",
    "jobs_open_by_wake",
    "jobs_finished_by_update",
    "jobs_in_review_by_update",
];

/// Reconciles several times, because PostgreSQL may use a generic plan from the sixth time on. Returns the accesses of
/// the last.
async fn accounts(fixture: &Fixture, log: &mut DatabaseLog) -> Vec<Access> {
    let (upkeep, minute, mut last) = (fixture.database.clone(), Duration::from_secs(60), Vec::new());
    for _ in 0..8 {
        upkeep.update_finished_totals().await.unwrap();
        log.accesses(fixture, "finished jobs are added").await;
        upkeep.reconcile(minute, CheckScope::Since(minute)).await.unwrap();
        last = log.accesses(fixture, "account of the last minutes").await;
    }
    last
}

/// References are unique per provider only. So other providers' payments with the same reference do not slow down a
/// finish.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn charges_of_other_providers_are_not_read() {
    let mut fixture = Fixture::migrated(Kind::Postgres).await;
    fixture.fill_namesakes(Kind::Postgres).await;
    explain(&mut fixture).await;
    let mut log = DatabaseLog::from_now(&fixture);
    let mut working = Working { fixture: &fixture, explained: &mut log, run: "work", accesses: Vec::new() };
    working.way_of_a_job().await;
    let by_charge = |access: &&Access| access.index.as_deref() == Some("jobs_one_payment_per_charge");
    let rows: Vec<_> = working.accesses.iter().filter(by_charge).filter_map(|access| access.rows).collect();
    assert!(rows.len() > 8 && rows.iter().all(|rows| *rows < 10), "{rows:?}");
}

/// By the statistics most rows belong to the account, and the erased ones precede the others in the order of ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn account_of_half_the_ledger_is_index_erased() {
    let mut fixture = Fixture::migrated(Kind::Postgres).await;
    fixture.fill(Kind::Postgres).await;
    let half = "UPDATE jobs SET account = 'half' WHERE state = 'succeeded'";
    fixture.without_constraints(half).await.unwrap();
    fixture.pass_events().await;
    fixture.sql("VACUUM ANALYZE").await.unwrap();
    explain(&mut fixture).await;
    let mut log = DatabaseLog::from_now(&fixture);
    let (operator, half) = (fixture.database.clone(), Identifier::new("half").unwrap());
    let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
    for round in 0..8 {
        let ended = operator.erasure_counts(&half).await.unwrap().finished;
        assert_eq!(ended, u64::from(filling::JOBS) / 2 - round * 500);
        let counted = log.accesses(&fixture, "an erasure is counted").await;
        assert_eq!(operator.erase_account(&half, 500, &by).await.unwrap().jobs, 500);
        let erased = log.accesses(&fixture, "an account is erased").await;
        for (accesses, most) in [(counted, ended + 500), (erased, 1_600)] {
            let of_jobs: Vec<_> = accesses.iter().filter(|access| access.table == "jobs").collect();
            assert!(of_jobs.iter().all(|access| access.sought || access.rows <= Some(20)), "{round}: {of_jobs:#?}");
            let rows: u64 = of_jobs.iter().filter_map(|access| access.rows).sum();
            assert!(rows >= 500 && rows <= most, "{round}: {rows} rows: {of_jobs:#?}");
        }
    }
}

#[test]
fn sequential_scan_is_detected() {
    let log = "2026-01-01 [7] mine LOG:  duration: 1 ms  plan:\n\t{\n\t\"Query Text\": \"SELECT\",\n\t\"Plan\": {\"Node Type\": \
               \"Limit\", \"Plans\": [{\"Node Type\": \"Seq Scan\", \"Relation Name\": \"jobs\", \"Actual Rows\": 7, \
               \"Rows Removed by Filter\": 3, \"Actual Loops\": 2}]}\n\t}\nother\n";
    assert!(plans(log, "other").is_empty());
    let plans = plans(log, "mine");
    let mut found = Vec::new();
    walk(&plans[0]["Plan"], &mut |node| found.extend(access(node, "a test", "SELECT")));
    assert_eq!(found.len(), 1);
    assert!(found[0].is_in_full() && found[0].reason().is_none());
    assert_eq!((found[0].table.as_str(), found[0].rows), ("jobs", Some(20)));
}
