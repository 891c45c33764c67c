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

use self::engines::{Engines, EnginesSeen};
use super::OpsState;
use super::guard::AuthenticationFailures;
use super::overview::{Lookout, Picture};
use crate::ledger::settings::Settings;
use crate::limiter::Limiter;
use crate::queue::Queue;
use crate::worker::deployment::Progress;

mod engines;
mod lanes;
mod overview;
mod process;
mod text;
mod write;

const PREFIX: &str = "sluicegate";
/// <https://prometheus.io/docs/instrumenting/exposition_formats/>
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";
/// <https://prometheus.io/docs/specs/om/open_metrics_spec/>
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The engines that a scrape looks at.
pub struct Looked {
    pub settings: Arc<dyn Settings>,
    pub queue: Arc<dyn Queue>,
    pub limiter: Arc<dyn Limiter>,
    pub lookout: Arc<Lookout>,
}

/// What scrapes share: the last look at the engines.
pub struct Metrics {
    progress: watch::Receiver<Progress>,
    engines: Engines,
    lookout: Arc<Lookout>,
}

/// All that one scrape shows.
#[derive(Debug)]
struct Snapshot {
    progress: Progress,
    failures: AuthenticationFailures,
    engines: Arc<EnginesSeen>,
    picture: Picture,
}

impl Metrics {
    #[must_use]
    pub fn new(progress: watch::Receiver<Progress>, looked: Looked) -> Self {
        let Looked { settings, queue, limiter, lookout } = looked;
        Self { progress, engines: Engines::new(settings, queue, limiter), lookout }
    }

    /// Everything, in the text format of OpenMetrics.
    ///
    /// # Errors
    /// Never, as far as strings can be written to.
    async fn scrape(&self, failures: AuthenticationFailures) -> Result<String, std::fmt::Error> {
        let progress = self.progress.borrow().clone();
        let (engines, picture) = tokio::join!(self.engines.look(), self.lookout.look());
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(Snapshot { progress, failures, engines, picture }));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl prometheus_client::collector::Collector for Snapshot {
    fn encode(&self, encoder: prometheus_client::encoding::DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut writer = write::Writer(encoder);
        process::write(&mut writer, &self.progress)?;
        process::write_authentication_failures(&mut writer, self.failures)?;
        lanes::write(&mut writer, &self.progress)?;
        engines::write(&mut writer, &self.engines)?;
        engines::write_limits(&mut writer, &self.progress.known, &self.picture.evidence.used)?;
        overview::write(&mut writer, &self.picture)
    }
}

/// Answers in the older text format unless the newer one is asked for.
pub(super) async fn show(State(state): State<OpsState>, headers: HeaderMap) -> Response {
    let wants = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match state.metrics.scrape(state.wrong_tokens.failures()).await {
        Ok(text) if wants.contains("application/openmetrics-text") => {
            ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
        }
        Ok(text) => ([(header::CONTENT_TYPE, PLAIN)], text::plain(&text)).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics cannot be written");
            axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
