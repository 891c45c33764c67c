//! The published description of the API (OpenAPI 3.1), generated from the handlers and their types.
//!
//! A new route under `/api/v1` needs `#[utoipa::path]` on its handler and a line in the list here. Tests compare the
//! list with the router, and real responses with their schemas.

use utoipa::openapi::OpenApi as Description;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::json::JsonResponse;

/// The list of described routes.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sluicegate ops API",
        description = "Payments, limits and lanes of a running deployment. Errors are {\"error\": text}.",
    ),
    paths(
        super::lanes,
        super::peek_routes::limits,
        super::peek_routes::account_backlog,
        super::reconciliation::show,
        super::api::jobs::list,
        super::api::jobs::show,
        super::api::jobs::list_dead,
        super::api::jobs::show_dead,
        super::api::resolutions::resolve,
        super::api::resolutions::cancel,
        super::api::resolutions::replay,
        super::api::resolutions::discard,
        super::api::settings::list_limits,
        super::api::settings::pause,
        super::api::settings::resume,
        super::api::settings::set_limit,
        super::explain::show,
        super::overview::show,
        super::overview::provider,
        super::overview::provider_history,
        super::flows::show,
        super::overview::workers,
        super::deployment::show,
        show,
    ),
    modifiers(&TokenSecurity),
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
        // Either of them; none without `ops.token`.
        let any = ["bearer", "basic"].map(|name| SecurityRequirement::new(name, none));
        description.security = Some(any.into_iter().chain([SecurityRequirement::default()]).collect());
    }
}

/// The OpenAPI description of this API.
#[utoipa::path(
    get,
    path = "/api/v1/openapi.json",
    tag = "description",
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value))
)]
pub(super) async fn show() -> JsonResponse<Description> {
    JsonResponse(description())
}

pub(super) fn description() -> Description {
    ApiDescription::openapi()
}
