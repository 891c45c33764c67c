//! Policy for the targets of requests and their secrets, by the lists `outbound.allow` and `outbound.secrets`.
//!
//! It applies to the URL, and again to every resolved address. Public https is always allowed. Private, loopback and
//! link-local addresses and plain http need an entry in the list. A provider's URL comes from a database row: it must
//! not open the worker's network to the operator who writes rows.
//!
//! A rule for addresses is for IP addresses, not for names. So a connection's address is the one that was checked.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use hyper::{Uri, header::HeaderValue};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use url::{Host, Position, Url};

use crate::domain::printable::redact_url;
use crate::domain::sensitive::secret::quote_if_safe;
use crate::provider::FreezeError;
use crate::provider::secret_grants::{SecretGrants, canonical_host};
use crate::tls::Authorities;

/// The lists `outbound.allow` and `outbound.secrets`, validated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboundPolicy {
    loopback: bool,
    networks: Vec<IpNet>,
    https_targets: BTreeSet<(String, u16)>,
    http_targets: BTreeSet<(String, u16)>,
    authorities: Authorities,
    pub(super) secret_grants: SecretGrants,
    /// Files of this program's own configuration; no row's secret is read from them.
    pub(super) own_files: Vec<PathBuf>,
}

/// A URL that may be called, with the rule for its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboundTarget {
    pub url: Url,
    /// Path and query of the URL, as a request line has them.
    pub path: Uri,
    /// `host` or `host:port`, without the scheme's default port.
    pub host_header: HeaderValue,
    /// The URL's host in canonical form.
    pub host: String,
    pub address_rule: AddressRule,
    /// TLS authorities to trust besides the system's.
    pub authorities: Authorities,
}

impl OutboundTarget {
    pub fn is_encrypted(&self) -> bool {
        self.url.scheme() == "https"
    }
}

impl OutboundPolicy {
    /// Parses entries of the form `loopback`, `host:port` (https), CIDR (https) or `http://host:port`.
    pub fn parse(entries: &[String]) -> Result<Self, Vec<String>> {
        let mut policy = Self::default();
        let numbered = (1..).zip(entries);
        let problem = |(number, entry): (u32, &String)| {
            Some(format!("entry {number}, {}", policy.add_entry(entry.trim()).err()?))
        };
        let problems: Vec<String> = numbered.filter_map(problem).collect();
        if problems.is_empty() { Ok(policy) } else { Err(problems) }
    }

    /// Adds TLS authorities, only for the targets that the list names as `host:port`. An authority of the operator's
    /// own network must not certify hosts of the public internet.
    pub fn with_authorities(self, authorities: &Authorities) -> Self {
        Self { authorities: authorities.clone(), ..self }
    }

    /// Lets rows use these secrets, each for its hosts. Files of this program's own configuration stay excluded.
    pub fn with_secret_grants(self, secrets: &SecretGrants, own_files: &[PathBuf]) -> Self {
        Self { secret_grants: secrets.clone(), own_files: own_files.to_owned(), ..self }
    }

    fn add_entry(&mut self, entry: &str) -> Result<(), String> {
        if entry == "loopback" {
            self.loopback = true;
        } else if let Some(target) = entry.strip_prefix("http://") {
            self.http_targets.insert(host_and_port(target.trim_end_matches('/'), Some(80))?);
        } else if entry.contains("://") {
            let entry = quote_if_safe(entry);
            return Err(format!("{entry}: write host:port for https, or http://host:port for plain http"));
        } else if entry.contains('/') {
            self.networks.push(parse_network(entry)?);
        } else {
            self.https_targets.insert(host_and_port(entry, None)?);
        }
        Ok(())
    }

    /// Checks a URL. A host name is admitted provisionally: its addresses are checked when it is resolved.
    ///
    /// # Errors
    /// [`FreezeError::Url`] with the reason and the fix, without the query and any credentials.
    pub(super) fn admit(&self, text: &str) -> Result<OutboundTarget, FreezeError> {
        let refused = |problem: &str| FreezeError::Url { url: redact_url(text), problem: problem.to_owned() };
        let url = Url::parse(text).map_err(|error| refused(&error.to_string()))?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(refused("credentials in a URL end up in logs: use `headers` with ${env:NAME}"));
        }
        let (Some(host), Some(port)) = (url.host().map(|host| host.to_owned()), url.port_or_known_default()) else {
            return Err(refused("it has no host"));
        };
        let key = (canonical_host(&host), port);
        let addresses = match url.scheme() {
            "https" if self.https_targets.contains(&key) => AddressRule::Any,
            "https" => AddressRule::Public { loopback: self.loopback, networks: self.networks.clone() },
            "http" if self.http_targets.contains(&key) => AddressRule::Any,
            "http" if self.loopback && is_loopback_host(&host) => AddressRule::LoopbackOnly,
            "http" => {
                let entry = format!("http://{}:{port}", key.0);
                return Err(refused(&format!("plain http: use https, or add `{entry}` to outbound.allow")));
            }
            _ => return Err(refused("only https and http can be called")),
        };
        if addresses != AddressRule::Any && !may_be_permitted(&host, &addresses) {
            let entry = format!("{}:{port}", key.0);
            return Err(refused(&format!("not on the public internet: to allow it, add `{entry}` to outbound.allow")));
        }
        let is_named = self.https_targets.contains(&key);
        let authorities = if is_named { self.authorities.clone() } else { Authorities::default() };
        let path = url[Position::BeforePath..Position::AfterQuery].parse().map_err(|_| refused("unsendable path"))?;
        let host = HeaderValue::from_str(&url[Position::BeforeHost..Position::AfterPort]);
        let host_header = host.map_err(|_| refused("unsendable host"))?;
        Ok(OutboundTarget { url, path, host_header, host: key.0, address_rule: addresses, authorities })
    }
}

/// Parses `host:port` into the form in which targets are compared.
fn host_and_port(text: &str, default_port: Option<u16>) -> Result<(String, u16), String> {
    let bad = || format!("{} is neither `loopback`, host:port, a CIDR nor http://host:port", quote_if_safe(text));
    let (host, port) = match text.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit())) {
        Some((host, port)) => (host, port.parse().map_err(|_| bad())?),
        None => (text, default_port.ok_or_else(bad)?),
    };
    let host = Host::parse(host).map_err(|_| bad())?;
    Ok((canonical_host(&host), port))
}

/// Names under `localhost` never leave the machine. <https://www.rfc-editor.org/rfc/rfc6761#section-6.3>
fn is_loopback_host(host: &Host) -> bool {
    match host {
        Host::Domain(_) => {
            let name = canonical_host(host);
            name == "localhost" || name.ends_with(".localhost")
        }
        Host::Ipv4(ip) => ip.is_loopback(),
        Host::Ipv6(ip) => ip.to_canonical().is_loopback(),
    }
}

/// Whether the rule can permit this host. The connector does not resolve a literal address, so it is checked here.
fn may_be_permitted(host: &Host, rule: &AddressRule) -> bool {
    match host {
        Host::Domain(_) => !is_loopback_host(host) || rule.permits(std::net::Ipv4Addr::LOCALHOST.into()),
        Host::Ipv4(ip) => rule.permits((*ip).into()),
        Host::Ipv6(ip) => rule.permits((*ip).into()),
    }
}

/// Ranges that are never a provider on the public internet.
/// <https://www.iana.org/assignments/iana-ipv4-special-registry>
const V4_SPECIAL: [Ipv4Net; 15] = [
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
const V6_SPECIAL: [Ipv6Net; 4] = [
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32),
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20),
];

const V6_GLOBAL_UNICAST: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
/// An IPv4 address as an IPv6-only network sees it. <https://www.rfc-editor.org/rfc/rfc6052#section-2.1>
const V6_NAT64: Ipv6Net = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);

/// Rule for the addresses at which one target may be connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressRule {
    /// Every address, because the operator named host and port.
    Any,
    /// This machine only, for plain http.
    LoopbackOnly,
    /// Public addresses, and those that `outbound.allow` adds.
    Public { loopback: bool, networks: Vec<IpNet> },
}

impl AddressRule {
    pub fn permits(&self, ip: IpAddr) -> bool {
        // A connection to ::ffff:10.0.0.1 is one to 10.0.0.1, so the rule for 10.0.0.1 applies.
        let ip = ip.to_canonical();
        match self {
            Self::Any => true,
            Self::LoopbackOnly => ip.is_loopback(),
            Self::Public { loopback, networks } => {
                is_public(ip) || (*loopback && ip.is_loopback()) || networks.iter().any(|network| network.contains(&ip))
            }
        }
    }
}

fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !V4_SPECIAL.iter().any(|range| range.contains(&ip)),
        IpAddr::V6(ip) if V6_NAT64.contains(&ip) => {
            let [.., a, b, c, d] = ip.octets();
            is_public(Ipv4Addr::new(a, b, c, d).into())
        }
        IpAddr::V6(ip) => V6_GLOBAL_UNICAST.contains(&ip) && !V6_SPECIAL.iter().any(|range| range.contains(&ip)),
    }
}

const fn v4([a, b, c, d]: [u8; 4], prefix_bits: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix_bits)
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix_bits: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix_bits)
}

/// Parses `address/bits`.
///
/// # Errors
/// When the text has another form, or the address has bits set beyond the prefix, most likely by mistake.
fn parse_network(text: &str) -> Result<IpNet, String> {
    let bad = || format!("{} is not a CIDR: write it like 10.0.0.0/8", quote_if_safe(text));
    let (base, bits) = text.split_once('/').ok_or_else(bad)?;
    let (base, bits) = (base.parse().map_err(|_| bad())?, bits.parse().map_err(|_| bad())?);
    let network = IpNet::new(base, bits).map_err(|_| bad())?;
    if network.trunc() != network {
        return Err(format!(
            "{} has bits set beyond /{bits}: write the first address of the range",
            quote_if_safe(text)
        ));
    }
    Ok(network)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(entries: &[&str]) -> OutboundPolicy {
        OutboundPolicy::parse(&entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn url_rules_follow_the_contract() {
        let table: [(&[&str], &str, bool); 34] = [
            (&[], "https://api.stripe.com/v1/charges", true),
            (&[], "https://api.stripe.com:8443/", true),
            (&[], "https://1.1.1.1/", true),
            (&[], "http://api.stripe.com/", false),
            (&[], "https://127.0.0.1/", false),
            (&[], "https://localhost/", false),
            (&[], "https://[::1]/", false),
            (&[], "https://10.0.0.1/", false),
            (&[], "https://169.254.169.254/latest/meta-data", false),
            (&[], "https://0x7f.1/", false),
            (&[], "https://2130706433/", false),
            (&[], "https://[::ffff:10.0.0.1]/", false),
            (&[], "https://[fd00::1]/", false),
            (&[], "ftp://api.stripe.com/", false),
            (&[], "file:///etc/passwd", false),
            (&[], "not a url", false),
            (&[], "https://user:pw@api.stripe.com/", false),
            (&[], "https://user@api.stripe.com/", false),
            (&["loopback"], "http://127.0.0.1:9000/charges", true),
            (&["loopback"], "http://localhost:9000/", true),
            (&["loopback"], "http://LOCALHOST.:9000/", true),
            (&["loopback"], "http://[::1]:9000/", true),
            (&["loopback"], "https://127.0.0.1/", true),
            (&["loopback"], "http://localhost.evil.example/", false),
            (&["loopback"], "http://10.0.0.1/", false),
            (&["loopback"], "http://provider:9000/", false),
            (&["http://provider:9000"], "http://provider:9000/charges", true),
            (&["http://provider:9000"], "http://provider:9001/", false),
            (&["http://provider"], "http://provider/", true),
            (&["10.0.0.0/8"], "https://10.9.9.9/", true),
            (&["10.0.0.0/8"], "http://10.9.9.9/", false),
            (&["10.0.0.5:8443"], "https://10.0.0.5:8443/", true),
            (&["10.0.0.5:8443"], "https://10.0.0.5/", false),
            (&["[fd00::1]:443"], "https://[fd00::1]/", true),
        ];
        for (allow, url, allowed) in table {
            assert_eq!(policy(allow).admit(url).is_ok(), allowed, "{allow:?} {url}");
        }
    }

    /// All spellings of a private address. Look-ups are admitted by the same function.
    #[test]
    fn no_spelling_of_a_private_address_is_admitted() {
        for host in [
            "169.254.169.254",
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.254",
            "192.168.1.1",
            "100.64.0.1",
            "0.0.0.0",
            "0",
            "255.255.255.255",
            "224.0.0.1",
            "2852039166",             // 169.254.169.254 as one number
            "0xa9fea9fe",             // the same
            "0251.0376.0251.0376",    // the same
            "025177524776",           // the same
            "169.16689662",           // the same
            "10.1",                   // 10.0.0.1
            "0x0a.0.0.1",             // the same
            "10.0.0.1.",              // with the root's dot
            "\u{2460}\u{24ea}.0.0.1", // 10 in circles, which IDNA turns into digits
            "[::]",
            "[::ffff:169.254.169.254]",
            "[::ffff:a9fe:a9fe]",
            "[::10.0.0.1]",
            "[64:ff9b::a9fe:a9fe]",
            "[64:ff9b:1::1]",
            "[2002:a00:1::]",
            "[fe80::1]",
            "[fec0::1]",
            "[fc00::1]",
            "[fd12:3456::1]",
            "[ff02::1]",
            "api.stripe.com@10.0.0.1",
            "api.stripe.com:443@10.0.0.1",
        ] {
            for url in [format!("https://{host}/charges"), format!("https://{host}:8443/"), format!("http://{host}/")] {
                let answers = [&[] as &[&str], &["loopback"], &["api.stripe.com:443", "fd00:1::/32", "11.0.0.0/8"]];
                for allow in answers {
                    assert!(policy(allow).admit(&url).is_err(), "{allow:?} {url}");
                }
            }
        }
    }

    #[test]
    fn names_are_left_to_their_addresses() {
        let resolved = |allow: &[&str], url| policy(allow).admit(url).unwrap().address_rule;
        let private: std::net::IpAddr = "10.0.0.1".parse().unwrap();
        assert!(!resolved(&[], "https://intranet.example/").permits(private));
        assert!(resolved(&["intranet.example:443"], "https://intranet.example/").permits(private));
        assert!(resolved(&["http://provider:9000"], "http://provider:9000/").permits(private));
        assert!(!resolved(&["loopback"], "http://localhost:1/").permits(private));
    }

    #[test]
    fn every_bad_entry_is_reported() {
        let entries = ["loopback", "provider", "10.0.0.0/40", "https://x", "x:99999", ""].map(str::to_owned);
        assert_eq!(OutboundPolicy::parse(&entries).unwrap_err().len(), 5);
    }

    #[test]
    fn a_refusal_shows_no_secret() {
        for url in ["https://user:hunter2@a.example/p?x=1", "http://a.example/p?token=hunter2#hunter2"] {
            let text = policy(&[]).admit(url).unwrap_err().to_string();
            assert!(!text.contains("hunter2") && text.contains("a.example/p"), "{text}");
        }
    }

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
        let networks = vec![parse_network("10.1.0.0/16").unwrap(), parse_network("fd00:1::/32").unwrap()];
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
        assert!(parse_network("0.0.0.0/0").unwrap().contains(&ip("9.9.9.9")));
        assert!(parse_network("::/0").unwrap().contains(&ip("fd00::1")));
        assert!(!parse_network("10.0.0.1/32").unwrap().contains(&ip("10.0.0.2")));
        for bad in ["10.0.0.0", "10.0.0.0/33", "10.0.0.1/8", "::1/129", "host/8", "10.0.0.0/-1"] {
            assert!(parse_network(bad).is_err(), "{bad}");
        }
    }
}
