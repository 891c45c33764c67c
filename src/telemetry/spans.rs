//! Spans of a worker: one for each time that a job is claimed, with its waits as child spans.
//!
//! They contain only the provider's name, the job's id and fixed words: no payload, header, account or key. Without the
//! feature `otlp` every span is empty. The names and attributes are in docs/tracing.md.

use std::collections::BTreeMap;

use tracing::Span;

use crate::domain::job::JobId;

/// The target of spans: log filters exclude it, and the exporter accepts only it.
pub const TARGET: &str = "sluicegate::spans";

/// The span of an active job, a child of its message's `traceparent`.
/// <https://www.w3.org/TR/trace-context/#traceparent-header>
pub fn job(provider: &str, headers: &BTreeMap<String, String>) -> Span {
    #[cfg(feature = "otlp")]
    {
        let span = tracing::info_span!(
            target: "sluicegate::spans",
            "job",
            otel.kind = "consumer",
            sluicegate.provider = provider,
            sluicegate.job_id = tracing::field::Empty,
            sluicegate.end = tracing::field::Empty,
            sluicegate.outcome = tracing::field::Empty,
            otel.status_code = tracing::field::Empty,
            error.type = tracing::field::Empty,
        );
        super::otlp::set_parent(&span, headers);
        span
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = (provider, headers);
        Span::none()
    }
}

/// A step of the job whose span is current.
pub fn step(name: &'static str) -> Span {
    #[cfg(feature = "otlp")]
    {
        tracing::info_span!(
            target: "sluicegate::spans",
            "step",
            otel.name = name,
            sluicegate.refused_for = tracing::field::Empty,
            sluicegate.limit = tracing::field::Empty,
        )
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = name;
        Span::none()
    }
}

/// The span of the one request, which ends with the provider's response.
pub fn request(name: &'static str) -> Span {
    #[cfg(feature = "otlp")]
    {
        tracing::info_span!(
            target: "sluicegate::spans",
            "request",
            otel.name = name,
            otel.kind = "client",
            sluicegate.outcome = tracing::field::Empty,
            http.response.status_code = tracing::field::Empty,
            otel.status_code = tracing::field::Empty,
            error.type = tracing::field::Empty,
        )
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = name;
        Span::none()
    }
}

/// Records the job's id in the current span, and keeps the context for the outcome event.
pub fn record_job(id: &JobId) {
    #[cfg(feature = "otlp")]
    {
        let span = Span::current();
        span.record("sluicegate.job_id", id.as_str());
        super::otlp::store_context(id.as_str(), &span);
    }
    #[cfg(not(feature = "otlp"))]
    let _ = id;
}

/// Records the outcome and the HTTP status of a request. No response, or a status of 400 or more, is an error of the
/// span. <https://opentelemetry.io/docs/specs/semconv/http/http-spans/>
pub fn record_response(span: &Span, outcome: &'static str, status: Option<u16>) {
    #[cfg(feature = "otlp")]
    {
        span.record("sluicegate.outcome", outcome);
        if let Some(status) = status {
            span.record("http.response.status_code", i64::from(status));
        }
        if status.is_none_or(|status| status >= 400) {
            span.record("otel.status_code", "ERROR");
            span.record("error.type", status.map_or_else(|| outcome.to_owned(), |status| status.to_string()).as_str());
        }
    }
    #[cfg(not(feature = "otlp"))]
    let _ = (span, outcome, status);
}

/// Records the result of the current job: its final state, or why it waits. `review` and `dead` are errors.
pub fn record_result(outcome: &'static str) {
    #[cfg(feature = "otlp")]
    {
        let span = Span::current();
        span.record("sluicegate.outcome", outcome);
        if matches!(outcome, "review" | "dead") {
            span.record("otel.status_code", "ERROR");
            span.record("error.type", outcome);
        }
    }
    #[cfg(not(feature = "otlp"))]
    let _ = outcome;
}

/// Records the code why a permit was refused, and the limit that refused it.
pub fn record_refusal(span: &Span, reason: &'static str, limit: Option<&str>) {
    #[cfg(feature = "otlp")]
    {
        span.record("sluicegate.refused_for", reason);
        if let Some(limit) = limit {
            span.record("sluicegate.limit", limit);
        }
    }
    #[cfg(not(feature = "otlp"))]
    let _ = (span, reason, limit);
}

/// Records how the delivery ended. A span ends when it is left for the last time.
pub fn record_end(span: &Span, end: &'static str) {
    #[cfg(feature = "otlp")]
    span.in_scope(|| {
        span.record("sluicegate.end", end);
        if matches!(end, "fault" | "backend refused") {
            span.record("otel.status_code", "ERROR");
            span.record("error.type", end);
        }
    });
    #[cfg(not(feature = "otlp"))]
    let _ = (span, end);
}

/// Headers with the job's trace context for its outcome event: `traceparent` and `tracestate`. Empty if another process
/// handled the job, or if that was long ago.
pub fn trace_headers(id: &str) -> BTreeMap<String, String> {
    #[cfg(feature = "otlp")]
    {
        super::otlp::stored_headers(id)
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = id;
        BTreeMap::new()
    }
}
