//! docs/configuration.md: lists every key and column with default and range, none missing and none extra.

use std::collections::BTreeMap;

use sluicegate::config::DEFAULTS;
use sluicegate::ledger::database::Database;
use sqlx::Row as _;

use crate::page::{Page, plain};

const PAGE: &str = "docs/configuration.md";
const FIRST_CELLS: usize = 5;
/// Columns without a constraint on their values: the database writes them, or they refer to another table.
const WITHOUT_RULE: [(&str, &str); 9] = [
    ("providers", "resumed_at"),
    ("providers", "version"),
    ("providers", "updated_at"),
    ("provider_limits", "provider"),
    ("provider_limits", "until_at"),
    ("account_overrides", "provider"),
    ("account_overrides", "id"),
    ("account_overrides", "until_at"),
    ("providers", "kind"),
];

/// Second and third cell of each row, by the first.
fn rows(heading: &str, first: &str) -> BTreeMap<String, (String, String)> {
    let rows = Page::read(PAGE).table(heading, first);
    let count = rows.len();
    let named: BTreeMap<_, _> = rows
        .into_iter()
        .map(|row| {
            assert_eq!(row.len(), FIRST_CELLS, "{heading}: {row:?}");
            (plain(&row[0]).to_owned(), (plain(&row[1]).to_owned(), row[2].clone()))
        })
        .collect();
    assert_eq!(named.len(), count, "{heading}: a row is listed twice");
    named
}

#[test]
fn every_key_is_explained_with_its_default() {
    let mut documented = rows("## Keys", "key");
    let defaults: toml::Table = DEFAULTS.parse().unwrap();
    for (section, keys) in &defaults {
        for (key, value) in keys.as_table().unwrap() {
            let name = format!("{section}.{key}");
            let (default, may_be) = documented.remove(&name).unwrap_or_else(|| panic!("{name} is not documented"));
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let value = if value.is_empty() { "(empty)".to_owned() } else { value };
            assert_eq!(default, value, "{name}");
            // The range as in the comments of the defaults.
            if may_be.starts_with(|c: char| c.is_ascii_digit()) {
                let range = may_be.split([',', ';']).next().unwrap();
                let range = range.trim_end_matches(" ms").trim_end_matches(" days");
                let comments = DEFAULTS.replace("\n# ", " ");
                assert!(comments.contains(range), "{name}: `{range}` is not in config/default.toml");
            }
        }
    }
    assert!(documented.is_empty(), "there are no such keys: {:?}", documented.keys());
}

/// `1 to 63 of a-z` as the names of constraints spell it; text after a comma or a colon is a remark.
fn spelled(may_be: &str) -> String {
    let rule = may_be.split([',', ':', ';']).next().unwrap_or_default().trim();
    // `1 ms to 31 days` keeps its units, because the constraint has them.
    let units = ["ms", "s", "%", "per", "workers", "jobs", "requests"];
    let words: Vec<&str> = rule.split(' ').collect();
    let end = words
        .iter()
        .enumerate()
        .position(|(at, word)| units.contains(word) && at > 0 && words.get(at + 1) != Some(&"to"));
    let rule = words[..end.unwrap_or(words.len())].join(" ");
    rule.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

#[tokio::test]
async fn every_column_documents_default_and_range() {
    let database = Database::open("sqlite::memory:", 1).unwrap();
    database.migrate().await.unwrap();
    let pool = database.sqlite_pool().unwrap();
    for table in ["providers", "provider_limits", "account_overrides"] {
        let mut documented = rows(&format!("### {table}"), "column");
        let schema: String = sqlx::query_scalar("SELECT sql FROM sqlite_schema WHERE name = ?1")
            .bind(table)
            .fetch_one(&pool)
            .await
            .unwrap();
        let info = sqlx::query("SELECT name, type, dflt_value, \"notnull\" FROM pragma_table_info(?1)");
        for column in info.bind(table).fetch_all(&pool).await.unwrap() {
            let name: String = column.get("name");
            let (default, may_be) =
                documented.remove(&name).unwrap_or_else(|| panic!("{table}.{name} is not documented"));
            let boolean = schema.contains(&format!("{name}_is_0_or_1"));
            let in_schema = match column.get::<Option<String>, _>("dflt_value") {
                Some(value) if boolean => (value == "1").to_string(),
                // PostgreSQL writes it by default, SQLite by a trigger.
                Some(_) if name == "updated_at" => "(now)".to_owned(),
                Some(value) => value.trim_matches('\'').to_owned(),
                None if column.get::<bool, _>("notnull") => "(required)".to_owned(),
                None => "(none)".to_owned(),
            };
            assert_eq!(default, in_schema, "{table}.{name}");
            if boolean {
                assert_eq!(may_be, "true or false", "{table}.{name}");
            } else if !WITHOUT_RULE.contains(&(table, name.as_str())) {
                let rule = format!("{name}_is_{}", spelled(&may_be));
                assert!(schema.contains(&rule), "{table}.{name}: no constraint `{rule}`");
            }
        }
        assert!(documented.is_empty(), "{table} has no such columns: {:?}", documented.keys());
    }
    database.close().await;
}

#[test]
fn ranges_are_spelled_as_constraints_are() {
    for (may_be, rule) in [
        ("10 to 60000 ms, for `grant` alone", "10_to_60000"),
        ("1 ms to 31 days", "1_ms_to_31_days"),
        ("0 to 99 % of each limit", "0_to_99"),
        ("1 to 63 of a-z 0-9 underscore dash", "1_to_63_of_a_z_0_9_underscore_dash"),
        ("known: `exempt` or `limit`", "known"),
    ] {
        assert_eq!(spelled(may_be), rule);
    }
}
