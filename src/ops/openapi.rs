//! The published description of the API (OpenAPI 3.1), generated from the handlers and their types, and the deployment
//! that it belongs to.
//!
//! A new route under `/api/v1` needs `#[utoipa::path]` on its handler and a line in the list here. Tests compare the
//! list with the router, and real responses with their schemas. Each response names the deployment in a header. A command
//! compares it with the database of its own configuration, because another deployment may listen on the same address.

use axum::extract::State;
use axum::http::HeaderValue;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi as Description, Ref, ResponseBuilder};
use utoipa::{Modify, OpenApi, ToSchema};

use super::OpsState;
use super::json::JsonResponse;
use crate::ledger::fleet::DeploymentId;

/// The list of described routes.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sluicegate ops API",
        description = "Payments, limits and lanes of a running deployment. Errors are {\"error\": text}.",
    ),
    paths(
        super::overview::lanes,
        super::peek::limits,
        super::peek::account_backlog,
        super::overview::reconciliation,
        super::api::lists::list,
        super::api::lists::totals,
        super::api::lists::export,
        super::api::show,
        super::api::lists::list_dead,
        super::api::show_dead,
        super::api::changes::resolve,
        super::api::changes::cancel,
        super::api::changes::replay,
        super::api::changes::discard,
        super::api::batches::preview,
        super::api::batches::begin,
        super::api::batches::list,
        super::api::batches::show,
        super::api::batches::jobs,
        super::api::batches::stop,
        super::api::rejected::list,
        super::api::rejected::show,
        super::api::rejected::republish,
        super::api::rejected::discard,
        super::api::changes::list_limits,
        super::api::changes::pause,
        super::api::changes::resume,
        super::api::changes::set_limit,
        super::api::accounts::list,
        super::api::accounts::set,
        super::api::accounts::unset,
        super::api::pause_all::pause_all,
        super::api::pause_all::resume_all,
        super::explain::show,
        super::overview::show,
        super::overview::provider,
        super::overview::provider_history,
        super::history::show,
        super::flows::show,
        super::throttling::show,
        super::overview::workers,
        super::roles::whoami,
        deployment,
        show,
    ),
    modifiers(&TokenSecurity, &CommonErrors),
)]
struct ApiDescription;

/// The security schemes that the guard accepts.
struct TokenSecurity;

impl Modify for TokenSecurity {
    fn modify(&self, description: &mut Description) {
        let components = description.components.get_or_insert_default();
        for (name, scheme) in [("bearer", HttpAuthScheme::Bearer), ("basic", HttpAuthScheme::Basic)] {
            components.add_security_scheme(name, SecurityScheme::Http(Http::new(scheme)));
        }
        let none: [&str; 0] = [];
        // Either of them; none without tokens, or behind an authenticating proxy.
        let any = ["bearer", "basic"].map(|name| SecurityRequirement::new(name, none));
        description.security = Some(any.into_iter().chain([SecurityRequirement::default()]).collect());
    }
}

/// The errors of every change: its body, what its path names, and a refusal.
const CHANGE_ERRORS: [(&str, &str); 4] = [
    ("400", "A field is invalid"),
    ("403", "The caller's role does not suffice; the text names the one that is needed"),
    ("404", "What the path names does not exist"),
    ("409", "Refused; nothing was changed"),
];

/// The errors that need no line at a handler: those of every change, and a backend that is unavailable.
struct CommonErrors;

impl Modify for CommonErrors {
    fn modify(&self, description: &mut Description) {
        let body = Content::new(Some(Ref::from_schema_name("ErrorBody")));
        let add = |operation: &mut Operation, (status, text): (&str, &str)| {
            let error = ResponseBuilder::new().description(text).content("application/json", body.clone());
            operation.responses.responses.insert(status.to_owned(), error.into());
        };
        for item in description.paths.paths.values_mut() {
            if let Some(change) = &mut item.post {
                CHANGE_ERRORS.into_iter().for_each(|error| add(change, error));
            }
            for operation in [&mut item.get, &mut item.post].into_iter().flatten() {
                add(operation, ("503", "A backend is unavailable"));
            }
        }
    }
}

/// The OpenAPI description of this API.
#[utoipa::path(
    get,
    path = "/api/v1/openapi.json",
    tag = "description",
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value))
)]
pub async fn show() -> JsonResponse<Description> {
    JsonResponse(description())
}

pub fn description() -> Description {
    ApiDescription::openapi()
}

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
pub async fn deployment(State(state): State<OpsState>) -> JsonResponse<Deployment> {
    JsonResponse(state.deployment)
}

pub async fn add_header(State(state): State<OpsState>, mut answer: Response) -> Response {
    if let Ok(id) = HeaderValue::from_str(&state.deployment.id.to_string()) {
        answer.headers_mut().insert(HEADER, id);
    }
    answer
}
