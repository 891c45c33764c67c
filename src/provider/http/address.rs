//! Rules for network addresses: which are public, and which of the others an operator has allowed.
//!
//! A rule is for IP addresses, not for names. So the address that was checked is the address of the connection.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::domain::sensitive::secret::quote_if_safe;

/// Ranges that are never a provider on the public internet.
/// <https://www.iana.org/assignments/iana-ipv4-special-registry>
const V4_SPECIAL: [Network; 15] = [
    v4([0, 0, 0, 0], 8),
    v4([10, 0, 0, 0], 8),
    v4([100, 64, 0, 0], 10),
    v4([127, 0, 0, 0], 8),
    v4([169, 254, 0, 0], 16),
    v4([172, 16, 0, 0], 12),
    v4([192, 0, 0, 0], 24),
    v4([192, 0, 2, 0], 24),
    v4([192, 88, 99, 0], 24),
    v4([192, 168, 0, 0], 16),
    v4([198, 18, 0, 0], 15),
    v4([198, 51, 100, 0], 24),
    v4([203, 0, 113, 0], 24),
    v4([224, 0, 0, 0], 4),
    v4([240, 0, 0, 0], 4),
];

/// Exceptions within global unicast, `2000::/3`: protocol assignments with Teredo, documentation, 6to4.
/// <https://www.iana.org/assignments/iana-ipv6-special-registry>
const V6_SPECIAL: [Network; 4] = [
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32),
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20),
];

const V6_GLOBAL_UNICAST: Network = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
/// An IPv4 address as an IPv6-only network sees it. <https://www.rfc-editor.org/rfc/rfc6052#section-2.1>
const V6_NAT64: Network = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);

/// An address range written as CIDR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Network {
    base: IpAddr,
    prefix_bits: u8,
}

impl Network {
    /// Parses `address/bits`.
    ///
    /// # Errors
    /// When the text has another form, or the address has bits set beyond the prefix, most likely by mistake.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let bad = || format!("{} is not a CIDR: write it like 10.0.0.0/8", quote_if_safe(text));
        let (base, bits) = text.split_once('/').ok_or_else(bad)?;
        let base: IpAddr = base.parse().map_err(|_| bad())?;
        let prefix_bits: u8 = bits.parse().map_err(|_| bad())?;
        let width = if base.is_ipv4() { 32 } else { 128 };
        if prefix_bits > width {
            return Err(bad());
        }
        let beyond = match base {
            IpAddr::V4(ip) => u32::from(ip) & !mask_v4(prefix_bits) != 0,
            IpAddr::V6(ip) => u128::from(ip) & !mask_v6(prefix_bits) != 0,
        };
        if beyond {
            return Err(format!(
                "{} has bits set beyond /{prefix_bits}: write the first address of the range",
                quote_if_safe(text)
            ));
        }
        Ok(Self { base, prefix_bits })
    }

    fn contains(self, ip: IpAddr) -> bool {
        match (self.base, ip) {
            (IpAddr::V4(base), IpAddr::V4(ip)) => (u32::from(ip) ^ u32::from(base)) & mask_v4(self.prefix_bits) == 0,
            (IpAddr::V6(base), IpAddr::V6(ip)) => (u128::from(ip) ^ u128::from(base)) & mask_v6(self.prefix_bits) == 0,
            _ => false,
        }
    }
}

/// Rule for the addresses at which one target may be connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AddressRule {
    /// Every address, because the operator named host and port.
    Any,
    /// This machine only, for plain http.
    LoopbackOnly,
    /// Public addresses, and those that `outbound.allow` adds.
    Public { loopback: bool, networks: Vec<Network> },
}

impl AddressRule {
    pub(super) fn permits(&self, ip: IpAddr) -> bool {
        // A connection to ::ffff:10.0.0.1 is one to 10.0.0.1, so the rule for 10.0.0.1 applies.
        let ip = ip.to_canonical();
        match self {
            Self::Any => true,
            Self::LoopbackOnly => ip.is_loopback(),
            Self::Public { loopback, networks } => {
                is_public(ip) || (*loopback && ip.is_loopback()) || networks.iter().any(|network| network.contains(ip))
            }
        }
    }
}

fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(_) => !V4_SPECIAL.iter().any(|range| range.contains(ip)),
        IpAddr::V6(v6) if V6_NAT64.contains(ip) => {
            let [.., a, b, c, d] = v6.octets();
            is_public(Ipv4Addr::new(a, b, c, d).into())
        }
        IpAddr::V6(_) => V6_GLOBAL_UNICAST.contains(ip) && !V6_SPECIAL.iter().any(|range| range.contains(ip)),
    }
}

const fn v4([a, b, c, d]: [u8; 4], prefix_bits: u8) -> Network {
    Network { base: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix_bits }
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix_bits: u8) -> Network {
    Network { base: IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h)), prefix_bits }
}

fn mask_v4(bits: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0)
}

fn mask_v6(bits: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_the_public_internet_is_public() {
        let strict = AddressRule::Public { loopback: false, networks: vec![] };
        for public in ["1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::101:101", "::ffff:8.8.8.8"]
        {
            assert!(strict.permits(ip(public)), "{public}");
        }
        let private = [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "198.19.0.1",
            "203.0.113.9",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "ff02::1",
            "2001::1",
            "2001:db8::1",
            "2002:a00:1::",
        ];
        for private in private {
            assert!(!strict.permits(ip(private)), "{private}");
        }
    }

    #[test]
    fn allowed_networks_add_only_themselves() {
        let networks = vec![Network::parse("10.1.0.0/16").unwrap(), Network::parse("fd00:1::/32").unwrap()];
        let rule = AddressRule::Public { loopback: true, networks };
        for allowed in ["10.1.255.255", "::ffff:10.1.0.1", "fd00:1::5", "127.9.9.9", "::1", "9.9.9.9"] {
            assert!(rule.permits(ip(allowed)), "{allowed}");
        }
        for refused in ["10.2.0.0", "fd00:2::5", "192.168.0.1"] {
            assert!(!rule.permits(ip(refused)), "{refused}");
        }
        assert!(
            AddressRule::LoopbackOnly.permits(ip("127.0.0.1")) && !AddressRule::LoopbackOnly.permits(ip("8.8.8.8"))
        );
        assert!(AddressRule::Any.permits(ip("10.0.0.1")));
    }

    #[test]
    fn every_prefix_length_can_be_written() {
        assert!(Network::parse("0.0.0.0/0").unwrap().contains(ip("9.9.9.9")));
        assert!(Network::parse("::/0").unwrap().contains(ip("fd00::1")));
        assert!(!Network::parse("10.0.0.1/32").unwrap().contains(ip("10.0.0.2")));
        for bad in ["10.0.0.0", "10.0.0.0/33", "10.0.0.1/8", "::1/129", "host/8", "10.0.0.0/-1"] {
            assert!(Network::parse(bad).is_err(), "{bad}");
        }
    }
}
