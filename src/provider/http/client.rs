//! The HTTP client, set so that one call is at most one request on the wire, and the reading of its answer.
//!
//! Refuses second tries of any kind: no retry policy, no redirects, no proxy, no HTTP/2 (its GOAWAY and REFUSED_STREAM
//! blur what was sent). One thing inside hyper-util (0.1.21, `client/legacy/client.rs`, `send_request`) cannot be
//! switched off through reqwest and need not be: when a pooled connection closes, a request that its dispatcher never
//! took, of which no byte was written, moves to another connection. `tests/contract/provider.rs` counts it.

use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue, USER_AGENT};
use reqwest::{Certificate, Client, Method, Request, Response, redirect, retry};
use tokio::time::Instant;

use super::classify::{Body, Reading};
use super::failure::{Failure, cause_of, failure_of};
use super::outbound::{Target, printable};
use super::resolver::GuardedResolver;
use crate::provider::FreezeError;

/// Most of a body that is read, in bytes: no payment answer needs more, and memory stays bounded.
const BODY_BYTES_MAX: usize = 64 * 1024;
/// Most headers of an answer. Their bytes are bounded by hyper's own read buffer (about 400 KiB).
const HEADERS_MAX: usize = 64;
/// Longest time that making a connection may take.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(5);
/// Below the keep-alive of common servers (Node and Apache close after 5 s), so that we close first and an idle
/// connection is not cut by the other side just as a payment sets out on it.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Finds a peer that vanished without a word on connections that are busy.
const TCP_KEEPALIVE: Duration = Duration::from_secs(15);

/// Builds the client for one target.
///
/// # Errors
/// [`FreezeError::Url`] when TLS cannot be set up, most likely because the machine has no CA certificates.
pub(super) fn build(target: &Target, timeout: Duration, connections: u32) -> Result<Client, FreezeError> {
    // Nobody else may have chosen by now (tests, library users); if somebody is quicker, theirs is as good.
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let builder = Client::builder()
        // The default policy re-sends on protocol NACKs: an unmetered request.
        .retry(retry::never())
        // The default follows ten hops, each an unmetered request, possibly to a place that nobody allowed.
        .redirect(redirect::Policy::none())
        // A proxy from the environment would resolve and connect for us, past the outbound policy.
        .no_proxy()
        .http1_only()
        .https_only(target.is_encrypted())
        .dns_resolver(GuardedResolver::of_system(target.addresses.clone()))
        // Total: from the call to the last byte of the body.
        .timeout(timeout)
        // Strictly below the total, so that a connection that cannot be made ends as "not sent", not as "no answer".
        .connect_timeout((timeout * 9 / 10).min(CONNECT_TIMEOUT_MAX))
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .pool_max_idle_per_host(usize::try_from(connections).unwrap_or(usize::MAX))
        // A small request must not wait for the acknowledgement of the one before (Nagle).
        .tcp_nodelay(true)
        .tcp_keepalive(TCP_KEEPALIVE)
        .http1_max_headers(HEADERS_MAX)
        .referer(false)
        // Never the wire's bytes in a log, whatever its level.
        .connection_verbose(false);
    // The platform's verifier fails to build without CA certificates, which a plain target does not need.
    let builder = if target.is_encrypted() { builder } else { builder.tls_certs_only([]) };
    let refused = |error: reqwest::Error| FreezeError::Url {
        url: printable(target.url.as_str()),
        problem: format!("the client cannot be set up: {}", cause_of(&error)),
    };
    let trusted = target.authorities.pem().unwrap_or_default();
    let trusted = Certificate::from_pem_bundle(trusted.as_bytes()).map_err(refused)?;
    builder.tls_certs_merge(trusted).build().map_err(refused)
}

/// Everything that goes on the wire.
pub(super) struct Outgoing {
    pub(super) method: Method,
    pub(super) target: Target,
    pub(super) headers: HeaderMap,
    pub(super) body: Option<Vec<u8>>,
}

/// Headers that every request carries, before the row's own.
pub(super) fn base_headers(content_type: Option<HeaderValue>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.extend(content_type.map(|value| (CONTENT_TYPE, value)));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("sluicegate/", env!("CARGO_PKG_VERSION"))));
    headers
}

/// Sends one request and reads its answer; with the instant of the last byte that was read.
///
/// # Errors
/// [`Failure`] when there was no answer at all.
pub(super) async fn exchange(client: &Client, outgoing: Outgoing) -> Result<(Reading, Instant), Failure> {
    let mut request = Request::new(outgoing.method, outgoing.target.url);
    *request.headers_mut() = outgoing.headers;
    *request.body_mut() = outgoing.body.map(Into::into);
    let mut response = client.execute(request).await.map_err(|error| failure_of(&error))?;
    let mut read_at = Instant::now();
    let body = read_body(&mut response, &mut read_at).await;
    let headers = std::mem::take(response.headers_mut());
    Ok((Reading { status: response.status().as_u16(), headers, body }, read_at))
}

async fn read_body(response: &mut Response, read_at: &mut Instant) -> Body {
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => {
                *read_at = Instant::now();
                if body.len() + chunk.len() > BODY_BYTES_MAX {
                    return Body::TooLarge;
                }
                body.extend_from_slice(&chunk);
            }
            Ok(None) => {
                *read_at = Instant::now();
                return Body::Whole(body);
            }
            Err(error) => return Body::Broken(failure_of(&error).unknown_cause()),
        }
    }
}
