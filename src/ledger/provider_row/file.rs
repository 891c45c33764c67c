//! The provider file: TOML with `[[provider]]` tables, `[[provider.limit]]` and `[[provider.account]]` below them.
//!
//! Every table is read key by key, so one run reports all mistakes.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use toml::de::DeTable;
use toml::{Table, Value};

use super::file_text::{TableLines, holds_date, words};
use super::{AccountRow, LimitRow, ProviderRow};
use crate::domain::job::Identifier;

/// Below this similarity, no name is suggested.
const SIMILAR: f64 = 0.8;

/// A provider file as far as it can be read: its rows, and all problems.
#[derive(Debug, Default)]
pub struct ParsedProviderFile {
    pub rows: Vec<ProviderRow>,
    /// One line for each problem, with line, provider and field.
    pub problems: Vec<String>,
}

/// The parser's own message quotes the line, which may hold a secret.
fn unreadable(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    format!("line {}: {}", before.matches('\n').count() + 1, error.message().replace('\n', ", "))
}

/// Parses a provider file.
pub fn parse_provider_file(text: &str) -> Result<Vec<ProviderRow>, Vec<String>> {
    let ParsedProviderFile { rows, problems } = read_provider_file(text);
    if problems.is_empty() { Ok(rows) } else { Err(problems) }
}

/// Parses a provider file, and continues after each problem.
pub fn read_provider_file(text: &str) -> ParsedProviderFile {
    let Ok(mut file) = text.parse::<Table>() else {
        let (_, errors) = DeTable::parse_recoverable(text);
        let problems = errors.iter().map(|error| unreadable(text, error)).collect();
        return ParsedProviderFile { rows: Vec::new(), problems };
    };
    let lines = TableLines::parse(text);
    let mut place = TableContext::new("the file".to_owned(), &lines);
    let tables = tables(&mut file, "provider", &mut place);
    let mut problems = place.problems;
    let stray = file.keys().map(|key| {
        format!("line {}: `{key}` is unknown: a provider file holds [[provider]] tables only", lines.line_of_key(key))
    });
    problems.extend(stray);
    let mut rows: Vec<ProviderRow> = Vec::new();
    let mut names = BTreeSet::new();
    for (index, table) in tables.into_iter().enumerate() {
        let at = text_of_key(&table, "name")
            .map_or_else(|| format!("provider number {}", index + 1), |name| format!("provider `{name}`"));
        let mut place = TableContext::new(at, lines.below("provider", index));
        let resets = weight_resets(&table);
        let row = provider(table, &mut place);
        if !row.name.is_empty() && !names.insert(row.name.clone()) {
            place.problem("name", "is listed twice");
        }
        problems.append(&mut place.problems);
        let effective = without_accounts(&row, &resets);
        if let Err(bad) = effective.validate(0) {
            let own = bad.problems.iter().filter(|problem| !place.is_suspect(problem));
            problems.extend(own.map(|problem| place.locate_problem(&row, problem)));
        }
        rows.push(effective);
    }
    ParsedProviderFile { rows, problems }
}

/// The accounts of a provider's table whose tables say `weight = 1` and nothing else. The database has no row for such an
/// account, so applying the file deletes the row of its former weight.
fn weight_resets(provider: &Table) -> BTreeSet<String> {
    let tables = provider.get("account").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_table);
    let resets = |table: &&Table| table.len() == 2 && table.get("weight").and_then(Value::as_integer) == Some(1);
    let name = |table| text_of_key(table, "account").filter(|name| Identifier::new(name).is_ok());
    tables.filter(resets).filter_map(name).map(str::to_owned).collect()
}

/// The row without the tables that only set back the weights of these accounts.
fn without_accounts(row: &ProviderRow, resets: &BTreeSet<String>) -> ProviderRow {
    let mut row = row.clone();
    row.accounts.retain(|account| !(resets.contains(&account.account) && account.is_empty()));
    row
}

/// Context of one table while it is read.
struct TableContext<'a> {
    /// The table's name in messages, such as "provider `stripe`".
    at: String,
    lines: &'a TableLines,
    /// Keys that could not be read. A problem about one of them would only concern the default in its place.
    suspects: BTreeSet<String>,
    problems: Vec<String>,
}

impl<'a> TableContext<'a> {
    fn new(at: String, lines: &'a TableLines) -> Self {
        Self { at, lines, suspects: BTreeSet::new(), problems: Vec::new() }
    }

    fn problem(&mut self, key: &str, what: &str) {
        self.problems.push(format!("line {}: {}: {what}", self.lines.line_of_key(key), self.at));
    }

    fn is_suspect(&self, problem: &str) -> bool {
        words(problem).any(|word| self.suspects.contains(word))
    }

    /// Adds line and provider to a problem of the whole row. It may begin with the limit or account that it is about.
    fn locate_problem(&self, row: &ProviderRow, problem: &str) -> String {
        let names = [
            ("limit", row.limits.iter().map(|limit| limit.name.as_str()).collect::<Vec<_>>()),
            ("account", row.accounts.iter().map(|account| account.account.as_str()).collect()),
        ];
        let below = names.iter().find_map(|(key, names)| {
            let (name, rest) = problem.strip_prefix(key)?.strip_prefix(" `")?.split_once('`')?;
            let named = names.iter().enumerate().filter(|(_, own)| **own == name);
            let tables: Vec<&TableLines> = named.map(|(index, _)| self.lines.below(key, index)).collect();
            // Of two tables with one name, take the one that has the key.
            let with_key = tables.iter().find(|lines| lines.has_key_in(rest));
            Some((*with_key.or_else(|| tables.last())?, rest))
        });
        let line = match below {
            Some((lines, rest)) => lines.line_of_problem(rest),
            None => self.lines.line_of_problem(problem),
        };
        format!("line {line}: {}: {problem}", self.at)
    }
}

fn text_of_key<'a>(table: &'a Table, key: &str) -> Option<&'a str> {
    table.get(key).and_then(Value::as_str)
}

fn provider(mut table: Table, place: &mut TableContext<'_>) -> ProviderRow {
    let limits = tables(&mut table, "limit", place);
    let accounts = tables(&mut table, "account", place);
    match table.remove("accounts") {
        None => {}
        Some(Value::Array(none)) if none.is_empty() && accounts.is_empty() => {}
        Some(_) => {
            place.problem("accounts", "`accounts` can only be [], for no account rule: write [[provider.account]]")
        }
    }
    let mut row: ProviderRow = read_keys(table, place);
    row.limits = read_subtables::<LimitRow>(limits, ("limit", "name"), place);
    row.accounts = read_subtables::<AccountRow>(accounts, ("account", "account"), place);
    row
}

/// The rows of an array of tables; `kind`: its key, and the key with each row's name.
fn read_subtables<T: DeserializeOwned + Default>(
    tables: Vec<Table>,
    kind: (&str, &str),
    place: &mut TableContext<'_>,
) -> Vec<T> {
    let (key, name_key) = kind;
    let mut rows = Vec::with_capacity(tables.len());
    for (index, table) in tables.into_iter().enumerate() {
        let at = match text_of_key(&table, name_key) {
            Some(name) => format!("{}, {key} `{name}`", place.at),
            None => format!("{}, {key} number {}", place.at, index + 1),
        };
        let mut own = TableContext::new(at, place.lines.below(key, index));
        rows.push(read_keys(table, &mut own));
        place.suspects.append(&mut own.suspects);
        place.problems.append(&mut own.problems);
    }
    rows
}

/// Removes an array of tables from `parent` and returns it.
fn tables(parent: &mut Table, key: &str, place: &mut TableContext<'_>) -> Vec<Table> {
    let array = match parent.remove(key) {
        None => return Vec::new(),
        Some(Value::Array(array)) => array,
        Some(_) => {
            let what = format!("`{key}` must be an array of tables: write [[{key}]] with double brackets");
            place.problem(key, &what);
            place.suspects.insert(key.to_owned());
            return Vec::new();
        }
    };
    let mut tables = Vec::with_capacity(array.len());
    for value in array {
        match value {
            Value::Table(table) => tables.push(table),
            _ => place.problem(key, &format!("every `{key}` must be a table")),
        }
    }
    tables
}

/// Reads a table whose row type has a default for every key: first each key alone, then all valid keys at once.
fn read_keys<T: DeserializeOwned + Default>(table: Table, place: &mut TableContext<'_>) -> T {
    let mut good = Table::new();
    for (key, value) in table {
        if holds_date(&value) {
            place.problem(&key, &format!("`{key}`: JSON has no dates, put the date in quotes"));
            place.suspects.insert(key);
            continue;
        }
        let alone = Table::from_iter([(key.clone(), value.clone())]);
        match alone.try_into::<T>() {
            Ok(_) => {
                good.insert(key, value);
            }
            Err(error) => {
                let meant = similar_key(&key, error.message());
                place.problem(&key, &invalid_key(&key, &value, error.message(), meant.as_deref()));
                place.suspects.extend(meant);
                place.suspects.insert(key);
            }
        }
    }
    good.try_into().unwrap_or_default()
}

/// Why a key cannot be read, and how to write it. Repeats no text, which may be a secret, unless it is a number.
fn invalid_key(key: &str, value: &Value, message: &str, meant: Option<&str>) -> String {
    if message.starts_with("unknown field") {
        let hint = meant
            .map_or_else(|| "docs/providers.md has all fields".to_owned(), |meant| format!("did you mean `{meant}`?"));
        return format!("`{key}` is unknown: {hint}");
    }
    let got = match value {
        Value::String(text) if text.trim().parse::<f64>().is_ok() => {
            format!("the text \"{text}\": write it without quotes")
        }
        Value::String(_) => "a text".to_owned(),
        Value::Integer(number) => format!("the number {number}"),
        Value::Float(number) => format!("the number {number}"),
        Value::Boolean(bool) => format!("{bool}"),
        Value::Array(_) => "an array".to_owned(),
        Value::Table(_) => "a table".to_owned(),
        Value::Datetime(_) => "a date".to_owned(),
    };
    let wanted = match message.rsplit_once("expected ").map(|(_, wanted)| wanted.trim()) {
        Some("i64" | "u64" | "u32") => "an integer",
        Some("f64") => "a number",
        Some("a boolean") => "true or false",
        Some("a string") => "a text in quotes",
        Some("a map") => "a table: { key = value }",
        _ => return format!("`{key}`: {}", without_quotation(message)),
    };
    format!("`{key}` must be {wanted}, got {got}")
}

/// The most likely key for an unknown one, out of those that the error lists.
fn similar_key(unknown: &str, message: &str) -> Option<String> {
    let listed = message.strip_prefix("unknown field")?.split_once("expected")?.1;
    let known = listed.split('`').skip(1).step_by(2);
    nearest(unknown, known).map(str::to_owned)
}

/// The most similar known word, if it is similar enough.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let close = known.map(|known| (strsim::jaro_winkler(word, known), known)).filter(|(close, _)| *close >= SIMILAR);
    close.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| known)
}

/// An error message without the text that it quotes, which may be a secret.
fn without_quotation(message: &str) -> String {
    match (message.find('"'), message.rfind('"')) {
        (Some(from), Some(to)) if from < to => format!("{}{}", message[..from].trim_end(), &message[to + 1..]),
        _ => message.to_owned(),
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
        // A file with the output of `show` can be applied again.
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
            "line 6: provider `stripe`: `timeout` is unknown: did you mean `timeout_ms`?",
            "line 7: provider `stripe`: `workers` must be an integer, got a text",
            "line 10: provider `stripe`, limit `per-second`: `max_requests` must be an integer, got the text \"100\": write it \
             without quotes",
            "line 8: provider `stripe`: limit `per-second`: window_ms",
            "line 15: provider `Bad Name`: `request`: JSON has no dates",
            "line 12: provider `Bad Name`: name",
            "line 13: provider `Bad Name`: url must begin with https://",
            "line 14: provider `Bad Name`: workers",
            "provider number 3: name",
            "provider number 3: mode is `drop`",
            "provider number 3: a provider without an enabled limit",
        ] {
            assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:#?}");
        }
    }

    /// An earlier version reported two of seven mistakes.
    #[test]
    fn unreadable_key_hides_no_other_problem() {
        let text = r#"
[[provider]]
name = "acme"
uri = "https://acme.example/"
mode = "blockin"
workers = 0
[[provider.limit]]
name = "second"
max_requests = "100"
window_ms = 0
algoritm = "gcra"
[[provider.limit]]
name = "second"
max_requests = 1
window_ms = 1000
scope = "acount"
[[provider.account]]
account = "a b"
rule = "exemt"
"#;
        let problems = parse_provider_file(text).unwrap_err();
        let wanted = [
            "line 4: provider `acme`: `uri` is unknown: did you mean `url`?",
            "line 9: provider `acme`, limit `second`: `max_requests` must be an integer, got the text \"100\"",
            "line 11: provider `acme`, limit `second`: `algoritm` is unknown: did you mean `algorithm`?",
            "line 5: provider `acme`: mode is `blockin`: must be blocking or requeue; did you mean `blocking`?",
            "line 6: provider `acme`: workers is 0",
            "provider `acme`: limit `second`: is listed twice",
            "line 10: provider `acme`: limit `second`: ",
            "line 16: provider `acme`: limit `second`: scope is `acount`: must be provider or account or reference; did you mean `account`?",
            "rule is `exemt`: must be exempt or blocked or refuse or limit; did you mean `exempt`?",
        ];
        for part in wanted {
            assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:#?}");
        }
        let missing = problems.iter().any(|problem| problem.contains("url is missing"));
        assert!(!missing, "the misspelt key is blamed once: {problems:#?}");
    }

    /// The former weight goes with its row. A table without rule and weight is a mistake, as before.
    #[test]
    fn weight_of_one_sets_an_account_back() {
        let account = |keys: &str| format!("{GOOD}[[provider.account]]\naccount = \"shop\"\n{keys}");
        let accounts = |keys: &str| parse_provider_file(&account(keys)).map(|rows| rows[0].accounts.clone());
        assert_eq!(accounts("weight = 1\n"), Ok(Vec::new()));
        assert_eq!(accounts("weight = 2\n").unwrap()[0].weight, 2);
        assert_eq!(accounts("weight = 1\nrule = \"blocked\"\n").unwrap()[0].rule.as_deref(), Some("blocked"));
        let problems = accounts("").unwrap_err();
        assert!(problems.len() == 1 && problems[0].contains("has no rule, and its weight is 1"), "{problems:?}");
        let beside =
            parse_provider_file(&format!("{}[[provider.account]]\naccount = \"b\"\n", account("weight = 1\n")));
        let beside = beside.unwrap_err();
        assert!(beside.len() == 1 && beside[0].contains("provider `stripe`: account `b`: has no rule"), "{beside:?}");
    }

    #[test]
    fn every_toml_syntax_error_is_reported() {
        let problems = parse_provider_file("[[provider]]\nname = acme\nurl = 'x'\nmode = also\n").unwrap_err();
        let lines: Vec<&str> =
            problems.iter().filter_map(|problem| problem.split_once(':')).map(|(line, _)| line).collect();
        assert!(lines.contains(&"line 2") && lines.contains(&"line 4"), "{problems:?}");
    }

    #[test]
    fn toml_error_names_the_line_without_its_text() {
        let text = "# rows\n[[provider]]\nname = \"acme\"\nheaders = { Authorization = \"Bearer sk_live_4eC39HqL }\n";
        let problems = parse_provider_file(text).unwrap_err();
        assert!(problems.iter().all(|problem| problem.starts_with("line 4: ")), "{problems:?}");
        assert!(!problems.is_empty() && !problems.concat().contains("sk_live"), "{problems:?}");
    }

    #[test]
    fn misplaced_text_is_reported_without_its_value() {
        let text = "[[provider]]\nname = \"acme\"\nheaders = \"Bearer \\\"hunter2\\\"\"\nworkers = \"hunter2\"\n";
        let problems = parse_provider_file(text).unwrap_err();
        let headers =
            problems.iter().any(|problem| problem.starts_with("line 3: provider `acme`: `headers` must be a table"));
        let workers =
            problems.iter().any(|problem| problem.starts_with("line 4: provider `acme`: `workers` must be an integer"));
        assert!(headers && workers && !problems.concat().contains("hunter2"), "{problems:#?}");
    }

    #[test]
    fn provider_file_must_be_a_table_list() {
        assert!(parse_provider_file("provider = 1").unwrap_err()[0].contains("[[provider]]"));
        assert!(parse_provider_file("[[provider").is_err());
        let twice = format!("{GOOD}{GOOD}");
        assert_eq!(parse_provider_file(&twice).unwrap_err(), ["line 20: provider `stripe`: is listed twice"]);
    }
}
