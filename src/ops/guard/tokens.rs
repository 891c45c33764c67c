//! The callers of the ops server: their user name, program and token, and the rate limit of wrong tokens.
//!
//! The name that a client with the token gives is not verified. It distinguishes honest operators in the audit as long
//! as no people are configured. Wrong tokens and passwords are limited by client address. A token that comes too soon is
//! not compared, so its response reveals nothing. Behind a proxy all clients are one address.

use std::collections::HashMap;
use std::time::Duration;

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::domain::person::Identity;
use crate::domain::printable::printable;
use crate::domain::time::millis_down;
use crate::ops::connections::ClientAddress;

/// Most characters of a name that are kept.
const NAME_CHARS_MAX: usize = 64;
/// Wrong tokens without a delay: typos, and a program that still has the old token.
const FAILURES_WITHOUT_DELAY: u32 = 3;
const DELAY_MIN: Duration = Duration::from_secs(1);
/// Bounded, because an address may have honest clients too.
const DELAY_MAX: Duration = Duration::from_secs(60);
/// After this time without a wrong token the count of an address is reset.
const FAILURES_EXPIRE_AFTER: Duration = Duration::from_secs(15 * 60);
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Beyond this number the address with the oldest wrong token is forgotten.
const ADDRESSES_MAX: usize = 4_096;

/// Content of the header `Authorization`.
#[derive(Default)]
pub struct RequestCredentials {
    pub user: Option<String>,
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

/// The result of a token check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenCheck {
    Valid,
    Wrong,
    /// Not compared: the address must wait.
    TooSoon {
        retry_after: Duration,
    },
}

/// Rejected tokens since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuthenticationFailures {
    pub wrong_token: u64,
    pub too_soon: u64,
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
    wrong: u32,
    last_at: Instant,
    logged_at: Instant,
    /// Failures since the last log line.
    unlogged: AuthenticationFailures,
}

/// A log line to write.
#[derive(Debug, PartialEq, Eq)]
struct FailureLogLine {
    failures: AuthenticationFailures,
    delay: Duration,
}

/// The delay of an address after this number of wrong tokens.
fn delay_after(wrong: u32) -> Duration {
    let Some(doublings) = wrong.checked_sub(FAILURES_WITHOUT_DELAY + 1) else { return Duration::ZERO };
    DELAY_MIN.saturating_mul(2_u32.saturating_pow(doublings)).min(DELAY_MAX)
}

impl WrongTokens {
    /// Compares a token unless its address must wait. The comparison happens under the lock, so that simultaneous
    /// guesses are counted one after the other.
    pub fn check(&self, address: ClientAddress, compare: impl FnOnce() -> bool) -> TokenCheck {
        let (check, line) = self.state.lock().check(address, Instant::now(), compare);
        if let Some(FailureLogLine { failures: AuthenticationFailures { wrong_token, too_soon }, delay }) = line {
            let delay_ms = millis_down(delay);
            tracing::warn!(
                client = %address, wrong_token, too_soon, delay_ms,
                "wrong ops.token or password: those of this address are not compared until the delay is over"
            );
        }
        check
    }

    /// Whether a token of this address would not be compared now.
    pub fn must_wait(&self, address: ClientAddress) -> bool {
        !self.state.lock().retry_after(address, Instant::now()).is_zero()
    }

    /// The failures so far.
    pub fn failures(&self) -> AuthenticationFailures {
        self.state.lock().failures
    }
}

impl WrongTokenState {
    /// The recent failures of an address.
    fn known(&self, address: ClientAddress, now: Instant) -> Option<AddressFailures> {
        let known = self.addresses.get(&address).copied();
        known.filter(|guesses| now.duration_since(guesses.last_at) < FAILURES_EXPIRE_AFTER)
    }

    fn retry_after(&self, address: ClientAddress, now: Instant) -> Duration {
        self.known(address, now).map_or(Duration::ZERO, |guesses| {
            (guesses.last_at + delay_after(guesses.wrong)).saturating_duration_since(now)
        })
    }

    fn check(
        &mut self,
        address: ClientAddress,
        now: Instant,
        compare: impl FnOnce() -> bool,
    ) -> (TokenCheck, Option<FailureLogLine>) {
        let (known, retry_after) = (self.known(address, now), self.retry_after(address, now));
        let must_wait = !retry_after.is_zero();
        if !must_wait && compare() {
            return (TokenCheck::Valid, None);
        }
        let mut guesses = known.unwrap_or(AddressFailures {
            wrong: 0,
            last_at: now,
            logged_at: now,
            unlogged: AuthenticationFailures::default(),
        });
        let is_due = known.is_none() || now.duration_since(guesses.logged_at) >= LOG_INTERVAL;
        for failures in [&mut self.failures, &mut guesses.unlogged] {
            *(if must_wait { &mut failures.too_soon } else { &mut failures.wrong_token }) += 1;
        }
        if !must_wait {
            (guesses.wrong, guesses.last_at) = (guesses.wrong.saturating_add(1), now);
        }
        let line = is_due.then(|| {
            guesses.logged_at = now;
            FailureLogLine { failures: std::mem::take(&mut guesses.unlogged), delay: delay_after(guesses.wrong) }
        });
        self.store_failures(address, guesses);
        (if must_wait { TokenCheck::TooSoon { retry_after } } else { TokenCheck::Wrong }, line)
    }

    fn store_failures(&mut self, address: ClientAddress, guesses: AddressFailures) {
        if self.addresses.len() >= ADDRESSES_MAX && !self.addresses.contains_key(&address) {
            let oldest = self.addresses.iter().min_by_key(|(_, guesses)| guesses.last_at).map(|(address, _)| *address);
            oldest.and_then(|oldest| self.addresses.remove(&oldest));
        }
        self.addresses.insert(address, guesses);
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
    fn the_delay_doubles_with_each_wrong_token() {
        let seconds = |wrong| delay_after(wrong).as_secs();
        let delays: Vec<u64> = (0..=12).map(seconds).collect();
        assert_eq!(delays, [0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(seconds(u32::MAX), 60);
    }

    #[test]
    fn early_token_is_not_compared() {
        let (mut state, begin) = (WrongTokenState::default(), Instant::now());
        let at = |ms| begin + Duration::from_millis(ms);
        let mut check = |client: u32, ms, is_right| {
            let mut compared = false;
            let (check, _) = state.check(address(client), at(ms), || {
                compared = true;
                is_right
            });
            assert_eq!(compared, !matches!(check, TokenCheck::TooSoon { .. }));
            check
        };
        for _ in 0..4 {
            assert_eq!(check(1, 0, false), TokenCheck::Wrong);
        }
        let too_soon = |ms| TokenCheck::TooSoon { retry_after: Duration::from_millis(ms) };
        assert_eq!(check(1, 0, true), too_soon(1_000), "the response reveals nothing");
        assert_eq!(check(2, 0, true), TokenCheck::Valid, "no other address waits");
        assert_eq!(check(1, 400, false), too_soon(600), "a token that was not compared adds no delay");
        assert_eq!(check(1, 1_000, true), TokenCheck::Valid);
        assert_eq!(check(1, 1_000, false), TokenCheck::Wrong);
        assert_eq!(check(1, 1_000, true), too_soon(2_000), "a right token between guesses forgives none");
        let forgotten = 1_000 + 15 * 60 * 1_000;
        for _ in 0..4 {
            assert_eq!(check(1, forgotten, false), TokenCheck::Wrong);
        }
        assert_eq!(state.failures, AuthenticationFailures { wrong_token: 9, too_soon: 3 });
    }

    #[test]
    fn one_log_line_per_address_and_minute() {
        let (mut state, begin) = (WrongTokenState::default(), Instant::now());
        let mut line = |client: u32, ms| state.check(address(client), begin + Duration::from_millis(ms), || false).1;
        let first = Some(FailureLogLine {
            failures: AuthenticationFailures { wrong_token: 1, too_soon: 0 },
            delay: Duration::ZERO,
        });
        assert_eq!((line(1, 0), line(2, 0)), (first, line(3, 0)));
        for ms in 1..=100 {
            assert_eq!(line(1, ms * 500), None, "{ms}");
        }
        let next = line(1, 60_000).unwrap();
        // At 0.5, 1, 1.5, 2.5, 4.5, 8.5, 16.5 and 32.5 s; a minute after it began the 32 s are not over.
        assert_eq!(next.failures, AuthenticationFailures { wrong_token: 8, too_soon: 93 });
        assert_eq!(next.delay, Duration::from_secs(32));
        assert_eq!(line(1, 60_001), None);
    }

    #[test]
    fn remembered_addresses_are_bounded() {
        let (mut state, begin) = (WrongTokenState::default(), Instant::now());
        let most = u32::try_from(ADDRESSES_MAX).unwrap();
        for number in 0..most + 10 {
            let _ = state.check(address(number), begin + Duration::from_millis(number.into()), || false);
        }
        assert_eq!(state.addresses.len(), ADDRESSES_MAX);
        assert!(!state.addresses.contains_key(&address(9)) && state.addresses.contains_key(&address(10)));
    }
}
