//! Byte stream on which reading is an error between the first and the last written byte of a request.
//!
//! A response that begins before its request is fully written belongs to an earlier request, or does not cover all of
//! this one. The stream works above TLS, so the bytes are HTTP's own.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes came while a request was being written.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("an answer began before the request was written to its end")]
pub(super) struct EarlyResponse;

/// Whether a response may begin early, and whether one did.
///
/// The first response of a connection answers its first request, and a server may refuse that by its head alone.
#[derive(Debug)]
pub(super) struct EarlyReads {
    is_allowed: AtomicBool,
    has_happened: AtomicBool,
}

impl EarlyReads {
    pub(super) fn allowed() -> Arc<Self> {
        Arc::new(Self { is_allowed: AtomicBool::new(true), has_happened: AtomicBool::new(false) })
    }

    pub(super) fn forbid(&self) {
        self.is_allowed.store(false, Ordering::Relaxed);
    }

    pub(super) fn have_happened(&self) -> bool {
        self.has_happened.load(Ordering::Relaxed)
    }

    fn record(&self) -> io::Result<()> {
        self.has_happened.store(true, Ordering::Relaxed);
        match self.is_allowed.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, EarlyResponse)),
        }
    }
}

pub(super) struct HalfDuplex<S> {
    stream: S,
    early: Arc<EarlyReads>,
    /// Something was written since the last flush that came to its end.
    is_writing: bool,
}

impl<S> HalfDuplex<S> {
    pub(super) fn new(stream: S, early: Arc<EarlyReads>) -> Self {
        Self { stream, early, is_writing: false }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HalfDuplex<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if self.is_writing && buffer.filled().len() > before {
            return Poll::Ready(self.early.record());
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HalfDuplex<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.is_writing = true;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    /// hyper flushes when it has handed over all of a request.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.is_writing = false;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn response_before_the_request_ends_is_an_error() {
        let (ours, mut peer) = duplex(64);
        let early = EarlyReads::allowed();
        let mut ours = HalfDuplex::new(ours, Arc::clone(&early));
        for _ in 0..2 {
            ours.write_all(b"request").await.unwrap();
            ours.flush().await.unwrap();
            peer.write_all(b"answer").await.unwrap();
            assert_eq!(ours.read(&mut [0; 64]).await.unwrap(), 6);
        }
        assert!(!early.have_happened());
        ours.write_all(b"requ").await.unwrap();
        peer.write_all(b"answer").await.unwrap();
        assert_eq!((ours.read(&mut [0; 64]).await.unwrap(), early.have_happened()), (6, true));
        early.forbid();
        peer.write_all(b"answer").await.unwrap();
        let early = ours.read(&mut [0; 64]).await.unwrap_err();
        assert!(early.get_ref().is_some_and(|error| error.is::<EarlyResponse>()), "{early}");
    }
}
