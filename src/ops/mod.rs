//! The ops server: whether this process lives, whether it is ready, and what only it knows.
//!
//! Refuses to be open: it listens on loopback unless told otherwise, asks everybody for the token if there is one
//! (always, off loopback), and changes nothing.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::json;
use subtle::ConstantTimeEq;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::domain::provider::ProviderName;
use crate::domain::time::format_duration;
use crate::limiter::{LimitUse, Limiter};
use crate::worker::deployment::Progress;
use crate::worker::quotas::quota_spec;

/// What the server can tell.
#[derive(Clone)]
pub struct OpsState {
    pub progress: watch::Receiver<Progress>,
    pub limiter: Arc<dyn Limiter>,
    pub token: Option<SecretString>,
}

/// One limit as `/api/v1/limits/{provider}` and `limits peek --json` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitUsed {
    pub limit: String,
    /// As written: `100/1s`; after what is kept in reserve.
    pub allows: String,
    pub used: u64,
    pub free: u64,
}

impl LimitUsed {
    #[must_use]
    pub fn of(limit: &LimitUse) -> Self {
        Self {
            limit: limit.name.clone(),
            allows: format!("{}/{}", limit.max_requests, format_duration(limit.window)),
            used: limit.used,
            free: u64::from(limit.max_requests).saturating_sub(limit.used),
        }
    }
}

/// Serves until the token fires.
///
/// # Errors
/// When the listener fails.
pub async fn serve(listener: TcpListener, state: OpsState, stop: CancellationToken) -> std::io::Result<()> {
    axum::serve(listener, router(state)).with_graceful_shutdown(stop.cancelled_owned()).await
}

fn router(state: OpsState) -> Router {
    let guarded = Router::new()
        .route("/api/v1/limits/{provider}", get(limits))
        .route_layer(from_fn_with_state(state.clone(), authorised));
    Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/readyz", get(readyz))
        .merge(guarded)
        .with_state(state)
}

/// Asks no dependency: a probe that restarts the worker because an engine is away would lose what is in hand.
async fn readyz(State(state): State<OpsState>) -> Response {
    let (ready, draining) = {
        let progress = state.progress.borrow();
        (progress.ready, progress.draining)
    };
    match (ready, draining) {
        (_, true) => (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response(),
        (false, false) => (StatusCode::SERVICE_UNAVAILABLE, "starting\n").into_response(),
        (true, false) => "ready\n".into_response(),
    }
}

/// What each limit of a provider has used; takes nothing.
async fn limits(State(state): State<OpsState>, Path(provider): Path<String>) -> Response {
    let spec = {
        let known = state.progress.borrow().known.clone();
        ProviderName::new(provider)
            .ok()
            .and_then(|name| known.providers.get(&name).map(|row| row.quota.clone()))
            .and_then(|quota| quota_spec(&known, &quota))
    };
    let Some(spec) = spec else {
        return (StatusCode::NOT_FOUND, Json(json!({ "error": "no such provider, or it is disabled" })))
            .into_response();
    };
    match state.limiter.peek(&spec).await {
        Ok(uses) => Json(uses.iter().map(LimitUsed::of).collect::<Vec<_>>()).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": error.to_string() }))).into_response(),
    }
}

async fn authorised(State(state): State<OpsState>, request: Request, next: Next) -> Response {
    let Some(token) = &state.token else { return next.run(request).await };
    let given = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "))
        .unwrap_or_default();
    // Equal lengths apart, the comparison takes the same time wherever the two differ.
    if bool::from(given.ct_eq(token.expose_secret().as_bytes())) {
        return next.run(request).await;
    }
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], Json(json!({ "error": "ops.token is needed" })))
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::embedded::EmbeddedLimiter;

    async fn start(token: Option<&str>) -> (String, watch::Sender<Progress>, CancellationToken) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (progress_tx, progress) = watch::channel(Progress::default());
        let state =
            OpsState { progress, limiter: Arc::new(EmbeddedLimiter::new()), token: token.map(SecretString::from) };
        let stop = CancellationToken::new();
        tokio::spawn(serve(listener, state, stop.clone()));
        (address, progress_tx, stop)
    }

    async fn status(url: &str, token: Option<&str>) -> u16 {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let request = reqwest::Client::new().get(url);
        let request = match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        request.send().await.unwrap().status().as_u16()
    }

    #[tokio::test]
    async fn readiness_follows_the_worker_and_life_does_not() {
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
    async fn a_token_guards_everything_but_the_probes() {
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        let url = format!("{address}/api/v1/limits/stripe");
        assert_eq!(status(&url, None).await, 401);
        assert_eq!(status(&url, Some("let-me-out")).await, 401);
        assert_eq!(status(&url, Some("let-me-in")).await, 404);
        assert_eq!(status(&format!("{address}/livez"), None).await, 200);
        stop.cancel();
    }
}
