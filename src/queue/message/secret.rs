//! Whether a message holds what is obviously a credential, in any key or string of it.
//!
//! Refuses to look at numbers, and to say where it was: a path into a payload is payload.

use super::json::{Json, Member};
use crate::domain::secret_text::looks_secret;

pub(super) fn found_in(member: &Member<'_>) -> bool {
    looks_secret(&member.key) || is_in(&member.value)
}

fn is_in(json: &Json<'_>) -> bool {
    match json {
        Json::Null | Json::Bool(_) | Json::Number(_) => false,
        Json::Text(text) => looks_secret(text),
        Json::Array(items) => items.iter().any(is_in),
        Json::Object(members) => members.iter().any(found_in),
    }
}
