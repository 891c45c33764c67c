//! The provider file: TOML with `[[provider]]` tables, `[[provider.limit]]` and `[[provider.account]]` below them.
//!
//! Refuses to stop at the first mistake: every table is read key by key, so one run names them all.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::{AccountRow, LimitRow, ProviderRow};

/// The error's own words quote the line, which may hold a secret.
fn unreadable(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    format!("line {}: {}", before.matches('\n').count() + 1, error.message().replace('\n', ", "))
}

/// Reads and checks a provider file.
///
/// # Errors
/// Every problem of the file, one line each, naming provider and field.
pub fn parse_provider_file(text: &str) -> Result<Vec<ProviderRow>, Vec<String>> {
    let mut file: Table = text.parse().map_err(|error| vec![unreadable(text, &error)])?;
    let mut problems = Vec::new();
    let tables = tables(&mut file, "provider", "the file", &mut problems);
    problems
        .extend(file.keys().map(|key| format!("`{key}` is unknown: a provider file holds [[provider]] tables only")));
    let mut rows: Vec<ProviderRow> = Vec::new();
    let mut names = BTreeSet::new();
    for (index, table) in tables.into_iter().enumerate() {
        let at = table
            .get("name")
            .and_then(Value::as_str)
            .map_or_else(|| format!("provider number {}", index + 1), |name| format!("provider `{name}`"));
        let found_before = problems.len();
        let row = provider(table, &at, &mut problems);
        if !names.insert(row.name.clone()) {
            problems.push(format!("{at}: is listed twice"));
        }
        // A row with unreadable keys would be blamed for the defaults in their place.
        if problems.len() == found_before
            && let Err(bad) = row.meant(0)
        {
            problems.extend(bad.problems.into_iter().map(|problem| format!("{at}: {problem}")));
        }
        rows.push(row);
    }
    if problems.is_empty() { Ok(rows) } else { Err(problems) }
}

fn provider(mut table: Table, at: &str, problems: &mut Vec<String>) -> ProviderRow {
    let limits = tables(&mut table, "limit", at, problems);
    let accounts = tables(&mut table, "account", at, problems);
    let mut row: ProviderRow = keys(table, at, problems);
    row.limits = limits
        .into_iter()
        .map(|limit| {
            let name = limit.get("name").and_then(Value::as_str).unwrap_or("?").to_owned();
            keys::<LimitRow>(limit, &format!("{at}, limit `{name}`"), problems)
        })
        .collect();
    row.accounts = accounts
        .into_iter()
        .map(|account| {
            let name = account.get("account").and_then(Value::as_str).unwrap_or("?").to_owned();
            keys::<AccountRow>(account, &format!("{at}, account `{name}`"), problems)
        })
        .collect();
    row
}

/// Takes an array of tables out of `parent`.
fn tables(parent: &mut Table, key: &str, at: &str, problems: &mut Vec<String>) -> Vec<Table> {
    let array = match parent.remove(key) {
        None => return Vec::new(),
        Some(Value::Array(array)) => array,
        Some(_) => {
            problems.push(format!("{at}: `{key}` must be an array of tables: write [[{key}]] with double brackets"));
            return Vec::new();
        }
    };
    let mut tables = Vec::with_capacity(array.len());
    for value in array {
        match value {
            Value::Table(table) => tables.push(table),
            _ => problems.push(format!("{at}: every `{key}` must be a table")),
        }
    }
    tables
}

/// Reads a table whose row type has a default for every key: each key alone first, then all good ones together.
fn keys<T: DeserializeOwned + Default>(table: Table, at: &str, problems: &mut Vec<String>) -> T {
    let mut good = Table::new();
    for (key, value) in table {
        if holds_date(&value) {
            problems.push(format!("{at}: `{key}`: JSON has no dates, put the date in quotes"));
            continue;
        }
        let alone = Table::from_iter([(key.clone(), value.clone())]);
        match alone.try_into::<T>() {
            Ok(_) => {
                good.insert(key, value);
            }
            Err(error) => problems.push(format!("{at}: `{key}`: {}", without_quotation(error.message()))),
        }
    }
    good.try_into().unwrap_or_default()
}

/// Words of an error that quotes a text, which may be a secret, without it.
fn without_quotation(message: &str) -> String {
    match (message.find('"'), message.rfind('"')) {
        (Some(from), Some(to)) if from < to => format!("{}{}", message[..from].trim_end(), &message[to + 1..]),
        _ => message.to_owned(),
    }
}

fn holds_date(value: &Value) -> bool {
    match value {
        Value::Datetime(_) => true,
        Value::Array(array) => array.iter().any(holds_date),
        Value::Table(table) => table.values().any(holds_date),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
[[provider]]
name = "stripe"
url = "https://api.stripe.com/v1/charges"
idempotency_retention_s = 86400
leak_per_second = 5
headers = { Authorization = "Bearer ${env:STRIPE_KEY}" }
statuses = { 402 = "declined" }

[provider.request]
body = "form"
template = { amount = "${amount}" }

[[provider.limit]]
name = "per-second"
max_requests = 100
window_ms = 1000
"#;

    #[test]
    fn reads_the_contract_names_with_their_defaults() {
        let rows = parse_provider_file(GOOD).unwrap();
        let [row] = rows.as_slice() else { panic!("{rows:?}") };
        assert_eq!((row.workers, row.max_wait_ms, row.idempotency_retention_s), (32, 5_000, Some(86_400)));
        assert_eq!(row.leak_per_second, Some(5.0));
        assert_eq!(row.limits[0].algorithm, "sliding_log");
        assert_eq!(row.headers["Authorization"], "Bearer ${env:STRIPE_KEY}");
        // What `show` prints can be applied again.
        let printed = toml::to_string(&std::collections::BTreeMap::from([("provider", [row])])).unwrap();
        assert_eq!(parse_provider_file(&printed).unwrap(), rows, "{printed}");
    }

    #[test]
    fn names_every_problem_at_once() {
        let text = r#"
stray = 1
[[provider]]
name = "stripe"
url = "https://api.stripe.com/"
timeout = 5
workers = "many"
[[provider.limit]]
name = "per-second"
max_requests = "100"
[[provider]]
name = "Bad Name"
url = "ftp://example.com"
workers = 0
[provider.request]
template = { at = 2026-01-01 }
[[provider]]
url = "https://example.com/"
mode = "drop"
"#;
        let problems = parse_provider_file(text).unwrap_err();
        for part in [
            "`stray` is unknown",
            "provider `stripe`: `timeout`: unknown field",
            "provider `stripe`: `workers`: invalid type",
            "provider `stripe`, limit `per-second`: `max_requests`: invalid type",
            "provider `Bad Name`: `request`: JSON has no dates",
            "provider number 3: name",
            "provider number 3: mode is `drop`",
            "provider number 3: a provider without an enabled limit",
        ] {
            assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:#?}");
        }
    }

    #[test]
    fn a_file_that_is_no_toml_names_its_line_and_not_its_text() {
        let text = "# rows\n[[provider]]\nname = \"acme\"\nheaders = { Authorization = \"Bearer sk_live_4eC39HqL }\n";
        let problems = parse_provider_file(text).unwrap_err();
        let [problem] = problems.as_slice() else { panic!("{problems:?}") };
        assert!(problem.starts_with("line 4: ") && !problem.contains("sk_live"), "{problem}");
    }

    #[test]
    fn a_text_where_none_may_be_is_named_by_its_key_and_not_repeated() {
        let text = "[[provider]]\nname = \"acme\"\nheaders = \"Bearer \\\"hunter2\\\"\"\nworkers = \"hunter2\"\n";
        let problems = parse_provider_file(text).unwrap_err();
        let headers =
            problems.iter().any(|problem| problem.starts_with("provider `acme`: `headers`: invalid type: string, "));
        let workers =
            problems.iter().any(|problem| problem.starts_with("provider `acme`: `workers`: invalid type: string, "));
        assert!(headers && workers && !problems.concat().contains("hunter2"), "{problems:#?}");
    }

    #[test]
    fn refuses_what_is_no_list_of_tables() {
        assert!(parse_provider_file("provider = 1").unwrap_err()[0].contains("[[provider]]"));
        assert!(parse_provider_file("[[provider").is_err());
        let twice = format!("{GOOD}{GOOD}");
        assert_eq!(parse_provider_file(&twice).unwrap_err(), ["provider `stripe`: is listed twice"]);
    }
}
