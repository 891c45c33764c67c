//! Whether a list of targets that requests may reach (`outbound.allow`) can be meant, for whoever reads a configuration.
//!
//! Refuses to know how it is used: the policy itself belongs to the implementation that calls providers.

use super::http::OutboundPolicy;

/// # Errors
/// One line per entry that is neither `loopback`, host:port, a CIDR nor http://host:port.
pub fn validate(entries: &[String]) -> Result<(), Vec<String>> {
    OutboundPolicy::parse(entries).map(drop)
}
