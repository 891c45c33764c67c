//! HTTP client of one target: one call is at most one request on the wire, and none of it leaves after its deadline.
//!
//! No retry policy, no redirects, no proxy, no HTTP/2 (its GOAWAY and REFUSED_STREAM blur what was sent). A request
//! that a pooled connection did not take, because it had ended, goes on another one: no byte of it was written.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ACCEPT, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, USER_AGENT};
use hyper::{Method, Request};
use tokio::time::Instant;
use url::{Position, Url};

use super::connection::{Answered, Exchange};
use super::connector::Connector;
use super::failure::Failure;
use super::outbound::Target;
use super::pool::{Pool, Reuse};
use super::resolver::GuardedResolver;
use super::strays::{Stray, StrayLog};
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::UnknownCause;
use crate::provider::FreezeError;

pub(super) struct Client {
    connector: Connector,
    pool: Arc<Pool>,
    /// Total: from the call to the last byte of the answer.
    timeout: Duration,
    strays: Arc<StrayLog>,
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

impl Client {
    /// # Errors
    /// [`FreezeError::Url`] when TLS cannot be set up, most likely because the machine has no CA certificates.
    pub(super) fn new(
        target: &Target,
        timeout: Duration,
        reuse: Reuse,
        strays: Arc<StrayLog>,
    ) -> Result<Self, FreezeError> {
        Self::with_resolver(target, GuardedResolver::of_system(target.addresses.clone()), timeout, reuse, strays)
    }

    /// # Errors
    /// As [`Client::new`].
    pub(super) fn with_resolver(
        target: &Target,
        resolver: GuardedResolver,
        timeout: Duration,
        reuse: Reuse,
        strays: Arc<StrayLog>,
    ) -> Result<Self, FreezeError> {
        Ok(Self { connector: Connector::new(target, resolver, timeout)?, pool: Pool::new(reuse), timeout, strays })
    }

    /// Sends one request to the client's target and reads its answer. The caller tells with [`Client::conclude`] what the
    /// answer was worth.
    ///
    /// # Errors
    /// [`Failure`] when there was no answer at all.
    pub(super) async fn exchange(&self, outgoing: Outgoing) -> Result<Box<Answered>, Failure> {
        let deadline = Instant::now() + self.timeout;
        let mut request = request_of(outgoing)?;
        if !self.pool.keeps() {
            request.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        while let Some(connection) = self.pool.take() {
            match connection.exchange(request, deadline, &self.strays).await {
                Exchange::NotTaken(untouched) => request = *untouched,
                ended => return answer_of(ended),
            }
        }
        let connection = self.connector.connect(deadline).await?;
        answer_of(connection.exchange(request, deadline, &self.strays).await)
    }

    /// Keeps the connection for the next request, unless it is in doubt whether the answer was this request's.
    pub(super) fn conclude(&self, answered: Answered, doubt: Option<UnknownCause>) {
        if let Some(UnknownCause::NotEchoed(_)) = doubt {
            self.strays.note(Stray::NotEchoed);
        }
        if let (Some(connection), None) = (answered.connection, doubt) {
            self.pool.put(connection, &answered.reading.headers);
        }
    }
}

fn answer_of(exchange: Exchange) -> Result<Box<Answered>, Failure> {
    match exchange {
        Exchange::Answered(answered) => Ok(answered),
        Exchange::NotTaken(_) => {
            Err(Failure::NotSent("the connection was closed, or spoken on, before the request".to_owned()))
        }
        Exchange::Failed(failure) => Err(failure),
    }
}

fn request_of(outgoing: Outgoing) -> Result<Request<Full<Bytes>>, Failure> {
    let url = &outgoing.target.url;
    let unusable = |what: &str| {
        Failure::Local(LocalFault::Unbuildable(format!("the address has a {what} that no request can hold")))
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

/// `host` or `host:port`; the port of the scheme is left out.
fn authority(url: &Url) -> String {
    url[Position::BeforeHost..Position::AfterPort].to_owned()
}
