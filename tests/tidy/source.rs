//! A source file as the rules check it: its text, its code without comments and literals, and its code without test
//! items.

use std::path::{Path, PathBuf};

pub struct Source {
    /// Path from the repository's root, with `/`.
    pub path: String,
    pub text: String,
    /// The text with comments, strings and characters blanked; same length and lines.
    pub code: String,
    /// The code without items that are compiled for tests alone; empty for files of tests.
    pub production: String,
}

impl Source {
    pub fn of(path: &str, text: &str) -> Self {
        let code = code_only(text);
        let name = path.rsplit('/').next().unwrap_or(path);
        let for_tests =
            !path.starts_with("src/") || name == "tests.rs" || name.ends_with("_tests.rs") || path.contains("/tests/");
        let production = if for_tests { String::new() } else { without_test_items(&code) };
        Self { path: path.to_owned(), text: text.to_owned(), code, production }
    }

    /// `path:line` of a byte of the text.
    pub fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.path, self.text[..offset].matches('\n').count() + 1)
    }
}

/// All Rust files of the repository.
pub fn all() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders: Vec<PathBuf> = ["src", "tests", "benches"].iter().map(|folder| root.join(folder)).collect();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    let read = |path: &PathBuf| {
        let relative = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
        Source::of(&relative, &std::fs::read_to_string(path).unwrap())
    };
    files.iter().map(read).collect()
}

/// Blanks comments, string and character literals.
fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match literal_end(bytes, at) {
            Some(end) => end.min(bytes.len()),
            None => {
                at += 1;
                continue;
            }
        };
        code[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at = end;
    }
    String::from_utf8(code).unwrap()
}

/// The end of the comment or literal that begins here.
fn literal_end(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let in_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if rest.starts_with(b"//") {
        return Some(at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()));
    }
    if rest.starts_with(b"/*") {
        return Some(at + find(rest, b"*/").map_or(rest.len(), |end| end + 2));
    }
    if rest[0] == b'"' {
        return Some(at + quoted_end(rest, b'"'));
    }
    if rest[0] == b'r' && (!in_word || bytes[at - 1] == b'b') {
        let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
            let body = 2 + hashes;
            return Some(at + find(&rest[body..], &close).map_or(rest.len(), |end| body + end + close.len()));
        }
    }
    if rest[0] == b'\'' {
        // A lifetime has no closing quote after one character.
        let escaped = rest.get(1) == Some(&b'\\');
        let width = std::str::from_utf8(&rest[1..rest.len().min(5)])
            .unwrap_or_else(|error| std::str::from_utf8(&rest[1..=error.valid_up_to()]).unwrap_or_default());
        let width = width.chars().next().map_or(1, char::len_utf8);
        if escaped || rest.get(1 + width) == Some(&b'\'') {
            return Some(at + quoted_end(rest, b'\''));
        }
    }
    None
}

fn quoted_end(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

fn find(text: &[u8], needle: &[u8]) -> Option<usize> {
    text.windows(needle.len()).position(|window| window == needle)
}

/// Blanks every item under `#[cfg(test)]`.
fn without_test_items(code: &str) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut kept = code.to_owned();
    while let Some(start) = kept.find(MARK) {
        let body = start + MARK.len();
        let end = body + item_end(&kept[body..]);
        let blank: String = kept[start..end].chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
        kept.replace_range(start..end, &blank);
    }
    kept
}

/// The end of the item that begins here: its closing brace, or the semicolon of an item without a body.
fn item_end(code: &str) -> usize {
    let mut depth = 0_usize;
    for (at, c) in code.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth <= 1 => return at + 1,
            '}' => depth -= 1,
            ';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

#[test]
fn literals_comments_and_test_items_are_not_code() {
    let text = r####"let a = "x.unwrap()"; // y.unwrap()
let b = r#"z" .unwrap()"#; let c = '"'; let d: &'static str = f('\'', 'ß');
/* w.unwrap()
*/ g.unwrap();
#[cfg(test)]
mod tests { fn t() { h.unwrap(); } }
i.unwrap();
"####;
    let source = Source::of("src/x.rs", text);
    assert_eq!((source.text.len(), source.code.len()), (text.len(), source.production.len()));
    assert_eq!(source.code.matches(".unwrap()").count(), 3, "{}", source.code);
    assert_eq!(source.production.matches(".unwrap()").count(), 2, "{}", source.production);
    assert!(source.code.contains("&'static str = f("), "{}", source.code);
    assert!(Source::of("src/x/tests.rs", text).production.is_empty());
}
