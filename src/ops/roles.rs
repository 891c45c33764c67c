//! The roles that routes need: one table of every route that changes something, and the caller's own identity.
//!
//! A GET changes nothing and needs `viewer`. A change that the table does not name needs `admin`, so a forgotten line
//! opens nothing.

use axum::Extension;
use axum::http::Method;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::guard::ApiCaller;
use super::json::JsonResponse;
use crate::domain::person::Role;

/// A route that changes something, and the role that it needs.
pub struct ChangeRoute {
    pub path: &'static str,
    pub role: Role,
}

const fn change(path: &'static str, role: Role) -> ChangeRoute {
    ChangeRoute { path, role }
}

/// Every POST of the API.
pub const CHANGES: [ChangeRoute; 16] = [
    change("/api/v1/jobs/{id}/resolve", Role::Operator),
    change("/api/v1/jobs/{id}/cancel", Role::Operator),
    // Changes nothing, and costs as much as a batch.
    change("/api/v1/batches/preview", Role::Operator),
    change("/api/v1/batches", Role::Operator),
    change("/api/v1/batches/{id}/stop", Role::Operator),
    change("/api/v1/dlq/{id}/replay", Role::Operator),
    change("/api/v1/dlq/{id}/discard", Role::Operator),
    change("/api/v1/rejected/{id}/republish", Role::Operator),
    change("/api/v1/rejected/{id}/discard", Role::Operator),
    change("/api/v1/pause-all", Role::Operator),
    change("/api/v1/resume-all", Role::Operator),
    change("/api/v1/providers/{name}/pause", Role::Operator),
    change("/api/v1/providers/{name}/resume", Role::Operator),
    change("/api/v1/providers/{name}/accounts/{account}", Role::Operator),
    change("/api/v1/providers/{name}/accounts/{account}/unset", Role::Operator),
    change("/api/v1/providers/{name}/limits/{limit}", Role::Admin),
];

/// The role that a request needs; `path` is the route's own, with its placeholders.
pub fn needed_role(method: &Method, path: Option<&str>) -> Role {
    if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
        return Role::Viewer;
    }
    CHANGES.iter().find(|route| Some(route.path) == path).map_or(Role::Admin, |route| route.role)
}

/// The caller, as the server has identified it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallerIdentity {
    /// Empty: nothing names the caller.
    pub name: String,
    /// `viewer`, `operator` or `admin`.
    pub role: String,
    /// `open` (the server asks for nothing), `token` or `proxy`.
    pub path: String,
}

/// The caller's name and role, and how it was identified.
#[utoipa::path(
    get,
    path = "/api/v1/whoami",
    tag = "description",
    responses((status = 200, description = "The caller", body = CallerIdentity))
)]
pub async fn whoami(Extension(caller): Extension<ApiCaller>) -> JsonResponse<CallerIdentity> {
    let identity = caller.identity();
    JsonResponse(CallerIdentity {
        name: identity.name.clone(),
        role: identity.role.name().to_owned(),
        path: identity.path.name().to_owned(),
    })
}
