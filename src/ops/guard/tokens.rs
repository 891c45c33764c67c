//! The callers of the ops server: their user name, program and token, and the rate limit of wrong tokens.
//!
//! The name that a client gives beside a token is not verified. It distinguishes honest operators in the audit as long
//! as no people are configured. Wrong tokens are bounded by client address and minute. That bounds log and work: guesses
//! fail by the length of a token. Behind a proxy all clients are one address, so a right token is never refused.

use std::collections::HashMap;
use std::time::Duration;

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::domain::person::Identity;
use crate::domain::printable::printable;
use crate::ops::connections::ClientAddress;

/// Most characters of a name that are kept.
const NAME_CHARS_MAX: usize = 64;
/// Wrong tokens of an address in a minute that get 401; further ones get 429.
const WRONG_PER_MINUTE: u32 = 10;
const MINUTE: Duration = Duration::from_secs(60);
/// Beyond this number the address with the oldest minute is forgotten.
const ADDRESSES_MAX: usize = 4_096;

/// Content of the header `Authorization`.
#[derive(Default)]
pub struct RequestCredentials {
    pub user: Option<String>,
    /// The secret of a token.
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
    identity: Identity,
    /// The name that was typed, where names are not verified.
    typed: Option<String>,
    /// Whether the audit names role and path.
    is_qualified: bool,
    /// `page`, or the first word of the program's `User-Agent`.
    client: String,
}

impl ApiCaller {
    /// `is_qualified`: the audit names role and path, because people are distinguished.
    pub fn new(headers: &HeaderMap, given: &RequestCredentials, identity: Identity, is_qualified: bool) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        // Browsers mark requests of our own page, and no page can set that header itself. Over plain http only the
        // origin is sent; a change with a foreign origin was refused before.
        let ours = text("sec-fetch-site").map_or_else(|| text("origin").is_some(), |site| site == "same-origin");
        let program = text("user-agent").and_then(|agent| agent.split_whitespace().next()).map(audit_name);
        let client = if ours { "page".to_owned() } else { program.unwrap_or_else(|| "api".to_owned()) };
        Self { identity, typed: given.user.clone(), is_qualified, client }
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The caller as the audit names it: `user@client`, or only the client; if people are distinguished,
    /// `alice@page (operator, user)`.
    pub fn name(&self) -> String {
        let Identity { name, role, path } = &self.identity;
        match &self.typed {
            _ if self.is_qualified => format!("{name}@{} ({role}, {path})", self.client),
            Some(user) => format!("{user}@{}", self.client),
            None => self.client.clone(),
        }
    }
}

/// A name as the audit keeps it.
fn audit_name(text: &str) -> String {
    printable(text).chars().take(NAME_CHARS_MAX).collect()
}

/// The answer to a wrong token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrongToken {
    Counted,
    /// Its address has sent too many in this minute.
    TooMany {
        retry_after: Duration,
    },
}

/// Rejected tokens since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuthenticationFailures {
    pub wrong_token: u64,
    pub too_many: u64,
}

/// The addresses that recently sent a wrong token.
#[derive(Debug, Default)]
pub struct WrongTokens {
    state: Mutex<WrongTokenState>,
}

#[derive(Debug, Default)]
struct WrongTokenState {
    failures: AuthenticationFailures,
    addresses: HashMap<ClientAddress, AddressFailures>,
}

#[derive(Clone, Copy, Debug)]
struct AddressFailures {
    /// When its present minute began.
    since: Instant,
    /// Wrong tokens of this minute that got 401.
    wrong: u32,
    /// Failures since the last log line.
    unlogged: AuthenticationFailures,
}

impl AddressFailures {
    fn new(now: Instant) -> Self {
        Self { since: now, wrong: 0, unlogged: AuthenticationFailures::default() }
    }
}

impl WrongTokens {
    /// Counts a wrong token of an address.
    pub fn count(&self, address: ClientAddress) -> WrongToken {
        let (answer, line) = self.state.lock().count(address, Instant::now());
        if let Some(AuthenticationFailures { wrong_token, too_many }) = line {
            tracing::warn!(
                client = %address, wrong_token, too_many,
                "wrong token: beyond {WRONG_PER_MINUTE} in a minute, wrong tokens of this address get 429"
            );
        }
        answer
    }

    /// The failures so far.
    pub fn failures(&self) -> AuthenticationFailures {
        self.state.lock().failures
    }
}

impl WrongTokenState {
    /// The answer, and the failures to log: those of the minute before, and the first of this one.
    fn count(&mut self, address: ClientAddress, now: Instant) -> (WrongToken, Option<AuthenticationFailures>) {
        let known = self.addresses.get(&address).copied();
        let is_new_minute = known.is_none_or(|known| now.duration_since(known.since) >= MINUTE);
        let mut counted = known.unwrap_or_else(|| AddressFailures::new(now));
        if is_new_minute {
            counted = AddressFailures { unlogged: counted.unlogged, ..AddressFailures::new(now) };
        }
        let is_too_many = counted.wrong >= WRONG_PER_MINUTE;
        for failures in [&mut self.failures, &mut counted.unlogged] {
            *(if is_too_many { &mut failures.too_many } else { &mut failures.wrong_token }) += 1;
        }
        let answer = if is_too_many {
            WrongToken::TooMany { retry_after: MINUTE.saturating_sub(now.duration_since(counted.since)) }
        } else {
            counted.wrong += 1;
            WrongToken::Counted
        };
        let line = is_new_minute.then(|| std::mem::take(&mut counted.unlogged));
        self.store(address, counted);
        (answer, line)
    }

    fn store(&mut self, address: ClientAddress, counted: AddressFailures) {
        if self.addresses.len() >= ADDRESSES_MAX && !self.addresses.contains_key(&address) {
            let oldest = self.addresses.iter().min_by_key(|(_, counted)| counted.since).map(|(address, _)| *address);
            oldest.and_then(|oldest| self.addresses.remove(&oldest));
        }
        self.addresses.insert(address, counted);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::domain::person::{IdentityPath, Role};

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
            let identity = Identity { name: "token".to_owned(), role: Role::Admin, path: IdentityPath::Token };
            let caller = |is_qualified| {
                ApiCaller::new(&headers, &read_credentials(&headers), identity.clone(), is_qualified).name()
            };
            let qualified = caller(true);
            assert!(qualified.starts_with("token@") && qualified.ends_with(" (admin, token)"), "{qualified}");
            caller(false)
        };
        let alice = ("authorization", "Basic YWxpY2U6bGV0Om1lLWlu");
        assert_eq!(name(&[("sec-fetch-site", "same-origin"), ("user-agent", "Mozilla/5.0 (X11)")]), "page");
        assert_eq!(name(&[alice, ("sec-fetch-site", "same-origin")]), "alice@page");
        assert_eq!(name(&[alice, ("origin", "http://ops.internal"), ("user-agent", "Mozilla/5.0")]), "alice@page");
        assert_eq!(name(&[alice, ("user-agent", "curl/8.5.0")]), "alice@curl/8.5.0");
        assert_eq!(name(&[("authorization", "Basic YQpiADo=")]), "a\\nb\\u{0}@api");
        assert_eq!(name(&[]), "api");
    }

    fn address(number: u32) -> ClientAddress {
        IpAddr::V4(Ipv4Addr::from_bits(number)).into()
    }

    #[test]
    fn wrong_tokens_are_bounded_by_address_and_minute() {
        let mut state = WrongTokenState::default();
        let begin = Instant::now();
        let mut count = |client: u32, second| state.count(address(client), begin + Duration::from_secs(second)).0;
        for second in 0..10 {
            assert_eq!(count(1, second), WrongToken::Counted, "{second}");
        }
        let too_many = |seconds| WrongToken::TooMany { retry_after: Duration::from_secs(seconds) };
        assert_eq!((count(1, 10), count(1, 59)), (too_many(50), too_many(1)));
        assert_eq!(count(2, 59), WrongToken::Counted, "no other address waits");
        for _ in 0..10 {
            assert_eq!(count(1, 60), WrongToken::Counted, "a new minute");
        }
        assert_eq!(count(1, 61), too_many(59));
        assert_eq!(state.failures, AuthenticationFailures { wrong_token: 21, too_many: 3 });
    }

    #[test]
    fn one_log_line_per_address_and_minute() {
        let mut state = WrongTokenState::default();
        let begin = Instant::now();
        let mut line = |client: u32, second| state.count(address(client), begin + Duration::from_secs(second)).1;
        let first = Some(AuthenticationFailures { wrong_token: 1, too_many: 0 });
        assert_eq!((line(1, 0), line(2, 0)), (first, first));
        for second in 1..60 {
            assert_eq!(line(1, second), None, "{second}");
        }
        assert_eq!(line(1, 60), Some(AuthenticationFailures { wrong_token: 10, too_many: 50 }));
        assert_eq!((line(1, 61), line(2, 500)), (None, first));
    }

    #[test]
    fn remembered_addresses_are_bounded() {
        let (mut state, begin) = (WrongTokenState::default(), Instant::now());
        let most = u32::try_from(ADDRESSES_MAX).unwrap();
        for number in 0..most + 10 {
            let _ = state.count(address(number), begin + Duration::from_millis(number.into()));
        }
        assert_eq!(state.addresses.len(), ADDRESSES_MAX);
        assert!(!state.addresses.contains_key(&address(9)) && state.addresses.contains_key(&address(10)));
    }
}
