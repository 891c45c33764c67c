//! Text that may be shown: escapes for every output, such as a table, a log line, a page or a JSON document, and
//! addresses without their secrets.
//!
//! Ids, references, reasons and errors come from producers, providers, operators and backends. A line break in one
//! could fake a log line, and an escape sequence could control the terminal. An invisible or direction-changing
//! character could hide text. Every output escapes them, and keeps the letters of all scripts.
//!
//! Addresses of providers may contain a signature or a key (`?sig=…`). The names of parameters stay, so that an
//! operator can tell two addresses apart. Segments of the path stay, because it is not known which of them is a secret.

use std::borrow::Cow;

/// The text on one line, with each hidden character in its escaped form: `\n`, `\r`, `\t`, `\u{202e}`.
///
/// Escaped text stays as it is, so outputs may be stacked. A backslash stays too: a text that contains the characters
/// `\u{202e}` looks the same, and `--json` tells the two apart.
pub fn printable(text: &str) -> Cow<'_, str> {
    escape_matching(text, is_hidden, |out, c| match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c => out.push_str(&format!("\\u{{{:x}}}", u32::from(c))),
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
                out.push_str(&format!("\\u{unit:04x}"));
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

/// The text of an error of the operating system without its number, which helps no operator.
pub fn without_error_number(text: &str) -> String {
    let Some((before, number)) = text.split_once(" (os error ") else { return text.to_owned() };
    format!("{before}{}", number.split_once(')').map_or("", |(_, after)| after))
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

/// Replacement for a hidden part. No address has this character unescaped.
pub const REDACTED: char = '…';

/// The address without possible secrets. A parameter whose whole value is a placeholder (`${job:id}`) keeps it.
pub fn redact_url(text: &str) -> String {
    let (text, fragment) = text.split_once('#').map_or((text, false), |(text, _)| (text, true));
    let (address, query) = text.split_once('?').map_or((text, None), |(address, query)| (address, Some(query)));
    let mut shown = redact_credentials(address);
    if let Some(query) = query {
        let parameters: Vec<String> = query.split('&').map(redact_parameter).collect();
        shown.push('?');
        shown.push_str(&parameters.join("&"));
    }
    if fragment {
        shown.push('#');
        shown.push(REDACTED);
    }
    shown
}

/// Change of an address, in a form without secrets.
pub fn describe_url_change(from: &str, to: &str) -> String {
    let (from, to) = (redact_url(from), redact_url(to));
    if from == to { format!("{to} (another value of a parameter)") } else { format!("{from} → {to}") }
}

/// Whether an address was redacted, and so is not complete.
pub fn has_redaction(url: &str) -> bool {
    url.contains(REDACTED)
}

fn redact_parameter(text: &str) -> String {
    match text.split_once('=') {
        _ if text.is_empty() => String::new(),
        Some((name, value)) if value.is_empty() || is_placeholder(value) => format!("{name}={value}"),
        Some((name, _)) => format!("{name}={REDACTED}"),
        // Text without `=` is a value.
        None => REDACTED.to_string(),
    }
}

fn is_placeholder(value: &str) -> bool {
    let name = value.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
    name.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || matches!(byte, b':' | b'_')))
}

/// Parsers accept any number of slashes, of both kinds, after the scheme.
fn redact_credentials(address: &str) -> String {
    let after_scheme = address.find(':').map_or(0, |colon| colon + 1);
    let start = after_scheme + address[after_scheme..].bytes().take_while(|byte| matches!(byte, b'/' | b'\\')).count();
    let (scheme, rest) = address.split_at(start);
    let end = rest.find(['/', '\\']).unwrap_or(rest.len());
    let host = rest[..end].rsplit('@').next().unwrap_or_default();
    // The password may hold a slash that is not escaped: then the apparent path belongs to the password.
    let is_host =
        host.split_once(']').map_or(host, |(_, port)| port).split_once(':').is_none_or(|(_, port)| is_port(port));
    let end = if is_host { end } else { rest.len() };
    match rest[..end].rfind('@') {
        Some(at) => format!("{scheme}{REDACTED}{}", &rest[at..]),
        None => address.to_owned(),
    }
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
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

    #[test]
    fn hidden_value_change_is_reported_without_the_value() {
        let change = |from, to| describe_url_change(from, to);
        assert_eq!(
            change("https://a.example/?s=1", "https://b.example/?s=1"),
            "https://a.example/?s=… → https://b.example/?s=…"
        );
        assert_eq!(
            change("https://a.example/?s=1", "https://a.example/?s=2"),
            "https://a.example/?s=… (another value of a parameter)"
        );
    }

    #[test]
    fn values_and_credentials_are_redacted() {
        for (url, shown) in [
            ("https://pay.example/charges", "https://pay.example/charges"),
            ("https://pay.example/charges?sig=hunter2", "https://pay.example/charges?sig=…"),
            ("https://pay.example/?a=hunter2&b=&sig=hunter2=hunter2", "https://pay.example/?a=…&b=&sig=…"),
            ("https://pay.example/?hunter2", "https://pay.example/?…"),
            ("https://pay.example/?a=1;b=hunter2?c=hunter2", "https://pay.example/?a=…"),
            ("https://pay.example/#hunter2", "https://pay.example/#…"),
            ("https://pay.example/?a=b#c?d=hunter2", "https://pay.example/?a=…#…"),
            ("https://user:hunter2@pay.example/charges", "https://…@pay.example/charges"),
            ("https://hunter2@pay.example:8443/", "https://…@pay.example:8443/"),
            ("https://user:hunter2@x@pay.example/", "https://…@pay.example/"),
            ("https:user:hunter2@pay.example/", "https:…@pay.example/"),
            ("https:\\\\user:hunter2@pay.example/", "https:\\\\…@pay.example/"),
            ("https://user:/hunter2@pay.example/", "https://…@pay.example/"),
            ("https://user:hunter/2@pay.example/", "https://…@pay.example/"),
            ("https://pay.example:8443/@shop/charges", "https://pay.example:8443/@shop/charges"),
            ("https://[2001:db8::1]:8443/@shop/", "https://[2001:db8::1]:8443/@shop/"),
            ("https://pay.example/${job:reference}?id=${job:id}", "https://pay.example/${job:reference}?id=${job:id}"),
            ("https://pay.example/?id=x${job:id}&k=${HUNTER2}", "https://pay.example/?id=…&k=…"),
            ("pay.example/charges?sig=hunter2", "pay.example/charges?sig=…"),
            ("sqlite://ledger.db?mode=rwc", "sqlite://ledger.db?mode=…"),
            ("", ""),
        ] {
            assert_eq!(redact_url(url), shown, "{url}");
            assert_eq!(redact_url(shown), shown, "shown twice");
            assert!(!shown.to_lowercase().contains("hunter"), "{shown}");
            assert_eq!(has_redaction(shown), shown != url, "{url}");
        }
    }
}
