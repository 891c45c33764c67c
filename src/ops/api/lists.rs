//! The lists of payments: page by page, newest first, with their number and sums, and as a file.
//!
//! All take the same filters, and parse them as the commands do. An export is sent while it is read. It begins only
//! when its first page is there, so an error before that has its own status; a later one ends the connection.

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use futures_util::stream::StreamExt as _;
use serde::Deserialize;
use utoipa::IntoParams;

use super::{DEAD, page_size};
use crate::domain::job::{Identifier, JobId};
use crate::domain::job_filter::JobFilter;
use crate::ledger::job_filter_input::{InvalidFilter, RawJobFilter};
use crate::ledger::operator::{JobPage, JobSearchError, JobTotals};
use crate::ops::OpsState;
use crate::ops::export::{ExportFormat, JobExport};
use crate::ops::json::{ApiError, ErrorBody, JsonResponse};

/// The parameters of an address: those of the filter, then its own.
macro_rules! filter_query {
    ($(#[$meta:meta])* $name:ident { $($(#[$about:meta])* $own:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Deserialize, IntoParams)]
        #[serde(deny_unknown_fields)]
        #[into_params(parameter_in = Query)]
        pub struct $name {
            /// One or more of `waiting`, `sending`, `unknown`, `review`, `dead`, `succeeded`, `declined`, `expired` and
            /// `cancelled`, separated by commas.
            state: Option<String>,
            provider: Option<String>,
            /// The whole account, exactly.
            account: Option<String>,
            /// The whole id, exactly.
            id: Option<String>,
            /// The beginning of an id or of a reference, or a provider's whole reference of a charge.
            search: Option<String>,
            /// The code of a reason to wait, or the beginning of the reason of a finished payment.
            reason: Option<String>,
            /// Three capital letters.
            currency: Option<String>,
            /// In units of `currency`, like `12.99`.
            min_amount: Option<String>,
            /// Like `min_amount`; this amount belongs to the range.
            max_amount: Option<String>,
            /// An instant like `2026-11-27T14:00:00Z`, or a date, which begins at 00:00 UTC.
            created_from: Option<String>,
            /// Like `created_from`; this instant does not belong to the range.
            created_to: Option<String>,
            /// When the payment got its final state.
            finished_from: Option<String>,
            /// Like `finished_from`; this instant does not belong to the range.
            finished_to: Option<String>,
            $($(#[$about])* $own: $type,)*
        }

        impl $name {
            fn filter(self) -> Result<JobFilter, InvalidFilter> {
                RawJobFilter {
                    state: self.state,
                    provider: self.provider,
                    account: self.account,
                    id: self.id,
                    search: self.search,
                    reason: self.reason,
                    currency: self.currency,
                    min_amount: self.min_amount,
                    max_amount: self.max_amount,
                    created_from: self.created_from,
                    created_to: self.created_to,
                    finished_from: self.finished_from,
                    finished_to: self.finished_to,
                }
                .validate()
            }
        }
    };
}

filter_query! {
    /// Filters of the list of payments, and the page; a payment must match all filters.
    JobQuery {
        /// Returns the page after this id: `next` of the page before.
        after: Option<String>,
        /// Payments per page, 1 to 1000; default 50.
        limit: Option<u32>,
    }
}

filter_query! {
    /// Filters of the totals; a payment must match all of them.
    TotalsQuery {}
}

filter_query! {
    /// Filters of an export, and its format; a payment must match all filters.
    ExportQuery {
        /// `csv` or `jsonl`; default `jsonl`.
        format: Option<String>,
    }
}

/// Filters of the list of dead payments; a payment must match all of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeadJobQuery {
    provider: Option<String>,
    /// The whole account, exactly.
    account: Option<String>,
    /// Returns the page after this id: `next` of the page before.
    after: Option<String>,
    /// Payments per page, 1 to 1000; default 50.
    limit: Option<u32>,
}

impl From<InvalidFilter> for ApiError {
    fn from(invalid: InvalidFilter) -> Self {
        Self::bad_request(invalid.to_string())
    }
}

impl From<JobSearchError> for ApiError {
    fn from(error: JobSearchError) -> Self {
        match error {
            JobSearchError::UnknownCursor(_) => Self::bad_request(error.to_string()),
            JobSearchError::Ledger(error) => error.into(),
        }
    }
}

/// Payments, page by page, newest first.
///
/// A page may have few payments, or none, and a `next`: so many payments were searched. Ask for the next page to go on.
#[utoipa::path(
    get,
    path = "/api/v1/jobs",
    tag = "jobs",
    params(JobQuery),
    responses(
        (status = 200, description = "A page", body = JobPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn list(
    State(ops): State<OpsState>,
    which: Result<Query<JobQuery>, QueryRejection>,
) -> Result<JsonResponse<JobPage>, ApiError> {
    let mut query = which?.0;
    let page = Page::validate(query.after.take(), query.limit)?;
    list_page(&ops, &query.filter()?, page).await
}

/// Dead payments (retries exhausted, confirmed not charged), page by page, newest first.
#[utoipa::path(
    get,
    path = "/api/v1/dlq",
    tag = "dlq",
    params(DeadJobQuery),
    responses(
        (status = 200, description = "A page", body = JobPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn list_dead(
    State(ops): State<OpsState>,
    which: Result<Query<DeadJobQuery>, QueryRejection>,
) -> Result<JsonResponse<JobPage>, ApiError> {
    let DeadJobQuery { provider, account, after, limit } = which?.0;
    let filter = RawJobFilter { state: Some(DEAD.to_owned()), provider, account, ..RawJobFilter::default() };
    list_page(&ops, &filter.validate()?, Page::validate(after, limit)?).await
}

struct Page {
    after: Option<JobId>,
    at_most: u32,
}

impl Page {
    fn validate(after: Option<String>, limit: Option<u32>) -> Result<Self, ApiError> {
        let at_most = page_size(limit)?;
        let after = after.map(Identifier::new).transpose();
        Ok(Self { after: after.map_err(|why| ApiError::bad_field("after", why))?, at_most })
    }
}

async fn list_page(ops: &OpsState, filter: &JobFilter, page: Page) -> Result<JsonResponse<JobPage>, ApiError> {
    let ledger = &ops.reads;
    Ok(JsonResponse(ledger.list_jobs(filter, page.after.as_ref(), page.at_most).await?))
}

/// The number of payments that match, and their sum in each currency.
///
/// Of many payments only the newest are counted; then `at_least` is true.
#[utoipa::path(
    get,
    path = "/api/v1/job-totals",
    tag = "jobs",
    params(TotalsQuery),
    responses(
        (status = 200, description = "Number and sums", body = JobTotals),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn totals(
    State(ops): State<OpsState>,
    which: Result<Query<TotalsQuery>, QueryRejection>,
) -> Result<JsonResponse<JobTotals>, ApiError> {
    Ok(JsonResponse(ops.reads.job_totals(&which?.0.filter()?).await?))
}

/// All payments that match, newest first, as CSV or as one JSON object per line.
///
/// A cell of a text is in quotes, and begins with an apostrophe if a spreadsheet would run it as a formula.
#[utoipa::path(
    get,
    path = "/api/v1/job-export",
    tag = "jobs",
    params(ExportQuery),
    responses(
        (status = 200, description = "The file", content(
            (String = "text/csv"),
            (String = "application/x-ndjson"),
        )),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn export(
    State(ops): State<OpsState>,
    which: Result<Query<ExportQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let query = which?.0;
    let format = ExportFormat::from_name(query.format.as_deref().unwrap_or(ExportFormat::JsonLines.name()))
        .ok_or_else(|| ApiError::bad_request("`format`: must be csv or jsonl".to_owned()))?;
    let mut export = JobExport::new(ops.reads.clone(), query.filter()?, format);
    let first = export.next_part().await?.unwrap_or_default();
    let rest = stream::try_unfold(export, async |mut export| {
        let part = export.next_part().await?;
        Ok::<_, JobSearchError>(part.map(|part| (part, export)))
    });
    let parts = stream::once(async { Ok(first) }).chain(rest);
    let headers = [
        (header::CONTENT_TYPE, format.content_type().to_owned()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"payments.{}\"", format.name())),
    ];
    Ok((headers, Body::from_stream(parts)).into_response())
}
