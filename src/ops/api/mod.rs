//! What the API reads of single payments and of limits as written, and everything that it changes: verdicts, pauses, rates.
//!
//! Refuses to be a second way: verdicts go through the ledger's operator face and `worker::send_again`, settings through
//! `ops::change`, as the commands do, with the same refusals and the same audit.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

use super::OpsState;
use super::guard::Caller;
use crate::ledger::operator::{By, Operator};
use crate::ledger::settings::Settings;
use crate::queue::Queue;
use crate::queue::message::CardNumbers;

pub mod body;
pub mod jobs;
pub mod problem;
pub mod refused;
#[cfg(test)]
mod repeated_tests;
pub mod settings;
#[cfg(test)]
mod shown_tests;
#[cfg(test)]
mod tests;
pub mod verdicts;

/// In the audit of everything that is changed here.
const PROGRAM: &str = "sluicegate ops";

/// What a person's decisions need.
#[derive(Clone)]
pub struct Desk {
    pub operator: Arc<dyn Operator>,
    pub settings: Arc<dyn Settings>,
    pub queue: Arc<dyn Queue>,
    pub card_numbers: CardNumbers,
}

/// The routes of this part; each is described in `ops::openapi`.
pub(super) fn routes() -> Router<OpsState> {
    Router::new()
        .route("/api/v1/jobs", get(jobs::list))
        .route("/api/v1/jobs/{id}", get(jobs::show))
        .route("/api/v1/jobs/{id}/resolve", post(verdicts::resolve))
        .route("/api/v1/jobs/{id}/cancel", post(verdicts::cancel))
        .route("/api/v1/dlq", get(jobs::list_dead))
        .route("/api/v1/dlq/{id}", get(jobs::show_dead))
        .route("/api/v1/dlq/{id}/replay", post(verdicts::replay))
        .route("/api/v1/dlq/{id}/discard", post(verdicts::discard))
        .route("/api/v1/limits", get(settings::list_limits))
        .route("/api/v1/providers/{name}/pause", post(settings::pause))
        .route("/api/v1/providers/{name}/resume", post(settings::resume))
        .route("/api/v1/providers/{name}/limits/{limit}", post(settings::set_limit))
}

/// Who asks, for the audit.
fn by(caller: &Caller, because: Option<String>) -> By {
    By { os_user: caller.name(), program: Some(PROGRAM), because }
}
