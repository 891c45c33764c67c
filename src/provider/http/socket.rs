//! TCP socket of a provider connection, bound to the deadline of the request that it carries.
//!
//! A request counts at the provider when its last byte arrives, so the kernel must not deliver it after its deadline
//! (G1). Three measures:
//! 1. Each write checks the clock. A process that was stopped before a write doesn't write afterwards.
//! 2. `SO_LINGER` is 0 while a request is in flight. Dropping the socket resets the connection, and the kernel discards
//!    unsent and unacknowledged bytes. A killed process drops its sockets too.
//! 3. `TCP_USER_TIMEOUT` ends with the request. A stopped process drops nothing, but its kernel gives up by then.
//!
//! Bytes that come before a request, or after its response, must be found (`docs/decisions/0032-connection-reuse.md`).
//! The runtime learns of bytes later than the kernel, so reads ask the kernel itself then. While a response is awaited,
//! they wait for the runtime.

use std::io::{self, Read as _};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Most of a request's time that is left out of `TCP_USER_TIMEOUT`, in favour of the first retransmission.
const RETRANSMISSION_MAX: Duration = Duration::from_secs(1);

/// Time after which the kernel gives up bytes that the peer hasn't acknowledged, for a request with this time left.
///
/// Linux measures the user timeout from the first retransmission, not from the first transmission. The difference is
/// the retransmission timeout, at least 200 ms and about 1 s on a long way.
fn user_timeout(left: Duration) -> Duration {
    left.saturating_sub(RETRANSMISSION_MAX.min(left / 2)).max(Duration::from_millis(1))
}

/// A connected TCP socket with the deadline and the byte count of its current request.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    pub opened_at: Instant,
    /// Microseconds after `opened_at`.
    deadline_us: AtomicU64,
    /// Bytes that the kernel took since the request began.
    bytes_written: AtomicU64,
    /// Whether reads ask the kernel if the runtime knows of no bytes.
    asks_kernel: AtomicBool,
}

impl Socket {
    /// `deadline` bounds the bytes before the first request: a TLS handshake.
    ///
    /// # Errors
    /// The operating system's error when an option cannot be set.
    pub fn new(stream: TcpStream, deadline: Instant) -> io::Result<Arc<Self>> {
        let opened = Instant::now();
        let socket = Self {
            stream,
            opened_at: opened,
            deadline_us: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
            asks_kernel: AtomicBool::new(true),
        };
        socket.begin_request(deadline)?;
        Ok(Arc::new(socket))
    }

    /// Begins a request. From now on, dropping the socket resets the connection, and nothing is written after the
    /// deadline.
    ///
    /// # Errors
    /// The operating system's error when an option cannot be set. Then the connection must not carry a request.
    pub fn begin_request(&self, deadline: Instant) -> io::Result<()> {
        let deadline = deadline.saturating_duration_since(self.opened_at).as_micros();
        self.deadline_us.store(u64::try_from(deadline).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.bytes_written.store(0, Ordering::Relaxed);
        self.ask_kernel();
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))
    }

    /// Lets reads find bytes that the runtime doesn't know of, until the next flush of a written request.
    pub fn ask_kernel(&self) {
        self.asks_kernel.store(true, Ordering::Relaxed);
    }

    /// Ends a request that has its response. From now on, dropping the socket closes the connection in the usual way.
    pub fn end_request(&self) {
        // If this fails, the connection is reset when it is dropped, which costs only a line in the server's log.
        let _ = SockRef::from(&self.stream).set_linger(None);
    }

    /// Whether not a single byte of the current request left the process.
    pub fn wrote_nothing(&self) -> bool {
        self.bytes_written.load(Ordering::Relaxed) == 0
    }

    /// Waits until the peer has closed or reset the connection. Bytes that still arrive are read and dropped.
    pub async fn peer_closed(&self) {
        while self.stream.readable().await.is_ok() {
            match self.stream.try_read(&mut [0; 1_024]) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return,
            }
        }
    }

    /// Reads bytes that the kernel has, whether or not the runtime knows of them.
    fn read_now(&self, buffer: &mut ReadBuf<'_>) -> io::Result<usize> {
        let read = (&*SockRef::from(&self.stream)).read(buffer.initialize_unfilled())?;
        buffer.advance(read);
        Ok(read)
    }

    /// Reads when the runtime knows of bytes. After a read that leaves room in the buffer, the kernel has no more, so the
    /// runtime learns of the next ones.
    fn read_ready(&self, buffer: &mut ReadBuf<'_>) -> io::Result<()> {
        let mut filled = 0;
        let read = self.stream.try_io(Interest::READABLE, || {
            filled = self.read_now(buffer)?;
            match filled > 0 && buffer.remaining() > 0 {
                true => Err(io::ErrorKind::WouldBlock.into()),
                false => Ok(()),
            }
        });
        if filled > 0 { Ok(()) } else { read }
    }

    fn time_left(&self) -> io::Result<Duration> {
        let used = u64::try_from(self.opened_at.elapsed().as_micros()).unwrap_or(u64::MAX);
        match self.deadline_us.load(Ordering::Relaxed).saturating_sub(used) {
            0 => Err(io::Error::new(io::ErrorKind::TimedOut, "the request's time is over")),
            left => Ok(Duration::from_micros(left)),
        }
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.time_left()?;
        #[cfg(target_os = "linux")]
        SockRef::from(&self.stream).set_tcp_user_timeout(Some(user_timeout(left)))?;
        let written = self.stream.try_write(bytes)?;
        self.bytes_written.fetch_add(u64::try_from(written).unwrap_or(u64::MAX), Ordering::Relaxed);
        Ok(written)
    }
}

/// The byte stream of a [`Socket`], for TLS and HTTP.
#[derive(Debug)]
pub struct SocketStream(pub Arc<Socket>);

impl AsyncRead for SocketStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let socket = &self.0;
        let is_blocked = |read: &io::Result<()>| read.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
        while socket.stream.poll_read_ready(cx)?.is_ready() {
            let read = socket.read_ready(buffer);
            if !is_blocked(&read) {
                return Poll::Ready(read);
            }
        }
        if !socket.asks_kernel.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        let read = socket.read_now(buffer).map(drop);
        if is_blocked(&read) { Poll::Pending } else { Poll::Ready(read) }
    }
}

impl AsyncWrite for SocketStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.stream.poll_write_ready(cx))?;
            match self.0.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    /// HTTP and TLS flush when a request is written to its end, and after each later poll.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.0.wrote_nothing() {
            self.0.asks_kernel.store(false, Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&self.0.stream).shutdown(std::net::Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// A socket under test, and the peer's end of its connection.
    async fn pair(deadline: Instant) -> (Arc<Socket>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (theirs, _) = listener.accept().await.unwrap();
        theirs.set_nodelay(true).unwrap();
        (Socket::new(ours, deadline).unwrap(), theirs)
    }

    fn in_10_s() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn user_timeout_leaves_time_for_the_first_retransmission() {
        let seconds = Duration::from_secs_f64;
        for (left, wanted) in [(10.0, 9.0), (2.0, 1.0), (1.0, 0.5), (0.002, 0.001), (0.0, 0.001)] {
            assert_eq!(user_timeout(seconds(left)), seconds(wanted), "{left} s left");
        }
    }

    #[tokio::test]
    async fn dropped_request_resets_and_finished_one_closes() {
        let (socket, mut peer) = pair(in_10_s()).await;
        SocketStream(socket).write_all(b"half a request").await.unwrap();
        let reset = peer.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(reset.kind(), io::ErrorKind::ConnectionReset);

        let (socket, mut peer) = pair(in_10_s()).await;
        SocketStream(Arc::clone(&socket)).write_all(b"a request").await.unwrap();
        assert!(!socket.wrote_nothing());
        socket.end_request();
        drop(socket);
        let mut received = Vec::new();
        peer.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"a request");
    }

    #[tokio::test]
    async fn nothing_is_written_after_the_deadline() {
        let (socket, mut peer) = pair(Instant::now()).await;
        let mut stream = SocketStream(Arc::clone(&socket));
        let late = stream.write_all(b"a late request").await.unwrap_err();
        assert_eq!((late.kind(), socket.wrote_nothing()), (io::ErrorKind::TimedOut, true));
        // The next request has a time of its own.
        socket.begin_request(in_10_s()).unwrap();
        stream.write_all(b"in time").await.unwrap();
        let mut received = [0; 7];
        peer.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"in time");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn each_write_renews_tcp_user_timeout() {
        let (socket, _peer) = pair(in_10_s()).await;
        let given = || SockRef::from(&socket.stream).tcp_user_timeout().unwrap().unwrap();
        let mut stream = SocketStream(Arc::clone(&socket));
        stream.write_all(b"x").await.unwrap();
        assert!(given() <= Duration::from_secs(9), "{:?}", given());
        socket.begin_request(Instant::now() + Duration::from_secs(2)).unwrap();
        stream.write_all(b"x").await.unwrap();
        assert!(given() <= Duration::from_secs(1), "{:?}", given());
    }

    /// Polls a stream once for bytes: how many there were.
    fn read_once(stream: &mut SocketStream) -> Poll<usize> {
        let mut bytes = [0; 8];
        let mut buffer = ReadBuf::new(&mut bytes);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        Pin::new(stream).poll_read(&mut cx, &mut buffer).map(|read| read.map(|()| buffer.filled().len()).unwrap())
    }

    /// The runtime asks the kernel for events when no task can go on, so it cannot know of these bytes.
    #[tokio::test]
    async fn bytes_are_read_before_runtime_readiness() {
        let (socket, peer) = pair(in_10_s()).await;
        let mut stream = SocketStream(socket);
        assert_eq!(read_once(&mut stream), Poll::Pending);
        assert_eq!(peer.try_write(b"stray").unwrap(), 5);
        assert_eq!(read_once(&mut stream), Poll::Ready(5));
        assert_eq!(read_once(&mut stream), Poll::Pending);
        drop(peer);
        assert_eq!(read_once(&mut stream), Poll::Ready(0));
    }

    /// While a response is awaited, the runtime's word is enough. After it, and before the next request, it is not.
    #[tokio::test]
    async fn written_request_leaves_bytes_to_the_runtime() {
        let (socket, mut peer) = pair(in_10_s()).await;
        let mut stream = SocketStream(Arc::clone(&socket));
        let asks: [fn(&Socket); 2] = [Socket::ask_kernel, |socket| socket.begin_request(in_10_s()).unwrap()];
        for ask in asks {
            stream.write_all(b"x").await.unwrap();
            stream.flush().await.unwrap();
            peer.write_all(b"response").await.unwrap();
            socket.stream.readable().await.unwrap();
            assert_eq!(read_once(&mut stream), Poll::Ready(8));
            // A full buffer says nothing: the runtime's word stands until the kernel has no more.
            assert_eq!(read_once(&mut stream), Poll::Pending);
            assert_eq!(peer.try_write(b"stray").unwrap(), 5);
            assert_eq!(read_once(&mut stream), Poll::Pending);
            ask(&socket);
            assert_eq!(read_once(&mut stream), Poll::Ready(5));
        }
        // The end of the stream comes after a read that left room in the buffer.
        stream.write_all(b"x").await.unwrap();
        stream.flush().await.unwrap();
        peer.write_all(b"end").await.unwrap();
        socket.stream.readable().await.unwrap();
        assert_eq!(read_once(&mut stream), Poll::Ready(3));
        assert_eq!(read_once(&mut stream), Poll::Pending);
        peer.shutdown().await.unwrap();
        assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    }
}
