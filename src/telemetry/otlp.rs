//! The span exporter: OTLP over HTTP as JSON, in batches, on its own thread.
//!
//! It never delays a payment: if the collector is slow or unreachable, spans are lost. It exports only
//! [`super::spans`], no log lines. It follows no redirects and uses no proxies, so spans go only to the configured
//! address.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, Tracer};
use parking_lot::Mutex;
use reqwest::blocking::Client;
use reqwest::{Certificate, redirect};
use tracing::Span;
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt as _};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::{Filtered, LevelFilter, Targets};
use tracing_subscriber::layer::Layer as _;

use super::spans::TARGET;
use crate::tls::Authorities;

/// The path for traces. <https://opentelemetry.io/docs/specs/otlp/#otlphttp-request>
const PATH: &str = "/v1/traces";
/// Attributes of a deployment: `key=value,key=value`.
const RESOURCE_ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of jobs whose context is kept for their outcome event, which usually follows within milliseconds.
const CONTEXTS_MAX: usize = 4_096;
/// Longest header that is read: `traceparent` has 55 characters, and at least 512 of `tracestate` must be propagated.
/// <https://www.w3.org/TR/trace-context/#tracestate-limits>
const HEADER_CHARACTERS_MAX: usize = 512;

pub type SpanLayer = Filtered<OpenTelemetryLayer<Registry, Tracer>, Targets, Registry>;

/// Sends the remaining spans when it is dropped, for at most [`EXPORT_TIMEOUT`].
#[derive(Debug)]
pub struct ExportGuard(SdkTracerProvider);

impl Drop for ExportGuard {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown_with_timeout(EXPORT_TIMEOUT) {
            tracing::warn!(%error, "the last spans were not exported and are lost");
        }
    }
}

fn client(endpoint: &str, authorities: &Authorities) -> Result<Client, reqwest::Error> {
    let trusted = Certificate::from_pem_bundle(authorities.pem().unwrap_or_default().as_bytes())?;
    let client = Client::builder().redirect(redirect::Policy::none()).no_proxy().timeout(EXPORT_TIMEOUT);
    // The platform's verifier fails to build without CA certificates, which plain text does not need.
    let client = if endpoint.starts_with("https:") { client } else { client.tls_certs_only([]) };
    client.tls_certs_merge(trusted).build()
}

/// A layer that exports to this collector.
pub fn layer(endpoint: &str, authorities: &Authorities) -> Result<(SpanLayer, ExportGuard), String> {
    let client = client(endpoint, authorities).map_err(|error| format!("telemetry.otlp_endpoint: {error}"))?;
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpJson)
        .with_endpoint(format!("{}{PATH}", endpoint.trim_end_matches('/')))
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|error| format!("telemetry.otlp_endpoint: {error}"))?;
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource()).build();
    let spans = OpenTelemetryLayer::new(provider.tracer("sluicegate"))
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_target(false)
        .with_filter(Targets::new().with_default(LevelFilter::OFF).with_target(TARGET, LevelFilter::INFO));
    Ok((spans, ExportGuard(provider)))
}

/// The sender of the spans: the program, its version, and an instance id, unless the environment sets one.
/// <https://opentelemetry.io/docs/specs/semconv/resource/service/>
fn resource() -> Resource {
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let built = Resource::builder().with_service_name("sluicegate").with_attribute(version);
    let named = std::env::var(RESOURCE_ATTRIBUTES).is_ok_and(|marks| marks.contains("service.instance.id="));
    if named {
        return built.build();
    }
    let instance = KeyValue::new("service.instance.id", uuid::Uuid::now_v7().to_string());
    built.with_attribute(instance).build()
}

struct HeaderExtractor<'a>(&'a BTreeMap<String, String>);

impl Extractor for HeaderExtractor<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str).filter(|value| value.len() <= HEADER_CHARACTERS_MAX)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

struct HeaderInjector<'a>(&'a mut BTreeMap<String, String>);

impl Injector for HeaderInjector<'_> {
    fn set(&mut self, key: &str, value: String) {
        if !value.is_empty() {
            self.0.insert(key.to_owned(), value);
        }
    }
}

/// Makes the span a child of the headers' trace context, if there is one.
pub fn set_parent(span: &Span, headers: &BTreeMap<String, String>) {
    if headers.contains_key("traceparent") {
        let parent = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
        // Fails only without a layer, which exports nothing.
        let _ = span.set_parent(parent);
    }
}

/// Contexts by job, oldest first.
#[derive(Default)]
struct JobContexts {
    order: VecDeque<String>,
    contexts: HashMap<String, BTreeMap<String, String>>,
}

static CONTEXTS: Mutex<Option<JobContexts>> = Mutex::new(None);

pub fn store_context(id: &str, span: &Span) {
    let mut headers = BTreeMap::new();
    TraceContextPropagator::new().inject_context(&span.context(), &mut HeaderInjector(&mut headers));
    if headers.is_empty() {
        return;
    }
    let mut kept = CONTEXTS.lock();
    let kept = kept.get_or_insert_default();
    if kept.contexts.insert(id.to_owned(), headers).is_none() {
        kept.order.push_back(id.to_owned());
    }
    if kept.order.len() > CONTEXTS_MAX
        && let Some(oldest) = kept.order.pop_front()
    {
        kept.contexts.remove(&oldest);
    }
}

/// Headers with the job's trace context for its next run and its outcome event: `traceparent` and `tracestate`. Empty if
/// another process handled the job, or if that was long ago.
pub fn trace_headers(id: &str) -> BTreeMap<String, String> {
    let kept = CONTEXTS.lock();
    kept.as_ref().and_then(|kept| kept.contexts.get(id).cloned()).unwrap_or_default()
}
