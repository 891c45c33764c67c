//! Spans of a worker: one for each time that a job is claimed, with its waits as child spans.
//!
//! They contain only the provider's name, the job's id and fixed words: no payload, header, account or key. Without the
//! feature `otlp` no filter lets a span through, so every span is empty. The names and attributes are in
//! docs/tracing.md.

use std::collections::BTreeMap;

use tracing::field::Empty;
use tracing::{Span, info_span};

#[cfg(feature = "otlp")]
pub use super::otlp::trace_headers;
#[cfg(feature = "otlp")]
use super::otlp::{set_parent, store_context};
use crate::domain::job::JobId;

/// The target of spans: log filters exclude it, and the exporter accepts only it.
pub const TARGET: &str = "sluicegate::spans";

/// Without an exporter, no trace goes on.
#[cfg(not(feature = "otlp"))]
mod no_exporter {
    use super::{BTreeMap, Span};

    pub fn set_parent(_: &Span, _: &BTreeMap<String, String>) {}

    pub fn store_context(_: &str, _: &Span) {}

    pub fn trace_headers(_: &str) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}
#[cfg(not(feature = "otlp"))]
pub use no_exporter::trace_headers;
#[cfg(not(feature = "otlp"))]
use no_exporter::{set_parent, store_context};

/// The span of an active job, a child of its message's `traceparent`, or of its last run in this process.
/// <https://www.w3.org/TR/trace-context/#traceparent-header>
pub fn job(provider: &str, headers: &BTreeMap<String, String>) -> Span {
    let span = info_span!(
        target: TARGET,
        "job",
        otel.kind = "consumer",
        sluicegate.provider = provider,
        sluicegate.job_id = Empty,
        sluicegate.end = Empty,
        sluicegate.outcome = Empty,
        otel.status_code = Empty,
        error.type = Empty,
    );
    set_parent(&span, headers);
    span
}

/// A step of the job whose span is current.
pub fn step(name: &'static str) -> Span {
    info_span!(target: TARGET, "step", otel.name = name, sluicegate.refused_for = Empty, sluicegate.limit = Empty)
}

/// The span of the one request, which ends with the provider's response.
pub fn request(name: &'static str) -> Span {
    info_span!(
        target: TARGET,
        "request",
        otel.name = name,
        otel.kind = "client",
        sluicegate.outcome = Empty,
        http.response.status_code = Empty,
        otel.status_code = Empty,
        error.type = Empty,
    )
}

fn record_error(span: &Span, kind: &str) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", kind);
}

/// Records the job's id in the current span, and keeps the context for the outcome event.
pub fn record_job(id: &JobId) {
    let span = Span::current();
    span.record("sluicegate.job_id", id.as_str());
    store_context(id.as_str(), &span);
}

/// Records the outcome and the HTTP status of a request. No response, or a status of 400 or more, is an error of the
/// span. <https://opentelemetry.io/docs/specs/semconv/http/http-spans/>
pub fn record_response(span: &Span, outcome: &'static str, status: Option<u16>) {
    span.record("sluicegate.outcome", outcome);
    if let Some(status) = status {
        span.record("http.response.status_code", i64::from(status));
    }
    if status.is_none_or(|status| status >= 400) {
        record_error(span, &status.map_or_else(|| outcome.to_owned(), |status| status.to_string()));
    }
}

/// Records the result of the current job: its final state, or why it waits. `review` and `dead` are errors.
pub fn record_result(outcome: &'static str) {
    let span = Span::current();
    span.record("sluicegate.outcome", outcome);
    if matches!(outcome, "review" | "dead") {
        record_error(&span, outcome);
    }
}

/// Records the code why a permit was refused, and the limit that refused it.
pub fn record_refusal(span: &Span, reason: &'static str, limit: Option<&str>) {
    span.record("sluicegate.refused_for", reason);
    span.record("sluicegate.limit", limit);
}

/// Records how the delivery ended. A span ends when it is left for the last time.
pub fn record_end(span: &Span, end: &'static str) {
    span.in_scope(|| {
        span.record("sluicegate.end", end);
        if matches!(end, "fault" | "backend refused") {
            record_error(span, end);
        }
    });
}
