//! All workers together: the report of each, and the overview that is computed from them.
//!
//! Pure functions: `worker::heartbeat` writes the reports, and `ops` and `status` gather the data of databases and
//! stores. For the same data [`overview`] is the same everywhere.

pub mod backlog;
pub mod overview;
pub mod pace;
pub mod provider_status;
pub mod report;
pub mod workers;

pub use backlog::{ProviderReconciliation, by_provider};
pub use overview::{Overview, OverviewInput, ProviderOverview, overview};
pub use provider_status::ProviderState;
