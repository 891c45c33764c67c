//! The stream that lapin reads from, behind a [`Sanitizer`], and the runtime that knows such streams.
//!
//! `handshake` makes the connection, with TLS below this stream, so that the bytes seen here are plain.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::TokioRuntime;
use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use futures_io::{AsyncRead, AsyncWrite};
use futures_util::Stream;
use lapin::tcp::AsyncTcpStream;

use super::sanitizer::Sanitizer;

/// Tokio, with guarded streams.
pub(super) type SanitizingRuntime = async_rs::Runtime<RuntimeParts<TokioRuntime, SanitizingReactor>>;

/// Bytes that are read at a time; a TLS record has as many.
const CHUNK_BYTES: usize = 16 * 1024;

type Tcp = AsyncTcpStream<<TokioRuntime as Reactor>::TcpStream>;

/// The runtime for lapin on top of Tokio's.
pub(super) fn sanitizing_runtime(tokio: &TokioRuntime) -> SanitizingRuntime {
    async_rs::Runtime::new(RuntimeParts::new(tokio.clone(), SanitizingReactor(tokio.clone())))
}

#[derive(Clone, Debug)]
pub(super) struct SanitizingReactor(TokioRuntime);

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
pub(super) struct SanitizedStream {
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
