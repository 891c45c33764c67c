//! Connector of one target: name resolution, TCP and TLS.
//!
//! It runs before the first byte of a request, so each of its failures means "not sent".

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use hyper::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::ClientConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls_platform_verifier::Verifier;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tower::Service as _;
use url::{Host, Url};

use super::connection::{HttpConnection, Transport};
use super::failure::{RequestFailure, failure_before_send};
use super::outbound::OutboundTarget;
use super::resolver::GuardedResolver;
use super::socket::{Socket, SocketStream};
use crate::domain::printable::redact_url;
use crate::provider::FreezeError;

/// Longest time that making a connection may take.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(5);
/// Interval of TCP keepalive, which detects a peer that vanished while a connection is busy.
const TCP_KEEPALIVE: Duration = Duration::from_secs(15);

pub(super) struct Connector {
    tcp: HttpConnector<GuardedResolver>,
    /// Absent for plain http.
    tls: Option<(TlsConnector, ServerName<'static>)>,
    target_uri: Uri,
    timeout: Duration,
}

impl Connector {
    /// `timeout` is the row's total timeout of a request.
    ///
    /// # Errors
    /// [`FreezeError::Url`] when TLS cannot be set up, most likely because the machine has no CA certificates.
    pub(super) fn new(
        target: &OutboundTarget,
        resolver: GuardedResolver,
        timeout: Duration,
    ) -> Result<Self, FreezeError> {
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
        Ok(Self { tcp, tls, target_uri, timeout })
    }

    /// Makes one connection, within the time for it and before the request's deadline.
    ///
    /// # Errors
    /// [`RequestFailure::NotSent`] or [`RequestFailure::Local`].
    pub(super) async fn connect(&self, deadline: Instant) -> Result<HttpConnection, RequestFailure> {
        let by = deadline.min(Instant::now() + self.timeout);
        let connected = timeout_at(by, self.open_connection(deadline)).await;
        let failed = |error: Box<dyn Error + Send + Sync>| failure_before_send(&*error);
        connected.map_err(|_| RequestFailure::NotSent("no connection in time".to_owned()))?.map_err(failed)
    }

    async fn open_connection(&self, deadline: Instant) -> Result<HttpConnection, Box<dyn Error + Send + Sync>> {
        let stream = self.tcp.clone().call(self.target_uri.clone()).await?.into_inner();
        let socket = Socket::new(stream, deadline)?;
        let plain = SocketStream(Arc::clone(&socket));
        let transport: Transport = match &self.tls {
            Some((tls, name)) => Box::new(tls.connect(name.clone(), plain).await?),
            None => Box::new(plain),
        };
        Ok(HttpConnection::open(socket, transport).await?)
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
