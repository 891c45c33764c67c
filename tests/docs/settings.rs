//! Configuration keys, variables, provider files and SQL in the documentation: each exists in the program.

use std::collections::BTreeSet;

use sluicegate::config::DEFAULTS;
use sluicegate::domain::limit::{Algorithm, Rate};
use sluicegate::domain::response::{StatusMeaning, WaitUnit};
use sluicegate::ledger::database::Database;
use sluicegate::ledger::provider_row::parse_provider_file;
use sluicegate::provider::http::HttpProvider;

use crate::page::{Page, plain};

/// Keys that producers, operators and scripts rely on: none may be removed or renamed.
const PUBLIC_KEYS: [&str; 16] = [
    "database.url",
    "database.max_connections",
    "queue.url",
    "queue.prefix",
    "limiter.url",
    "limiter.prefix",
    "outbound.allow",
    "outbound.secrets",
    "ops.listen",
    "ops.token",
    "worker.drain_timeout_ms",
    "worker.card_numbers",
    "ledger.scrub_after_days",
    "ledger.scrub_review_after_days",
    "tls.ca_file",
    "tls.plaintext_hosts",
];
const SECRETS: [&str; 4] = ["database.url", "queue.url", "limiter.url", "ops.token"];

fn defaults() -> toml::Table {
    DEFAULTS.parse().unwrap()
}

pub fn keys() -> BTreeSet<String> {
    let sections = defaults().into_iter();
    sections
        .flat_map(|(section, values)| {
            let keys: Vec<String> = values.as_table().unwrap().keys().map(|key| format!("{section}.{key}")).collect();
            keys
        })
        .collect()
}

/// The fault of a word that looks like a key (`queue.url`) or a variable of the program.
pub fn wrong(word: &str, keys: &BTreeSet<String>) -> Option<String> {
    let sections: BTreeSet<&str> = keys.iter().filter_map(|key| key.split('.').next()).collect();
    let key = match word.strip_prefix("SLUICEGATE_") {
        Some("CONFIG") => return None,
        Some(name) => {
            let (name, secret) = name.strip_suffix("_FILE").map_or((name, false), |name| (name, true));
            let key = name.to_ascii_lowercase().replace("__", ".");
            if secret && !SECRETS.contains(&key.as_str()) {
                return Some(format!("{word}: {key} is no secret key"));
            }
            key
        }
        None => word.to_owned(),
    };
    let looks_like_a_key = key.split_once('.').is_some_and(|(section, _)| sections.contains(section));
    let ours = word.starts_with("SLUICEGATE_") || looks_like_a_key;
    (ours && !keys.contains(&key)).then(|| format!("{word}: there is no such key"))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    // Slashes belong to the word: `tests/limiter.rs` is a path.
    text.split(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '.' | '/'))).map(|word| word.trim_matches('.'))
}

#[test]
fn every_key_and_variable_named_exists() {
    let keys = keys();
    for key in PUBLIC_KEYS {
        assert!(keys.contains(key), "{key} is missing in config/default.toml");
    }
    let mut problems = Vec::new();
    let mut named = BTreeSet::new();
    for page in Page::all() {
        let code = page.spans().into_iter().chain(page.blocks_of("sh"));
        for text in code.filter(|text| !text.contains('<')) {
            for word in words(&text) {
                problems.extend(wrong(word, &keys).map(|problem| format!("{}: {problem}", page.path)));
                named.extend(keys.contains(word).then(|| word.to_owned()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(named.len() > 8, "keys were not found: {named:?}");
}

#[test]
fn wrong_keys_are_found() {
    let keys = keys();
    for word in ["queue.uri", "SLUICEGATE_QUEUE__URI", "SLUICEGATE_QUEUE__PREFIX_FILE", "worker.threads"] {
        assert!(wrong(word, &keys).is_some(), "{word}");
    }
    for word in ["queue.url", "SLUICEGATE_QUEUE__URL_FILE", "SLUICEGATE_CONFIG", "payments.invalid", "1.2"] {
        assert_eq!(wrong(word, &keys), None);
    }
}

/// The provider files and the SQL of the first pages, on a separate database.
#[tokio::test]
async fn example_provider_files_and_sql_apply() {
    let first_steps = Page::read("docs/getting-started.md");
    let database = Database::open("sqlite::memory:", 1).unwrap();
    database.migrate().await.unwrap();
    let settings = database.clone();
    for (page, changes) in [(&Page::read("README.md"), 2), (&first_steps, 0)] {
        let files: Vec<String> = page.blocks_of("toml");
        assert_eq!(files.len(), 1, "{}", page.path);
        let rows = parse_provider_file(&files[0]).unwrap();
        rows.iter().for_each(|row| drop(row.validate(0).unwrap()));
        let changed = settings.apply_settings(&rows, false).await.unwrap();
        assert_eq!(changed.len(), changes, "{}: {changed:?}", page.path);
    }
    let rate = async || {
        let snapshot = settings.load_settings().await.unwrap();
        snapshot.providers[0].as_ref().unwrap().limits[0].rate
    };
    assert_eq!(rate().await, "100/1s".parse::<Rate>().unwrap());
    for statement in Page::read("docs/commands.md").blocks_of("sql") {
        let done = sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&database.sqlite_pool().unwrap()).await.unwrap();
        assert_eq!(done.rows_affected(), 1);
    }
    assert_eq!(rate().await, "200/1s".parse::<Rate>().unwrap());
    let counted = first_steps.blocks_of("sh").join("\n");
    let query = counted.split("sqlite3 sluicegate.db '").nth(1).unwrap().split('\'').next().unwrap().to_owned();
    sqlx::query(sqlx::AssertSqlSafe(query)).fetch_all(&database.sqlite_pool().unwrap()).await.unwrap();
    database.close().await;
}

/// The provider files of the documentation and of `config/`.
#[test]
fn every_provider_file_shown_is_valid() {
    let shown = Page::read("docs/providers.md").blocks_of("toml");
    assert_eq!(shown.len(), 4);
    let files = ["config/providers.example.toml", "config/compose.providers.toml"];
    let texts = files.map(|path| Page::read(path).text).into_iter().chain(shown);
    let rows: Vec<_> = texts.flat_map(|text| parse_provider_file(&text).unwrap()).collect();
    let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["acme", "bolt", "acme", "bolt", "issuer", "gateway", "stripe", "adyen", "vipps", "bank"]);
    for row in rows {
        let problems = HttpProvider::problems(&row.validate(0).unwrap());
        assert!(problems.is_empty(), "{}: {problems:?}", row.name);
    }
}

/// The tables of docs/providers.md name every keyword of a row, and no other.
#[test]
fn row_keywords_match_the_program() {
    let page = Page::read("docs/providers.md");
    let words = |table: Vec<Vec<String>>| -> BTreeSet<String> {
        table.iter().map(|row| plain(row[0].split(' ').next().unwrap()).to_owned()).collect()
    };
    let algorithms = words(page.table("## Limits", "algorithm"));
    assert_eq!(algorithms, Algorithm::ALL.map(|algorithm| algorithm.name().to_owned()).into());
    assert_eq!(
        words(page.table("## Account rules", "`rule`")),
        ["blocked", "exempt", "limit", "refuse"].map(str::to_owned).into()
    );
    for meaning in StatusMeaning::ALL {
        assert!(page.text.contains(&format!("`{}`", meaning.name())), "{} is not documented", meaning.name());
    }
    let keys = words(page.table("## How a payment is requested", "key"));
    assert_eq!(keys, known("request", "no key of it"));
    let about_waits = page.text.split("**A wait**").nth(1).unwrap().split("```").next().unwrap();
    let wait_keys = known("request", "wait").into_iter();
    for word in wait_keys.chain(WaitUnit::ALL.map(|unit| unit.name().to_owned())) {
        assert!(about_waits.contains(&format!("`{word}`")), "{word} is not documented");
    }
}

/// The keys that the program accepts in a JSON column, or in a table of it, from the error about an unknown key.
fn known(column: &str, key: &str) -> BTreeSet<String> {
    let text = format!(
        "[[provider]]\nname = \"acme\"\nurl = \"https://x.example\"\n{column} = {{ \"{key}\" = {{ \"no key of it\" = 1 }} }}\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 1\nwindow_ms = 1000\n"
    );
    let problems = parse_provider_file(&text).unwrap_err();
    let named = problems[0].split("expected one of ").nth(1).unwrap();
    named.split(", ").map(|key| key.trim_matches('`').to_owned()).collect()
}
