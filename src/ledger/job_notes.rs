//! The notes of operators on a payment: to whom its review is assigned, and comments.
//!
//! A note changes no payment. Notes are kept for ever, like the audit, so a comment goes through the checks of a reason.

use serde::Serialize;
use utoipa::ToSchema;

use super::decision_input::validate_reason;
use super::operator::DatabaseTime;
use crate::domain::job_filter::AssignedFilter;

/// Longest name of an assignee, in characters.
const ASSIGNEE_CHARS_MAX: usize = 100;

/// What a note says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewNote {
    /// The review is this person's or team's; `None`: no one's any more.
    Assigned(Option<Assignee>),
    Comment(Comment),
}

/// A person or a team, as operators name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignee(String);

impl Assignee {
    /// # Errors
    /// When the name is empty or too long, has control characters, is a word of the filter, or holds card data or a
    /// secret.
    pub fn new(text: &str) -> Result<Self, String> {
        let name = assignee_name(text)?;
        if [AssignedFilter::ANYONE, AssignedFilter::NO_ONE].contains(&name) {
            return Err(format!("`{name}` is a word of the filter by assignee: write another name"));
        }
        validate_reason(name).map(Self)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name as it is compared.
///
/// # Errors
/// When it is empty or too long, or has control characters.
pub fn assignee_name(text: &str) -> Result<&str, String> {
    let name = text.trim();
    if name.is_empty() {
        return Err("is empty: write a name".to_owned());
    }
    if name.chars().count() > ASSIGNEE_CHARS_MAX {
        return Err(format!("write at most {ASSIGNEE_CHARS_MAX} characters"));
    }
    if name.chars().any(char::is_control) {
        return Err("holds control characters: write a name".to_owned());
    }
    Ok(name)
}

/// A comment on a payment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comment(String);

impl Comment {
    /// # Errors
    /// When the text is empty or too long, or holds card data or a secret.
    pub fn new(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("is empty: write a comment".to_owned());
        }
        validate_reason(text).map(Self)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A note of an operator on a payment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct JobNote {
    pub at: DatabaseTime,
    /// The database's user.
    pub who: String,
    pub os_user: Option<String>,
    pub program: Option<String>,
    /// `assigned` or `comment`.
    pub kind: String,
    /// The comment, or to whom the review is assigned; `null`: to no one any more.
    pub text: Option<String>,
}

/// To whom the last assignment gives the payment.
pub fn assigned_to(notes: &[JobNote]) -> Option<String> {
    notes.iter().rev().find(|note| note.kind == ASSIGNED)?.text.clone()
}

/// Kind of a note that assigns.
pub const ASSIGNED: &str = "assigned";
/// Kind of a note that comments.
pub const COMMENT: &str = "comment";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_names_are_checked_like_reasons() {
        assert_eq!(Assignee::new(" alice ").unwrap().as_str(), "alice");
        assert_eq!(Comment::new("asked them, ticket 4711").unwrap().as_str(), "asked them, ticket 4711");
        for (text, words) in [
            (" ", "is empty"),
            (&"x".repeat(501), "at most 500"),
            ("4111 1111 1111 1111", "leave it out"),
            ("sk_live_4eC39HqLyjWD", "leave it out"),
        ] {
            assert!(Comment::new(text).unwrap_err().contains(words), "{text}");
        }
        for (text, words) in [
            ("", "is empty"),
            (&"x".repeat(101), "100 characters"),
            ("a\nb", "control"),
            (" none", "a word of the filter"),
            ("4111111111111111", "leave it out"),
        ] {
            assert!(Assignee::new(text).unwrap_err().contains(words), "{text}");
        }
    }
}
