//! HTTP client of one target: one call sends at most one request, and no byte of it leaves after its deadline.
//!
//! It has no retry policy, redirects, proxy or HTTP/2, whose GOAWAY and REFUSED_STREAM blur what was sent. If a pooled
//! connection has ended before it takes a request, the request goes on another one: no byte of it was written.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ACCEPT, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, USER_AGENT};
use hyper::{Method, Request};
use tokio::time::Instant;
use url::{Position, Url};

use super::connection::{ExchangeResult, ReceivedResponse};
use super::connector::Connector;
use super::failure::RequestFailure;
use super::outbound::OutboundTarget;
use super::pool::{ConnectionPool, ConnectionReuse};
use super::resolver::GuardedResolver;
use super::unexpected_responses::{UnexpectedResponse, UnexpectedResponseLog};
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::UnknownCause;
use crate::provider::FreezeError;

pub(super) struct HttpClient {
    connector: Connector,
    pool: Arc<ConnectionPool>,
    /// Total time, from the call to the last byte of the response.
    timeout: Duration,
    response_log: Arc<UnexpectedResponseLog>,
}

/// A request with all that is sent: target, headers and body.
pub(super) struct PreparedRequest {
    pub(super) method: Method,
    pub(super) target: OutboundTarget,
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

impl HttpClient {
    /// Client with the system's name resolver, behind the target's address rule.
    ///
    /// # Errors
    /// [`FreezeError::Url`] when TLS cannot be set up, most likely because the machine has no CA certificates.
    pub(super) fn new(
        target: &OutboundTarget,
        timeout: Duration,
        reuse: ConnectionReuse,
        response_log: Arc<UnexpectedResponseLog>,
    ) -> Result<Self, FreezeError> {
        Self::with_resolver(target, GuardedResolver::system(target.address_rule.clone()), timeout, reuse, response_log)
    }

    /// Client with this resolver.
    pub(super) fn with_resolver(
        target: &OutboundTarget,
        resolver: GuardedResolver,
        timeout: Duration,
        reuse: ConnectionReuse,
        response_log: Arc<UnexpectedResponseLog>,
    ) -> Result<Self, FreezeError> {
        Ok(Self {
            connector: Connector::new(target, resolver, timeout)?,
            pool: ConnectionPool::new(reuse),
            timeout,
            response_log,
        })
    }

    /// Sends one request to the client's target and reads its response. The caller then checks the response and calls
    /// [`Self::release_connection`].
    ///
    /// # Errors
    /// [`RequestFailure`] when there was no response.
    pub(super) async fn exchange(&self, outgoing: PreparedRequest) -> Result<Box<ReceivedResponse>, RequestFailure> {
        let deadline = Instant::now() + self.timeout;
        let mut request = build_request(outgoing)?;
        if !self.pool.reuses_connections() {
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

    /// Keeps the connection for the next request, unless it is in doubt whether the response belongs to this request.
    pub(super) fn release_connection(&self, answered: ReceivedResponse, doubt: Option<UnknownCause>) {
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

fn build_request(outgoing: PreparedRequest) -> Result<Request<Full<Bytes>>, RequestFailure> {
    let url = &outgoing.target.url;
    let unusable = |what: &str| {
        RequestFailure::Local(LocalFault::Unbuildable(format!("the address has a {what} that cannot be sent")))
    };
    let path = url[Position::BeforePath..Position::AfterQuery].parse().map_err(|_| unusable("path"))?;
    let host = HeaderValue::from_str(&authority(url)).map_err(|_| unusable("host"))?;
    let length = outgoing.body.as_ref().map(Vec::len);
    let mut request = Request::new(Full::from(outgoing.body.unwrap_or_default()));
    (*request.method_mut(), *request.uri_mut(), *request.headers_mut()) = (outgoing.method, path, outgoing.headers);
    request.headers_mut().insert(HOST, host);
    // A POST without a length is refused by some servers (411).
    request.headers_mut().extend(length.map(|length| (CONTENT_LENGTH, HeaderValue::from(length))));
    Ok(request)
}

/// Value of the `Host` header: `host` or `host:port`, without the scheme's default port.
fn authority(url: &Url) -> String {
    url[Position::BeforeHost..Position::AfterPort].to_owned()
}
