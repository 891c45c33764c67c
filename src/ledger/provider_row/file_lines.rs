//! Line numbers of the tables and keys of a provider file.
//!
//! Parsed rows have no line numbers, and an error without a line is hard to find in a file of many providers.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

/// Line numbers of one table and its keys.
#[derive(Clone, Debug, Default)]
pub(super) struct TableLines {
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
pub(super) fn words(sentence: &str) -> impl Iterator<Item = &str> {
    sentence.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

fn line_of(text: &str, at: usize) -> usize {
    text.get(..at).unwrap_or_default().matches('\n').count() + 1
}
