//! The writer of metrics that are read at scrape time: a name, a help text, and a value for each set of labels.
//!
//! Values are counted elsewhere. A family without values is written too, so that every scrape lists these metrics.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;

pub use crate::worker::meter::Labels;

const MS_PER_S: f64 = 1_000.0;

pub struct MetricsWriter<'a>(pub DescriptorEncoder<'a>);

impl MetricsWriter<'_> {
    /// Writes a counter; `name` is without `_total`.
    pub fn counter(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, u64)>,
    ) -> Result<(), fmt::Error> {
        let write = |metric: &mut MetricEncoder<'_>, value| metric.encode_counter::<Labels, u64, u64>(&value, None);
        write_family(self.0.encode_descriptor(name, help, None, MetricType::Counter)?, values, write)
    }

    pub fn gauge(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, f64)>,
    ) -> Result<(), fmt::Error> {
        let write = |metric: &mut MetricEncoder<'_>, value| metric.encode_gauge(&value);
        write_family(self.0.encode_descriptor(name, help, None, MetricType::Gauge)?, values, write)
    }
}

fn write_family<V>(
    mut family: MetricEncoder<'_>,
    values: impl IntoIterator<Item = (Labels, V)>,
    write: impl Fn(&mut MetricEncoder<'_>, V) -> Result<(), fmt::Error>,
) -> Result<(), fmt::Error> {
    for (labels, value) in values {
        if labels.is_empty() {
            write(&mut family, value)?;
        } else {
            write(&mut family.encode_family(&labels)?, value)?;
        }
    }
    Ok(())
}

/// A count as a float; beyond 2^53 it loses its last digits.
#[allow(clippy::cast_precision_loss, reason = "metrics are floats")]
pub fn float(count: u64) -> f64 {
    count as f64
}

/// Converts milliseconds to seconds.
pub fn seconds(ms: u64) -> f64 {
    float(ms) / MS_PER_S
}
