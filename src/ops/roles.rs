//! The roles that routes need: one table of every route that changes something, and the caller's own identity.
//!
//! A GET changes nothing and needs `viewer`. A change that the table does not name needs `admin`, so a forgotten line
//! opens nothing.

use axum::Extension;
use axum::extract::State;
use axum::http::Method;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::OpsState;
use super::guard::ApiCaller;
use super::json::JsonResponse;
use crate::domain::approval::{ApprovalRule, Threshold};
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
pub const CHANGES: [ChangeRoute; 19] = [
    change("/api/v1/jobs/{id}/resolve", Role::Operator),
    change("/api/v1/jobs/{id}/cancel", Role::Operator),
    change("/api/v1/jobs/{id}/assignment", Role::Operator),
    change("/api/v1/jobs/{id}/comments", Role::Operator),
    // Changes nothing; the body holds the selection.
    change("/api/v1/batches/preview", Role::Viewer),
    change("/api/v1/batches", Role::Operator),
    change("/api/v1/batches/{id}/stop", Role::Operator),
    // An approval needs the role of its action too.
    change("/api/v1/approvals/{id}/approve", Role::Operator),
    change("/api/v1/approvals/{id}/refuse", Role::Operator),
    change("/api/v1/approvals/{id}/withdraw", Role::Operator),
    change("/api/v1/dlq/{id}/replay", Role::Operator),
    change("/api/v1/dlq/{id}/discard", Role::Operator),
    change("/api/v1/rejected/{id}/republish", Role::Operator),
    change("/api/v1/rejected/{id}/discard", Role::Operator),
    change("/api/v1/pause-all", Role::Operator),
    change("/api/v1/resume-all", Role::Operator),
    change("/api/v1/providers/{name}/pause", Role::Operator),
    change("/api/v1/providers/{name}/resume", Role::Operator),
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
    /// `open` (the server asks for nothing), `token`, `user` or `proxy`.
    pub path: String,
    /// Actions that need a second person, each from its size on.
    #[serde(default)]
    pub approvals: Vec<RuleView>,
}

/// One rule of `approvals.require`. Without a threshold the action always needs a second person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuleView {
    pub action: String,
    pub payments: Option<u64>,
    /// Minor units.
    pub amount: Option<i64>,
    pub currency: Option<String>,
}

impl From<&ApprovalRule> for RuleView {
    fn from(rule: &ApprovalRule) -> Self {
        let (payments, amount, currency) = match &rule.threshold {
            Threshold::Always => (None, None, None),
            Threshold::Payments(payments) => (Some(*payments), None, None),
            Threshold::Amount { minor, currency } => (None, Some(*minor), Some(currency.clone())),
        };
        Self { action: rule.action.name().to_owned(), payments, amount, currency }
    }
}

/// The caller's name and role, and how it was identified.
#[utoipa::path(
    get,
    path = "/api/v1/whoami",
    tag = "description",
    responses((status = 200, description = "The caller", body = CallerIdentity))
)]
pub async fn whoami(
    State(ops): State<OpsState>,
    Extension(caller): Extension<ApiCaller>,
) -> JsonResponse<CallerIdentity> {
    let identity = caller.identity();
    JsonResponse(CallerIdentity {
        name: identity.name.clone(),
        role: identity.role.name().to_owned(),
        path: identity.path.name().to_owned(),
        approvals: ops.approvals.rules.0.iter().map(RuleView::from).collect(),
    })
}
