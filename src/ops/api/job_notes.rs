//! The API for notes on one payment: to whom its review is assigned, and comments.
//!
//! A note changes no payment. `/api/v1/jobs/{id}` returns them all. The commands `jobs assign` and `jobs comment` use the
//! same code of the ledger.

use axum::extract::{Path, State};
use axum::routing::post;
use axum::{Extension, Router};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::changes::actor;
use super::parse_job_id;
use crate::ledger::job_notes::{Assignee, Comment, JobNote, NewNote, assigned_to};
use crate::ledger::operator::ResolutionError;
use crate::ops::OpsState;
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, JsonResponse};

pub fn routes() -> Router<OpsState> {
    Router::new().route("/api/v1/jobs/{id}/assignment", post(assign)).route("/api/v1/jobs/{id}/comments", post(comment))
}

/// To whom a review is assigned.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Assignment {
    /// A person or a team, at most 100 characters; `null`: to no one.
    #[schema(required)]
    to: Option<String>,
}

/// A comment on a payment.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewComment {
    /// At most 500 characters, without card data. It is kept for ever.
    text: String,
}

/// The notes of a payment.
#[derive(Debug, Serialize, ToSchema)]
pub struct NotesResponse {
    id: String,
    /// To whom the review is assigned; `null`: to no one.
    assigned_to: Option<String>,
    /// Oldest first.
    notes: Vec<JobNote>,
}

/// Assigns a payment in `review` to a person or a team, or to no one any more.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/assignment",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = Assignment,
    responses((status = 200, description = "Assigned", body = NotesResponse))
)]
pub async fn assign(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<Assignment>,
) -> Result<JsonResponse<NotesResponse>, ApiError> {
    let to = asked.to.as_deref().map(Assignee::new).transpose();
    let to = to.map_err(|why| ApiError::bad_request(format!("`to`: {why}")))?;
    add(&ops, id, &caller, &NewNote::Assigned(to)).await
}

/// Adds a comment to a payment.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/comments",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = NewComment,
    responses((status = 200, description = "Added", body = NotesResponse))
)]
pub async fn comment(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<NewComment>,
) -> Result<JsonResponse<NotesResponse>, ApiError> {
    let text = Comment::new(&asked.text).map_err(|why| ApiError::bad_request(format!("`text`: {why}")))?;
    add(&ops, id, &caller, &NewNote::Comment(text)).await
}

async fn add(
    ops: &OpsState,
    id: String,
    caller: &ApiCaller,
    note: &NewNote,
) -> Result<JsonResponse<NotesResponse>, ApiError> {
    let (id, by) = (parse_job_id(id)?, actor(caller, None)?);
    let ledger = &ops.operator_context.ledger;
    ledger.add_note(&id, note, &by).await.map_err(|error| match error {
        ResolutionError::Refused(refusal) => ApiError::from(refusal),
        ResolutionError::Ledger(error) => error.into(),
    })?;
    let notes = ledger.job_notes(&id).await?;
    Ok(JsonResponse(NotesResponse { id: id.to_string(), assigned_to: assigned_to(&notes), notes }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::ops::api::tests::TestApi;

    #[tokio::test]
    async fn review_is_assigned_and_commented() {
        let api = TestApi::new().await;
        api.add_job("pay-1", "a", "review").await;
        let (status, answer) = api.post("/api/v1/jobs/pay-1/assignment", json!({"to": "bob"})).await;
        assert_eq!((status, &answer["assigned_to"]), (200, &json!("bob")));
        let (status, answer) = api.post("/api/v1/jobs/pay-1/comments", json!({"text": "asked them"})).await;
        let note = &answer["notes"][1];
        assert_eq!((status, &note["kind"], &note["text"]), (200, &json!("comment"), &json!("asked them")));
        assert_eq!((&note["os_user"], &note["program"]), (&json!("alice@curl/8.5.0"), &json!("sluicegate ops")));
        let (_, job) = api.get("/api/v1/jobs/pay-1").await;
        assert_eq!((&job["assigned_to"], &job["notes"]), (&json!("bob"), &answer["notes"]));
        let (_, answer) = api.post("/api/v1/jobs/pay-1/assignment", json!({"to": null})).await;
        assert_eq!((&answer["assigned_to"], answer["notes"].as_array().unwrap().len()), (&json!(null), 3));
    }

    #[tokio::test]
    async fn notes_are_rejected_like_reasons() {
        let api = TestApi::new().await;
        api.add_job("pay-1", "a", "waiting").await;
        for (path, body, status, words) in [
            ("pay-1/assignment", json!({"to": "bob"}), 409, "only a job that is `review` can be assigned"),
            ("nothing/assignment", json!({"to": "bob"}), 404, "no such job"),
            ("nothing/comments", json!({"text": "a"}), 404, "no such job"),
            ("pay-1/assignment", json!({"to": " "}), 400, "`to`: is empty"),
            ("pay-1/comments", json!({"text": ""}), 400, "`text`: is empty"),
            ("pay-1/comments", json!({"text": "4111 1111 1111 1111"}), 400, "leave it out"),
            ("pay-1/comments", json!({"text": "a", "to": "b"}), 400, "unknown field"),
        ] {
            let (given, answer) = api.post(&format!("/api/v1/jobs/{path}"), body).await;
            assert_eq!(given, status, "{path}: {answer}");
            assert!(answer["error"].as_str().unwrap().contains(words), "{path}: {answer}");
        }
        assert_eq!(api.post("/api/v1/jobs/pay-1/comments", json!({"text": "ok"})).await.0, 200);
    }
}
