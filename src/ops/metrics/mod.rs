//! The `/metrics` endpoint: the counters of this process, and the figures of the overview.
//!
//! A scrape does not fail when a backend is unavailable: it reads the worker's last check of each. Label values come
//! from provider rows and closed lists, never from jobs or accounts.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::{encode, encode_registry};
use prometheus_client::registry::Registry;

use super::OpsState;
use super::guard::AuthenticationFailures;
use super::overview::OverviewSnapshot;
use crate::worker::meter::PREFIX;
use crate::worker::supervisor::WorkerStatus;

mod lanes;
mod limits;
mod overview;
mod process;
mod text;
mod write;

/// <https://prometheus.io/docs/instrumenting/exposition_formats/>
const PLAIN_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// <https://prometheus.io/docs/specs/om/open_metrics_spec/>
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The data of one scrape that the meter does not count.
#[derive(Debug)]
struct MetricsSnapshot {
    worker_status: WorkerStatus,
    failures: AuthenticationFailures,
    overview: OverviewSnapshot,
}

/// All metrics in the text format of OpenMetrics.
async fn scrape(state: &OpsState) -> Result<String, std::fmt::Error> {
    let worker_status = state.worker_status.borrow().clone();
    let failures = state.wrong_tokens.failures();
    let overview = state.collector.snapshot().await;
    let mut text = String::new();
    encode_registry(&mut text, worker_status.meter.registry())?;
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(MetricsSnapshot { worker_status, failures, overview }));
    encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for MetricsSnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut writer = write::MetricsWriter(encoder);
        process::write(&mut writer, &self.worker_status, self.failures)?;
        lanes::write(&mut writer, &self.worker_status)?;
        limits::write(&mut writer, &self.worker_status.settings, &self.overview.input.limit_usage)?;
        overview::write(&mut writer, &self.overview)
    }
}

/// Responds in the older text format unless the client accepts OpenMetrics.
pub(super) async fn show(State(state): State<OpsState>, headers: HeaderMap) -> Response {
    let wants = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match scrape(&state).await {
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
