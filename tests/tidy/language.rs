//! Rules of plain language that a program can check: banned words, and the length of sentences and table cells.
//!
//! The words come from the table in docs/glossary.md. In Rust files comments and literals are checked, and names are
//! not.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::Offence;
use crate::source::Source;

/// Most words in a sentence of a module's documentation.
const SENTENCE_WORDS_MAX: usize = 30;
/// Most words in a cell of a table of the documents; text in backticks does not count.
const CELL_WORDS_MAX: usize = 25;
/// Folders and files with prose, from the repository's root.
const PROSE: [&str; 9] = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs",
    "lua",
    "migrations",
    "config",
    "deploy",
    "src/ops/page/assets",
];
const PROSE_ENDINGS: [&str; 8] = ["md", "lua", "sql", "toml", "yml", "yaml", "js", "html"];
/// The page that defines the words.
const GLOSSARY: &str = "docs/glossary.md";

/// A text that is not Rust.
pub struct Prose {
    pub path: String,
    pub text: String,
}

impl Prose {
    fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.path, self.text[..offset].matches('\n').count() + 1)
    }
}

/// All texts in [`PROSE`], without the glossary.
pub fn prose() -> Vec<Prose> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut open: Vec<PathBuf> = PROSE.iter().map(|path| root.join(path)).collect();
    let mut found = Vec::new();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let relative = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
        if PROSE_ENDINGS.contains(&ending) && relative != GLOSSARY {
            found.push(Prose { path: relative, text: std::fs::read_to_string(&path).unwrap() });
        }
    }
    found.sort_by(|first, second| first.path.cmp(&second.path));
    found
}

/// The banned words, from the glossary's table.
pub fn banned_words() -> Vec<String> {
    let glossary = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(GLOSSARY)).unwrap();
    let table = glossary.split("## Banned words").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| row.split('`').next().unwrap().to_owned()).collect()
}

/// Positions of banned words, as whole words and without regard to case; a phrase may cross a line end.
fn banned(text: &str) -> Vec<(usize, &'static str)> {
    static BANNED: OnceLock<Vec<String>> = OnceLock::new();
    let text = text.to_ascii_lowercase().replace('\n', " ");
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    let is_whole =
        |at: usize, word: &str| !text[..at].ends_with(in_word) && !text[at + word.len()..].starts_with(in_word);
    let mut found: Vec<(usize, &'static str)> = Vec::new();
    for word in BANNED.get_or_init(banned_words) {
        found.extend(
            text.match_indices(word.as_str())
                .filter(|(at, word)| is_whole(*at, word))
                .map(|(at, _)| (at, word.as_str())),
        );
    }
    // Of two that begin at one place, the longer one.
    found.sort_by_key(|(at, word)| (*at, std::cmp::Reverse(word.len())));
    found.dedup_by_key(|(at, _)| *at);
    found
}

/// Banned words in comments and literals.
pub fn words(source: &Source) -> Vec<Offence> {
    if !source.path.starts_with("src/") {
        return Vec::new();
    }
    let is_code = |at: usize| source.code.as_bytes()[at] != b' ';
    let found = banned(&source.text).into_iter().filter(|(at, _)| !is_code(*at));
    found.map(|(at, word)| format!("{}: banned word `{word}`", source.place(at))).collect()
}

/// Banned words in a text that is not Rust.
pub fn words_of_prose(prose: &Prose) -> Vec<Offence> {
    let found = banned(&prose.text).into_iter();
    found.map(|(at, word)| format!("{}: banned word `{word}`", prose.place(at))).collect()
}

/// Sentences of a module's documentation that are too long, or that describe the module by its refusals.
pub fn headers(source: &Source) -> Vec<Offence> {
    if !source.path.starts_with("src/") {
        return Vec::new();
    }
    let lines = source.text.lines().take_while(|line| line.starts_with("//!"));
    let header: Vec<&str> = lines.map(|line| line.trim_start_matches("//!").trim()).collect();
    let mut offences = Vec::new();
    for paragraph in header.split(|line| line.is_empty()) {
        // A table or a list is no sentence.
        let is_prose = |line: &&&str| !line.starts_with(['|', '-', '*', '`']);
        let text = paragraph.iter().filter(is_prose).copied().collect::<Vec<_>>().join(" ");
        for sentence in text.split_inclusive(&['.', '!', '?', ':']).flat_map(|part| part.split("; ")) {
            let words = sentence.split_whitespace().count();
            if words > SENTENCE_WORDS_MAX {
                offences.push(format!("{}: a sentence of {words} words: {sentence}", source.path));
            }
        }
        if text.split_whitespace().any(|word| word == "Refuses") {
            offences.push(format!("{}: describe what the module is, not what it refuses", source.path));
        }
    }
    offences
}

/// Cells of tables that are too long.
pub fn cells(prose: &Prose) -> Vec<Offence> {
    if !prose.path.ends_with(".md") {
        return Vec::new();
    }
    let mut offences = Vec::new();
    for (number, line) in prose.text.lines().enumerate().filter(|(_, line)| line.starts_with('|')) {
        // A pipe in a name is escaped, or is in backticks.
        let names: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" ").replace("\\|", " ");
        for cell in names.split('|') {
            let words = cell.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count();
            if words > CELL_WORDS_MAX {
                offences.push(format!("{}:{}: a cell of {words} words", prose.path, number + 1));
            }
        }
    }
    offences
}

#[test]
fn each_banned_word_is_detected() {
    let words = banned_words();
    assert!(words.len() > 50, "{words:?}");
    for word in words {
        let comment = Source::of("src/worker/lane.rs", &format!("// So it is {word} here.\nfn f() {{}}"));
        assert!(!self::words(&comment).is_empty(), "{word} in a comment");
        let literal = Source::of("src/worker/lane.rs", &format!("fn f() {{ g(\"so it is {word}\") }}"));
        assert!(!self::words(&literal).is_empty(), "{word} in a literal");
        let page = Prose { path: "docs/x.md".to_owned(), text: format!("So it is\n{}.", word.to_uppercase()) };
        assert!(!words_of_prose(&page).is_empty(), "{word} on a page");
    }
    let name = Source::of("src/worker/lane.rs", "fn mend() {}");
    assert!(self::words(&name).is_empty(), "a name is not prose");
}

#[test]
fn long_sentences_and_cells_are_detected() {
    let long = vec!["word"; SENTENCE_WORDS_MAX + 1].join(" ");
    let header = |text: &str| headers(&Source::of("src/worker/lane.rs", &format!("//! {text}\nfn f() {{}}"))).len();
    assert_eq!(header(&format!("{long}.")), 1);
    assert_eq!(header(&format!("Short. {}.", &long[5..])), 0);
    assert_eq!(header("The lane. Refuses to wait."), 1);
    let table = |cell: &str| Prose { path: "docs/x.md".to_owned(), text: format!("| a | {cell} |\n") };
    let cell = vec!["word"; CELL_WORDS_MAX + 1].join(" ");
    assert_eq!(cells(&table(&cell)).len(), 1);
    assert_eq!(cells(&table(&format!("{} `some more names`", &cell[5..]))).len(), 0);
}
