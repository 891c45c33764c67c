//! The `/metrics` endpoint: the counters of this process, and the figures of the overview.
//!
//! A scrape does not fail when a backend is unavailable: it checks each at most once a second, with a timeout. Label
//! values come from provider rows and closed lists, never from jobs or accounts.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use self::backends::{BackendHealth, BackendMonitor};
use super::OpsState;
use super::guard::AuthenticationFailures;
use super::overview::{OverviewCollector, OverviewSnapshot};
use crate::ledger::database::Database;
use crate::limiter::Limiter;
use crate::queue::Queue;
use crate::worker::supervisor::WorkerStatus;

mod backends;
mod lanes;
mod overview;
mod process;
mod text;
mod write;

const PREFIX: &str = "sluicegate";
/// <https://prometheus.io/docs/instrumenting/exposition_formats/>
const PLAIN_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// <https://prometheus.io/docs/specs/om/open_metrics_spec/>
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The backends that a scrape reads.
pub struct MetricsSources {
    pub settings: Database,
    pub queue: Arc<dyn Queue>,
    pub limiter: Arc<dyn Limiter>,
    pub collector: Arc<OverviewCollector>,
}

/// The state that scrapes share: the cached results of backends and overview.
pub struct Metrics {
    worker_status: watch::Receiver<WorkerStatus>,
    backends: BackendMonitor,
    collector: Arc<OverviewCollector>,
}

/// The data of one scrape.
#[derive(Debug)]
struct MetricsSnapshot {
    worker_status: WorkerStatus,
    failures: AuthenticationFailures,
    backends: Arc<BackendHealth>,
    overview: OverviewSnapshot,
}

impl Metrics {
    pub fn new(worker_status: watch::Receiver<WorkerStatus>, sources: MetricsSources) -> Self {
        let MetricsSources { settings, queue, limiter, collector } = sources;
        Self { worker_status, backends: BackendMonitor::new(settings, queue, limiter), collector }
    }

    /// All metrics in the text format of OpenMetrics.
    async fn scrape(&self, failures: AuthenticationFailures) -> Result<String, std::fmt::Error> {
        let worker_status = self.worker_status.borrow().clone();
        let (backends, overview) = tokio::join!(self.backends.health(), self.collector.snapshot());
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(MetricsSnapshot { worker_status, failures, backends, overview }));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl prometheus_client::collector::Collector for MetricsSnapshot {
    fn encode(&self, encoder: prometheus_client::encoding::DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut writer = write::MetricsWriter(encoder);
        process::write(&mut writer, &self.worker_status)?;
        process::write_authentication_failures(&mut writer, self.failures)?;
        lanes::write(&mut writer, &self.worker_status)?;
        backends::write(&mut writer, &self.backends)?;
        backends::write_limits(&mut writer, &self.worker_status.settings, &self.overview.input.limit_usage)?;
        overview::write(&mut writer, &self.overview)
    }
}

/// Responds in the older text format unless the client accepts OpenMetrics.
pub(super) async fn show(State(state): State<OpsState>, headers: HeaderMap) -> Response {
    let wants = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match state.metrics.scrape(state.wrong_tokens.failures()).await {
        Ok(text) if wants.contains("application/openmetrics-text") => {
            ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
        }
        Ok(text) => ([(header::CONTENT_TYPE, PLAIN_TEXT)], text::from_open_metrics(&text)).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics could not be encoded; the scrape fails");
            axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
