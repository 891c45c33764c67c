//! The identification of a request: by the proxy's header, a user's password, or the token, in this order.
//!
//! Each request has one identity or none. A name that a client with the token types is no identity, and a configured
//! user is identified by that user's password alone.

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use secrecy::{ExposeSecret as _, SecretString};
use subtle::ConstantTimeEq as _;

use super::tokens::{RequestCredentials, TokenCheck, WrongTokens};
use super::users::Users;
use super::{Refusal, is_loopback_host, proxy};
use crate::config::people::{PeopleConfig, TOKEN_NAME};
use crate::domain::person::{Identity, IdentityPath, Role};
use crate::ops::connections::ClientInfo;

/// The people who may use the server, and the role of the token.
#[derive(Debug, Default)]
pub struct People {
    config: PeopleConfig,
    users: Users,
}

impl People {
    /// Reads the passwords of the users.
    ///
    /// # Errors
    /// Every password that cannot be used.
    pub fn load(config: &PeopleConfig, variable: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<String>> {
        Ok(Self { users: Users::load(&config.users, variable)?, config: config.clone() })
    }

    /// Whether the audit names role and path.
    pub fn are_configured(&self) -> bool {
        self.config.are_configured()
    }

    /// Whether the server needs no identity: it listens on loopback then.
    fn is_open(&self, token: Option<&SecretString>) -> bool {
        token.is_none() && self.users.is_empty() && self.config.proxy.is_none()
    }

    /// Identifies the sender of a request.
    pub async fn identify(&self, asked: &Credentials<'_>) -> Result<Identity, Refusal> {
        if let Some(configured) = &self.config.proxy
            && let Some(identity) = proxy::identify(configured, asked.headers, asked.client.ip)?
        {
            return Ok(identity);
        }
        if self.is_open(asked.token) {
            return open_identity(asked.headers);
        }
        // A request without a secret is no guess: browsers start with one.
        if asked.given.secret.is_empty() {
            return Err(self.unidentified(asked.token));
        }
        let user = asked.given.user.as_deref();
        let user = user.and_then(|name| self.users.role_of(name).map(|role| (name, role)));
        let (check, identity) = match user {
            Some((name, role)) => (
                self.users.check(name, &asked.given.secret, asked.wrong_tokens, asked.client.address).await,
                Identity { name: name.to_owned(), role, path: IdentityPath::User },
            ),
            None => (self.check_token(asked).await, self.token_identity()),
        };
        match check {
            TokenCheck::Valid => Ok(identity),
            TokenCheck::Wrong => Err(self.unidentified(asked.token)),
            TokenCheck::TooSoon { retry_after } => Err(Refusal::too_soon(retry_after)),
        }
    }

    fn token_identity(&self) -> Identity {
        Identity { name: TOKEN_NAME.to_owned(), role: self.config.token_role.0, path: IdentityPath::Token }
    }

    async fn check_token(&self, asked: &Credentials<'_>) -> TokenCheck {
        let Some(token) = asked.token else {
            // As long as for a user, so that the time tells no names.
            let name = asked.given.user.as_deref().unwrap_or_default();
            return self.users.check(name, &asked.given.secret, asked.wrong_tokens, asked.client.address).await;
        };
        // For equal lengths the comparison takes the same time wherever the two differ.
        let is_right = || bool::from(asked.given.secret.as_slice().ct_eq(token.expose_secret().as_bytes()));
        asked.wrong_tokens.check(asked.client.address, is_right)
    }

    fn unidentified(&self, token: Option<&SecretString>) -> Refusal {
        let words = match (token.is_some(), !self.users.is_empty()) {
            (true, false) => "ops.token is needed: as Bearer, or as the password of HTTP Basic",
            (true, true) => "a user of ops.users with its password, or ops.token, is needed",
            (false, true) => "a user of ops.users with its password is needed, by HTTP Basic",
            (false, false) => "open this server through its authenticating proxy: ops.proxy_user_header is needed",
        };
        Refusal::new(StatusCode::UNAUTHORIZED, words)
    }
}

/// What a request gives to identify its sender, and what it is compared with.
pub struct Credentials<'a> {
    pub headers: &'a HeaderMap,
    pub given: &'a RequestCredentials,
    pub client: &'a ClientInfo,
    pub token: Option<&'a SecretString>,
    pub wrong_tokens: &'a WrongTokens,
}

/// Without any identity the server listens on loopback only. A page whose name resolves to it (DNS rebinding) sends its
/// own name as host.
fn open_identity(headers: &HeaderMap) -> Result<Identity, Refusal> {
    if headers.get(header::HOST).is_none_or(|host| !is_loopback_host(host.as_bytes())) {
        let words = "call this server by localhost or its address";
        return Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, words));
    }
    Ok(Identity { name: String::new(), role: Role::Admin, path: IdentityPath::Open })
}

/// The refusal of a caller whose role does not suffice.
pub fn role_refusal(identity: &Identity, needed: Role, request: &Request) -> Refusal {
    let who = if identity.name.is_empty() { "you" } else { &identity.name };
    let (method, is) = (request.method(), identity.role);
    let words = format!("{method} needs role `{needed}` here, and {who} has role `{is}`");
    Refusal::new(StatusCode::FORBIDDEN, words)
}
