//! What only the text of a provider file says: the lines of its tables and keys, and pauses and account rules that it
//! does not mention.
//!
//! Parsed rows have no line numbers, and an error without a line is hard to find in a file of many providers.
//!
//! Applying a file that does not mention `paused` keeps the pause of the stored row. The default of `paused` is
//! `false`. Without this rule, a deployment that applies its rows would end the pause of an incident. Nor does a file
//! without account rules remove those of the stored row, unless it says `accounts = []`.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::ProviderRow;

/// Line numbers of one table and its keys.
#[derive(Clone, Debug, Default)]
pub struct TableLines {
    line: usize,
    keys: BTreeMap<String, usize>,
    /// The tables below it, by the key of their array.
    below: BTreeMap<String, Vec<TableLines>>,
}

impl TableLines {
    /// Line numbers of a valid TOML file.
    pub fn parse(text: &str) -> Self {
        DeTable::parse(text).map(|table| Self::of_table(text, 1, table.get_ref())).unwrap_or_default()
    }

    fn of_table(text: &str, line: usize, table: &DeTable<'_>) -> Self {
        let mut lines = Self { line, ..Self::default() };
        for (key, value) in table.iter() {
            let name = key.get_ref().to_string();
            if let DeValue::Array(array) = value.get_ref() {
                let tables = array.iter().filter_map(|element| match element.get_ref() {
                    DeValue::Table(table) => Some(Self::of_table(text, line_of(text, element.span().start), table)),
                    _ => None,
                });
                lines.below.insert(name.clone(), tables.collect());
            }
            lines.keys.insert(name, line_of(text, key.span().start));
        }
        lines
    }

    /// The table at this index of an array of tables; if there is none, this table.
    pub fn below(&self, key: &str, index: usize) -> &Self {
        self.below.get(key).and_then(|tables| tables.get(index)).unwrap_or(self)
    }

    /// The line of a key, or else of the table's header.
    pub fn line_of_key(&self, key: &str) -> usize {
        self.keys.get(key).copied().unwrap_or(self.line)
    }

    /// Whether a message names one of the table's keys.
    pub fn has_key_in(&self, sentence: &str) -> bool {
        words(sentence).any(|word| self.keys.contains_key(word))
    }

    /// The line of the first key that a message names.
    pub fn line_of_problem(&self, sentence: &str) -> usize {
        words(sentence).find_map(|word| self.keys.get(word).copied()).unwrap_or(self.line)
    }
}

/// Words of a message that may be keys.
pub fn words(sentence: &str) -> impl Iterator<Item = &str> {
    sentence.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

fn line_of(text: &str, at: usize) -> usize {
    text.get(..at).unwrap_or_default().matches('\n').count() + 1
}

/// Whether a value holds a date, which JSON has not.
pub fn holds_date(value: &Value) -> bool {
    match value {
        Value::Datetime(_) => true,
        Value::Array(array) => array.iter().any(holds_date),
        Value::Table(table) => table.values().any(holds_date),
        _ => false,
    }
}

/// Marks the rows of a file, as [`super::parse_provider_file`] read them, that do not mention `paused`, or account rules.
pub fn mark_unmentioned(text: &str, rows: &mut [ProviderRow]) {
    let Ok(file) = text.parse::<Table>() else { return };
    let tables = file.get("provider").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for (row, table) in rows.iter_mut().zip(tables) {
        row.pause_unmentioned = table.get("paused").is_none();
        row.accounts_unmentioned = ["account", "accounts"].iter().all(|key| table.get(key).is_none());
    }
}

impl ProviderRow {
    /// The row to apply, with pause and account rules of the stored row, if there is one, where the file says nothing.
    pub fn keep_unmentioned(&self, present: Option<&Self>) -> Self {
        let mut row = self.clone();
        let Some(present) = present else { return row };
        if row.pause_unmentioned {
            row.paused = present.paused;
        }
        if row.accounts_unmentioned {
            row.accounts.clone_from(&present.accounts);
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse_provider_file;

    use super::*;

    #[test]
    fn unmentioned_pause_and_rules_are_kept() {
        let row = |name: &str, line: &str| {
            format!(
                "[[provider]]\nname = \"{name}\"\nurl = \"https://x.example/\"\n{line}\n\
                 [[provider.limit]]\nname = \"all\"\nmax_requests = 1\nwindow_ms = 1000\n"
            )
        };
        let text = [row("a", ""), row("b", "paused = false"), row("c", "paused = true")].concat();
        let mut rows = parse_provider_file(&text).unwrap();
        mark_unmentioned(&text, &mut rows);
        assert_eq!(rows.iter().map(|row| row.pause_unmentioned).collect::<Vec<_>>(), [true, false, false]);
        let applied = |there: Option<bool>| -> Vec<bool> {
            let present = there.map(|paused| ProviderRow { paused, ..ProviderRow::default() });
            rows.iter().map(|row| row.keep_unmentioned(present.as_ref()).paused).collect()
        };
        assert_eq!(applied(None), [false, false, true]);
        assert_eq!(applied(Some(true)), [true, false, true]);
        assert_eq!(applied(Some(false)), [false, false, true]);
        let rule = "[[provider.account]]\naccount = \"x\"\nrule = \"blocked\"\n";
        let text = [row("a", ""), row("b", "accounts = []"), row("c", "") + rule].concat();
        let mut rows = parse_provider_file(&text).unwrap();
        mark_unmentioned(&text, &mut rows);
        let present = ProviderRow { accounts: rows[2].accounts.clone(), ..ProviderRow::default() };
        let kept = rows.iter().map(|row| row.keep_unmentioned(Some(&present)).accounts.len()).collect::<Vec<_>>();
        assert_eq!((kept, rows[1].keep_unmentioned(None).accounts.len()), (vec![1, 0, 1], 0));
    }
}
