//! `/metrics`: what this process has counted, and the figures of the overview.
//!
//! A scrape asks no engine that was asked within a second, each within a bound, and fails for none. Labels come from provider
//! rows and closed lists; no job and no account is ever one.

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
use crate::ledger::settings::Settings;
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

/// The engines that a scrape looks at.
pub struct MetricsSources {
    pub settings: Arc<dyn Settings>,
    pub queue: Arc<dyn Queue>,
    pub limiter: Arc<dyn Limiter>,
    pub collector: Arc<OverviewCollector>,
}

/// What scrapes share: the last look at the engines.
pub struct Metrics {
    worker_status: watch::Receiver<WorkerStatus>,
    backends: BackendMonitor,
    collector: Arc<OverviewCollector>,
}

/// All that one scrape shows.
#[derive(Debug)]
struct MetricsSnapshot {
    worker_status: WorkerStatus,
    failures: AuthenticationFailures,
    backends: Arc<BackendHealth>,
    overview: OverviewSnapshot,
}

impl Metrics {
    #[must_use]
    pub fn new(worker_status: watch::Receiver<WorkerStatus>, looked: MetricsSources) -> Self {
        let MetricsSources { settings, queue, limiter, collector } = looked;
        Self { worker_status, backends: BackendMonitor::new(settings, queue, limiter), collector }
    }

    /// Everything, in the text format of OpenMetrics.
    ///
    /// # Errors
    /// Never, as far as strings can be written to.
    async fn scrape(&self, failures: AuthenticationFailures) -> Result<String, std::fmt::Error> {
        let progress = self.worker_status.borrow().clone();
        let (engines, picture) = tokio::join!(self.backends.health(), self.collector.snapshot());
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(MetricsSnapshot {
            worker_status: progress,
            failures,
            backends: engines,
            overview: picture,
        }));
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

/// Answers in the older text format unless the newer one is asked for.
pub(super) async fn show(State(state): State<OpsState>, headers: HeaderMap) -> Response {
    let wants = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match state.metrics.scrape(state.wrong_tokens.failures()).await {
        Ok(text) if wants.contains("application/openmetrics-text") => {
            ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
        }
        Ok(text) => ([(header::CONTENT_TYPE, PLAIN_TEXT)], text::from_open_metrics(&text)).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics cannot be written");
            axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
