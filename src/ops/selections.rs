//! The bound on requests that select payments: previews and starts of batches, and exports.
//!
//! A selection holds up to 100,000 payments in memory, so two are made at once, and others wait a moment or are refused.
//! A selection counts until all of its response is handed over, and also after its client is gone: what the database was
//! asked for is read to its end.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::held_body::HeldBody;
use super::json::ApiError;

/// Selections at once, all routes together.
const SELECTIONS_MAX: usize = 2;
/// Longest wait for the end of another selection; less than the time for a response.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// The selections that may be made at once.
#[derive(Clone, Debug)]
pub struct SelectionSlots(Arc<Semaphore>);

impl Default for SelectionSlots {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(SELECTIONS_MAX)))
    }
}

/// For the routes that select payments: waits for a slot before the body of the request is read.
pub async fn bound_selections(State(slots): State<SelectionSlots>, request: Request, next: Next) -> Response {
    let Ok(Ok(slot)) = timeout(WAIT_MAX, Arc::clone(&slots.0).acquire_owned()).await else {
        return busy();
    };
    let selection = tokio::spawn(async move { next.run(request).await.map(|body| HeldBody::wrap(body, slot)) });
    selection
        .await
        .unwrap_or_else(|ended| ApiError::unavailable(format_args!("the selection ended: {ended}")).into_response())
}

fn busy() -> Response {
    let words = format!("{SELECTIONS_MAX} previews, batches or exports are being read: try again when one has ended");
    let mut response = ApiError(StatusCode::SERVICE_UNAVAILABLE, words).into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    response
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::{Body, HttpBody as _};
    use axum::middleware::from_fn_with_state;
    use axum::routing::{get, post};
    use tower::ServiceExt as _;

    use super::*;
    use crate::ops::{api, tests::state};

    #[tokio::test]
    async fn each_kind_of_selection_takes_a_slot() {
        let (state, _progress, _database) = state(None).await;
        let slots = SelectionSlots::default();
        let router: Router = api::routes(slots.clone()).with_state(state);
        for (method, path, free) in [
            ("GET", "/api/v1/job-export", 1),
            ("POST", "/api/v1/batches/preview", 1),
            ("POST", "/api/v1/batches", 1),
            ("GET", "/api/v1/batches", 2),
        ] {
            let response = router.clone().oneshot(asked(method, path)).await.unwrap();
            assert_eq!(slots.0.available_permits(), free, "{method} {path}");
            drop(response);
        }
    }

    /// Routes that share the slots; `/preview` ends with a permit of the returned semaphore.
    fn routes() -> (Router, SelectionSlots, Arc<Semaphore>) {
        let (slots, permits) = (SelectionSlots::default(), Arc::new(Semaphore::new(0)));
        let permit = Arc::clone(&permits);
        let preview = post(async move || permit.acquire().await.map(|permit| permit.forget()).is_ok().to_string());
        let bound = || from_fn_with_state(slots.clone(), bound_selections);
        let export = get(async || "payments").layer(bound());
        (Router::new().route("/preview", preview.layer(bound())).route("/export", export), slots, permits)
    }

    fn asked(method: &str, path: &str) -> Request {
        Request::builder().method(method).uri(path).body(Body::empty()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn third_selection_waits_and_is_refused() {
        let (router, slots, permits) = routes();
        let export = router.clone().oneshot(asked("GET", "/export")).await.unwrap();
        let preview = tokio::spawn(router.clone().oneshot(asked("POST", "/preview")));
        while slots.0.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = router.clone().oneshot(asked("GET", "/export")).await.unwrap();
        assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (503, &"5".parse().unwrap()));
        // A client that is gone frees nothing while its selection is read.
        preview.abort();
        assert!(preview.await.is_err());
        assert_eq!(slots.0.available_permits(), 0);
        permits.add_permits(1);
        let waiting = router.clone().oneshot(asked("GET", "/export")).await.unwrap();
        assert_eq!(waiting.status().as_u16(), 200);
        // A response counts until it is handed over.
        assert!(!export.body().is_end_stream());
        assert_eq!(slots.0.available_permits(), 0);
        drop((export, waiting));
        assert_eq!(slots.0.available_permits(), SELECTIONS_MAX);
    }
}
