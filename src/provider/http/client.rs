//! HTTP client of one target, its connector and its pool of idle connections.
//!
//! One call sends at most one request, and no byte of it leaves after its deadline. There is no retry policy, redirect,
//! proxy or HTTP/2, whose GOAWAY and REFUSED_STREAM blur what was sent. If a pooled connection has ended before it takes
//! a request, the request goes on another one: no byte of it was written.
//!
//! The connector resolves the name and makes TCP and TLS. It runs before the first byte of a request, so each of its
//! failures means "not sent". A connection leaves the pool before its server is likely to close it. So a request rarely
//! meets the close (`docs/decisions/0032-connection-reuse.md`).

use std::error::Error;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{
    ACCEPT, ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, USER_AGENT,
};
use hyper::{Method, Request, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls_platform_verifier::Verifier;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;
use tower::Service as _;
use url::{Host, Url};

use super::classify::ResponseBody;
use super::connection::{ExchangeResult, HttpConnection, ReceivedResponse};
use super::failure::{RequestFailure, UnexpectedResponse, UnexpectedResponseLog, failure_before_send};
use super::header_names::HeaderNames;
use super::outbound::OutboundTarget;
use super::resolver::GuardedResolver;
use super::socket::{Socket, SocketStream};
use crate::domain::outcome::UnknownCause;
use crate::domain::printable::redact_url;
use crate::provider::{ConnectionWatch, FreezeError};

pub struct HttpClient {
    connector: Connector,
    pool: Arc<ConnectionPool>,
    /// Total time, from the call to the last byte of the response.
    timeout: Duration,
    response_log: Arc<UnexpectedResponseLog>,
}

/// A request with all that is sent: target, headers and body.
pub struct PreparedRequest {
    pub method: Method,
    pub target: Arc<OutboundTarget>,
    pub headers: HeaderMap,
    pub body: Option<Bytes>,
}

/// Room for the headers of most requests.
const HEADERS_CAPACITY: usize = 12;

/// Headers that every request carries, before the row's own.
pub fn base_headers(content_type: Option<HeaderValue>) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(HEADERS_CAPACITY);
    headers.extend(content_type.map(|value| (CONTENT_TYPE, value)));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("sluicegate/", env!("CARGO_PKG_VERSION"))));
    headers
}

/// What a client needs beside its target.
#[derive(Clone)]
pub struct ClientSettings {
    /// Total time, from the call to the last byte of the response.
    pub timeout: Duration,
    pub reuse: ConnectionReuse,
    pub header_names: Arc<HeaderNames>,
    pub response_log: Arc<UnexpectedResponseLog>,
}

impl HttpClient {
    /// Client with the system's name resolver, behind the target's address rule.
    ///
    /// # Errors
    /// [`FreezeError::Url`] when TLS cannot be set up, most likely because the machine has no CA certificates.
    pub fn new(target: &OutboundTarget, settings: ClientSettings) -> Result<Self, FreezeError> {
        Self::with_resolver(target, GuardedResolver::system(target.address_rule.clone()), settings)
    }

    /// Client with this resolver.
    pub fn with_resolver(
        target: &OutboundTarget,
        resolver: GuardedResolver,
        settings: ClientSettings,
    ) -> Result<Self, FreezeError> {
        let ClientSettings { timeout, reuse, header_names, response_log } = settings;
        Ok(Self {
            connector: Connector { header_names, ..Connector::new(target, resolver, timeout)? },
            pool: Arc::new(ConnectionPool { reuse, idle: Mutex::default() }),
            timeout,
            response_log,
        })
    }

    /// Sends one request to the client's target and reads its response. The caller then checks the response and calls
    /// [`Self::release_connection`].
    ///
    /// # Errors
    /// [`RequestFailure`] when there was no response.
    pub async fn exchange(&self, outgoing: PreparedRequest) -> Result<Box<ReceivedResponse>, RequestFailure> {
        let deadline = Instant::now() + self.timeout;
        let mut request = build_request(outgoing);
        if !self.pool.reuse.is_allowed {
            request.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        while let Some(connection) = self.pool.take() {
            match connection.exchange(request, deadline, &self.response_log).await {
                ExchangeResult::Unsent(untouched) => request = *untouched,
                ended => return into_response(ended),
            }
        }
        let connection = self.connector.connect(deadline).await?;
        into_response(connection.exchange(request, deadline, &self.response_log).await)
    }

    /// Watches the connection of a response that may answer an earlier request. `None`: the response was cut off, so
    /// nothing that follows can be told from it.
    pub fn watch(&self, answered: ReceivedResponse) -> Option<ConnectionWatch> {
        let ReceivedResponse { response, connection, .. } = answered;
        let response_log = Arc::clone(&self.response_log);
        match connection {
            Some(connection) => Some(ConnectionWatch::new(async move {
                let follows = connection.receives_more().await;
                if follows {
                    response_log.record(UnexpectedResponse::AfterResponse);
                }
                follows
            })),
            // The provider said that it closes the connection.
            None => {
                matches!(response.body, ResponseBody::Whole(_)).then(|| ConnectionWatch::new(std::future::ready(false)))
            }
        }
    }

    /// Keeps the connection for the next request, unless it is in doubt whether the response belongs to this request.
    pub fn release_connection(&self, answered: ReceivedResponse, doubt: Option<UnknownCause>) {
        if let Some(UnknownCause::NotEchoed(_)) = doubt {
            self.response_log.record(UnexpectedResponse::NotEchoed);
        }
        if let (Some(connection), None) = (answered.connection, doubt) {
            self.pool.put(connection, &answered.response.headers);
        }
    }
}

fn into_response(exchange: ExchangeResult) -> Result<Box<ReceivedResponse>, RequestFailure> {
    match exchange {
        ExchangeResult::Responded(answered) => Ok(answered),
        ExchangeResult::Unsent(_) => {
            Err(RequestFailure::NotSent("the connection was closed, or received bytes, before the request".to_owned()))
        }
        ExchangeResult::Failed(failure) => Err(failure),
    }
}

fn build_request(outgoing: PreparedRequest) -> Request<Full<Bytes>> {
    let PreparedRequest { method, target, headers, body } = outgoing;
    let length = body.as_ref().map(Bytes::len);
    let mut request = Request::new(Full::new(body.unwrap_or_default()));
    *request.method_mut() = method;
    *request.uri_mut() = target.path.clone();
    *request.headers_mut() = headers;
    request.headers_mut().insert(HOST, target.host_header.clone());
    // A POST without a length is refused by some servers (411).
    request.headers_mut().extend(length.map(|length| (CONTENT_LENGTH, HeaderValue::from(length))));
    request
}

/// Longest time that making a connection may take.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(5);
/// Interval of TCP keepalive, which detects a peer that vanished while a connection is busy.
const TCP_KEEPALIVE: Duration = Duration::from_secs(15);

struct Connector {
    tcp: HttpConnector<GuardedResolver>,
    /// Absent for plain http.
    tls: Option<(TlsConnector, ServerName<'static>)>,
    target_uri: Uri,
    timeout: Duration,
    header_names: Arc<HeaderNames>,
}

impl Connector {
    /// `timeout` is the row's total timeout of a request.
    ///
    /// # Errors
    /// [`FreezeError::Url`] when TLS cannot be set up, most likely because the machine has no CA certificates.
    pub fn new(target: &OutboundTarget, resolver: GuardedResolver, timeout: Duration) -> Result<Self, FreezeError> {
        let failed = |problem: &dyn std::fmt::Display| FreezeError::Url {
            url: redact_url(target.url.as_str()),
            problem: format!("the client cannot be set up: {problem}"),
        };
        // Less than the total, so that a failed connection is reported before the request's deadline.
        let timeout = (timeout * 9 / 10).min(CONNECT_TIMEOUT_MAX);
        let mut tcp = HttpConnector::new_with_resolver(resolver);
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(timeout));
        // A small request must not wait for the acknowledgement of the one before (Nagle).
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(TCP_KEEPALIVE));
        let tls = match server_name(&target.url).filter(|_| target.is_encrypted()) {
            Some(name) => {
                let config = tls_config(target).map_err(|error| failed(&error))?;
                Some((TlsConnector::from(Arc::new(config)), name))
            }
            None if target.is_encrypted() => return Err(failed(&"its host is not valid in a TLS certificate")),
            None => None,
        };
        let target_uri =
            format!("{}/", target.url.origin().ascii_serialization()).parse().map_err(|error| failed(&error))?;
        Ok(Self { tcp, tls, target_uri, timeout, header_names: Arc::default() })
    }

    /// Makes one connection, within the time for it and before the request's deadline.
    ///
    /// # Errors
    /// [`RequestFailure::NotSent`] or [`RequestFailure::Local`].
    pub async fn connect(&self, deadline: Instant) -> Result<HttpConnection, RequestFailure> {
        let by = deadline.min(Instant::now() + self.timeout);
        let connected = timeout_at(by, self.open_connection(deadline)).await;
        let failed = |error: Box<dyn Error + Send + Sync>| failure_before_send(&*error);
        connected.map_err(|_| RequestFailure::NotSent("no connection in time".to_owned()))?.map_err(failed)
    }

    async fn open_connection(&self, deadline: Instant) -> Result<HttpConnection, Box<dyn Error + Send + Sync>> {
        let stream = self.tcp.clone().call(self.target_uri.clone()).await?.into_inner();
        let socket = Socket::new(stream, deadline)?;
        let plain = SocketStream(Arc::clone(&socket));
        let transport = match &self.tls {
            Some((tls, name)) => Either::Left(tls.connect(name.clone(), plain).await?),
            None => Either::Right(plain),
        };
        Ok(HttpConnection::open(socket, transport, Arc::clone(&self.header_names)).await?)
    }
}

fn server_name(url: &Url) -> Option<ServerName<'static>> {
    match url.host()? {
        Host::Domain(name) => ServerName::try_from(name.to_owned()).ok(),
        Host::Ipv4(ip) => Some(ServerName::IpAddress(ip.into())),
        Host::Ipv6(ip) => Some(ServerName::IpAddress(ip.into())),
    }
}

/// TLS configuration that trusts the platform's authorities and the target's own. Early data stays off: a replayed or
/// delayed first flight would be a request.
fn tls_config(target: &OutboundTarget) -> Result<ClientConfig, rustls::Error> {
    // Another part of the process may have installed the crypto provider; it is always ring.
    let crypto =
        CryptoProvider::get_default().map_or_else(|| Arc::new(rustls::crypto::ring::default_provider()), Arc::clone);
    let pem = target.authorities.pem().unwrap_or_default();
    let authorities = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    let authorities = authorities.map_err(|error| rustls::Error::General(error.to_string()))?;
    let verifier = Verifier::new_with_extra_roots(authorities, Arc::clone(&crypto))?;
    let mut config = ClientConfig::builder_with_provider(crypto)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Longest time that a connection is kept idle. Common servers (Node, Apache) close after 5 s.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// Part of the server's own idle time that is left for the next request to arrive.
const IDLE_MARGIN: Duration = Duration::from_secs(1);

/// Whether, and for how long, requests share connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionReuse {
    pub is_allowed: bool,
    /// Time from opening a connection to the last request that may begin on it.
    pub max_age: Duration,
}

/// Longest idle time of a connection after a response with these headers.
fn max_idle_time(headers: &HeaderMap) -> Duration {
    keep_alive_timeout(headers).map_or(IDLE_MAX, |server| server.saturating_sub(IDLE_MARGIN).min(IDLE_MAX))
}

/// Idle time by `Keep-Alive: timeout=5, max=100`: the server closes the connection after `timeout` seconds, or after
/// `max` more requests. It is zero if no request is left.
fn keep_alive_timeout(headers: &HeaderMap) -> Option<Duration> {
    let lines = headers.get_all("keep-alive").iter().filter_map(|value| value.to_str().ok());
    let parameters = lines.flat_map(|line| line.split(',')).filter_map(|parameter| parameter.split_once('='));
    let parameters = parameters.filter_map(|(name, value)| {
        let number: u64 = value.trim().trim_matches('"').parse().ok()?;
        match name.trim().to_ascii_lowercase().as_str() {
            "timeout" => Some(Duration::from_secs(number)),
            "max" if number == 0 => Some(Duration::ZERO),
            _ => None,
        }
    });
    parameters.min()
}

struct ConnectionPool {
    reuse: ConnectionReuse,
    idle: Mutex<IdleConnections>,
}

#[derive(Default)]
struct IdleConnections {
    /// In the order of use; the most recently used is last.
    connections: Vec<IdleConnection>,
    /// A task runs that closes expired connections.
    has_sweep_task: bool,
}

struct IdleConnection {
    connection: HttpConnection,
    expires_at: Instant,
}

impl ConnectionPool {
    /// Takes the most recently used connection. Its server may have closed it, or sent bytes on it, meanwhile.
    pub fn take(&self) -> Option<HttpConnection> {
        loop {
            let idle = self.idle.lock().connections.pop()?;
            if Instant::now() < idle.expires_at {
                return Some(idle.connection);
            }
        }
    }

    /// Keeps a connection for the next request, if it may carry one after a response with these headers.
    pub fn put(self: &Arc<Self>, connection: HttpConnection, headers: &HeaderMap) {
        let until = (Instant::now() + max_idle_time(headers)).min(connection.socket.opened_at + self.reuse.max_age);
        if !self.reuse.is_allowed || until <= Instant::now() {
            return;
        }
        let mut idle = self.idle.lock();
        idle.connections.push(IdleConnection { connection, expires_at: until });
        if !std::mem::replace(&mut idle.has_sweep_task, true) {
            drop(idle);
            tokio::spawn(close_expired_until_empty(Arc::downgrade(self)));
        }
    }

    /// Closes expired connections. Returns when the next one expires.
    fn close_expired(&self) -> Option<Instant> {
        let mut idle = self.idle.lock();
        let now = Instant::now();
        let expired: Vec<IdleConnection> = idle.connections.extract_if(.., |entry| entry.expires_at <= now).collect();
        let next = idle.connections.iter().map(|entry| entry.expires_at).min();
        idle.has_sweep_task = next.is_some();
        drop(idle);
        drop(expired);
        next
    }
}

/// Task that closes expired connections. It ends with the last idle connection, or with the pool.
async fn close_expired_until_empty(pool: Weak<ConnectionPool>) {
    while let Some(next) = pool.upgrade().and_then(|pool| pool.close_expired()) {
        sleep_until(next).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_connection_expires_before_the_server_closes() {
        for (lines, seconds) in [
            (&[][..], 4),
            (&["timeout=60"], 4),
            (&["timeout=5, max=100"], 4),
            (&["timeout=3"], 2),
            (&["max=7 , Timeout = 2"], 1),
            (&["timeout=\"2\""], 1),
            (&["timeout=1"], 0),
            (&["timeout=0"], 0),
            (&["timeout=60, max=0"], 0),
            (&["timeout=60", "timeout=2"], 1),
            (&["timeout=soon", "timeout", ""], 4),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("keep-alive", line.parse().unwrap());
            }
            assert_eq!(max_idle_time(&headers), Duration::from_secs(seconds), "{lines:?}");
        }
    }
}
