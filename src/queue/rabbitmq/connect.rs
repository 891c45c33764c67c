//! How the broker is reached: the settings, checked before anything is sent, and one attempt to connect.
//!
//! An error never repeats the URL, because it holds the password. Whether plain text may be spoken to that host is
//! judged by `config`, before anything is opened. lapin reads from a stream behind a [`Sanitizer`], by a runtime that
//! knows such streams. TLS is below that stream, so that the bytes seen there are plain.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::TokioRuntime;
use async_rs::traits::{AsyncToSocketAddrs as _, Reactor};
use async_rs::util::RuntimeParts;
use futures_io::{AsyncRead, AsyncWrite};
use futures_util::Stream;
use lapin::tcp::{AsyncTcpStream, OwnedTLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Connection, ConnectionProperties};
use parking_lot::Mutex;
use secrecy::{ExposeSecret, SecretString};
use url::{Host, Url};

use super::channels::CallFailure;
use super::sanitizer::Sanitizer;
use crate::files::{self, CERTIFICATES_BYTES_MAX};
use crate::queue::QueueError;
use crate::tls::Authorities;

/// Seconds between heartbeats unless the URL says otherwise; a dead peer is noticed after two.
/// <https://www.rabbitmq.com/docs/heartbeats>: 5 to 20 s suits most environments.
const HEARTBEAT_S: u16 = 10;
/// Longest time for one connection attempt, handshake included, unless the URL's `connection_timeout` (ms) says otherwise.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Leaves room for a provider's name within the 255 bytes of a queue's.
const PREFIX_BYTES_MAX: usize = 100;

#[derive(Clone)]
pub struct RabbitSettings {
    pub(super) uri: AMQPUri,
    pub(super) tls: OwnedTLSConfig,
    connect_limit: Duration,
    pub(super) prefix: String,
}

impl RabbitSettings {
    /// Reads `amqp://` or `amqps://` (<https://www.rabbitmq.com/docs/uri-spec>, with the query keys `heartbeat` in
    /// seconds, `connection_timeout` in ms, `channel_max`, `auth_mechanism` and `cacertfile`, a PEM file with the
    /// authorities to trust besides the public ones). `prefix` begins the names of all exchanges and queues.
    ///
    /// # Errors
    /// [`QueueError::Refused`] names what is wrong and the fix; it never repeats the URL.
    pub fn new(url: &SecretString, prefix: &str) -> Result<Self, QueueError> {
        let parsed = Url::parse(url.expose_secret()).map_err(|error| refused(format!("queue.url: {error}")))?;
        if !matches!(parsed.scheme(), "amqp" | "amqps") {
            return Err(refused("queue.url: must begin with amqp:// or amqps://"));
        }
        let mut uri: AMQPUri =
            url.expose_secret().parse().map_err(|_| refused("queue.url: is not an AMQP URL; see uri-spec"))?;
        // The AMQP parser reads an IPv6 address as "no host" and would connect to localhost.
        if let Some(Host::Ipv6(address)) = parsed.host() {
            uri.authority.host = address.to_string();
        }
        // `amqp://host/` names the virtual host "", which no broker has; its writers mean the default one.
        if uri.vhost.is_empty() {
            "/".clone_into(&mut uri.vhost);
        }
        let connect_limit = uri.query.connection_timeout.map_or(CONNECT_LIMIT, Duration::from_millis);
        uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let fits = (1..=PREFIX_BYTES_MAX).contains(&prefix.len());
        if !fits || !prefix.bytes().all(plain) || prefix.starts_with("amq.") {
            return Err(refused(format!(
                "queue.prefix: must be 1 to {PREFIX_BYTES_MAX} of A-Z a-z 0-9 . _ - and not begin with `amq.`"
            )));
        }
        Ok(Self { tls: tls(&parsed)?, uri, connect_limit, prefix: prefix.to_owned() })
    }

    /// Trusts these authorities besides the public ones, unless the URL names a `cacertfile` of its own.
    pub fn with_authorities(mut self, authorities: &Authorities) -> Self {
        if self.tls.cert_chain.is_none() {
            self.tls.cert_chain = authorities.pem().map(str::to_owned);
        }
        self
    }
}

fn tls(url: &Url) -> Result<OwnedTLSConfig, QueueError> {
    let Some((_, path)) = url.query_pairs().find(|(key, _)| key == "cacertfile") else {
        return Ok(OwnedTLSConfig::default());
    };
    let read = files::read_trusted(Path::new(path.as_ref()), CERTIFICATES_BYTES_MAX);
    let pem = read.map_err(|error| refused(format!("queue.url: cacertfile `{path}` cannot be read: {error}")))?;
    Ok(OwnedTLSConfig { identity: None, cert_chain: Some(pem.text) })
}

fn refused(text: impl Into<String>) -> QueueError {
    QueueError::Refused(text.into())
}

/// Bytes that are read at a time; a TLS record has as many.
const CHUNK_BYTES: usize = 16 * 1024;

type Tcp = AsyncTcpStream<<TokioRuntime as Reactor>::TcpStream>;

/// Tokio's reactor, with guarded streams.
#[derive(Clone, Debug)]
struct SanitizingReactor(TokioRuntime);

impl Reactor for SanitizingReactor {
    type TcpStream = SanitizedStream;
    type Sleep = <TokioRuntime as Reactor>::Sleep;

    fn register<H: Read + Write + AsFd + AsRawFd + Send + 'static>(
        &self,
        socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        self.0.register(socket)
    }

    fn sleep(&self, wait: Duration) -> Self::Sleep {
        self.0.sleep(wait)
    }

    fn interval(&self, every: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(every)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move { Ok(SanitizedStream::new(AsyncTcpStream::Plain(connecting.await?), Sanitizer::default())) }
    }
}

/// A connection to the broker whose frames are read through a [`Sanitizer`].
struct SanitizedStream {
    stream: Tcp,
    chunk: Box<[u8]>,
    sanitizer: Sanitizer,
}

impl SanitizedStream {
    pub fn new(stream: Tcp, sanitizer: Sanitizer) -> Self {
        Self { stream, chunk: vec![0; CHUNK_BYTES].into_boxed_slice(), sanitizer }
    }

    fn stream(self: Pin<&mut Self>) -> Pin<&mut Tcp> {
        Pin::new(&mut self.get_mut().stream)
    }
}

impl AsyncRead for SanitizedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { stream, chunk, sanitizer } = self.get_mut();
        loop {
            let taken = sanitizer.take(bytes);
            if taken > 0 || bytes.is_empty() {
                return Poll::Ready(Ok(taken));
            }
            let read = ready!(Pin::new(&mut *stream).poll_read(cx, chunk))?;
            // At the end of the stream, the beginning of a frame is of no use.
            if read == 0 {
                return Poll::Ready(Ok(0));
            }
            sanitizer.add(&chunk[..read])?;
        }
    }
}

impl AsyncWrite for SanitizedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream().poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_close(cx)
    }
}

/// A connection to the broker.
pub struct BrokerConnection {
    pub connection: Connection,
    /// Of the broker, if it tells it.
    pub version: Option<String>,
    pub peer: Option<SocketAddr>,
}

/// The addresses of the broker in the order in which they are tried: the one of a connection that was left is the last.
fn in_order(mut addresses: Vec<SocketAddr>, last: Option<SocketAddr>) -> Vec<SocketAddr> {
    addresses.sort_by_key(|address| Some(*address) == last);
    addresses
}

/// One attempt to connect, with a time limit. lapin's I/O thread would wait for ever for a peer that accepts and says
/// nothing, so a copy of the socket is kept, and shut down when the time is up. `name` is what the broker's own lists show; `last` is the address that is tried last.
pub async fn connect(
    settings: &RabbitSettings,
    name: &str,
    last: Option<SocketAddr>,
) -> Result<BrokerConnection, CallFailure> {
    // No `enable_auto_recover`: the supervisor rebuilds everything as one generation.
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    let tokio = lapin::runtime::default_runtime().map_err(CallFailure::Broker)?;
    let runtime = async_rs::Runtime::new(RuntimeParts::new(tokio.clone(), SanitizingReactor(tokio.clone())));
    let (tls, limit) = (settings.tls.clone(), settings.connect_limit);
    let socket: Arc<Mutex<Option<TcpStream>>> = Arc::default();
    let kept = Arc::clone(&socket);
    let version: Arc<OnceLock<String>> = Arc::default();
    let announced = Arc::clone(&version);
    let connecting = Connection::connector(
        settings.uri.clone(),
        runtime,
        async move |uri, _| {
            let stream = async {
                let addresses = tokio.to_socket_addrs((uri.authority.host.clone(), uri.authority.port));
                let addresses = in_order(addresses.to_socket_addrs().await?.collect(), last);
                let stream = AsyncTcpStream::connect(&tokio, addresses).await?;
                if let AsyncTcpStream::Plain(tcp) = &stream {
                    let copy = TcpStream::from(tcp.get_ref().as_fd().try_clone_to_owned()?);
                    *kept.lock() = Some(copy);
                }
                match uri.scheme {
                    AMQPScheme::AMQP => Ok(stream),
                    AMQPScheme::AMQPS => stream.into_tls(&uri.authority.host, tls.as_ref()).await,
                }
            };
            // lapin's own connect knows no time limit; without one this thread would outlive the attempt.
            match tokio::time::timeout(limit, stream).await {
                Ok(stream) => {
                    let sanitizer = Sanitizer::with_version(Arc::clone(&announced));
                    Ok(AsyncTcpStream::Plain(SanitizedStream::new(stream?, sanitizer)))
                }
                Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            }
        },
        properties,
    );
    let ended = tokio::time::timeout(limit, connecting).await;
    let socket = socket.lock().take();
    match ended {
        Ok(connection) => Ok(BrokerConnection {
            connection: connection.map_err(CallFailure::Broker)?,
            version: version.get().cloned(),
            peer: socket.and_then(|socket| socket.peer_addr().ok()),
        }),
        Err(_) => {
            if let Some(Err(error)) = socket.map(|socket| socket.shutdown(Shutdown::Both)) {
                tracing::debug!(%error, "socket of a connection attempt was gone already");
            }
            Err(CallFailure::TimedOut)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> Result<RabbitSettings, String> {
        RabbitSettings::new(&SecretString::from(url), "payments").map_err(|error| error.to_string())
    }

    #[test]
    fn errors_never_repeat_the_password() {
        for url in ["http://u:hunter2@localhost", "amqp://u:hunter2@localhost?heartbeat=x", "amqp://u:hunter2@[::"] {
            let error = settings(url).err().unwrap();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn defaults_give_way_to_the_url() {
        let plain = settings("amqp://localhost/").unwrap();
        assert_eq!((plain.uri.vhost.as_str(), plain.uri.query.heartbeat), ("/", Some(10)));
        assert_eq!(plain.connect_limit, Duration::from_secs(5));
        let own = settings("amqp://[::1]/v?heartbeat=3&connection_timeout=700").unwrap();
        assert_eq!((own.uri.authority.host.as_str(), own.uri.query.heartbeat), ("::1", Some(3)));
        assert_eq!(own.connect_limit, Duration::from_millis(700));
    }

    #[test]
    fn left_address_is_tried_last() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let all = ["10.0.0.1:5672", "10.0.0.2:5672", "10.0.0.3:5672"].map(address);
        assert_eq!(in_order(all.to_vec(), None), all);
        assert_eq!(in_order(all.to_vec(), Some(all[0])), [all[1], all[2], all[0]]);
        assert_eq!(in_order(all[..1].to_vec(), Some(all[0])), all[..1], "there is no other");
        assert_eq!(in_order(all.to_vec(), Some(address("10.0.0.9:5672"))), all);
    }

    #[test]
    fn queue_prefix_must_be_a_valid_name() {
        let url = SecretString::from("amqp://localhost");
        for prefix in ["", "amq.x", "a b", "é", &"x".repeat(101)] {
            assert!(RabbitSettings::new(&url, prefix).is_err(), "{prefix}");
        }
        assert!(RabbitSettings::new(&url, "payments.test-1_a").is_ok());
    }
}
