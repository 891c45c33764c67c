//! All workers together: what each says of itself, and the one picture that comes out of it.
//!
//! Values in, values out. Refuses to ask anybody: `worker::reporting` writes reports, `ops` and `status` gather what stands
//! in the databases and stores, and [`overview`] is the same whoever asks.

pub mod backlog;
pub mod clears;
mod limits;
#[cfg(test)]
mod missing_tests;
pub mod overview;
mod provider_counts;
pub mod provider_status;
pub mod recent;
pub mod reconciliation;
pub mod report;
mod warnings;
pub mod workers;

pub use overview::{Overview, OverviewInput, ProviderOverview, overview};
pub use provider_status::ProviderState;
pub use reconciliation::{ProviderReconciliation, by_provider};
