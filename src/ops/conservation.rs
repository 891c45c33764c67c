//! Where every job is, as `/api/v1/conservation` shows it: per provider, with what does not add up in words.
//!
//! Refuses to read the whole ledger: settled jobs are held against their events only if they settled lately.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::OpsState;
use super::api::problem::ErrorBody;
use crate::ledger::upkeep::Account;
use crate::worker::sweeper::{ASTRAY_AFTER, CHECKED};

/// One provider's account; the fields are [`Account`]'s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Conserved {
    pub provider: String,
    pub recorded: u64,
    pub states: BTreeMap<String, u64>,
    pub in_hand: u64,
    pub parked: u64,
    pub due: u64,
    pub astray: u64,
    pub without_event: u64,
    pub without_cause: u64,
    /// What does not add up, in words; empty when everything does.
    pub faults: Vec<String>,
}

impl From<Account> for Conserved {
    fn from(account: Account) -> Self {
        Self {
            faults: account.faults(),
            provider: account.provider,
            recorded: account.recorded,
            states: account.states.into_iter().collect(),
            in_hand: account.in_hand,
            parked: account.parked,
            due: account.due,
            astray: account.astray,
            without_event: account.without_event,
            without_cause: account.without_cause,
        }
    }
}

/// Where every job is, per provider, and what does not add up.
#[utoipa::path(
    get,
    path = "/api/v1/conservation",
    tag = "jobs",
    responses(
        (status = 200, description = "One account per provider", body = Vec<Conserved>),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub(super) async fn show(State(state): State<OpsState>) -> Response {
    match state.upkeep.conservation(ASTRAY_AFTER, CHECKED).await {
        Ok(accounts) => Json(accounts.into_iter().map(Conserved::from).collect::<Vec<_>>()).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": error.to_string() }))).into_response(),
    }
}
