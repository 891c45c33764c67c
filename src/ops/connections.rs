//! The connections of the ops server, bounded: how many at once, how long without an answer, how many bytes of a request.
//!
//! Refuses to know HTTP: whoever sends too slowly, too much or never reads is cut off, whatever it says.

use std::future::Future as _;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// Connections at once; further ones wait to be accepted.
const CONNECTIONS_MAX: usize = 64;
/// From an answer, or from the connection's beginning, to the next answer: a request in drips ends here, and so does a
/// connection that nobody uses.
const UNANSWERED_MAX: Duration = Duration::from_secs(30);
/// Bytes between two answers: line, headers and body of a request together.
const REQUEST_BYTES_MAX: usize = 64 * 1024;

/// Accepts within the bounds.
pub(super) struct BoundedListener {
    listener: TcpListener,
    places: Arc<Semaphore>,
    unanswered_max: Duration,
}

impl BoundedListener {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(CONNECTIONS_MAX)), unanswered_max: UNANSWERED_MAX }
    }
}

impl Listener for BoundedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        // `None` only if somebody closed the semaphore, which nobody does.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, address) = Listener::accept(&mut self.listener).await;
        let due = Box::pin(sleep(self.unanswered_max));
        (Connection { stream, due, unanswered_max: self.unanswered_max, request_bytes: 0, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One accepted connection with its account.
pub(super) struct Connection {
    stream: TcpStream,
    due: Pin<Box<Sleep>>,
    unanswered_max: Duration,
    /// Since the last answer.
    request_bytes: usize,
    _place: Option<OwnedSemaphorePermit>,
}

impl Connection {
    /// What waits is woken when time is up, and fails.
    fn unless_overdue<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        ready!(self.due.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending => self.unless_overdue(context),
            Poll::Ready(Ok(())) => {
                self.request_bytes += buffer.filled().len() - before;
                let too_much = self.request_bytes > REQUEST_BYTES_MAX;
                Poll::Ready(if too_much { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) })
            }
            failed => failed,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(context, bytes) {
            Poll::Pending => self.unless_overdue(context),
            written => {
                let due = Instant::now() + self.unanswered_max;
                self.due.as_mut().reset(due);
                self.request_bytes = 0;
                written
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// A server with two places and little patience.
    async fn server() -> (SocketAddr, tokio::task::JoinHandle<()>) {
        let mut listener = BoundedListener::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
        listener.places = Arc::new(Semaphore::new(2));
        listener.unanswered_max = Duration::from_secs(2);
        let address = listener.local_addr().unwrap();
        let router = axum::Router::new().route("/", axum::routing::get(|| async { "here" }));
        (address, tokio::spawn(async move { axum::serve(listener, router).await.unwrap() }))
    }

    async fn said(mut stream: TcpStream, request: &[u8]) -> String {
        // Cut off in the middle of a write is what some of them wait for.
        let _ = stream.write_all(request).await;
        let mut answer = Vec::new();
        let reading = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut answer)).await;
        assert!(reading.is_ok(), "nobody cut it off");
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[tokio::test]
    async fn who_is_too_slow_or_too_long_is_cut_off_and_makes_place() {
        let (address, _server) = server().await;
        let connect = async || TcpStream::connect(address).await.unwrap();
        let plain = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
        assert!(said(connect().await, plain).await.ends_with("here"));
        // Two that never finish their request hold both places; whoever comes next waits for them, and is served.
        let (slow, idle) = (connect().await, connect().await);
        let slow = tokio::spawn(said(slow, b"GET / HTTP/1.1\r\nhost:"));
        let idle = tokio::spawn(said(idle, b""));
        assert!(said(connect().await, plain).await.ends_with("here"));
        assert_eq!((slow.await.unwrap().as_str(), idle.await.unwrap().as_str()), ("", ""));
        // A head that is too long, and a body.
        let long = "x".repeat(REQUEST_BYTES_MAX);
        let head = format!("GET / HTTP/1.1\r\nhost: a\r\nx-long: {long}\r\nconnection: close\r\n\r\n");
        assert!(!said(connect().await, head.as_bytes()).await.contains("here"));
    }
}
