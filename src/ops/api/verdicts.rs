//! What a person decides about one payment: settle it, send it again, stop it, end it.
//!
//! Refuses what the commands refuse, with their words. Many payments are decided one by one by whoever asks, at the rate
//! that was chosen there.

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::body::{Body, because};
use super::jobs::of_address;
use super::problem::{ErrorBody, Problem};
use super::{Desk, by};
use crate::domain::job::JobId;
use crate::ledger::operator::{By, Verdict};
use crate::ledger::said;
use crate::ops::OpsState;
use crate::ops::guard::Caller;
use crate::ops::json::Json;
use crate::worker::send_again::{NotSent, SendAgain, lanes};

/// What the provider's own records say of a payment in `review`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resolution {
    #[serde(rename = "as")]
    finding: Finding,
    /// With `succeeded`: the provider's reference of the charge.
    reference: Option<String>,
    /// For the audit; also in the job's reason and its outcome event. At most 500 characters.
    because: Option<String>,
}

/// What was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Finding {
    /// It was charged.
    Succeeded,
    /// It was not charged, and shall not be.
    Declined,
    /// It was surely not charged, and shall be: same key, same request, through every gate.
    Resend,
}

/// Why, if somebody says.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    /// For the audit; also in the job's reason and its outcome event. At most 500 characters.
    because: Option<String>,
}

/// What became of a payment.
#[derive(Debug, Serialize, ToSchema)]
pub struct Decided {
    id: String,
    /// What it is now.
    state: String,
    /// In words.
    done: String,
}

/// Settles a payment in `review`, or has it sent again.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/resolve",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = Resolution,
    responses(
        (status = 200, description = "Done", body = Decided),
        (status = 202, description = "Waiting in the ledger; the sweeper will publish its message", body = Decided),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "An engine is away", body = ErrorBody),
    )
)]
pub async fn resolve(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<Caller>,
    Body(asked): Body<Resolution>,
) -> Result<Response, Problem> {
    let Resolution { finding, reference, because: why } = asked;
    let verdict = match finding {
        Finding::Succeeded => Verdict::Succeeded { reference: None },
        Finding::Declined => Verdict::Declined,
        Finding::Resend => Verdict::Resend,
    };
    let verdict = said::with_reference(verdict, reference, ops.desk.card_numbers)
        .map_err(|why| Problem::bad(format!("`reference`: {why}")))?;
    decide(&ops.desk, id, verdict, by(&caller, because(why)?)).await
}

/// Stops a payment that is `waiting`; one that is on the wire is not stopped.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/cancel",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = Reason,
    responses(
        (status = 200, description = "Done", body = Decided),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn cancel(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<Caller>,
    Body(asked): Body<Reason>,
) -> Result<Response, Problem> {
    decide(&ops.desk, id, Verdict::Cancel, by(&caller, because(asked.because)?)).await
}

/// Tries a dead payment again: same key, same request, counters restarted, through every gate.
#[utoipa::path(
    post,
    path = "/api/v1/dlq/{id}/replay",
    tag = "dlq",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = Reason,
    responses(
        (status = 200, description = "Done", body = Decided),
        (status = 202, description = "Waiting in the ledger; the sweeper will publish its message", body = Decided),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "An engine is away", body = ErrorBody),
    )
)]
pub async fn replay(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<Caller>,
    Body(asked): Body<Reason>,
) -> Result<Response, Problem> {
    decide(&ops.desk, id, Verdict::Replay, by(&caller, because(asked.because)?)).await
}

/// Ends a dead payment for good: it becomes `cancelled`.
#[utoipa::path(
    post,
    path = "/api/v1/dlq/{id}/discard",
    tag = "dlq",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = Reason,
    responses(
        (status = 200, description = "Done", body = Decided),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn discard(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<Caller>,
    Body(asked): Body<Reason>,
) -> Result<Response, Problem> {
    decide(&ops.desk, id, Verdict::Discard, by(&caller, because(asked.because)?)).await
}

async fn decide(desk: &Desk, id: String, verdict: Verdict, by: By) -> Result<Response, Problem> {
    let id = of_address(id)?;
    let (state, mut done) = (verdict.to().to_owned(), verdict.done().to_owned());
    let mut status = StatusCode::OK;
    if verdict.sends_again() {
        if let Some(missing) = send_again(desk, &id, verdict, by).await? {
            (status, done) = (StatusCode::ACCEPTED, missing);
        }
    } else {
        desk.operator.decide(&id, &verdict, None, &by).await??;
    }
    Ok((status, Json(Decided { id: id.to_string(), state, done })).into_response())
}

/// Begins nothing while the broker is away: then the ledger stays as it is. Returns what is missing where the ledger has the
/// change and the broker has no message: this process has a sweeper, which will publish it.
async fn send_again(desk: &Desk, id: &JobId, verdict: Verdict, by: By) -> Result<Option<String>, Problem> {
    let Desk { operator, settings, queue, card_numbers } = desk;
    let providers = lanes(settings.as_ref()).await?;
    queue.ping().await?;
    let (operator, queue) = (operator.as_ref(), queue.as_ref());
    let sender = SendAgain { operator, queue, providers: &providers, card_numbers: *card_numbers, verdict, by };
    match sender.send(id).await {
        Ok(()) => Ok(None),
        Err(unpublished @ NotSent::Unpublished(_)) => Ok(Some(unpublished.to_string())),
        Err(error) => Err(error.into()),
    }
}
