//! Worker reports: rows that each worker rewrites, aged by the database's clock, and removed when the worker ends.

use sluicegate::ledger::LedgerError;
use sluicegate::ledger::fleet::WorkerReport;

use super::*;

on_every_database!(
    deployment_id_never_changes,
    a_worker_reports_again_and_leaves,
    silent_workers_are_removed_after_their_timeout,
    invalid_worker_report_is_rejected,
    the_oldest_open_job_is_found,
);

fn report(id: &str, body: &str) -> WorkerReport {
    WorkerReport {
        id: id.to_owned(),
        host: "pay-1".to_owned(),
        pid: 4_711,
        version: "0.1.0".to_owned(),
        uptime: Duration::from_secs(60),
        format: 1,
        body: body.to_owned(),
    }
}

fn silence(kind: Kind, id: &str, seconds: u32) -> String {
    let ago = if kind == Kind::Postgres { format!("interval '{seconds} s'") } else { format!("{seconds}000") };
    format!("UPDATE worker_reports SET reported_at = reported_at - {ago} WHERE id = '{id}'")
}

async fn deployment_id_never_changes(kind: Kind) {
    let (fixture, other) = (Fixture::empty(kind), Fixture::empty(kind));
    fixture.database.migrate().await.unwrap();
    other.database.migrate().await.unwrap();
    let id = fixture.database.deployment().await.unwrap();
    fixture.database.migrate().await.unwrap();
    assert_eq!(fixture.database.deployment().await.unwrap(), id);
    assert_ne!(other.database.deployment().await.unwrap(), id);
    let text = id.to_string();
    assert_eq!((text.len(), &text[14..15]), (36, "4"), "a random UUID: {text}");
    let refused = fixture.sql("INSERT INTO deployment (only_row, id) SELECT 2, id FROM deployment").await.unwrap_err();
    assert!(refused.contains("deployment_has_one_row"), "{refused}");
    assert!(fixture.sql("UPDATE deployment SET id = 'nobody'").await.is_err());
    // The runbook's statement for a copied database.
    let anew = "UPDATE deployment SET id = '6fa459ea-ee8a-4ca4-894e-db77e160355e'";
    fixture.sql(anew).await.unwrap();
    assert_eq!(fixture.database.deployment().await.unwrap().to_string(), "6fa459ea-ee8a-4ca4-894e-db77e160355e");
    fixture.sql("DELETE FROM deployment").await.unwrap();
    let error = fixture.database.deployment().await.unwrap_err();
    assert!(error.to_string().contains("table `deployment` has no row"), "{error}");
}

async fn a_worker_reports_again_and_leaves(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let fleet = fixture.database.clone();
    assert!(fleet.worker_reports().await.unwrap().is_empty());
    fleet.write_report(&report("b", r#"{"lanes": {}}"#)).await.unwrap();
    fleet.write_report(&report("a", "{}")).await.unwrap();
    let first = fleet.worker_reports().await.unwrap();
    assert_eq!(first.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let (host, pid, version) = (first[1].host.as_str(), first[1].pid, first[1].version.as_str());
    assert_eq!((host, pid, version, first[1].format), ("pay-1", 4_711, "0.1.0", 1));
    let ran = first[1].reported_at_ms - first[1].started_at_ms;
    assert!((59_000..=61_000).contains(&ran), "{ran} ms between start and report");
    assert!(first[1].age < Duration::from_secs(30), "{:?}", first[1].age);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&first[1].body).unwrap()["lanes"], serde_json::json!({}));

    fixture.sql(&silence(kind, "b", 40)).await.unwrap();
    assert!(fleet.worker_reports().await.unwrap()[1].age >= Duration::from_secs(40) - SECOND);
    let later = WorkerReport { uptime: Duration::from_secs(999), format: 2, ..report("b", r#"{"v": 2}"#) };
    fleet.write_report(&later).await.unwrap();
    let again = fleet.worker_reports().await.unwrap();
    assert!(again[1].age < Duration::from_secs(30), "it reported again: {:?}", again[1].age);
    assert_eq!((again[1].started_at_ms, again[1].format, again.len()), (first[1].started_at_ms, 2, 2));
    assert!(again[1].body.contains('2'));

    fleet.remove_report("b").await.unwrap();
    fleet.remove_report("b").await.unwrap();
    assert_eq!(fleet.worker_reports().await.unwrap().len(), 1);
}

async fn silent_workers_are_removed_after_their_timeout(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let fleet = fixture.database.clone();
    for id in ["here", "silent", "gone"] {
        fleet.write_report(&report(id, "{}")).await.unwrap();
    }
    fixture.sql(&silence(kind, "silent", 86_000)).await.unwrap();
    fixture.sql(&silence(kind, "gone", 86_500)).await.unwrap();
    assert_eq!(fleet.remove_silent_reports(Duration::from_secs(86_400)).await.unwrap(), 1);
    let left: Vec<String> = fleet.worker_reports().await.unwrap().into_iter().map(|row| row.id).collect();
    assert_eq!(left, ["here", "silent"]);
}

async fn invalid_worker_report_is_rejected(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let fleet = fixture.database.clone();
    let good = report("a", "{}");
    for (bad, rule) in [
        (WorkerReport { id: "no/id".to_owned(), ..good.clone() }, "worker_id_is_1_to_64"),
        (WorkerReport { id: String::new(), ..good.clone() }, "worker_id_is_1_to_64"),
        (WorkerReport { host: "h".repeat(256), ..good.clone() }, "host_is_at_most_255"),
        (WorkerReport { version: "1".repeat(65), ..good.clone() }, "version_is_at_most_64"),
        (WorkerReport { format: 0, ..good.clone() }, "format_is_1_or_more"),
        (WorkerReport { body: "{".to_owned(), ..good.clone() }, "json"),
    ] {
        let error = fleet.write_report(&bad).await.unwrap_err();
        assert!(matches!(&error, LedgerError::StatementFailed(text) if text.contains(rule)), "{bad:?}: {error}");
    }
    assert!(fleet.worker_reports().await.unwrap().is_empty());
}

async fn the_oldest_open_job_is_found(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let fleet = fixture.database.clone();
    assert!(fleet.oldest_open(&[]).await.unwrap().is_empty());
    assert!(fleet.oldest_open(&[name("stripe")]).await.unwrap().is_empty());
    for id in ["old", "young"] {
        fixture.take(&job(id)).await;
    }
    let minute = if kind == Kind::Postgres { "interval '1 minute'" } else { "60000" };
    fixture.sql(&format!("UPDATE jobs SET created_at = created_at - {minute} WHERE id = 'old'")).await.unwrap();
    let created = if kind == Kind::Postgres { "extract(epoch FROM created_at) * 1000" } else { "created_at" };
    let old: f64 = fixture.one(&format!("SELECT {created} FROM jobs WHERE id = 'old'")).await.parse().unwrap();
    let oldest = fleet.oldest_open(&[name("acme"), name("stripe")]).await.unwrap();
    assert_eq!(oldest.len(), 1);
    assert_eq!(oldest[0].0, "stripe");
    #[allow(clippy::cast_precision_loss, reason = "instants are far below 2^53")]
    let apart = oldest[0].1 as f64 - old;
    assert!(apart.abs() <= 1.0, "{apart} ms");
    fixture.sql("UPDATE jobs SET state = 'cancelled', holder = NULL, response_by = NULL").await.unwrap();
    assert!(fleet.oldest_open(&[name("stripe")]).await.unwrap().is_empty());
}
