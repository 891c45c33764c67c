//! Check of the configuration list `outbound.allow`: the targets that requests to providers may reach.
//!
//! The policy itself is `OutboundPolicy` in `http`, which calls the providers.

use super::http::OutboundPolicy;

/// Checks each entry of `outbound.allow`.
///
/// # Errors
/// One line per entry that is neither `loopback`, host:port, a CIDR nor http://host:port.
pub fn validate(entries: &[String]) -> Result<(), Vec<String>> {
    OutboundPolicy::parse(entries).map(drop)
}
