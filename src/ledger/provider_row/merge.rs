//! The comparison of a provider file with the database, column by column, by the file that was applied last.
//!
//! A value that only the file changes is applied. A value that only an operator has changed, by a command or by SQL, stays
//! and is reported. A value that both have changed is a conflict, and nothing is applied. Numbers that mean something
//! together (a rate, an account's rule) are compared together: a mixture of both sides would be neither's.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{AccountRow, LimitRow, Object, ProviderRow};
use crate::domain::printable::redact_url;

/// Columns of a limit that are one value.
const RATE: (&str, &[&str]) = ("rate", &["max_requests", "window_ms"]);
/// Columns of an account's row that are one value.
const RULE: (&str, &[&str]) = ("rule", &["rule", "max_requests", "window_ms", "burst"]);
/// Provider columns that hold any text, which may be a secret.
const UNSHOWN: [&str; 4] = ["headers", "request", "lookup", "statuses"];

/// A value that was changed by hand, and that the file does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandChange {
    pub provider: String,
    /// Table and key of the row in the audit, and the columns that differ there.
    pub table: &'static str,
    pub row_key: String,
    pub columns: Vec<String>,
    /// `workers`, `limit per-second`, `rule of account shop-7`.
    pub what: String,
    /// `None`: not shown.
    pub by_hand: Option<String>,
    pub in_file: Option<String>,
}

/// A provider's row after the comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedRow {
    pub row: ProviderRow,
    /// Changes by hand that stay.
    pub kept: Vec<HandChange>,
    /// Changes by hand of values that the file changes too.
    pub conflicts: Vec<HandChange>,
}

/// Compares a file's row with the present one; `applied` is the row of the file that was applied last. For a provider
/// that no file has described yet, that is [`ProviderRow::default`].
pub fn merge_file(applied: &ProviderRow, present: &ProviderRow, file: &ProviderRow) -> MergedRow {
    let mut merge = Merge { provider: &file.name, kept: Vec::new(), conflicts: Vec::new() };
    let mut row = merge.provider_row([applied, present, file]);
    row.limits = merge.rows([&applied.limits, &present.limits, &file.limits]);
    row.accounts = match file.accounts_unmentioned {
        true => present.accounts.clone(),
        false => merge.rows([&applied.accounts, &present.accounts, &file.accounts]),
    };
    MergedRow { row, kept: merge.kept, conflicts: merge.conflicts }
}

/// A row below a provider's.
trait RowBelow: Clone + PartialEq + Serialize + DeserializeOwned {
    const TABLE: &'static str;
    const TOGETHER: (&'static str, &'static [&'static str]);

    fn is_same(&self, other: &Self) -> bool;
    /// The key in the audit.
    fn audit_key(&self, provider: &str) -> String;
    fn name(&self) -> String;
    fn describe(&self) -> String;
    /// Takes over the return of the present row, because its value stays.
    fn keep_return(&mut self, present: &Self);
}

impl RowBelow for LimitRow {
    const TABLE: &'static str = "provider_limits";
    const TOGETHER: (&'static str, &'static [&'static str]) = RATE;

    fn is_same(&self, other: &Self) -> bool {
        self.name == other.name
    }

    fn audit_key(&self, provider: &str) -> String {
        format!("{provider}/{}", self.name)
    }

    fn name(&self) -> String {
        format!("limit {}", self.name)
    }

    fn describe(&self) -> String {
        Self::describe(self)
    }

    fn keep_return(&mut self, present: &Self) {
        self.returns = present.returns;
    }
}

impl RowBelow for AccountRow {
    const TABLE: &'static str = "account_overrides";
    const TOGETHER: (&'static str, &'static [&'static str]) = RULE;

    fn is_same(&self, other: &Self) -> bool {
        self.is_rule_of(&other.account, other.limit_name.as_deref())
    }

    fn audit_key(&self, provider: &str) -> String {
        Self::audit_key(self, provider)
    }

    fn name(&self) -> String {
        self.describe_subject()
    }

    fn describe(&self) -> String {
        Self::describe(self)
    }

    fn keep_return(&mut self, present: &Self) {
        self.returns.clone_from(&present.returns);
    }
}

/// The row of the last file, of the database and of the file.
type Three<T> = [T; 3];

/// The side that a value is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Present,
    /// The present value, which was changed by hand.
    Kept,
    File,
    Conflict,
}

fn side<T: PartialEq>([applied, present, file]: Three<T>) -> Side {
    match () {
        () if file == applied && present == applied => Side::Present,
        () if file == applied => Side::Kept,
        () if present == applied || present == file => Side::File,
        () => Side::Conflict,
    }
}

struct Merge<'a> {
    provider: &'a str,
    kept: Vec<HandChange>,
    conflicts: Vec<HandChange>,
}

impl Merge<'_> {
    fn report(&mut self, side: Side, change: HandChange) {
        match side {
            Side::Kept => self.kept.push(change),
            Side::Conflict => self.conflicts.push(change),
            Side::Present | Side::File => {}
        }
    }

    fn provider_row(&mut self, rows: Three<&ProviderRow>) -> ProviderRow {
        let [applied, present, file] = rows;
        let three = rows.map(columns);
        let mut merged = Object::new();
        for column in column_names(&three, &["limit", "account"]) {
            let values = three.each_ref().map(|row| row.get(&column));
            // Neither file says it, or the new one does for the first time.
            let side = match (column.as_str(), file.pause_unmentioned, applied.pause_unmentioned) {
                ("paused", true, _) => Side::Present,
                ("paused", false, true) => Side::File,
                _ => side(values),
            };
            self.report(
                side,
                HandChange {
                    provider: self.provider.to_owned(),
                    table: "providers",
                    row_key: self.provider.to_owned(),
                    columns: vec![column.clone()],
                    what: column.clone(),
                    by_hand: shown(&column, values[1]),
                    in_file: shown(&column, values[2]),
                },
            );
            let [_, present, file] = values;
            let taken = if side == Side::File { file } else { present };
            merged.extend(taken.map(|value| (column, value.clone())));
        }
        let row: ProviderRow = from_columns(merged).unwrap_or_else(|| present.clone());
        ProviderRow { resumed_at: present.resumed_at, ..row }
    }

    fn rows<T: RowBelow>(&mut self, rows: Three<&[T]>) -> Vec<T> {
        let [applied, present, file] = rows;
        let added = file.iter().filter(|row| !present.iter().any(|other| other.is_same(row)));
        let gone = applied.iter().filter(|row| !present.iter().chain(file).any(|other| other.is_same(row)));
        let all = present.iter().chain(added).chain(gone);
        let find = |row: &T| rows.map(|side| side.iter().find(|other| other.is_same(row)));
        all.filter_map(|row| self.row(row, find(row))).collect()
    }

    /// One row below the provider's; `None`: there is none afterwards.
    fn row<T: RowBelow>(&mut self, any: &T, three: Three<Option<&T>>) -> Option<T> {
        let [_, present, file] = three;
        let name = self.provider;
        let change = |what: String, columns: Vec<String>, values: [Option<String>; 2]| {
            let [by_hand, in_file] = values;
            let row_key = any.audit_key(name);
            HandChange { provider: name.to_owned(), table: T::TABLE, row_key, columns, what, by_hand, in_file }
        };
        let [Some(_), Some(now), Some(_)] = three else {
            let side = side(three.map(|row| row.map(columns)));
            let describe = |row: Option<&T>| Some(row.map_or_else(|| "none".to_owned(), RowBelow::describe));
            let change = change(any.name(), Vec::new(), [describe(present), describe(file)]);
            self.report(side, change);
            return if side == Side::File { file.cloned() } else { present.cloned() };
        };
        let objects = three.map(|row| row.map(columns).unwrap_or_default());
        let (together, group) = T::TOGETHER;
        let names = column_names(&objects, group).into_iter().map(|name| (name.clone(), vec![name]));
        let group = (together.to_owned(), group.iter().map(|&name| name.to_owned()).collect());
        let (mut merged, mut keeps_return, mut found) = (Object::new(), true, Vec::new());
        for (name, columns) in std::iter::once(group).chain(names) {
            let values = objects.each_ref().map(|row| columns.iter().map(|column| row.get(column)).collect::<Vec<_>>());
            let side = side(values.each_ref());
            let [_, present, file] = &values;
            let describe = |values: &[Option<&Value>]| describe_values::<T>(&columns, values);
            let shown = [describe(present), describe(file)];
            let taken = if side == Side::File { file } else { present };
            let given = columns.iter().zip(taken).filter_map(|(name, value)| Some((name.clone(), (*value)?.clone())));
            merged.extend(given);
            keeps_return &= name != together || side != Side::File;
            found.push((side, change(format!("{name} of {}", any.name()), columns.clone(), shown)));
        }
        found.into_iter().for_each(|(side, change)| self.report(side, change));
        let mut row: T = from_columns(merged).unwrap_or_else(|| now.clone());
        if keeps_return {
            row.keep_return(now);
        }
        Some(row)
    }
}

/// The columns of a row, by the names that the file uses.
fn columns<T: Serialize>(row: &T) -> Object {
    match serde_json::to_value(row) {
        Ok(Value::Object(columns)) => columns,
        _ => Object::new(),
    }
}

fn from_columns<T: DeserializeOwned>(columns: Object) -> Option<T> {
    serde_json::from_value(Value::Object(columns)).ok()
}

fn column_names(rows: &Three<Object>, except: &[&str]) -> Vec<String> {
    let names = rows.iter().flat_map(Object::keys).filter(|name| !except.contains(&name.as_str()));
    let mut names: Vec<String> = names.cloned().collect();
    names.sort();
    names.dedup();
    names
}

/// A provider's column for a message; `None`: it may hold a secret.
fn shown(column: &str, value: Option<&Value>) -> Option<String> {
    match value {
        _ if UNSHOWN.contains(&column) => None,
        Some(Value::String(url)) if column == "url" => Some(redact_url(url)),
        value => Some(describe_value(value)),
    }
}

/// Values of a limit or an account's rule: a rate or a rule as a whole, or one column.
fn describe_values<T: RowBelow>(columns: &[String], values: &[Option<&Value>]) -> Option<String> {
    if let [value] = values {
        return Some(describe_value(*value));
    }
    let given = columns.iter().zip(values).filter_map(|(name, value)| Some((name.clone(), (*value)?.clone())));
    Some(from_columns::<T>(given.collect())?.describe())
}

pub fn describe_value(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "none".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::with;
    use super::*;

    fn texts(changes: &[HandChange]) -> Vec<String> {
        let text = |change: &HandChange| {
            let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".to_owned());
            format!("{}: {} | {}", change.what, value(&change.by_hand), value(&change.in_file))
        };
        changes.iter().map(text).collect()
    }

    /// `(last file, by hand, file)`, the value afterwards, and the report.
    #[test]
    fn each_value_comes_from_the_side_that_changed_it() {
        let limits = |max_requests: u32, window_ms: u32| json!({"limit": [{"name": "all", "max_requests": max_requests, "window_ms": window_ms}]});
        let accounts = |rows: serde_json::Value| json!({"account": rows});
        let blocked = json!({"account": "a", "rule": "blocked"});
        let own = json!({"account": "a", "rule": "limit", "max_requests": 5, "window_ms": 1000});
        let heavy = json!({"account": "a", "rule": "blocked", "weight": 3});
        let none = json!({});
        let table = [
            // By hand only.
            ([&none, &json!({"workers": 64}), &none], &json!({"workers": 64}), "kept workers: 64 | 32"),
            (
                [&none, &accounts(json!([blocked])), &none],
                &accounts(json!([blocked])),
                "kept account a: blocked | none",
            ),
            (
                [&accounts(json!([blocked])), &none, &accounts(json!([blocked]))],
                &none,
                "kept account a: none | blocked",
            ),
            (
                [&accounts(json!([own])), &accounts(json!([blocked])), &accounts(json!([own]))],
                &accounts(json!([blocked])),
                "kept rule of account a: blocked | limit 5/1s",
            ),
            // In the file only, or the same on both sides.
            ([&none, &none, &json!({"workers": 16})], &json!({"workers": 16}), ""),
            ([&accounts(json!([blocked])), &accounts(json!([blocked])), &none], &none, ""),
            ([&none, &accounts(json!([blocked])), &accounts(json!([blocked]))], &accounts(json!([blocked])), ""),
            // Both, at different values.
            (
                [&accounts(json!([blocked])), &accounts(json!([own])), &accounts(json!([heavy]))],
                &accounts(
                    json!([{"account": "a", "rule": "limit", "max_requests": 5, "window_ms": 1000, "weight": 3}]),
                ),
                "kept rule of account a: limit 5/1s | blocked",
            ),
            // Both, at the same one.
            (
                [&none, &json!({"workers": 64}), &json!({"workers": 16})],
                &json!({"workers": 64}),
                "conflict workers: 64 | 16",
            ),
            (
                [&none, &accounts(json!([blocked])), &accounts(json!([own]))],
                &accounts(json!([blocked])),
                "conflict account a: blocked | limit 5/1s",
            ),
            (
                [&accounts(json!([own])), &accounts(json!([blocked])), &none],
                &accounts(json!([blocked])),
                "conflict account a: blocked | none",
            ),
            // The numbers of a rate belong together.
            (
                [&limits(100, 1000), &limits(200, 1000), &limits(100, 2000)],
                &limits(200, 1000),
                "conflict rate of limit all: 200/1s | 100/2s",
            ),
            (
                [&none, &json!({"headers": {"A": "x"}}), &json!({"headers": {"A": "y"}})],
                &json!({"headers": {"A": "x"}}),
                "conflict headers: ? | ?",
            ),
        ];
        for (rows, wanted, report) in table {
            let [applied, present, file] = rows.map(|columns| with(columns.clone()));
            let merged = merge_file(&applied, &present, &file);
            let kept = texts(&merged.kept).into_iter().map(|text| format!("kept {text}"));
            let conflicts = texts(&merged.conflicts).into_iter().map(|text| format!("conflict {text}"));
            assert_eq!(kept.chain(conflicts).collect::<Vec<_>>().join("; "), report, "{rows:?}");
            assert_eq!(merged.row, with(wanted.clone()), "{rows:?}");
        }
    }

    #[test]
    fn unmentioned_values_are_never_compared() {
        let rules = json!({"account": [{"account": "a", "rule": "blocked"}], "paused": true});
        let file = ProviderRow { accounts_unmentioned: true, pause_unmentioned: true, ..with(json!({})) };
        let merged = merge_file(&with(json!({})), &with(rules.clone()), &file);
        assert_eq!((merged.row, merged.kept.len() + merged.conflicts.len()), (with(rules.clone()), 0));
        // The first file that mentions the pause decides it.
        let merged = merge_file(&file, &with(json!({"paused": true})), &with(json!({"paused": false})));
        assert!(!merged.row.paused && merged.conflicts.is_empty());
    }
}
