//! HTTP server of the strict provider: charges on any path, look-ups at `GET /charges?id=`, reports under `/_…`.
//!
//! A request is counted, under one short lock, before its body is read. So serving does not distort the counts. A
//! request handler can sever its connection without a response, as a crashed provider would. After that, nothing can be
//! written to it.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Json, Request, State};
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderName, HeaderValue, Method, Response, StatusCode};
use axum::routing::{get, post};
use axum::serve::{IncomingStream, Listener};
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::strict::{Arrival, Reply, error_body};
use super::{ChargeRequest, Effect, FakeOptions, FakeProviderReport, ResponseTimes, StrictProvider};
use crate::domain::time::millis_up;

/// Largest body that is read, in bytes: above what the worker ever sends.
const BODY_BYTES_MAX: usize = 256 * 1024;
const LOOKUP_PATH: &str = "/charges";
/// Time that active requests may take after a stop, in addition to the longest latency.
const STOP_GRACE: Duration = Duration::from_secs(1);
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// Header with the exact wait in milliseconds; `Retry-After` has only whole seconds.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("x-retry-after-ms");

/// A strict provider that does not listen yet.
#[derive(Debug)]
pub struct FakeProvider {
    handle: FakeHandle,
    latency_max: Duration,
}

/// Access to a provider's counts from within the process, before, while and after it serves.
#[derive(Clone, Debug)]
pub struct FakeHandle {
    provider: Arc<Mutex<StrictProvider>>,
    started: Instant,
}

impl FakeProvider {
    pub fn new(options: FakeOptions) -> Self {
        let latency_max = options.latency.1;
        let provider = Arc::new(Mutex::new(StrictProvider::new(options)));
        Self { handle: FakeHandle { provider, started: Instant::now() }, latency_max }
    }

    pub fn handle(&self) -> FakeHandle {
        self.handle.clone()
    }

    /// Serves until cancelled, then finishes active requests.
    pub async fn serve(self, listener: TcpListener, cancel: CancellationToken) -> io::Result<()> {
        let router = Router::new()
            .route("/_report", get(async |State(handle): State<FakeHandle>| Json(handle.report())))
            .route("/_effects", get(async |State(handle): State<FakeHandle>| Json(handle.effects())))
            .route("/_arrivals", get(async |State(handle): State<FakeHandle>| Json(handle.arrivals_us())))
            .route("/_reset", post(async |State(handle): State<FakeHandle>| handle.provider.lock().reset()))
            .fallback(handle_request)
            .with_state(self.handle)
            .into_make_service_with_connect_info::<SeverHandle>();
        let served = axum::serve(NodelayListener(listener), router)
            .with_graceful_shutdown(cancel.clone().cancelled_owned())
            .into_future();
        let overdue = async {
            cancel.cancelled().await;
            tokio::time::sleep(self.latency_max + STOP_GRACE).await;
        };
        tokio::select! {
            result = served => result,
            () = overdue => Ok(()),
        }
    }
}

impl FakeHandle {
    /// Report of all requests so far. Percentiles are computed outside the lock, so that a report delays no arrival.
    pub fn report(&self) -> FakeProviderReport {
        let (counted, durations_us) = {
            let provider = self.provider.lock();
            (provider.report_without_times(), provider.durations_us())
        };
        FakeProviderReport { answer_ms: ResponseTimes::from_durations(durations_us), ..counted }
    }

    pub fn effects(&self) -> Vec<Effect> {
        self.provider.lock().effects().to_vec()
    }

    /// Microseconds since the provider was made, ascending.
    pub fn arrivals_us(&self) -> Vec<u64> {
        self.provider.lock().arrivals().to_vec()
    }

    /// The provider's clock: microseconds since it was made.
    pub fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Records an arrival. The clock is read under the lock, so that arrivals are recorded in order.
    fn record_arrival(&self) -> Arrival {
        let mut provider = self.provider.lock();
        let now_us = self.now_us();
        let arrival = provider.record_arrival(now_us);
        provider.begin_flight(arrival)
    }

    fn record_response(&self, arrival: Arrival, status: u16) {
        self.provider.lock().record_response(arrival, self.now_us(), status);
    }
}

async fn handle_request(
    State(handle): State<FakeHandle>,
    ConnectInfo(connection): ConnectInfo<SeverHandle>,
    request: Request,
) -> Response<Body> {
    if request.uri().path().starts_with("/_") {
        return json_response(404, error_body("no_such_page"));
    }
    let key = request.headers().get(IDEMPOTENCY_KEY).cloned();
    let arrival = handle.record_arrival();
    let mut response = match arrival.refused_for {
        Some(wait) => rate_limit_response(wait),
        None => match respond_to_the_end(&handle, arrival, request).await {
            Some(response) => response,
            None => {
                connection.sever().await;
                // This response cannot be written.
                return Response::default();
            }
        },
    };
    handle.record_response(arrival, response.status().as_u16());
    // It tells to which request this response belongs, a refusal too.
    if let Some(key) = key {
        response.headers_mut().insert(IDEMPOTENCY_KEY, key);
    }
    response
}

/// As [`respond`], in a task of its own: a request whose client has gone stays in flight until its response is due.
async fn respond_to_the_end(handle: &FakeHandle, arrival: Arrival, request: Request) -> Option<Response<Body>> {
    let handle = handle.clone();
    let work = tokio::spawn(async move {
        let response = respond(&handle, arrival, request).await;
        handle.provider.lock().end_flight();
        response
    });
    work.await.ok().flatten()
}

/// The response, or `None` when it must be lost.
async fn respond(handle: &FakeHandle, arrival: Arrival, request: Request) -> Option<Response<Body>> {
    let reply = match process_request(handle, arrival, request).await {
        Ok(reply) => reply,
        Err((status, code)) => return Some(json_response(status, error_body(code))),
    };
    // The timer counts whole milliseconds and rounds up, so a response that is due already skips it.
    if reply.due_us > handle.now_us() {
        tokio::time::sleep_until(handle.started + Duration::from_micros(reply.due_us)).await;
    }
    if reply.lost {
        return None;
    }
    let mut response = json_response(reply.status, reply.body);
    if reply.replayed {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    }
    Some(response)
}

/// The reply to a request. An invalid request gets a status and an error code.
async fn process_request(
    handle: &FakeHandle,
    arrival: Arrival,
    request: Request,
) -> Result<Reply, (u16, &'static str)> {
    let (parts, body) = request.into_parts();
    if parts.method == Method::GET && parts.uri.path() == LOOKUP_PATH {
        let mut provider = handle.provider.lock();
        if !provider.options.lookup {
            return Err((404, "no_such_page"));
        }
        let query = url::form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes());
        let id = query.into_iter().find(|(name, _)| name == "id").ok_or((400, "missing_id"))?.1;
        return Ok(provider.look_up(arrival, &id));
    }
    if ![Method::POST, Method::PUT, Method::PATCH].contains(&parts.method) {
        return Err((405, "method_not_allowed"));
    }
    let body = to_bytes(body, BODY_BYTES_MAX).await.map_err(|_| (413, "body_unreadable"))?;
    let header = |name: HeaderName| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let is_form = header(CONTENT_TYPE).is_some_and(|kind| kind.starts_with("application/x-www-form-urlencoded"));
    let asked = ChargeRequest::parse(header(IDEMPOTENCY_KEY), is_form, &body).map_err(|code| (400, code))?;
    Ok(handle.provider.lock().process(arrival, &asked))
}

fn rate_limit_response(wait: Duration) -> Response<Body> {
    let mut response = json_response(429, error_body("rate_limit"));
    let wait_ms = millis_up(wait);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(wait_ms.div_ceil(1_000)));
    response.headers_mut().insert(RETRY_AFTER_MS, HeaderValue::from(wait_ms));
    response
}

fn json_response(status: u16, body: String) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Listener with TCP_NODELAY: without it, small responses wait for acknowledgements, which would falsify measured times.
struct NodelayListener(TcpListener);

impl Listener for NodelayListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        let (stream, peer) = Listener::accept(&mut self.0).await;
        let _ = stream.set_nodelay(true);
        (stream, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// Handle that closes one connection. It has a descriptor of its own; without one, it cannot close anything.
#[derive(Clone, Debug)]
struct SeverHandle(Option<Arc<OwnedFd>>);

impl SeverHandle {
    /// Closes the connection for both sides, or waits for its client to do so.
    async fn sever(&self) {
        match &self.0 {
            // An error means that the client has closed it already.
            Some(socket) => drop(SockRef::from(&**socket).shutdown(Shutdown::Both)),
            None => std::future::pending().await,
        }
    }
}

impl Connected<IncomingStream<'_, NodelayListener>> for SeverHandle {
    fn connect_info(stream: IncomingStream<'_, NodelayListener>) -> Self {
        Self(stream.io().as_fd().try_clone_to_owned().ok().map(Arc::new))
    }
}
