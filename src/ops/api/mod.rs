//! The API for operators: it reads payments and configured limits, and changes payments, pauses and rates.
//!
//! Resolutions go through the ledger's operator interface and `worker::resend`, settings through `ops::change`. The
//! commands use the same code, so both reject the same requests and write the same audit.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

use super::OpsState;
use super::guard::ApiCaller;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::queue::Queue;
use crate::queue::message::CardNumbers;

pub mod body;
#[cfg(test)]
mod every_route_tests;
pub mod jobs;
pub mod problem;
pub mod resolutions;
pub mod settings;
#[cfg(test)]
mod tests;

/// Name of this program in the audit.
const PROGRAM: &str = "sluicegate ops";

/// The services that an operator's decisions need.
#[derive(Clone)]
pub struct OperatorContext {
    pub ledger: Database,
    pub queue: Arc<dyn Queue>,
    pub card_numbers: CardNumbers,
}

/// The routes of this module; each is described in `ops::openapi`.
pub(super) fn routes() -> Router<OpsState> {
    Router::new()
        .route("/api/v1/jobs", get(jobs::list))
        .route("/api/v1/jobs/{id}", get(jobs::show))
        .route("/api/v1/jobs/{id}/resolve", post(resolutions::resolve))
        .route("/api/v1/jobs/{id}/cancel", post(resolutions::cancel))
        .route("/api/v1/dlq", get(jobs::list_dead))
        .route("/api/v1/dlq/{id}", get(jobs::show_dead))
        .route("/api/v1/dlq/{id}/replay", post(resolutions::replay))
        .route("/api/v1/dlq/{id}/discard", post(resolutions::discard))
        .route("/api/v1/limits", get(settings::list_limits))
        .route("/api/v1/providers/{name}/pause", post(settings::pause))
        .route("/api/v1/providers/{name}/resume", post(settings::resume))
        .route("/api/v1/providers/{name}/limits/{limit}", post(settings::set_limit))
}

/// The actor for the audit.
fn actor(caller: &ApiCaller, because: Option<String>) -> Actor {
    Actor { os_user: caller.name(), program: Some(PROGRAM), reason: because }
}
