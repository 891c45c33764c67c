//! Texts are compared byte by byte on both databases, whatever the text order of the server.

use sluicegate::domain::job_filter::JobFilter;
use sluicegate::ledger::database::{ChangedCollation, ForeignCollation, TextOrder};

use super::*;

on_every_database!(every_text_is_compared_byte_by_byte, texts_are_sorted_by_their_bytes, another_order_is_found);

/// Ids that differ by what languages skip or fold: case, `-` and `_`.
fn similar_ids() -> Vec<String> {
    let letters = || 'a'..='j';
    let forms = |(x, y): (char, char)| {
        let [capital_x, capital_y] = [x, y].map(|letter| letter.to_ascii_uppercase());
        [
            format!("{x}{y}"),
            format!("{x}-{y}"),
            format!("{x}_{y}"),
            format!("{x}{capital_y}"),
            format!("{capital_x}{y}"),
            format!("{capital_x}-{y}"),
        ]
    };
    letters().flat_map(|x| letters().map(move |y| (x, y))).flat_map(forms).collect()
}

/// The databases say it themselves, in their catalogs.
async fn every_text_is_compared_byte_by_byte(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let others = match kind {
        Kind::Postgres => {
            "SELECT 'index ' || indexrelid::regclass::text FROM pg_index \
                 JOIN pg_class ON pg_class.oid = indrelid AND relnamespace = 'public'::regnamespace, \
                 unnest(indcollation::oid[]) AS one (oid) WHERE one.oid NOT IN (0, 'pg_catalog.\"C\"'::regcollation) \
             UNION ALL SELECT attrelid::regclass::text || '.' || attname FROM pg_attribute \
                 JOIN pg_class ON pg_class.oid = attrelid AND relnamespace = 'public'::regnamespace AND relkind <> 'i' \
             WHERE attcollation NOT IN (0, 'pg_catalog.\"C\"'::regcollation) \
                 AND attrelid <> '_sqlx_migrations'::regclass \
             UNION ALL SELECT typname FROM pg_type \
             WHERE typtype = 'd' AND typnamespace = 'public'::regnamespace AND typcollation NOT IN (0, 'pg_catalog.\"C\"'::regcollation)"
        }
        _ => {
            "SELECT lists.name || '.' || keys.name FROM sqlite_schema AS tables, pragma_index_list(tables.name) AS lists, \
                 pragma_index_xinfo(lists.name) AS keys \
             WHERE tables.type = 'table' AND keys.key = 1 AND keys.coll <> 'BINARY' \
             UNION ALL SELECT name FROM sqlite_schema WHERE sql LIKE '%collate%'"
        }
    };
    assert_eq!(fixture.column(others).await, [], "another collation");
    let keys = match kind {
        Kind::Postgres => "SELECT count(*) FROM pg_index, unnest(indcollation::oid[]) AS one (oid) WHERE one.oid = 950",
        _ => "SELECT count(*) FROM sqlite_schema WHERE type = 'index'",
    };
    assert!(fixture.one(keys).await.parse::<u32>().unwrap() > 30, "the query sees the keys");
    assert_eq!(fixture.database.text_order().await.unwrap(), TextOrder::default());
}

async fn texts_are_sorted_by_their_bytes(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let mut ids = similar_ids();
    for id in &ids {
        fixture.take(&job(id)).await;
    }
    ids.sort();
    let listed = fixture.column("SELECT id FROM jobs ORDER BY id").await;
    assert_eq!(listed.into_iter().flatten().collect::<Vec<_>>(), ids);
    for beginning in ["a", "a-", "A", "a_b", "j"] {
        let filter = JobFilter { search: Some(beginning.to_owned()), ..JobFilter::default() };
        let page = fixture.database.list_jobs(&filter, None, 200).await.unwrap();
        let mut found: Vec<String> = page.jobs.into_iter().map(|job| job.id).collect();
        found.sort();
        let expected: Vec<String> = ids.iter().filter(|id| id.starts_with(beginning)).cloned().collect();
        assert_eq!(found, expected, "{beginning}");
    }
}

async fn another_order_is_found(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let foreign =
        |name: &str, collation: &str| ForeignCollation { name: name.to_owned(), collation: collation.to_owned() };
    if kind != Kind::Postgres {
        fixture.sql("CREATE INDEX by_reason ON jobs (reason COLLATE NOCASE)").await.unwrap();
        let order = fixture.database.text_order().await.unwrap();
        assert_eq!(order, TextOrder { foreign: vec![foreign("index by_reason", "NOCASE")], changed: vec![] });
        return;
    }
    let version = fixture.one("SELECT collversion FROM pg_collation WHERE collname = 'de-x-icu'").await;
    let database = fixture.one("SELECT datcollversion FROM pg_database WHERE datname = current_database()").await;
    fixture
        .sql(
            "CREATE INDEX by_reason ON jobs (reason COLLATE \"de-x-icu\"); \
             ALTER TABLE attempts ALTER COLUMN detail TYPE text COLLATE \"sv-x-icu\"; \
             CREATE DOMAIN foreign_text AS text; CREATE TABLE foreign_table (id text PRIMARY KEY); \
             UPDATE pg_collation SET collversion = '1' WHERE collname IN ('de-x-icu', 'fr-x-icu'); \
             UPDATE pg_database SET datcollversion = '2' WHERE datname = current_database()",
        )
        .await
        .unwrap();
    let changed = |name: &str, built: &str, present: &str| ChangedCollation {
        name: name.to_owned(),
        built: built.to_owned(),
        present: present.to_owned(),
    };
    // Tables of others, and collations that nothing uses, are no business of ours.
    let expected = TextOrder {
        foreign: vec![foreign("column attempts.detail", "sv-x-icu"), foreign("index by_reason", "de-x-icu")],
        changed: vec![changed("collation de-x-icu", "1", &version), changed("the database", "2", &database)],
    };
    assert_eq!(fixture.database.text_order().await.unwrap(), expected);
}

/// What an upgrade of the operating system does to a database: its locale gets another order. The same payments come
/// again afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_locale_makes_no_payment_new() {
    let server = Postgres::start_in_a_locale();
    let url = server.create_database("payments");
    let record = async |ids: &[String]| {
        let database = Database::open(&url, 4).unwrap();
        database.migrate().await.unwrap();
        let mut recorded = 0;
        for id in ids {
            // Without a key the id is the key, and the index of keys would find the payment.
            let claim = database.claim(&job(id), hash(1), "worker-a").await.unwrap();
            recorded += u32::from(matches!(claim, Claim::Claimed(_)));
        }
        database.close().await;
        recorded
    };
    let ids = similar_ids();
    assert_eq!(record(&ids).await, 600);
    server.kill();
    server.change_text_order();
    server.restart();
    assert_eq!(record(&ids).await, 0, "payments that would be charged twice");
}
