//! What a worker says of a job's way, as spans: one for each time that the job is taken in hand, with its waits below it.
//!
//! Refuses to hold anything but the provider's name, the job's id and fixed words: no payload, no header's value, no account,
//! no key of its own. Without the feature `otlp` nothing of this is there and every span is none.

use std::collections::BTreeMap;

use tracing::Span;

use crate::domain::job::JobId;

/// What the log filters leave out, and the exporter takes alone.
pub const TARGET: &str = "sluicegate::spans";

/// A job in hand, as a child of what its message's `traceparent` names.
/// <https://www.w3.org/TR/trace-context/#traceparent-header>
#[must_use]
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
#[must_use]
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

/// The one request: a span that its provider's answer ends.
#[must_use]
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

/// Names the job of the current span, and keeps its context for the outcome's event.
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

/// What a request came to: our word for it, and the status that was answered. No answer, and one of 400 or more, is an
/// error of the span. <https://opentelemetry.io/docs/specs/semconv/http/http-spans/>
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

/// What became of the job of the current span: its final state, or why it waits. What a person must look at is an error.
pub fn record_result(word: &'static str) {
    #[cfg(feature = "otlp")]
    {
        let span = Span::current();
        span.record("sluicegate.outcome", word);
        if matches!(word, "review" | "dead") {
            span.record("otel.status_code", "ERROR");
            span.record("error.type", word);
        }
    }
    #[cfg(not(feature = "otlp"))]
    let _ = word;
}

/// Why a permit was refused, in a word, and by which limit if it was one.
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

/// How the job was put down, now. A span ends when it was last entered.
pub fn record_end(span: &Span, end: &'static str) {
    #[cfg(feature = "otlp")]
    span.in_scope(|| {
        span.record("sluicegate.end", end);
        if matches!(end, "fault" | "engine refused") {
            span.record("otel.status_code", "ERROR");
            span.record("error.type", end);
        }
    });
    #[cfg(not(feature = "otlp"))]
    let _ = (span, end);
}

/// Headers that carry the context of a job on to its outcome's event: `traceparent` and `tracestate`. None if another
/// process had the job, or if that was long ago.
#[must_use]
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
