//! A provider's row as a provider file, with every hidden character escaped.
//!
//! The TOML library may write strings in quotes that allow no escapes, or over several lines. So hidden characters are
//! first replaced by marks, and the marks then become escapes.

use serde::Serialize;
use toml::Value;

use crate::cli::CommandError;
use crate::domain::printable::is_hidden;
use crate::ledger::provider_row::RedactedRow;

/// Begins a mark: this noncharacter and the six digits of a code point. No text contains it.
const MARK: char = '\u{10ffff}';
const MARK_DIGITS: usize = 6;

#[derive(Serialize)]
struct ExportedFile<'a> {
    provider: &'a [&'a RedactedRow],
}

/// The file, in the form that `provider apply` reads.
pub(super) fn to_provider_file(row: &RedactedRow) -> Result<String, CommandError> {
    let file = ExportedFile { provider: &[row] };
    let failed = |error: toml::ser::Error| CommandError::Failed(format!("the row cannot be shown as TOML: {error}"));
    let plain = toml::to_string_pretty(&file).map_err(failed)?;
    let layout_alone = |c: char| c == '\n' || !is_hidden(c);
    if plain.chars().all(layout_alone) && !plain.contains("\"\"\"") && !plain.contains("'''") {
        return Ok(plain.trim_end().to_owned());
    }
    let marked = toml::to_string_pretty(&mark_hidden_in(Value::try_from(&file).map_err(failed)?)).map_err(failed)?;
    Ok(marks_to_escapes(marked.trim_end()))
}

fn mark_hidden_in(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(mark_hidden(text)),
        Value::Array(values) => Value::Array(values.into_iter().map(mark_hidden_in).collect()),
        Value::Table(table) => {
            Value::Table(table.into_iter().map(|(key, value)| (mark_hidden(key), mark_hidden_in(value))).collect())
        }
        value => value,
    }
}

/// Marks quotes and backslashes too, so that the library uses quotes that allow escapes.
fn mark_hidden(text: String) -> String {
    if !text.chars().any(is_hidden) {
        return text;
    }
    let marked = |c: char| match c {
        c if is_hidden(c) || matches!(c, '"' | '\\' | MARK) => format!("{MARK}{:0MARK_DIGITS$x}", u32::from(c)),
        c => c.to_string(),
    };
    text.chars().map(marked).collect()
}

/// <https://toml.io/en/v1.0.0#string>: `\UXXXXXXXX`.
fn marks_to_escapes(marked: &str) -> String {
    marked.replace(MARK, "\\U00")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ledger::provider_row::ProviderRow;

    #[test]
    fn exported_row_reads_back_unchanged() {
        for text in [
            "plain",
            "two\nlines",
            "quote \" and \\ and \u{202e}",
            "it's\u{200b}\t\u{1b}[2J",
            "\u{e0041}\u{9b}\r\n",
            "'''",
        ] {
            let row: ProviderRow = serde_json::from_value(json!({
                "name": "acme", "url": "https://pay.example/", "headers": { "X-Text": text },
                "request": { "template": { "note": text, text: [text] } },
            }))
            .unwrap();
            let file = to_provider_file(&RedactedRow::from(&row)).unwrap();
            let shown = file.lines().flat_map(str::chars).all(|c| !is_hidden(c));
            assert!(shown && file.lines().count() < 60, "{file}");
            let read: toml::Table = file.parse().unwrap();
            let back: ProviderRow = read["provider"][0].clone().try_into().unwrap();
            assert_eq!(back, row, "{file}");
        }
    }
}
