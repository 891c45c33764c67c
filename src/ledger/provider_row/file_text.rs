//! What only the text of a provider file says: the lines of its tables and keys, and pauses that it does not mention.
//!
//! Parsed rows have no line numbers, and an error without a line is hard to find in a file of many providers.
//!
//! Applying a file that does not mention `paused` keeps the pause of the stored row. The default of `paused` is
//! `false`. Without this rule, a deployment that applies its rows would end the pause of an incident.

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

/// Marks the rows of a file, as [`super::parse_provider_file`] read them, that do not mention `paused`.
pub fn mark_unmentioned_pauses(text: &str, rows: &mut [ProviderRow]) {
    let Ok(file) = text.parse::<Table>() else { return };
    let tables = file.get("provider").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for (row, table) in rows.iter_mut().zip(tables) {
        row.pause_unmentioned = table.get("paused").is_none();
    }
}

impl ProviderRow {
    /// The row to apply, with the pause of the stored row, if there is one.
    pub fn keep_unmentioned_pause(&self, present: Option<&Self>) -> Self {
        let kept = present.filter(|_| self.pause_unmentioned).map(|present| present.paused);
        Self { paused: kept.unwrap_or(self.paused), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse_provider_file;

    use super::*;

    #[test]
    fn unmentioned_pause_is_kept() {
        let row = |name: &str, line: &str| {
            format!(
                "[[provider]]\nname = \"{name}\"\nurl = \"https://x.example/\"\n{line}\n\
                 [[provider.limit]]\nname = \"all\"\nmax_requests = 1\nwindow_ms = 1000\n"
            )
        };
        let text = [row("a", ""), row("b", "paused = false"), row("c", "paused = true")].concat();
        let mut rows = parse_provider_file(&text).unwrap();
        mark_unmentioned_pauses(&text, &mut rows);
        assert_eq!(rows.iter().map(|row| row.pause_unmentioned).collect::<Vec<_>>(), [true, false, false]);
        let applied = |there: Option<bool>| -> Vec<bool> {
            let present = there.map(|paused| ProviderRow { paused, ..ProviderRow::default() });
            rows.iter().map(|row| row.keep_unmentioned_pause(present.as_ref()).paused).collect()
        };
        assert_eq!(applied(None), [false, false, true]);
        assert_eq!(applied(Some(true)), [true, false, true]);
        assert_eq!(applied(Some(false)), [false, false, true]);
    }
}
