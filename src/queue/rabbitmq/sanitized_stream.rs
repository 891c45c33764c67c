//! The stream that lapin reads from, behind a [`Sanitizer`] and a [`ServerInfo`], and the runtime that knows such
//! streams.
//!
//! `handshake` makes the connection, with TLS below this stream, so that the bytes seen here are plain.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
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
use super::server_info::ServerInfoReader;

/// Tokio, with guarded streams.
pub(super) type SanitizingRuntime = async_rs::Runtime<RuntimeParts<TokioRuntime, SanitizingReactor>>;

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
        async move { Ok(SanitizedStream::new(AsyncTcpStream::Plain(connecting.await?), ServerInfoReader::default())) }
    }
}

/// A connection to the broker whose incoming headers cannot nest without end.
pub(super) struct SanitizedStream {
    stream: Tcp,
    sanitizer: Sanitizer,
    server_info: ServerInfoReader,
}

impl SanitizedStream {
    pub fn new(stream: Tcp, server_info: ServerInfoReader) -> Self {
        Self { stream, sanitizer: Sanitizer::default(), server_info }
    }

    fn stream(self: Pin<&mut Self>) -> Pin<&mut Tcp> {
        Pin::new(&mut self.get_mut().stream)
    }
}

impl AsyncRead for SanitizedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &mut [u8]) -> Poll<io::Result<usize>> {
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, bytes))?;
        self.sanitizer.pass(&mut bytes[..read]);
        self.server_info.read(&bytes[..read]);
        Poll::Ready(Ok(read))
    }

    fn poll_read_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let read = ready!(Pin::new(&mut self.stream).poll_read_vectored(cx, slices))?;
        let mut left = read;
        for slice in slices {
            let filled = left.min(slice.len());
            self.sanitizer.pass(&mut slice[..filled]);
            self.server_info.read(&slice[..filled]);
            left -= filled;
        }
        Poll::Ready(Ok(read))
    }
}

impl AsyncWrite for SanitizedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write_vectored(cx, slices)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_close(cx)
    }
}
