//! Safe quotes of a wrong text in errors: plain words only, and nothing that could be a secret.
//!
//! A password that was pasted into the wrong place must not get into logs and tickets through the error about it.

use std::path::Path;

use super::secret::looks_secret;

/// Longest text that is quoted, in bytes. Keys, words and addresses are shorter; 16 random bytes in hexadecimal are
/// not.
const QUOTED_BYTES_MAX: usize = 31;

/// Whether a text is a plain word: short, of `a-z 0-9 _ . -`, and without the marks of a credential.
pub fn is_plain_word(text: &str) -> bool {
    is_safe_text(text, b"_.-")
}

/// The text in backticks if it is a plain word or an address, else a replacement.
pub fn quote_if_safe(text: &str) -> String {
    if is_safe_text(text, b"_.-:/[]") { format!("`{text}`") } else { "what is written there".to_owned() }
}

/// The path if it is certainly a path, else a replacement: the text may be the secret itself instead of its file's
/// path.
pub fn path_if_safe(path: &Path) -> String {
    let text = path.to_string_lossy();
    let begins = ["/", "./", "../"].iter().any(|begin| text.starts_with(begin));
    let is_path = begins && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte));
    if is_path && !looks_secret(&text) { text.into_owned() } else { "(a path that is not shown)".to_owned() }
}

fn is_safe_text(text: &str, marks: &[u8]) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || marks.contains(&byte);
    (1..=QUOTED_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed) && !looks_secret(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_words_and_paths_are_quoted() {
        for text in ["queue.preffix", "worker.drain_timeout", "10.0.0.0-8"] {
            assert!(is_plain_word(text), "{text}");
        }
        let hex = "0123456789abcdef0123456789abcdef";
        for text in
            ["", "postgres://u:hunter2@db/pay", "u:hunter2", "Hunter2", "hunter2!", "sk_live_51habcdefghijklmnop", hex]
        {
            assert!(!is_plain_word(text), "{text}");
        }
        assert_eq!(quote_if_safe("https://x.example:443"), "`https://x.example:443`");
        for text in ["https://u:hunter2@x.example", "a,b", hex] {
            assert_eq!(quote_if_safe(text), "what is written there", "{text}");
        }
        for (path, shown) in [("/run/secrets/db-url_1.txt", true), ("./token", true), (hex, false), ("/a b", false)] {
            assert_eq!(path_if_safe(Path::new(path)) == path, shown, "{path}");
        }
    }
}
