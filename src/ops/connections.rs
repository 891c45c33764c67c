//! The bounded listener of the ops server: bounds on connections, on the time without a response, and on request bytes.
//!
//! A client that sends too slowly, sends too much or stops reading is disconnected. HTTP is not parsed here: `guard`
//! decides which requests are probes.

use std::future::Future as _;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use std::{fmt, io};

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use self::admission::{AdmissionBounds, AdmittedConnection, ConnectionAdmission};
pub use self::admission::{AdmissionError, RequestInProgress, RequestKind};
use super::json::LARGE_BYTES_MAX;

mod admission;

/// 64 requests at once, at most half of them from one address, which may be a proxy with all users behind it. 16 more
/// connections are reserved for probes.
const BOUNDS: AdmissionBounds = AdmissionBounds { requests: 64, requests_per_address: 32, probe_connections: 16 };
/// Longest time from a piece of a response, or from the start of the connection, to the next piece. It ends requests that
/// arrive too slowly, responses that are not read, and unused connections.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes between two responses: line, headers and body of a request together.
const REQUEST_BYTES_MAX: usize = LARGE_BYTES_MAX + 64 * 1024;

/// Accepts connections, and closes idle ones when the bound is reached.
pub struct BoundedListener {
    listener: TcpListener,
    admission: Arc<ConnectionAdmission>,
    response_timeout: Duration,
}

impl BoundedListener {
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, admission: ConnectionAdmission::new(BOUNDS), response_timeout: RESPONSE_TIMEOUT }
    }
}

impl Listener for BoundedListener {
    type Io = BoundedConnection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedConnection, SocketAddr) {
        loop {
            let (stream, address) = Listener::accept(&mut self.listener).await;
            let client = ClientAddress::from(address.ip());
            let Some(place) = self.admission.admit(client) else {
                tracing::debug!(%client, "closed a new connection to the ops server: no connection is idle");
                continue;
            };
            return (BoundedConnection::new(stream, place, address.ip(), self), address);
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// The client of a connection, as request handlers see it.
#[derive(Clone, Debug)]
pub struct ClientInfo {
    pub address: ClientAddress,
    pub ip: IpAddr,
    connection: u64,
    admission: Arc<ConnectionAdmission>,
}

impl ClientInfo {
    /// Admits a request; it counts until the returned value is dropped.
    pub fn begin_request(&self, kind: RequestKind) -> Result<RequestInProgress, AdmissionError> {
        self.admission.begin_request(self.connection, kind)
    }
}

impl Connected<IncomingStream<'_, BoundedListener>> for ClientInfo {
    fn connect_info(stream: IncomingStream<'_, BoundedListener>) -> Self {
        stream.io().client.clone()
    }
}

/// One accepted connection.
pub struct BoundedConnection {
    stream: TcpStream,
    client: ClientInfo,
    admitted: AdmittedConnection,
    close_signal: Pin<Box<WaitForCancellationFutureOwned>>,
    deadline: Pin<Box<Sleep>>,
    response_timeout: Duration,
    /// Bytes received since the last response.
    request_bytes: usize,
    /// Bytes of a response wait for the client.
    is_writing: bool,
}

impl BoundedConnection {
    fn new(stream: TcpStream, admitted: AdmittedConnection, ip: IpAddr, listener: &BoundedListener) -> Self {
        let (response_timeout, places) = (listener.response_timeout, Arc::clone(&listener.admission));
        Self {
            stream,
            client: ClientInfo { address: ip.into(), ip, connection: admitted.id, admission: places },
            close_signal: Box::pin(admitted.close_signal.clone().cancelled_owned()),
            admitted,
            deadline: Box::pin(sleep(response_timeout)),
            response_timeout,
            request_bytes: 0,
            is_writing: false,
        }
    }

    fn restart_deadline(&mut self) {
        let due = Instant::now() + self.response_timeout;
        self.deadline.as_mut().reset(due);
    }

    fn set_writing(&mut self, is_writing: bool) {
        if std::mem::replace(&mut self.is_writing, is_writing) != is_writing {
            self.admitted.set_writing(is_writing);
        }
    }

    /// Fails if the connection must close to make room, even while its client sends or reads.
    fn check_open(&self) -> io::Result<()> {
        if self.admitted.close_signal.is_cancelled() { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }

    /// Fails a pending read or write when the deadline passes or the connection must close to make room. While a client
    /// waits for the next piece of its response, it is not late: the guard and the database bound that time.
    fn poll_ended<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if self.close_signal.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        ready!(self.deadline.as_mut().poll(context));
        if self.is_writing || !self.admitted.has_request() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        self.restart_deadline();
        self.deadline.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for BoundedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_open()?;
        let before = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending => self.poll_ended(context),
            Poll::Ready(Ok(())) => {
                self.request_bytes += buffer.filled().len() - before;
                let too_much = self.request_bytes > REQUEST_BYTES_MAX;
                Poll::Ready(if too_much { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) })
            }
            failed => failed,
        }
    }
}

impl AsyncWrite for BoundedConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_open()?;
        match Pin::new(&mut self.stream).poll_write(context, bytes) {
            Poll::Pending => {
                self.set_writing(true);
                self.poll_ended(context)
            }
            written => {
                self.restart_deadline();
                self.request_bytes = 0;
                written
            }
        }
    }

    /// hyper flushes when it has handed over all bytes that it has.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.set_writing(false);
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

const NETWORK_BITS: u32 = 64;

/// The client by which connections and wrong tokens are counted: an IPv4 address or an IPv6 network, because a host
/// usually has a whole /64 network. All clients behind a proxy share the proxy's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientAddress(IpAddr);

impl From<IpAddr> for ClientAddress {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            // On a link all hosts share one network.
            IpAddr::V6(v6) if v6.is_loopback() || v6.is_unicast_link_local() => IpAddr::V6(v6),
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> NETWORK_BITS << NETWORK_BITS)),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V6(v6) if !v6.is_loopback() && !v6.is_unicast_link_local() => write!(f, "{v6}/{NETWORK_BITS}"),
            address => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::middleware::from_fn;
    use axum::routing::get;
    use futures_util::stream;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpSocket;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::ops::guard::admit_request;

    /// A server with low bounds. Responses of `/slow` need a permit.
    async fn spawn_server(bounds: AdmissionBounds, unanswered_max: Duration) -> (SocketAddr, Arc<Semaphore>) {
        let mut listener = BoundedListener::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
        listener.admission = ConnectionAdmission::new(bounds);
        listener.response_timeout = unanswered_max;
        let (address, permits) = (listener.local_addr().unwrap(), Arc::new(Semaphore::new(0)));
        let permit = Arc::clone(&permits);
        let slow = get(async move || permit.acquire().await.map(|_| "slow").unwrap_or_default());
        let router = Router::new().route("/", get(async || "here")).route("/livez", get(async || "alive"));
        let permit = Arc::clone(&permits);
        let parts = get(async move || {
            Body::from_stream(stream::unfold(["begin", "end"].into_iter(), move |mut parts| {
                let permit = Arc::clone(&permit);
                async move {
                    let part = parts.next()?;
                    if part == "end" {
                        permit.acquire().await.ok()?.forget();
                    }
                    Some((Ok::<_, std::convert::Infallible>(part), parts))
                }
            }))
        });
        let router = router.route("/slow", slow).route("/parts", parts).layer(from_fn(admit_request));
        let service = router.into_make_service_with_connect_info::<ClientInfo>();
        tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
        (address, permits)
    }

    async fn connect(from: &str, server: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
        socket.connect(server).await.unwrap()
    }

    async fn send_and_read(mut stream: TcpStream, request: &[u8]) -> String {
        // Some tests expect to be disconnected in the middle of a write.
        let _ = stream.write_all(request).await;
        let mut answer = Vec::new();
        let reading = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut answer)).await;
        assert!(reading.is_ok(), "the connection was not closed");
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn last_request(path: &str) -> Vec<u8> {
        format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").into_bytes()
    }

    #[tokio::test]
    async fn slow_or_oversized_requests_are_cut_off() {
        let few = AdmissionBounds { requests: 1, requests_per_address: 1, probe_connections: 1 };
        let (address, _permits) = spawn_server(few, Duration::from_secs(2)).await;
        let connect = async || connect("127.0.0.1", address).await;
        assert!(send_and_read(connect().await, &last_request("/")).await.ends_with("here"));
        // The deadline ends a request that never completes, and a connection without one.
        let (slow, idle) = tokio::join!(
            send_and_read(connect().await, b"GET / HTTP/1.1\r\nhost:"),
            send_and_read(connect().await, b"")
        );
        assert_eq!((slow.as_str(), idle.as_str()), ("", ""));
        // A head that is too long, and a body.
        let long = "x".repeat(REQUEST_BYTES_MAX);
        let head = format!("GET / HTTP/1.1\r\nhost: a\r\nx-long: {long}\r\nconnection: close\r\n\r\n");
        assert!(!send_and_read(connect().await, head.as_bytes()).await.contains("here"));
    }

    /// An export is read from the database while its client reads it.
    #[tokio::test]
    async fn response_in_parts_is_not_idle() {
        let few = AdmissionBounds { requests: 1, requests_per_address: 1, probe_connections: 1 };
        let (address, permits) = spawn_server(few, Duration::from_secs(3_600)).await;
        let mut export = connect("127.0.0.1", address).await;
        export.write_all(&last_request("/parts")).await.unwrap();
        let mut read = Vec::new();
        while !String::from_utf8_lossy(&read).contains("begin") {
            assert_ne!(export.read_buf(&mut read).await.unwrap(), 0);
        }
        let idle = connect("127.0.0.1", address).await;
        let refused = send_and_read(connect("127.0.0.1", address).await, &last_request("/")).await;
        assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
        assert_eq!(send_and_read(idle, b"").await, "", "the idle one made room");
        permits.add_permits(1);
        assert!(send_and_read(export, b"").await.contains("end"));
        assert!(send_and_read(connect("127.0.0.1", address).await, &last_request("/")).await.ends_with("here"));
    }

    /// A filter that few payments match is searched page by page, and nothing is sent meanwhile.
    #[tokio::test]
    async fn slow_part_of_a_response_is_awaited() {
        let few = AdmissionBounds { requests: 1, requests_per_address: 1, probe_connections: 1 };
        let (address, permits) = spawn_server(few, Duration::from_secs(1)).await;
        let mut export = connect("127.0.0.1", address).await;
        export.write_all(&last_request("/parts")).await.unwrap();
        let mut read = Vec::new();
        while !String::from_utf8_lossy(&read).contains("begin") {
            assert_ne!(export.read_buf(&mut read).await.unwrap(), 0);
        }
        // Its deadline is later than that of the export would be.
        assert_eq!(send_and_read(connect("127.0.0.1", address).await, b"").await, "");
        permits.add_permits(1);
        assert!(send_and_read(export, b"").await.contains("end"));
    }

    /// Long before its deadline.
    #[tokio::test]
    async fn longest_idle_connection_is_replaced() {
        let few = AdmissionBounds { requests: 1, requests_per_address: 1, probe_connections: 1 };
        for (held, answer) in [("GET / HTTP/1.1\r\nhost:", ""), ("", ""), ("GET / HTTP/1.1\r\nhost: a\r\n\r\n", "here")]
        {
            let (address, _permits) = spawn_server(few, Duration::from_secs(3_600)).await;
            let mut clients = Vec::new();
            for _ in 0..2 {
                let mut client = connect("127.0.0.1", address).await;
                client.write_all(held.as_bytes()).await.unwrap();
                let mut read = Vec::new();
                while !read.ends_with(answer.as_bytes()) {
                    assert_ne!(client.read_buf(&mut read).await.unwrap(), 0);
                }
                clients.push(client);
            }
            assert!(send_and_read(connect("127.0.0.1", address).await, &last_request("/")).await.ends_with("here"));
            assert_eq!(send_and_read(clients.remove(0), b"").await, "");
        }
    }

    #[tokio::test]
    async fn busy_address_blocks_no_probe_or_other_address() {
        let bounds = AdmissionBounds { requests: 3, requests_per_address: 2, probe_connections: 1 };
        let (address, permits) = spawn_server(bounds, Duration::from_secs(3_600)).await;
        let ask = async |from: &'static str, path: &str| {
            send_and_read(connect(from, address).await, &last_request(path)).await
        };
        let begin = |from: &'static str| {
            tokio::spawn(async move { send_and_read(connect(from, address).await, &last_request("/slow")).await })
        };
        let mut slow = vec![begin("127.0.0.1"), begin("127.0.0.1")];
        // Until both are in progress.
        while ask("127.0.0.1", "/").await.ends_with("here") {}
        let refused = ask("127.0.0.1", "/").await;
        assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("\r\nretry-after: 1\r\n"), "{refused}");
        assert!(refused.contains("connection: close"), "{refused}");
        assert!(ask("127.0.0.1", "/livez").await.ends_with("alive"));
        assert!(ask("127.0.0.2", "/").await.ends_with("here"));
        slow.push(begin("127.0.0.2"));
        while ask("127.0.0.3", "/").await.ends_with("here") {}
        for from in ["127.0.0.1", "127.0.0.2", "127.0.0.3"] {
            assert!(ask(from, "/livez").await.ends_with("alive"), "{from}");
        }
        permits.add_permits(3);
        for slow in slow {
            assert!(slow.await.unwrap().ends_with("slow"));
        }
        assert!(ask("127.0.0.3", "/").await.ends_with("here"), "ended requests still count");
    }

    #[test]
    fn ipv6_network_is_one_client() {
        let shown = |address: &str| ClientAddress::from(address.parse::<IpAddr>().unwrap()).to_string();
        for (address, client) in [
            ("10.1.2.3", "10.1.2.3"),
            ("::ffff:10.1.2.3", "10.1.2.3"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("2001:db8:1:2::", "2001:db8:1:2::/64"),
            ("::1", "::1"),
            ("fe80::1:2", "fe80::1:2"),
        ] {
            assert_eq!(shown(address), client);
        }
    }
}
