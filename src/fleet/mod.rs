//! All workers together: what each says of itself, and the one picture that comes out of it.
//!
//! Values in, values out. Refuses to ask anybody: `worker::reporting` writes reports, `ops` and `status` gather what stands
//! in the databases and stores, and [`overview`] is the same whoever asks.

pub mod backlog;
pub mod clears;
pub mod conserved;
mod counted;
pub mod lately;
mod limits;
#[cfg(test)]
mod missing_tests;
pub mod overview;
pub mod report;
pub mod standing;
mod warnings;
pub mod workers;

pub use conserved::{Conserved, by_provider};
pub use overview::{Evidence, Overview, ProviderOverview, overview};
pub use standing::State;
