//! The command that shows the next page of a list: this process's command line, with another cursor.
//!
//! It is written for a shell. A word with other characters than those of [`PLAIN`] is quoted. One with a hidden
//! character is an ANSI-C string (`$'…'`) of bash, zsh and ksh, because the line must show every character.

use std::fmt::Write as _;
use std::io;

use super::Console;
use crate::domain::printable::is_hidden;

/// Characters beside letters and digits that have no meaning to a shell, wherever they stand behind the first.
const PLAIN: &str = "_@%+=:,./-";

impl Console {
    /// The output of this command line, the program's name first.
    pub fn with_command_line(mut self, words: impl IntoIterator<Item = String>) -> Self {
        self.command_line = words.into_iter().collect();
        self
    }

    /// Writes to stderr the command that shows the next page: this one, with another value of the option `cursor`.
    pub fn next_page(&mut self, cursor: &str, value: &str) -> io::Result<()> {
        self.message(&format!("next page: {}", command(&self.command_line, cursor, value)))
    }
}

/// The command line with the option `cursor` set to this value.
fn command(words: &[String], cursor: &str, value: &str) -> String {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let (options, rest) = words.split_at(end);
    let mut kept: Vec<&str> = Vec::with_capacity(words.len() + 2);
    let mut options = options.iter().map(String::as_str);
    while let Some(word) = options.next() {
        match word.strip_prefix(cursor) {
            // The old cursor, whose value is the next word.
            Some("") => drop(options.next()),
            Some(value) if value.starts_with('=') => {}
            _ => kept.push(word),
        }
    }
    // Another option is never read as a value, but as `--after=--json` it is one.
    let joined = format!("{cursor}={value}");
    match value.starts_with('-') {
        true => kept.push(&joined),
        false => kept.extend([cursor, value]),
    }
    kept.extend(rest.iter().map(String::as_str));
    kept.into_iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// One word for a shell.
fn quote(word: &str) -> String {
    if word.chars().any(is_hidden) {
        return quote_hidden(word);
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || PLAIN.contains(c);
    match !word.is_empty() && !word.starts_with('=') && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

fn quote_hidden(word: &str) -> String {
    let mut quoted = "$'".to_owned();
    for c in word.chars() {
        match c {
            '\'' | '\\' => quoted.extend(['\\', c]),
            c if is_hidden(c) => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    // Writing to a string succeeds.
                    let _ = write!(quoted, "\\{byte:03o}");
                }
            }
            c => quoted.push(c),
        }
    }
    quoted + "'"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(words: &[&str], value: &str) -> String {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        command(&words, "--after", value)
    }

    #[test]
    fn cursor_replaces_the_one_before() {
        for (words, value, expected) in [
            (vec!["s", "jobs", "list"], "p1", "s jobs list --after p1"),
            (vec!["s", "jobs", "list", "--after", "p0", "--limit", "3"], "p1", "s jobs list --limit 3 --after p1"),
            (vec!["s", "jobs", "list", "--after=p0"], "-1", "s jobs list --after=-1"),
            (vec!["s", "limits", "history", "--", "acme"], "7", "s limits history --after 7 -- acme"),
            (vec!["s", "list", "--afterwards", "x"], "7", "s list --afterwards x --after 7"),
        ] {
            assert_eq!(next(&words, value), expected);
        }
    }

    /// The shell itself reads each word back.
    #[test]
    fn shells_read_the_words_back() {
        let odd = [
            "",
            " ",
            "it's",
            "\"$HOME\" `id` $(id)",
            "\\",
            "a\\'b",
            "*",
            "~",
            "=ls",
            "#",
            "!!",
            "{a,b}",
            "é",
            "-x",
            "a\nb\t",
            "\u{202e}\u{7f}'\\ \u{e0041}9",
            "a;b|c&d<e>f",
            "%1",
            "@",
            "[a]",
        ];
        let line = next(&[&["printf", r"%s\0"], &odd[..]].concat(), "the end");
        assert!(!line.chars().any(is_hidden), "{line}");
        let shell = std::process::Command::new("bash").args(["-c", &line]).output().unwrap();
        let read = String::from_utf8(shell.stdout).unwrap();
        let words: Vec<&str> = read.split_terminator('\0').collect();
        assert_eq!(words, [&odd[..], &["--after", "the end"]].concat());
    }
}
