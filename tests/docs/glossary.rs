//! The glossary as programs read it: sorted terms, and banned words with the terms to use instead.

use std::collections::BTreeSet;

use crate::page::{Page, plain};

fn table(heading: &str, first: &str) -> Vec<Vec<String>> {
    Page::read("docs/glossary.md").table(heading, first)
}

/// The banned words and phrases, in lower case.
fn banned() -> Vec<String> {
    table("## Banned words", "banned").into_iter().map(|row| plain(&row[0]).to_owned()).collect()
}

#[test]
fn every_term_has_one_meaning() {
    let terms: Vec<String> = table("## Terms", "term").into_iter().map(|row| row[0].to_lowercase()).collect();
    let unique: BTreeSet<&String> = terms.iter().collect();
    assert_eq!(unique.len(), terms.len());
    let mut sorted = terms.clone();
    sorted.sort();
    assert_eq!(terms, sorted, "terms are in alphabetical order");
}

#[test]
fn banned_words_are_searchable() {
    let banned = banned();
    assert!(banned.len() > 30, "the table was not found");
    let unique: BTreeSet<&String> = banned.iter().collect();
    assert_eq!(unique.len(), banned.len(), "a word is listed twice");
    let odd =
        |word: &&String| !word.chars().all(|c| c.is_ascii_lowercase() || c == ' ') || word.trim() != word.as_str();
    let odd: Vec<&String> = banned.iter().filter(odd).collect();
    assert!(odd.is_empty(), "only lower-case words can be looked for: {odd:?}");
}

#[test]
fn no_term_is_banned() {
    let banned = banned();
    let instead = table("## Banned words", "banned").into_iter().map(|row| row[1].clone());
    let texts = table("## Terms", "term").into_iter().map(|row| row.join(" ")).chain(instead);
    let padded = |text: &str| format!(" {} ", text.replace(|c: char| !c.is_alphanumeric(), " ").to_lowercase());
    let wrong: Vec<String> =
        texts.filter(|text| banned.iter().any(|word| padded(text).contains(&padded(word)))).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}
