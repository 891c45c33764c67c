//! The pace of a provider as `status`, `provider show` and the overview report it.
//!
//! The figures and the text are those of [`Pace`], which the workers follow.

use serde::{Deserialize, Serialize};

use crate::domain::pace::Pace;
use crate::domain::provider::Provider;

/// How fast the limits and the egress rate let requests start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PaceOverview {
    /// The pace as one line.
    pub text: String,
    /// Requests that the limits allow within one second, all processes together; `null`: no limit has a window.
    pub within_second: Option<u32>,
    /// The limit that decides this.
    pub within_second_limit: Option<String>,
    /// Requests per second over a long time, all processes together; `null`: no limit has a window.
    pub mean_per_s: Option<f64>,
    /// The limit that decides this.
    pub mean_limit: Option<String>,
    /// Requests that the limits allow in flight, all processes together; `null`: no limit counts them.
    pub in_flight: Option<u32>,
    /// The limit that decides this.
    pub in_flight_limit: Option<String>,
    /// Starts are spaced by the mean rate (`pacing = "even"`).
    pub is_even: bool,
    /// Jobs per second that each process lets out; `null`: the egress is not paced.
    pub egress_per_s: Option<f64>,
    /// The row has no `leak_per_second`.
    pub egress_is_default: bool,
    /// One limit decides the whole pace.
    pub is_plain: bool,
}

impl PaceOverview {
    /// The pace of a row among all rows; `None`: no limit applies to every charge.
    pub fn new<'a>(row: &'a Provider, rows: impl IntoIterator<Item = &'a Provider>) -> Option<Self> {
        let pace = Pace::new(row, rows)?;
        Some(Self {
            text: pace.to_string(),
            is_plain: pace.is_plain(),
            within_second: pace.rate.as_ref().map(|rate| rate.within_second),
            within_second_limit: pace.rate.as_ref().map(|rate| rate.at_once.name.clone()),
            mean_per_s: pace.rate.as_ref().map(|rate| rate.over_time.mean_per_second),
            mean_limit: pace.rate.map(|rate| rate.over_time.name),
            in_flight: pace.in_flight.as_ref().map(|limit| limit.max_requests),
            in_flight_limit: pace.in_flight.map(|limit| limit.name),
            is_even: pace.is_even,
            egress_per_s: row.is_paced().then_some(pace.egress_per_second),
            egress_is_default: pace.egress_is_default,
        })
    }
}
