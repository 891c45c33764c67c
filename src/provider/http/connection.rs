//! HTTP/1.1 connection to a provider, driven by the task of the request that it carries.
//!
//! No other task writes to it. When a request's future is dropped, its connection is dropped too, and the socket resets
//! it (`docs/decisions/0032-connection-reuse.md`).
//!
//! Its byte stream works above TLS. A response that begins before its request is fully written belongs to an earlier
//! request, or does not cover all of this one. So reading is an error between the first and the last byte written.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection as Driver, SendRequest};
use hyper::header::{CONTENT_LENGTH, HeaderMap, TRANSFER_ENCODING};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use super::classify::{ProviderResponse, ResponseBody};
use super::content_coding;
use super::failure::{
    RequestFailure, UnexpectedResponse, UnexpectedResponseLog, demands_certificate, failure_after_connect,
    is_early_response,
};
use super::header_names::{HeadWriter, HeaderNames, Respelled};
use super::socket::{Socket, SocketStream};
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::UnknownCause;
use crate::domain::response::{RESPONSE_BODY_BYTES_MAX, RESPONSE_HEADERS_MAX};

/// Time that a peer has to close a finished connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A byte stream, TLS or plain.
pub type Transport = Either<TlsStream<SocketStream>, SocketStream>;
type OutgoingRequest = Request<Full<Bytes>>;

pub struct HttpConnection {
    pub socket: Arc<Socket>,
    sender: SendRequest<Full<Bytes>>,
    driver_state: DriverState,
    early: Arc<EarlyReads>,
    head_writer: Arc<HeadWriter>,
    /// An answer was read on it.
    was_used: bool,
    /// Received bytes that were part of no response when its driver ended.
    unexpected_bytes: Bytes,
    /// Its server wants a client certificate, as was seen when its driver ended.
    certificate_is_demanded: bool,
}

enum DriverState {
    Running(Box<Driver<TokioIo<HalfDuplex<Transport>>, Full<Bytes>>>),
    /// The request was fully written, and the response was fully read.
    Complete,
    Broken,
}

/// How one request on a connection ended.
pub enum ExchangeResult {
    Responded(Box<ReceivedResponse>),
    /// The connection had ended, or received something, before it took the request, which can go on another one.
    Unsent(Box<OutgoingRequest>),
    Failed(RequestFailure),
}

pub struct ReceivedResponse {
    pub response: ProviderResponse,
    /// When the last byte was read.
    pub read_at: Instant,
    /// The connection, if it can carry another request.
    pub connection: Option<HttpConnection>,
    /// The connection had carried a response before, which this one may be a copy of.
    pub on_used_connection: bool,
}

impl ReceivedResponse {
    /// On a connection that carries no other request.
    fn last(response: ProviderResponse, read_at: Instant, on_used_connection: bool) -> Box<Self> {
        Box::new(Self { response, read_at, connection: None, on_used_connection })
    }
}

impl HttpConnection {
    pub async fn open(
        socket: Arc<Socket>,
        transport: Transport,
        header_names: Arc<HeaderNames>,
    ) -> hyper::Result<Self> {
        let stream = HalfDuplex::new(transport, header_names);
        let (early, head_writer) = (Arc::clone(&stream.early), Arc::clone(&stream.head_writer));
        let io = TokioIo::new(stream);
        let mut builder = Builder::new();
        // Some servers still fold long headers, which RFC 9112 lets a client read.
        builder.allow_obsolete_multiline_headers_in_responses(true);
        let (sender, driver) = builder.max_headers(RESPONSE_HEADERS_MAX).title_case_headers(true).handshake(io).await?;
        let driver_state = DriverState::Running(Box::new(driver));
        let unexpected_bytes = Bytes::new();
        Ok(Self {
            socket,
            sender,
            driver_state,
            early,
            head_writer,
            was_used: false,
            unexpected_bytes,
            certificate_is_demanded: false,
        })
    }

    /// Polls the connection once, with all that the kernel has received, and returns whether it can take another
    /// request.
    async fn is_ready(&mut self) -> bool {
        self.socket.ask_kernel();
        self.drive(std::future::ready(())).await;
        matches!(self.driver_state, DriverState::Running(_)) && self.sender.is_ready()
    }

    /// Sends one request and reads its response. Dropping the future resets the connection.
    ///
    /// The connection reads before it writes. If bytes are there already, they answer no request, so none is written.
    pub async fn exchange(
        mut self,
        request: OutgoingRequest,
        deadline: Instant,
        strays: &UnexpectedResponseLog,
    ) -> ExchangeResult {
        if let Err(error) = self.socket.begin_request(deadline) {
            return ExchangeResult::Failed(failure_after_connect(&error, &self.socket));
        }
        self.head_writer.begin();
        let response = self.sender.try_send_request(request);
        let mut response = match timeout_at(deadline, self.drive(response)).await {
            Ok(Ok(response)) => response,
            Ok(Err(mut refused)) => {
                let unsent = refused.take_message();
                return self.without_head(unsent, refused.error(), strays);
            }
            Err(_) if self.socket.wrote_nothing() => {
                return ExchangeResult::Failed(RequestFailure::NotSent("no byte could be written in time".to_owned()));
            }
            Err(_) => return ExchangeResult::Failed(RequestFailure::Unknown(UnknownCause::Timeout)),
        };
        let (body, read_at) = if has_conflicting_lengths(response.headers()) {
            (ResponseBody::Ambiguous, Instant::now())
        } else {
            self.read_body(&mut response, deadline).await
        };
        let (head, _) = response.into_parts();
        let is_whole = matches!(body, ResponseBody::Whole(_));
        let body = match body {
            ResponseBody::Whole(bytes) => content_coding::decode(&head.headers, bytes),
            unread => unread,
        };
        let reading = ProviderResponse { status: head.status.as_u16(), headers: head.headers, body };
        if self.early.have_happened() {
            return end_early(reading, read_at, strays);
        }
        if !is_whole {
            // The server sends too much, or its next response could not be found: the connection is closed.
            return ExchangeResult::Responded(ReceivedResponse::last(reading, read_at, self.was_used));
        }
        self.end_exchange(reading, read_at, strays).await
    }

    /// What follows on an exchange without a head that could be read. The status of a head that is too large is known.
    fn without_head(
        self,
        unsent: Option<OutgoingRequest>,
        error: &hyper::Error,
        strays: &UnexpectedResponseLog,
    ) -> ExchangeResult {
        if !self.was_used && (self.certificate_is_demanded || demands_certificate(error)) {
            return ExchangeResult::Failed(RequestFailure::Local(LocalFault::ClientCertificate));
        }
        if let Some(request) = unsent {
            if !self.unexpected_bytes.is_empty() {
                strays.record(UnexpectedResponse::BeforeRequest);
            }
            return ExchangeResult::Unsent(Box::new(request));
        }
        if error.is_parse_too_large()
            && let Some(status) = status_of(&self.unexpected_bytes)
        {
            let reading = ProviderResponse { status, headers: HeaderMap::new(), body: ResponseBody::HeadTooLarge };
            return match self.early.have_happened() {
                true => end_early(reading, Instant::now(), strays),
                false => ExchangeResult::Responded(ReceivedResponse::last(reading, Instant::now(), self.was_used)),
            };
        }
        if is_early_response(error) {
            strays.record(UnexpectedResponse::WhileWriting);
        }
        ExchangeResult::Failed(failure_after_connect(error, &self.socket))
    }

    /// What follows on an answer that was read to its end.
    async fn end_exchange(
        mut self,
        mut reading: ProviderResponse,
        read_at: Instant,
        strays: &UnexpectedResponseLog,
    ) -> ExchangeResult {
        let reusable = self.is_ready().await;
        if !self.unexpected_bytes.is_empty() {
            strays.record(UnexpectedResponse::AfterResponse);
            if self.was_used {
                reading.body = ResponseBody::Ambiguous;
            }
        }
        if reusable || matches!(self.driver_state, DriverState::Complete) {
            self.socket.end_request();
        }
        if matches!(self.driver_state, DriverState::Complete) {
            tokio::spawn(close_after_peer(Arc::clone(&self.socket)));
        }
        let on_used_connection = std::mem::replace(&mut self.was_used, true);
        self.early.forbid();
        let mut received = ReceivedResponse::last(reading, read_at, on_used_connection);
        received.connection = reusable.then_some(self);
        ExchangeResult::Responded(received)
    }

    /// Reads a connection that carries no other request until it ends. Returns whether any bytes came.
    pub async fn receives_more(mut self) -> bool {
        poll_fn(|cx| {
            let polled = pin!(self.drive(std::future::ready(()))).poll(cx);
            match self.driver_state {
                DriverState::Running(_) => Poll::Pending,
                DriverState::Complete | DriverState::Broken => polled,
            }
        })
        .await;
        !self.unexpected_bytes.is_empty()
    }

    async fn read_body(&mut self, response: &mut Response<Incoming>, deadline: Instant) -> (ResponseBody, Instant) {
        let (mut bytes, mut read_at) = (Vec::new(), Instant::now());
        loop {
            let frame = match timeout_at(deadline, self.drive(response.body_mut().frame())).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => {
                    let cause = failure_after_connect(&error, &self.socket).into_unknown_cause();
                    return (ResponseBody::Incomplete(cause), read_at);
                }
                Ok(None) => return (ResponseBody::Whole(bytes), Instant::now()),
                Err(_) => return (ResponseBody::Incomplete(UnknownCause::Timeout), read_at),
            };
            read_at = Instant::now();
            let Ok(chunk) = frame.into_data() else { continue };
            if bytes.len() + chunk.len() > RESPONSE_BODY_BYTES_MAX {
                return (ResponseBody::TooLarge, read_at);
            }
            bytes.extend_from_slice(&chunk);
        }
    }

    /// Polls a future and the connection together.
    async fn drive<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|cx| {
            if let DriverState::Running(driver) = &mut self.driver_state
                && let Poll::Ready(ended) = driver.poll_without_shutdown(cx)
            {
                // The future ends with the connection's error, if there was one.
                let ended = if ended.is_ok() { DriverState::Complete } else { DriverState::Broken };
                if let DriverState::Running(driver) = std::mem::replace(&mut self.driver_state, ended) {
                    let mut parts = driver.into_parts();
                    self.unexpected_bytes = parts.read_buf;
                    self.certificate_is_demanded = has_certificate_alert(parts.io.inner_mut(), cx);
                }
            }
            future.as_mut().poll(cx)
        })
        .await
    }
}

/// The end of a first request that was answered before it was written to its end: only a refusal (4xx) needs no more of it.
fn end_early(response: ProviderResponse, read_at: Instant, strays: &UnexpectedResponseLog) -> ExchangeResult {
    if !(400..500).contains(&response.status) {
        strays.record(UnexpectedResponse::WhileWriting);
        return ExchangeResult::Failed(RequestFailure::Unknown(UnknownCause::ConnectionLost));
    }
    ExchangeResult::Responded(ReceivedResponse::last(response, read_at, false))
}

/// Whether the peer's alert for want of a client certificate waits to be read: a write may fail before it is.
fn has_certificate_alert(stream: &mut HalfDuplex<Transport>, cx: &mut Context<'_>) -> bool {
    let mut byte = [0];
    let read = Pin::new(stream).poll_read(cx, &mut ReadBuf::new(&mut byte));
    matches!(read, Poll::Ready(Err(error)) if demands_certificate(&error))
}

/// The status of a head that begins with these bytes: `HTTP/1.1 401 `.
fn status_of(head: &[u8]) -> Option<u16> {
    let status = head.strip_prefix(b"HTTP/1.")?.get(2..5)?;
    std::str::from_utf8(status).ok()?.parse().ok().filter(|status| (100..1000).contains(status))
}

/// Whether a head says in two ways where its body ends. hyper itself refuses two different numbers.
fn has_conflicting_lengths(headers: &HeaderMap) -> bool {
    headers.contains_key(CONTENT_LENGTH) && headers.contains_key(TRANSFER_ENCODING)
}

/// Lets the peer close first, for a moment. The side that closes first keeps the port for a minute (TIME_WAIT): a
/// client with a connection per request would run out of ports at 470 requests per second.
async fn close_after_peer(socket: Arc<Socket>) {
    let _ = timeout(CLOSE_TIMEOUT, socket.peer_closed()).await;
}

/// Bytes came while a request was being written.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("an answer began before the request was written to its end")]
pub struct EarlyResponse;

/// Whether a response may begin early, and whether one did.
///
/// The first response of a connection answers its first request, and a server may refuse that by its head alone.
#[derive(Debug, Default)]
struct EarlyReads {
    is_forbidden: AtomicBool,
    has_happened: AtomicBool,
}

impl EarlyReads {
    fn forbid(&self) {
        self.is_forbidden.store(true, Ordering::Relaxed);
    }

    fn have_happened(&self) -> bool {
        self.has_happened.load(Ordering::Relaxed)
    }

    fn record(&self) -> io::Result<()> {
        self.has_happened.store(true, Ordering::Relaxed);
        match self.is_forbidden.load(Ordering::Relaxed) {
            true => Err(io::Error::new(io::ErrorKind::InvalidData, EarlyResponse)),
            false => Ok(()),
        }
    }
}

struct HalfDuplex<S> {
    stream: S,
    early: Arc<EarlyReads>,
    /// Something was written since the last flush that came to its end.
    is_writing: bool,
    header_names: Arc<HeaderNames>,
    head_writer: Arc<HeadWriter>,
    /// What is left to write of a request whose header names were respelled.
    respelled: Option<Respelled>,
}

impl<S> HalfDuplex<S> {
    fn new(stream: S, header_names: Arc<HeaderNames>) -> Self {
        let (early, head_writer) = (Arc::default(), Arc::default());
        Self { stream, early, is_writing: false, header_names, head_writer, respelled: None }
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
        let this = &mut *self;
        this.is_writing = true;
        if let Some(respelled) = this.head_writer.respell(bytes, &this.header_names) {
            this.respelled = Some(respelled);
        }
        let Some(respelled) = &mut this.respelled else { return Pin::new(&mut this.stream).poll_write(cx, bytes) };
        let written = ready!(Pin::new(&mut this.stream).poll_write(cx, respelled.rest()))?;
        if !respelled.advance(written) {
            this.respelled = None;
        }
        Poll::Ready(Ok(written))
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
        let mut ours = HalfDuplex::new(ours, Arc::default());
        let early = Arc::clone(&ours.early);
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
