//! The client address by which the ops server counts connections and wrong tokens: an IPv4 address or an IPv6 network.
//!
//! A host usually has a whole /64 network of IPv6, so a bound on single IPv6 addresses would have no effect.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

const NETWORK_BITS: u32 = 64;

/// The address of one client; all clients behind a proxy share the proxy's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ClientAddress(IpAddr);

impl From<IpAddr> for ClientAddress {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            // On a link all hosts share one network.
            IpAddr::V6(v6) if v6.is_loopback() || v6.is_unicast_link_local() => IpAddr::V6(v6),
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> NETWORK_BITS << NETWORK_BITS)),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V6(v6) if !v6.is_loopback() && !v6.is_unicast_link_local() => write!(f, "{v6}/{NETWORK_BITS}"),
            address => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_network_is_one_client() {
        let shown = |address: &str| ClientAddress::from(address.parse::<IpAddr>().unwrap()).to_string();
        for (address, client) in [
            ("10.1.2.3", "10.1.2.3"),
            ("::ffff:10.1.2.3", "10.1.2.3"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("2001:db8:1:2::", "2001:db8:1:2::/64"),
            ("::1", "::1"),
            ("fe80::1:2", "fe80::1:2"),
        ] {
            assert_eq!(shown(address), client);
        }
    }
}
