//! How the broker is reached: the URL as meant, checked before anything is sent to it.
//!
//! Never repeats the URL in an error, because it holds the password. Whether plain text may be spoken to that host is
//! judged by `config`, before anything is opened.

use std::path::Path;
use std::time::Duration;

use lapin::tcp::OwnedTLSConfig;
use lapin::uri::AMQPUri;
use secrecy::{ExposeSecret, SecretString};
use url::{Host, Url};

use crate::files::{self, CERTIFICATES_BYTES_MAX};
use crate::queue::QueueError;
use crate::tls::Authorities;

/// Seconds between heartbeats unless the URL says otherwise; a dead peer is noticed after two.
/// <https://www.rabbitmq.com/docs/heartbeats>: 5 to 20 s suits most environments.
const HEARTBEAT_S: u16 = 10;
/// Longest time for one connection attempt, handshake included, unless the URL's `connection_timeout` (ms) says otherwise.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Leaves room for a provider's name within the 255 bytes of a queue's.
const PREFIX_BYTES_MAX: usize = 100;

#[derive(Clone)]
pub struct RabbitSettings {
    pub(super) uri: AMQPUri,
    pub(super) tls: OwnedTLSConfig,
    pub(super) connect_limit: Duration,
    pub(super) prefix: String,
}

impl RabbitSettings {
    /// Reads `amqp://` or `amqps://` (<https://www.rabbitmq.com/docs/uri-spec>, with the query keys `heartbeat` in
    /// seconds, `connection_timeout` in ms, `channel_max`, `auth_mechanism` and `cacertfile`, a PEM file with the
    /// authorities to trust besides the public ones). `prefix` begins the names of all exchanges and queues.
    ///
    /// # Errors
    /// [`QueueError::Refused`] names what is wrong and the fix; it never repeats the URL.
    pub fn new(url: &SecretString, prefix: &str) -> Result<Self, QueueError> {
        let parsed = Url::parse(url.expose_secret()).map_err(|error| refused(format!("queue.url: {error}")))?;
        if !matches!(parsed.scheme(), "amqp" | "amqps") {
            return Err(refused("queue.url: must begin with amqp:// or amqps://"));
        }
        let mut uri: AMQPUri =
            url.expose_secret().parse().map_err(|_| refused("queue.url: is not an AMQP URL; see uri-spec"))?;
        // The AMQP parser reads an IPv6 address as "no host" and would connect to localhost.
        if let Some(Host::Ipv6(address)) = parsed.host() {
            uri.authority.host = address.to_string();
        }
        // `amqp://host/` names the virtual host "", which no broker has; its writers mean the default one.
        if uri.vhost.is_empty() {
            "/".clone_into(&mut uri.vhost);
        }
        let connect_limit = uri.query.connection_timeout.map_or(CONNECT_LIMIT, Duration::from_millis);
        uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let fits = (1..=PREFIX_BYTES_MAX).contains(&prefix.len());
        if !fits || !prefix.bytes().all(plain) || prefix.starts_with("amq.") {
            return Err(refused(format!(
                "queue.prefix: must be 1 to {PREFIX_BYTES_MAX} of A-Z a-z 0-9 . _ - and not begin with `amq.`"
            )));
        }
        Ok(Self { tls: tls(&parsed)?, uri, connect_limit, prefix: prefix.to_owned() })
    }
}

impl RabbitSettings {
    /// Trusts these authorities besides the public ones, unless the URL names a `cacertfile` of its own.
    pub fn with_authorities(mut self, authorities: &Authorities) -> Self {
        if self.tls.cert_chain.is_none() {
            self.tls.cert_chain = authorities.pem().map(str::to_owned);
        }
        self
    }
}

fn tls(url: &Url) -> Result<OwnedTLSConfig, QueueError> {
    let Some((_, path)) = url.query_pairs().find(|(key, _)| key == "cacertfile") else {
        return Ok(OwnedTLSConfig::default());
    };
    let read = files::read_trusted(Path::new(path.as_ref()), CERTIFICATES_BYTES_MAX);
    let pem = read.map_err(|error| refused(format!("queue.url: cacertfile `{path}` cannot be read: {error}")))?;
    Ok(OwnedTLSConfig { identity: None, cert_chain: Some(pem.text) })
}

fn refused(text: impl Into<String>) -> QueueError {
    QueueError::Refused(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> Result<RabbitSettings, String> {
        RabbitSettings::new(&SecretString::from(url), "payments").map_err(|error| error.to_string())
    }

    #[test]
    fn errors_never_repeat_the_password() {
        for url in ["http://u:hunter2@localhost", "amqp://u:hunter2@localhost?heartbeat=x", "amqp://u:hunter2@[::"] {
            let error = settings(url).err().unwrap();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn defaults_give_way_to_the_url() {
        let plain = settings("amqp://localhost/").unwrap();
        assert_eq!((plain.uri.vhost.as_str(), plain.uri.query.heartbeat), ("/", Some(10)));
        assert_eq!(plain.connect_limit, Duration::from_secs(5));
        let own = settings("amqp://[::1]/v?heartbeat=3&connection_timeout=700").unwrap();
        assert_eq!((own.uri.authority.host.as_str(), own.uri.query.heartbeat), ("::1", Some(3)));
        assert_eq!(own.connect_limit, Duration::from_millis(700));
    }

    #[test]
    fn queue_prefix_must_be_a_valid_name() {
        let url = SecretString::from("amqp://localhost");
        for prefix in ["", "amq.x", "a b", "é", &"x".repeat(101)] {
            assert!(RabbitSettings::new(&url, prefix).is_err(), "{prefix}");
        }
        assert!(RabbitSettings::new(&url, "payments.test-1_a").is_ok());
    }
}
