//! The caller of a request by its own account: the user name of HTTP Basic, and the program.
//!
//! The name is not verified: a client with the token may give any name. It distinguishes honest operators in the audit.

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::domain::printable::printable;

/// Most characters of a name that are kept.
const NAME_CHARS_MAX: usize = 64;

/// Content of the header `Authorization`.
#[derive(Default)]
pub struct RequestCredentials {
    user: Option<String>,
    /// The given token.
    pub secret: Vec<u8>,
}

/// Reads `Bearer TOKEN` or `Basic base64(USER:TOKEN)` (<https://www.rfc-editor.org/rfc/rfc7617#section-2>).
pub fn read_credentials(headers: &HeaderMap) -> RequestCredentials {
    let Some(value) = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()) else {
        return RequestCredentials::default();
    };
    let Some(at) = value.iter().position(|byte| *byte == b' ') else { return RequestCredentials::default() };
    let (scheme, rest) = (&value[..at], &value[at + 1..]);
    if scheme.eq_ignore_ascii_case(b"bearer") {
        return RequestCredentials { user: None, secret: rest.to_vec() };
    }
    let decoded = if scheme.eq_ignore_ascii_case(b"basic") { STANDARD.decode(rest).ok() } else { None };
    let Some(pair) = decoded else { return RequestCredentials::default() };
    let Some(colon) = pair.iter().position(|byte| *byte == b':') else { return RequestCredentials::default() };
    let user = audit_name(&String::from_utf8_lossy(&pair[..colon]));
    RequestCredentials { user: (!user.is_empty()).then_some(user), secret: pair[colon + 1..].to_vec() }
}

/// The caller of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiCaller {
    user: Option<String>,
    /// `page`, or the first word of the program's `User-Agent`.
    client: String,
}

impl ApiCaller {
    pub(super) fn from_headers(headers: &HeaderMap, given: &RequestCredentials) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        // Browsers mark requests of our own page, and no page can set that header itself. Over plain http only the
        // origin is sent; a change with a foreign origin was refused before.
        let ours = text("sec-fetch-site").map_or_else(|| text("origin").is_some(), |site| site == "same-origin");
        let program = text("user-agent").and_then(|agent| agent.split_whitespace().next()).map(audit_name);
        let client = if ours { "page".to_owned() } else { program.unwrap_or_else(|| "api".to_owned()) };
        Self { user: given.user.clone(), client }
    }

    /// `user@client`, or only the client.
    pub fn name(&self) -> String {
        match &self.user {
            Some(user) => format!("{user}@{}", self.client),
            None => self.client.clone(),
        }
    }
}

/// A name as the audit keeps it.
fn audit_name(text: &str) -> String {
    printable(text).chars().take(NAME_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        all.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn token_is_read_from_bearer_or_basic() {
        for (value, user, secret) in [
            ("Bearer let-me-in", None, "let-me-in"),
            ("bearer let-me-in", None, "let-me-in"),
            // alice:let:me-in
            ("Basic YWxpY2U6bGV0Om1lLWlu", Some("alice"), "let:me-in"),
            ("basic OmxldC1tZS1pbg==", None, "let-me-in"),
            ("Basic YWxpY2U=", None, ""),
            ("Basic %%%%", None, ""),
            ("Digest x", None, ""),
            ("Bearer", None, ""),
        ] {
            let given = read_credentials(&headers(&[("authorization", value)]));
            assert_eq!((given.user.as_deref(), given.secret.as_slice()), (user, secret.as_bytes()), "{value}");
        }
    }

    #[test]
    fn audit_distinguishes_page_and_programs() {
        let name = |all: &[(&'static str, &str)]| {
            let headers = headers(all);
            ApiCaller::from_headers(&headers, &read_credentials(&headers)).name()
        };
        let alice = ("authorization", "Basic YWxpY2U6bGV0Om1lLWlu");
        assert_eq!(name(&[("sec-fetch-site", "same-origin"), ("user-agent", "Mozilla/5.0 (X11)")]), "page");
        assert_eq!(name(&[alice, ("sec-fetch-site", "same-origin")]), "alice@page");
        assert_eq!(name(&[alice, ("origin", "http://ops.internal"), ("user-agent", "Mozilla/5.0")]), "alice@page");
        assert_eq!(name(&[alice, ("user-agent", "curl/8.5.0")]), "alice@curl/8.5.0");
        assert_eq!(name(&[("authorization", "Basic YQpiADo=")]), "a\\nb\\u{0}@api");
        assert_eq!(name(&[]), "api");
    }
}
