//! The deployment of this process, named in a header of every response and at `/api/v1/deployment`.
//!
//! A command compares it with the database of its own configuration, because another deployment's process may listen on
//! the same address.

use axum::extract::State;
use axum::http::HeaderValue;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::OpsState;
use super::json::JsonResponse;
use crate::ledger::fleet::DeploymentId;

/// Header with the deployment's id. Error responses have it too, so that clients see it without the token.
pub const HEADER: &str = "x-sluicegate-deployment";

/// The deployment that responds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Deployment {
    /// The id in table `deployment` of its database.
    #[schema(value_type = String)]
    pub id: DeploymentId,
    /// Address of its database, without user and password.
    pub database: String,
}

/// The deployment of this process.
#[utoipa::path(
    get,
    path = "/api/v1/deployment",
    tag = "description",
    responses((status = 200, description = "Its id and the address of its database", body = Deployment))
)]
pub(super) async fn show(State(state): State<OpsState>) -> JsonResponse<Deployment> {
    JsonResponse(state.deployment)
}

pub(super) async fn add_header(State(state): State<OpsState>, mut answer: Response) -> Response {
    if let Ok(id) = HeaderValue::from_str(&state.deployment.id.to_string()) {
        answer.headers_mut().insert(HEADER, id);
    }
    answer
}
