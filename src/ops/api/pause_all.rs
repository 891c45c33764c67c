//! The API for the pause of all providers: it pauses each provider that is not paused, and later resumes exactly those.
//!
//! The commands `provider pause --all` and `provider resume --all` use the same code of the ledger. The overview shows the
//! pause that is in force.

use axum::extract::State;
use axum::routing::post;
use axum::{Extension, Router};

use super::changes::{PauseReason, actor};
use crate::ledger::pause_of_all::{PauseAllResult, ResumeAllResult};
use crate::ops::OpsState;
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, JsonResponse};

pub fn routes() -> Router<OpsState> {
    Router::new().route("/api/v1/pause-all", post(pause_all)).route("/api/v1/resume-all", post(resume_all))
}

/// Pauses every provider that is not paused, as one action. While such a pause is in force, a second one extends it.
#[utoipa::path(
    post,
    path = "/api/v1/pause-all",
    tag = "providers",
    request_body = PauseReason,
    responses((status = 200, description = "All are paused; workers follow within 2 s", body = PauseAllResult))
)]
pub async fn pause_all(
    State(ops): State<OpsState>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<PauseReason>,
) -> Result<JsonResponse<PauseAllResult>, ApiError> {
    let by = actor(&caller, asked.because)?;
    let paused = ops.operator_context.ledger.pause_all(&by).await?;
    Ok(JsonResponse(paused))
}

/// Resumes the providers that the pause of all has paused. Those that were paused otherwise stay paused.
#[utoipa::path(
    post,
    path = "/api/v1/resume-all",
    tag = "providers",
    request_body = PauseReason,
    responses((status = 200, description = "Resumed; workers follow within 2 s", body = ResumeAllResult))
)]
pub async fn resume_all(
    State(ops): State<OpsState>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<PauseReason>,
) -> Result<JsonResponse<ResumeAllResult>, ApiError> {
    let by = actor(&caller, asked.because)?;
    let resumed = ops.operator_context.ledger.resume_all(&by).await?;
    Ok(JsonResponse(resumed))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::ledger::operator::Actor;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};
    use crate::ops::api::tests::TestApi;
    use crate::ops::tests::{client, spawn_server, state};

    /// `acme` of the stand, and `bolt`, which was paused before.
    async fn with_paused_bolt() -> TestApi {
        let api = TestApi::new().await;
        let acme = api.database.readable_rows(None).await.unwrap().remove(0);
        let bolt = ProviderRow { name: "bolt".to_owned(), paused: true, ..acme };
        api.database.apply_settings(&[bolt], false).await.unwrap();
        api
    }

    #[tokio::test]
    async fn all_are_paused_and_the_same_are_resumed() {
        let api = with_paused_bolt().await;
        let nothing = json!({"id": null, "resumed": [], "resumed_before": [], "still_paused": ["bolt"]});
        assert_eq!(api.post("/api/v1/resume-all", json!({})).await, (200, nothing));
        let (status, paused) = api.post("/api/v1/pause-all", json!({"because": "incident 12"})).await;
        let expected = json!({"id": 1, "paused": ["acme"], "held": [], "paused_before": ["bolt"]});
        assert_eq!((status, paused), (200, expected));
        let (_, again) = api.post("/api/v1/pause-all", json!({})).await;
        assert_eq!(again, json!({"id": 1, "paused": [], "held": ["acme"], "paused_before": ["bolt"]}));
        let (status, resumed) = api.post("/api/v1/resume-all", json!({"because": "over"})).await;
        let expected = json!({"id": 1, "resumed": ["acme"], "resumed_before": [], "still_paused": ["bolt"]});
        assert_eq!((status, resumed), (200, expected));
        assert_eq!(api.post("/api/v1/pause-all", json!({"because": "4111 1111 1111 1111"})).await.0, 400);
    }

    #[tokio::test]
    async fn overview_names_the_pause_of_all() {
        let (state, _progress, database) = state(None).await;
        let limit = LimitRow { name: "all".to_owned(), max_requests: 5, window_ms: 1_000, ..LimitRow::default() };
        let (name, url) = ("acme".to_owned(), "https://pay.example/".to_owned());
        let row = ProviderRow { name, url, limits: vec![limit], ..ProviderRow::default() };
        database.apply_settings(&[row], false).await.unwrap();
        let alice = Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some("incident 12".to_owned()) };
        database.pause_all(&alice).await.unwrap();
        let (address, stop) = spawn_server(state).await;
        let overview = client().get(format!("{address}/api/v1/overview")).send().await.unwrap();
        let pause = overview.json::<Value>().await.unwrap()["pause_of_all"].take();
        assert_eq!((&pause["id"], &pause["providers"]), (&json!(1), &json!(["acme"])));
        assert_eq!((&pause["by"], &pause["because"]), (&json!("alice@desk"), &json!("incident 12")));
        stop.cancel();
    }
}
