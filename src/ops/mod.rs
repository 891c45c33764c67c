//! The ops server of a worker process: probes, metrics, the API and the web page.
//!
//! It listens on loopback unless configured otherwise, and needs a token, a user or a proxy elsewhere. A GET changes
//! nothing. Clients that are too slow or send too much are disconnected.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{from_fn, from_fn_with_state, map_response_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

pub use self::change::SettingsChangeError;
use self::connections::{BoundedListener, ClientInfo};
pub use self::guard::{People, WrongTokens};
pub use self::overview::{OverviewCollector, OverviewSources, all_provider_names, pause_authors, unix_ms};
pub use self::peek::{AccountBacklog, PeekError, PeekedLimit, peek, peek_backlog};
use self::selections::SelectionSlots;
use crate::domain::printable::printable;
use crate::ledger::database::Database;
use crate::limiter::Limiter;
use crate::worker::supervisor::WorkerStatus;

pub mod account_rules;
pub mod api;
pub mod batch;
pub mod change;
mod connections;
pub mod explain;
pub mod export;
pub mod flows;
mod guard;
mod held_body;
pub mod history;
mod json;
pub mod limit_change;
pub mod metrics;
pub mod openapi;
#[cfg(test)]
mod openapi_tests;
mod overview;
mod page;
mod peek;
#[cfg(test)]
mod port_tests;
mod roles;
pub mod row_in_force;
mod selections;
pub mod throttling;
pub mod until;

const LIVEZ: &str = "/livez";
const READYZ: &str = "/readyz";
const STARTING: &str = "starting\n";

/// The data sources of the server.
#[derive(Clone)]
pub struct OpsState {
    pub deployment: openapi::Deployment,
    pub worker_status: watch::Receiver<WorkerStatus>,
    pub limiter: Arc<dyn Limiter>,
    pub people: Arc<People>,
    pub wrong_tokens: Arc<WrongTokens>,
    pub collector: Arc<OverviewCollector>,
    pub operator_context: api::OperatorContext,
    /// The ledger for requests that change nothing: they end with their clients, and hold up no payment.
    pub reads: Database,
}

/// The handler of all requests. Until it is opened, only `/livez` succeeds and all else is unavailable.
#[derive(Clone, Default)]
pub struct StartupGate {
    router: Arc<OnceLock<Router>>,
    /// The cause why it is not open yet.
    waiting_for: Arc<Mutex<Option<String>>>,
}

impl StartupGate {
    /// Opens all routes. A second call changes nothing.
    pub fn open(&self, state: OpsState) {
        self.router.get_or_init(|| router(state));
    }

    /// Sets what the start waits for, in the words of the backend.
    pub fn set_waiting_for(&self, cause: String) {
        *self.waiting_for.lock() = Some(cause);
    }

    async fn respond(self, request: Request) -> Response {
        match self.router.get() {
            Some(router) => router.clone().oneshot(request).await.into_response(),
            None if request.uri().path() == LIVEZ => livez().await.into_response(),
            None => (StatusCode::SERVICE_UNAVAILABLE, self.starting_body()).into_response(),
        }
    }

    fn starting_body(&self) -> String {
        let cause = self.waiting_for.lock();
        cause.as_ref().map_or_else(|| STARTING.to_owned(), |cause| format!("starting: {}\n", printable(cause)))
    }
}

/// Serves until `stop` fires.
pub async fn serve(listener: TcpListener, gate: StartupGate, stop: CancellationToken) -> std::io::Result<()> {
    let answers = Router::new().fallback(move |request| gate.clone().respond(request));
    let service = answers
        .layer(from_fn(json::with_json_errors))
        .layer(from_fn(guard::admit_request))
        .layer(from_fn(guard::check_request));
    let service = service.into_make_service_with_connect_info::<ClientInfo>();
    axum::serve(BoundedListener::new(listener), service).with_graceful_shutdown(stop.cancelled_owned()).await
}

fn router(state: OpsState) -> Router {
    let guarded = Router::new()
        .route("/metrics", get(metrics::show))
        .route("/api/v1/limits/{provider}", get(peek::limits))
        .route("/api/v1/limits/{provider}/backlog", get(peek::account_backlog))
        .route("/api/v1/jobs/{id}/explain", get(explain::show))
        .route("/api/v1/providers/{name}/flows", get(flows::show))
        .route("/api/v1/providers/{name}/throttling", get(throttling::show))
        .route("/api/v1/history", get(history::show))
        .merge(overview::routes())
        .route("/api/v1/deployment", get(openapi::deployment))
        .route("/api/v1/whoami", get(roles::whoami))
        .route("/api/v1/openapi.json", get(openapi::show))
        .merge(api::routes(SelectionSlots::default()))
        .merge(page::router())
        .route_layer(from_fn_with_state(state.clone(), guard::authorise));
    let all = Router::new().route(LIVEZ, get(livez)).route(READYZ, get(readyz)).merge(guarded);
    all.layer(map_response_with_state(state.clone(), openapi::add_header)).with_state(state)
}

async fn livez() -> &'static str {
    "alive\n"
}

/// Asks no backend, and looks at the last committed write. `/livez` does not: a restart repairs no database, and would
/// abandon active jobs.
async fn readyz(State(state): State<OpsState>) -> Response {
    let (ready, draining) = {
        let progress = state.worker_status.borrow();
        (progress.ready, progress.draining)
    };
    let cause = match (ready, draining, state.operator_context.ledger.committed_writes().stalled()) {
        (_, true, _) => "draining\n".to_owned(),
        (false, false, _) => STARTING.to_owned(),
        (true, false, Some(stalled)) => format!("{}\n", printable(&stalled.to_string())),
        (true, false, None) => return "ready\n".into_response(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, cause).into_response()
}

#[cfg(test)]
mod tests {
    use secrecy::SecretString;

    use super::*;
    use crate::config::OpsConfig;
    use crate::config::people::PeopleConfig;
    use crate::ledger::database::Database;
    use crate::limiter::embedded::EmbeddedLimiter;
    use crate::queue::message::CardNumbers;

    /// The state of a server with an in-memory database.
    pub async fn state(token: Option<&str>) -> (OpsState, watch::Sender<WorkerStatus>, Database) {
        let (progress_tx, progress) = watch::channel(WorkerStatus::default());
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        let limiter = Arc::new(EmbeddedLimiter::new());
        let collector = overview::tests::test_collector(&database, progress.clone(), limiter.clone());
        let operator_context =
            api::OperatorContext { ledger: database.clone(), queue: None, card_numbers: CardNumbers::Refuse };
        let id = database.deployment().await.unwrap();
        let ops = OpsConfig { listen: None, token: token.map(SecretString::from), people: PeopleConfig::default() };
        let state = OpsState {
            deployment: openapi::Deployment { id, database: "sqlite::memory:".to_owned() },
            collector,
            worker_status: progress,
            limiter,
            people: Arc::new(People::load(&ops, |_| None).unwrap()),
            wrong_tokens: Arc::default(),
            operator_context,
            reads: database.clone(),
        };
        (state, progress_tx, database)
    }

    pub async fn spawn_server(state: OpsState) -> (String, CancellationToken) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let (collector, collector_stop) = (Arc::clone(&state.collector), stop.clone());
        tokio::spawn(async move { collector.run(collector_stop).await });
        let gate = StartupGate::default();
        gate.open(state);
        tokio::spawn(serve(listener, gate, stop.clone()));
        (address, stop)
    }

    pub async fn start(token: Option<&str>) -> (String, watch::Sender<WorkerStatus>, CancellationToken) {
        let (state, progress, _) = state(token).await;
        let (address, stop) = spawn_server(state).await;
        (address, progress, stop)
    }

    pub fn client() -> reqwest::Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        reqwest::Client::new()
    }

    async fn get(url: &str, token: Option<&str>) -> reqwest::Response {
        let request = client().get(url);
        let request = match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        request.send().await.unwrap()
    }

    async fn status(url: &str, token: Option<&str>) -> u16 {
        get(url, token).await.status().as_u16()
    }

    #[tokio::test]
    async fn readyz_follows_the_worker_livez_does_not() {
        let (address, progress, stop) = start(None).await;
        assert_eq!(status(&format!("{address}/readyz"), None).await, 503);
        progress.send_modify(|progress| progress.ready = true);
        assert_eq!(status(&format!("{address}/readyz"), None).await, 200);
        progress.send_modify(|progress| progress.draining = true);
        assert_eq!(status(&format!("{address}/readyz"), None).await, 503);
        assert_eq!(status(&format!("{address}/livez"), None).await, 200);
        stop.cancel();
    }

    #[tokio::test]
    async fn starting_process_is_live_and_not_ready() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (gate, stop) = (StartupGate::default(), CancellationToken::new());
        tokio::spawn(serve(listener, gate.clone(), stop.clone()));
        for (path, wanted) in [("/livez", 200), ("/readyz", 503), ("/api/v1/lanes", 503), ("/nowhere", 503)] {
            assert_eq!(status(&format!("{address}{path}"), None).await, wanted, "{path}");
        }
        let (state, _progress, _database) = state(Some("let-me-in")).await;
        gate.open(state);
        for (path, wanted) in [("/livez", 200), ("/readyz", 503), ("/api/v1/lanes", 401), ("/nowhere", 404)] {
            assert_eq!(status(&format!("{address}{path}"), None).await, wanted, "{path}");
        }
        stop.cancel();
    }

    #[tokio::test]
    async fn token_guards_all_but_probes() {
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        let url = format!("{address}/api/v1/limits/stripe");
        assert_eq!(status(&url, None).await, 401);
        assert_eq!(status(&url, Some("let-me-out")).await, 401);
        assert_eq!(status(&url, Some("let-me-in")).await, 404);
        assert_eq!(status(&format!("{address}/livez"), None).await, 200);
        let account = format!("{address}/api/v1/reconciliation");
        assert_eq!((status(&account, None).await, status(&account, Some("let-me-in")).await), (401, 200));
        stop.cancel();
    }

    #[tokio::test]
    async fn limits_are_shown_by_provider_and_account() {
        let (address, progress, stop) = start(None).await;
        progress.send_modify(|progress| progress.settings = peek::tests::test_settings().into());
        let asked = async |rest: &str| {
            let answer = get(&format!("{address}/api/v1/limits/{rest}"), None).await;
            let status = answer.status().as_u16();
            (status, answer.text().await.unwrap())
        };
        let (status, body) = asked("plain").await;
        let mut limits: serde_json::Value = serde_json::from_str(&body).unwrap();
        // Without a payment the limiter is in a cold start: its first call reads the usage from the ledger.
        let [retry_ms, reset_ms] = ["retry_after_ms", "reset_after_ms"].map(|name| limits[0][name].take());
        assert_eq!(retry_ms, reset_ms);
        assert!(retry_ms.as_u64() > Some(1_000), "{retry_ms}");
        let expected = serde_json::json!([{
            "limit": "all", "allows": "100/1s", "used": 0, "remaining": 100, "retry_after_ms": null, "reset_after_ms": null,
        }]);
        assert_eq!((status, limits), (200, expected));
        for (rest, wanted, words) in [
            ("missing", 404, "there is no provider `missing`"),
            ("Bad", 404, "there is no provider `Bad`"),
            ("scoped?account=a%20b", 400, "account must be 1 to 64 characters"),
            ("scoped?account=", 400, "account must be 1 to 64 characters"),
            ("plain?acount=a", 400, "unknown field"),
        ] {
            let (status, body) = asked(rest).await;
            assert!(status == wanted && body.contains(words), "{rest}: {status} {body}");
            assert!(body.starts_with(r#"{"error":""#), "{rest}: {body}");
        }
        stop.cancel();
    }

    #[tokio::test]
    async fn every_answer_names_the_deployment() {
        let (state, _progress, database) = state(Some("let-me-in")).await;
        let id = database.deployment().await.unwrap().to_string();
        let (address, stop) = spawn_server(state).await;
        for (path, token, wanted) in [
            ("/livez", None, 200),
            ("/readyz", None, 503),
            ("/api/v1/overview", None, 401),
            ("/api/v1/deployment", None, 401),
            ("/api/v1/deployment", Some("let-me-in"), 200),
            ("/nowhere", None, 404),
        ] {
            let answer = get(&format!("{address}{path}"), token).await;
            let named = answer.headers().get(openapi::HEADER).map(|id| id.to_str().unwrap().to_owned());
            assert_eq!((answer.status().as_u16(), named), (wanted, Some(id.clone())), "{path}");
        }
        let response = get(&format!("{address}/api/v1/deployment"), Some("let-me-in")).await;
        let response: openapi::Deployment = response.json().await.unwrap();
        assert_eq!((response.id.to_string(), response.database.as_str()), (id, "sqlite::memory:"));
        stop.cancel();
    }

    /// Every error response of the API is JSON.
    #[tokio::test]
    async fn api_errors_are_json_with_text() {
        let (address, _progress, stop) = start(None).await;
        let json = |request: reqwest::RequestBuilder| request.header("content-type", "application/json");
        for (method, path, wanted) in [
            ("GET", "/api/v1/limits/acme?acount=a", 400),
            ("GET", "/api/v1/providers/acme/history?seconds=x", 400),
            ("GET", "/api/v1/jobs?limit=x", 400),
            ("GET", "/api/v1/jobs/%ff", 400),
            ("GET", "/api/v1/nowhere", 404),
            ("GET", "/api/nowhere", 404),
            ("POST", "/api/v1/nowhere", 404),
            ("POST", "/api/v1/overview", 405),
            ("DELETE", "/api/v1/jobs/p1", 405),
            ("GET", "/api/v1/jobs/p1/cancel", 405),
        ] {
            let method = method.parse().unwrap();
            let answer = json(client().request(method, format!("{address}{path}"))).send().await.unwrap();
            assert_eq!(answer.status().as_u16(), wanted, "{path}");
            let body: serde_json::Value = answer.json().await.unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(body["error"].as_str().is_some_and(|words| words.len() > 10), "{path}: {body}");
        }
        let answer = client().get(format!("{address}/api/v1/jobs/p1/cancel")).send().await.unwrap();
        assert_eq!(answer.headers()["allow"], "POST");
        // Responses outside the API are unchanged.
        let page = get(&format!("{address}/nowhere"), None).await;
        assert_eq!((page.status().as_u16(), page.text().await.unwrap().as_str()), (404, ""));
        stop.cancel();
    }
}
