//! Printable text: escapes for every output, such as a table, a message, a log line, a page or a JSON document.
//!
//! Ids, references, reasons and errors come from producers, providers, operators and backends. A line break in one
//! could fake a log line, and an escape sequence could control the terminal. An invisible or direction-changing
//! character could hide text. Every output escapes them, and keeps the letters of all scripts.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The text on one line, with each hidden character in its escaped form: `\n`, `\r`, `\t`, `\u{202e}`.
///
/// Escaped text stays as it is, so outputs may be stacked. A backslash stays too: a text that contains the characters
/// `\u{202e}` looks the same, and `--json` tells the two apart.
pub fn printable(text: &str) -> Cow<'_, str> {
    escape_matching(text, is_hidden, |out, c| match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c => push_escape(out, format_args!("\\u{{{:x}}}", u32::from(c))),
    })
}

/// A JSON document in which each hidden character of a string is escaped: the same document for every parser.
///
/// Line ends and tabs between values are layout and stay; within a string JSON allows none.
pub fn printable_json(document: &str) -> Cow<'_, str> {
    escape_matching(
        document,
        |c| is_hidden(c) && !matches!(c, '\n' | '\r' | '\t'),
        |out, c| {
            for unit in c.encode_utf16(&mut [0; 2]) {
                push_escape(out, format_args!("\\u{unit:04x}"));
            }
        },
    )
}

/// Whether a character controls an output or is invisible: control characters, line and paragraph separators, and
/// [invisible](is_invisible) ones.
pub fn is_hidden(c: char) -> bool {
    c.is_control() || is_invisible(c) || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Whether a character shows nothing, or changes the order of the text around it.
///
/// These are property `Default_Ignorable_Code_Point` of Unicode 16, and the interlinear annotations.
pub fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

fn escape_matching(text: &str, hides: impl Fn(char) -> bool, escape: impl Fn(&mut String, char)) -> Cow<'_, str> {
    let Some(first) = text.find(&hides) else { return Cow::Borrowed(text) };
    let (plain, rest) = text.split_at(first);
    let mut out = String::with_capacity(text.len() + 16);
    out.push_str(plain);
    for c in rest.chars() {
        if hides(c) { escape(&mut out, c) } else { out.push(c) }
    }
    Cow::Owned(out)
}

fn push_escape(out: &mut String, escape: std::fmt::Arguments<'_>) {
    // Writing to a `String` never fails.
    out.write_fmt(escape).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_escaped_visibly() {
        for (text, shown) in [
            ("pay-1\npay-2 succeeded", "pay-1\\npay-2 succeeded"),
            ("a\r\n\tb", "a\\r\\n\\tb"),
            ("\u{1b}[2J\u{7}", "\\u{1b}[2J\\u{7}"),
            ("\u{9b}2J\u{85}\u{7f}\0", "\\u{9b}2J\\u{85}\\u{7f}\\u{0}"),
            ("\u{202e}0001\u{2066}", "\\u{202e}0001\\u{2066}"),
            ("pay\u{200b}-1\u{feff}", "pay\\u{200b}-1\\u{feff}"),
            ("a\u{2028}b\u{2029}", "a\\u{2028}b\\u{2029}"),
            ("\u{e0041}", "\\u{e0041}"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }

    #[test]
    fn text_of_every_script_stays_as_it_is() {
        for text in
            ["plain", "Żółć e\u{301}", "дом", "עברית", "العربية", "हिन्दी", "漢字", "한글", "€ → …", "C:\\new", "🙂"]
        {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text), "{text}");
            assert!(matches!(printable_json(text), Cow::Borrowed(same) if same == text), "{text}");
        }
    }

    #[test]
    fn no_character_is_left_hidden_or_escaped_twice() {
        for c in (0..=0x0010_ffff).filter_map(char::from_u32) {
            let text = String::from(c);
            let shown = printable(&text);
            assert!(!shown.is_empty() && !shown.chars().any(is_hidden), "{c:?}");
            assert_eq!(printable(&shown), shown, "{c:?}");
            assert_eq!(shown == text, !is_hidden(c), "{c:?}");
            let document = serde_json::to_string(&text).unwrap();
            let safe = printable_json(&document);
            assert!(!safe.chars().any(is_hidden), "{c:?}");
            assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), text, "{c:?}");
        }
    }

    #[test]
    fn the_layout_of_a_document_stays() {
        let document = serde_json::to_string_pretty(&serde_json::json!({ "a\u{202e}": ["x\ny"] })).unwrap();
        assert_eq!(printable_json(&document), "{\n  \"a\\u202e\": [\n    \"x\\ny\"\n  ]\n}");
    }
}
