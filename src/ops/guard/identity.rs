//! The identification of a request: by the proxy's header, or by a token, in this order.
//!
//! Each request has one identity or none. A name that a client types beside a token is no identity. A right token
//! passes, however many wrong ones came from its address: so a stranger behind the same proxy locks no operator out.

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};

use super::token_list::TokenList;
use super::tokens::{RequestCredentials, WrongToken, WrongTokens};
use super::{Refusal, is_loopback_host, proxy};
use crate::config::OpsConfig;
use crate::config::people::ProxyConfig;
use crate::domain::person::{Identity, IdentityPath, Role};
use crate::ops::connections::ClientInfo;

/// Who may use the server: the tokens, and the people that a proxy names.
#[derive(Debug, Default)]
pub struct People {
    tokens: TokenList,
    proxy: Option<ProxyConfig>,
    are_configured: bool,
}

impl People {
    /// Reads the secrets of the tokens.
    ///
    /// # Errors
    /// Every secret that cannot be used.
    pub fn load(ops: &OpsConfig, variable: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<String>> {
        let tokens = TokenList::load(ops, variable)?;
        Ok(Self { tokens, proxy: ops.people.proxy.clone(), are_configured: ops.people.are_configured() })
    }

    /// Whether the audit names role and path.
    pub fn are_configured(&self) -> bool {
        self.are_configured
    }

    /// Whether the server needs no identity: it listens on loopback then.
    fn is_open(&self) -> bool {
        self.tokens.is_empty() && self.proxy.is_none()
    }

    /// Identifies the sender of a request.
    pub fn identify(&self, asked: &Credentials<'_>) -> Result<Identity, Refusal> {
        if let Some(configured) = &self.proxy
            && let Some(identity) = proxy::identify(configured, asked.headers, asked.client.ip)?
        {
            return Ok(identity);
        }
        if self.is_open() {
            return open_identity(asked.headers);
        }
        // A request without a secret is no guess: browsers start with one.
        if asked.given.secret.is_empty() {
            return Err(self.unidentified());
        }
        if let Some(identity) = self.tokens.find(&asked.given.secret) {
            return Ok(identity.clone());
        }
        Err(match asked.wrong_tokens.count(asked.client.address) {
            WrongToken::Counted => self.unidentified(),
            WrongToken::TooMany { retry_after } => Refusal::too_many(retry_after),
        })
    }

    fn unidentified(&self) -> Refusal {
        let words = match self.tokens.is_empty() {
            false => "a token is needed, ops.token or one of ops.tokens: as Bearer, or as the password of HTTP Basic",
            true => "open this server through its authenticating proxy: ops.proxy_user_header is needed",
        };
        Refusal::new(StatusCode::UNAUTHORIZED, words)
    }
}

/// What a request gives to identify its sender, and the count of wrong tokens.
pub struct Credentials<'a> {
    pub headers: &'a HeaderMap,
    pub given: &'a RequestCredentials,
    pub client: &'a ClientInfo,
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
