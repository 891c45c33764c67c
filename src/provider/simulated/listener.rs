//! TCP listener whose connections the simulated provider can drop without a response, as a crashed provider would.
//!
//! A request handler severs its connection. After that, nothing can be written to it.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// Pause after a failed accept, most likely for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Handle that drops one connection.
#[derive(Clone, Debug)]
pub(super) struct SeverHandle(Arc<AtomicBool>);

impl SeverHandle {
    pub(super) fn sever(&self) {
        self.0.store(true, Ordering::Release);
    }
}

pub(super) struct SeverableListener(pub(super) TcpListener);

pub(super) struct SeverableStream {
    stream: TcpStream,
    sever_handle: SeverHandle,
}

impl SeverableStream {
    fn check(&self) -> io::Result<()> {
        if self.sever_handle.0.load(Ordering::Acquire) { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }
}

impl Listener for SeverableListener {
    type Io = SeverableStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (SeverableStream, SocketAddr) {
        loop {
            // Without TCP_NODELAY small responses wait for acknowledgements, which would falsify measured times.
            let accepted = self.0.accept().await.and_then(|(stream, peer)| {
                stream.set_nodelay(true)?;
                Ok((stream, peer))
            });
            match accepted {
                Ok((stream, peer)) => {
                    let severed = SeverHandle(Arc::new(AtomicBool::new(false)));
                    return (SeverableStream { stream, sever_handle: severed }, peer);
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl Connected<IncomingStream<'_, SeverableListener>> for SeverHandle {
    fn connect_info(stream: IncomingStream<'_, SeverableListener>) -> Self {
        stream.io().sever_handle.clone()
    }
}

impl AsyncRead for SeverableStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for SeverableStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
