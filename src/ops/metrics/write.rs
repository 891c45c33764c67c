//! The writer of metric families: a name, a help text, and a value for each set of labels.
//!
//! Values are counted elsewhere. A family without values is written too, so that every scrape lists all metrics.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;

use crate::worker::meter::Distribution;

const US_PER_S: f64 = 1_000_000.0;
const MS_PER_S: f64 = 1_000.0;

/// Label names and values.
pub type Labels = Vec<(&'static str, String)>;
type NoExemplar<'a> = Option<&'a Exemplar<Labels, u64>>;

pub struct MetricsWriter<'a>(pub DescriptorEncoder<'a>);

impl MetricsWriter<'_> {
    /// Writes a counter; `name` is without `_total`.
    pub fn counter(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, u64)>,
    ) -> Result<(), fmt::Error> {
        self.family(name, help, MetricType::Counter, values, |metric, value| metric.encode_counter(&value, NO_EXEMPLAR))
    }

    pub fn gauge(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, f64)>,
    ) -> Result<(), fmt::Error> {
        self.family(name, help, MetricType::Gauge, values, |metric, value| metric.encode_gauge(&value))
    }

    /// Writes a histogram in seconds.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, Distribution)>,
    ) -> Result<(), fmt::Error> {
        self.family(name, help, MetricType::Histogram, values, |metric, value| {
            let bounds = value.bounds_us.iter().map(|us| float(*us) / US_PER_S).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(value.counts.iter().copied()).collect();
            let count = value.counts.iter().sum();
            metric.encode_histogram::<Labels>(float(value.sum_us) / US_PER_S, count, &buckets, None)
        })
    }

    fn family<V>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        values: impl IntoIterator<Item = (Labels, V)>,
        write: impl Fn(&mut MetricEncoder<'_>, V) -> Result<(), fmt::Error>,
    ) -> Result<(), fmt::Error> {
        let mut family = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, value) in values {
            if labels.is_empty() {
                write(&mut family, value)?;
            } else {
                write(&mut family.encode_family(&labels)?, value)?;
            }
        }
        Ok(())
    }
}

const NO_EXEMPLAR: NoExemplar<'static> = None;

/// A count as a float; beyond 2^53 it loses its last digits.
#[allow(clippy::cast_precision_loss, reason = "metrics are floats")]
pub fn float(count: u64) -> f64 {
    count as f64
}

/// Converts milliseconds to seconds.
pub fn seconds(ms: u64) -> f64 {
    float(ms) / MS_PER_S
}
