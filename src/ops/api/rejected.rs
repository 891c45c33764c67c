//! The API for rejected messages: a page of them, one message, and an operator's decision about one.
//!
//! Bodies are never returned, only how each begins, its size and its digest.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::changes::{ActionReason, actor};
use super::page_size;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::Actor;
use crate::ledger::rejected::{RejectedDecision, RejectedFilter, RejectedPage, RejectedRefusal, RejectedSummary};
use crate::ops::OpsState;
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, ErrorBody, JsonResponse};
use crate::worker::rejected::{RejectedDecider, RejectedError};
use crate::worker::resend::provider_names;

pub fn routes() -> Router<OpsState> {
    Router::new()
        .route("/api/v1/rejected", get(list))
        .route("/api/v1/rejected/{id}", get(show))
        .route("/api/v1/rejected/{id}/republish", post(republish))
        .route("/api/v1/rejected/{id}/discard", post(discard))
}

/// Filters of the list; a message must match all of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RejectedQuery {
    /// The provider whose lane the messages came in.
    provider: Option<String>,
    /// The code of the reason, like `bad_amount`.
    reason: Option<String>,
    /// `true`: those that were decided, in place of the open ones.
    decided: Option<bool>,
    /// Returns the page with ids below this one: `next` of the page before.
    before: Option<i64>,
    /// Messages per page, 1 to 1000; default 50.
    limit: Option<u32>,
}

/// The result of a decision.
#[derive(Debug, Serialize, ToSchema)]
pub struct RejectedResult {
    id: i64,
    /// `republished` or `discarded`.
    decision: String,
}

/// Rejected messages that are open, or that were decided; newest first.
#[utoipa::path(
    get,
    path = "/api/v1/rejected",
    tag = "rejected",
    params(RejectedQuery),
    responses(
        (status = 200, description = "A page", body = RejectedPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn list(
    State(ops): State<OpsState>,
    which: Result<Query<RejectedQuery>, QueryRejection>,
) -> Result<JsonResponse<RejectedPage>, ApiError> {
    let RejectedQuery { provider: name, reason, decided, before, limit } = which?.0;
    let at_most = page_size(limit)?;
    let provider =
        name.map(|name| ProviderName::new(name).map_err(|why| ApiError::bad_field("provider", why))).transpose()?;
    let filter = RejectedFilter { provider, reason, decided: decided.unwrap_or_default() };
    Ok(JsonResponse(ops.reads.list_rejected(&filter, before, at_most).await?))
}

/// One rejected message, and the decision about it.
#[utoipa::path(
    get,
    path = "/api/v1/rejected/{id}",
    tag = "rejected",
    params(("id" = String, Path, description = "The message's number")),
    responses(
        (status = 200, description = "The message", body = RejectedSummary),
        (status = 404, description = "There is no such message", body = ErrorBody),
    )
)]
pub async fn show(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
) -> Result<JsonResponse<RejectedSummary>, ApiError> {
    let id = parse_id(&id)?;
    let message = ops.reads.rejected_message(id).await?;
    message.map(JsonResponse).ok_or_else(|| RejectedError::from(RejectedRefusal::NoSuchMessage(id)).into())
}

/// Publishes a rejected message to its lane again, byte for byte.
#[utoipa::path(
    post,
    path = "/api/v1/rejected/{id}/republish",
    tag = "rejected",
    params(("id" = String, Path, description = "The message's number")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = RejectedResult),
    )
)]
pub async fn republish(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<JsonResponse<RejectedResult>, ApiError> {
    decide(&ops, &id, RejectedDecision::Republished, actor(&caller, asked.because)?).await
}

/// Discards a rejected message: its body is removed for good.
#[utoipa::path(
    post,
    path = "/api/v1/rejected/{id}/discard",
    tag = "rejected",
    params(("id" = String, Path, description = "The message's number")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = RejectedResult),
    )
)]
pub async fn discard(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<JsonResponse<RejectedResult>, ApiError> {
    decide(&ops, &id, RejectedDecision::Discarded, actor(&caller, asked.because)?).await
}

async fn decide(
    ops: &OpsState,
    id: &str,
    decision: RejectedDecision,
    actor: Actor,
) -> Result<JsonResponse<RejectedResult>, ApiError> {
    let (id, context) = (parse_id(id)?, &ops.operator_context);
    let providers = provider_names(&context.ledger).await?;
    let ledger = &context.ledger;
    let queue = context.queue.as_deref();
    RejectedDecider { ledger, queue, providers: &providers, actor }.decide(id, decision).await?;
    Ok(JsonResponse(RejectedResult { id, decision: decision.name().to_owned() }))
}

/// Parses the number in an address; an invalid one is an unknown message.
fn parse_id(id: &str) -> Result<i64, ApiError> {
    id.parse().map_err(|_| ApiError::not_found("there is no such rejected message"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use sha2::{Digest as _, Sha256};

    use crate::domain::provider::ProviderName;
    use crate::ledger::rejected::{RejectedMessage, StoredMessage};
    use crate::ops::api::tests::TestApi;
    use crate::queue::Queue as _;

    async fn reject(api: &TestApi, body: &'static str) {
        let message = RejectedMessage {
            lane: ProviderName::new("acme").unwrap(),
            job_id: None,
            reason: "bad_amount",
            detail: "amount: must be above 0".to_owned(),
            body_sha256: Sha256::digest(body).into(),
            body_bytes: body.len(),
            head: body.to_owned(),
            stored: StoredMessage { body: body.into(), ..StoredMessage::default() },
        };
        api.database.reject(&message).await.unwrap();
    }

    #[tokio::test]
    async fn rejected_messages_are_listed_and_decided() {
        let api = TestApi::new().await;
        for body in ["one", "two", "three"] {
            reject(&api, body).await;
        }
        let ids =
            |page: &Value| page["messages"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect::<Value>();
        let (status, page) = api.get("/api/v1/rejected?provider=acme&reason=bad_amount&limit=2").await;
        assert_eq!((status, ids(&page), &page["next"]), (200, json!([3, 2]), &json!(2)));
        assert_eq!(ids(&api.get("/api/v1/rejected?before=2").await.1), json!([1]));
        assert_eq!(ids(&api.get("/api/v1/rejected?reason=secret").await.1), json!([]));
        assert_eq!(api.get("/api/v1/rejected/1").await.1["head"], "one");
        let (status, done) = api.post("/api/v1/rejected/1/republish", json!({"because": "ticket 4711"})).await;
        assert_eq!((status, done), (200, json!({"id": 1, "decision": "republished"})));
        assert_eq!(api.queue.depth(&ProviderName::new("acme").unwrap()).await.unwrap(), Some(1));
        let (status, done) = api.post("/api/v1/rejected/2/discard", json!({})).await;
        assert_eq!((status, done), (200, json!({"id": 2, "decision": "discarded"})));
        let (_, decided) = api.get("/api/v1/rejected?decided=true").await;
        assert_eq!(ids(&decided), json!([2, 1]));
        let first = &decided["messages"][1];
        assert_eq!((&first["os_user"], &first["because"]), (&json!("alice@curl/8.5.0"), &json!("ticket 4711")));
        for (path, status) in [
            ("/api/v1/rejected/1/discard", 409),
            ("/api/v1/rejected/9/discard", 404),
            ("/api/v1/rejected/pay-1/republish", 404),
        ] {
            assert_eq!(api.post(path, json!({})).await.0, status, "{path}");
        }
        for (path, status) in [
            ("/api/v1/rejected/9", 404),
            ("/api/v1/rejected/pay-1", 404),
            ("/api/v1/rejected?limit=0", 400),
            ("/api/v1/rejected?before=x", 400),
            ("/api/v1/rejected?provider=No", 400),
            ("/api/v1/rejected?colour=red", 400),
        ] {
            assert_eq!(api.get(path).await.0, status, "{path}");
        }
        // The overview counts what is open.
        let (_, overview) = api.get("/api/v1/overview").await;
        assert_eq!(overview["rejected"], json!({"messages": 1, "is_at_least": false, "providers": {"acme": 1}}));
    }
}
