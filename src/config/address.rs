//! The addresses of database, queue and limiter: their kinds, and their redacted form.
//!
//! `Display` and `Debug` show no password. Only `expose` returns the full URL.

use std::fmt;
use std::path::PathBuf;

use secrecy::{ExposeSecret, SecretString};
use url::{Position, Url};

use crate::domain::printable::redact_url;
use crate::domain::sensitive::secret::names_credential;
use crate::ledger::database::{is_postgres_parameter, sqlite_file};

/// A URL with credentials in it.
#[derive(Clone)]
pub struct SecretUrl {
    text: SecretString,
    redacted: String,
}

impl SecretUrl {
    fn new(text: &str, url: &Url) -> Self {
        Self { text: SecretString::from(text), redacted: redacted(url) }
    }

    /// Whether the URL contains a secret: a password, a user that may be a token, or a parameter with a secret's name.
    /// An unknown parameter of PostgreSQL may be a misspelt password.
    pub fn holds_secret(&self) -> bool {
        Url::parse(self.expose()).is_ok_and(|url| {
            let is_postgres = url.scheme().starts_with("postgres");
            let by_parameter = url
                .query_pairs()
                .any(|(name, _)| names_credential(&name) || (is_postgres && !is_postgres_parameter(&name)));
            !matches!(credentials(&url), UrlCredentials::None | UrlCredentials::User(_)) || by_parameter
        })
    }

    /// The URL with its password, for the driver alone.
    pub fn expose(&self) -> &str {
        self.text.expose_secret()
    }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted)
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted)
    }
}

impl PartialEq for SecretUrl {
    fn eq(&self, other: &Self) -> bool {
        self.expose() == other.expose()
    }
}

/// `database.url`.
#[derive(Clone, Debug, PartialEq)]
pub enum DatabaseUrl {
    /// The URL as written, and its file; `None` for a database in memory.
    Sqlite {
        url: String,
        path: Option<PathBuf>,
    },
    Postgres(SecretUrl),
}

impl DatabaseUrl {
    /// # Errors
    /// When the text is not a URL of a supported database.
    pub fn parse(text: &str) -> Result<Self, ValueProblem> {
        if let Some(rest) = text.strip_prefix("sqlite:") {
            let file = rest.strip_prefix("//").unwrap_or(rest);
            let file = file.split_once('?').map_or(file, |(file, _)| file);
            if file.is_empty() {
                return Err(ValueProblem::new("names no file", "Write sqlite://PATH"));
            }
            if file.starts_with("file:") {
                return Err(ValueProblem::new("names its file by a URI of SQLite's own form", "Write sqlite://PATH"));
            }
            let path = sqlite_file(text)
                .map_err(|_| ValueProblem::new("is not a URL of a SQLite database", "Write sqlite://PATH"))?;
            return Ok(Self::Sqlite { url: text.to_owned(), path });
        }
        let url = parse_url(text, &["postgres", "postgresql"], "sqlite://PATH or postgres://USER:PASSWORD@HOST/NAME")?;
        let address = Self::Postgres(SecretUrl::new(text, &url));
        if address.hosts().is_empty() {
            // The driver would then use PGHOST, which is not checked here.
            return Err(ValueProblem::new("names no host", "Write postgres://USER:PASSWORD@HOST/NAME"));
        }
        Ok(address)
    }

    /// The URL for the driver.
    pub fn expose(&self) -> &str {
        match self {
            Self::Sqlite { url, .. } => url,
            Self::Postgres(url) => url.expose(),
        }
    }

    /// The location of the database, to compare two of them: an absolute path, or scheme, host, port and name; no user.
    pub fn location(&self) -> String {
        match self {
            Self::Sqlite { path: None, .. } => "sqlite::memory:".to_owned(),
            Self::Sqlite { path: Some(path), .. } => {
                let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
                format!("sqlite://{}", absolute.as_deref().unwrap_or(path).display())
            }
            Self::Postgres(url) => {
                let Ok(url) = Url::parse(url.expose()) else { return "postgres://".to_owned() };
                let named = url.query_pairs().filter(|(key, _)| matches!(key.as_ref(), "host" | "port" | "dbname"));
                let named: Vec<String> = named.map(|(key, value)| format!("{key}={value}")).collect();
                let parameters = if named.is_empty() { String::new() } else { format!("?{}", named.join("&")) };
                let port = url.port().unwrap_or(5_432);
                format!("postgres://{}:{port}{}{parameters}", url.host_str().unwrap_or_default(), url.path())
            }
        }
    }

    /// The hosts that the driver may connect to; a path is a local socket.
    pub fn hosts(&self) -> Vec<String> {
        let Self::Postgres(url) = self else { return Vec::new() };
        let Ok(url) = Url::parse(url.expose()) else { return Vec::new() };
        let named = url.query_pairs().filter(|(key, _)| key == "host" || key == "hostaddr");
        let named = named.map(|(_, host)| host.into_owned());
        let host =
            url.host_str().filter(|host| !host.is_empty()).map(|host| host.replace("%2F", "/").replace("%2f", "/"));
        host.into_iter().chain(named).collect()
    }

    /// Whether the driver checks the server's certificate and name.
    pub fn is_verified(&self) -> bool {
        let Self::Postgres(url) = self else { return true };
        let Ok(url) = Url::parse(url.expose()) else { return false };
        let modes = url.query_pairs().filter(|(key, _)| key == "sslmode" || key == "ssl-mode");
        // The driver uses the last one.
        modes.last().is_some_and(|(_, mode)| mode.eq_ignore_ascii_case("verify-full"))
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite { url, .. } => f.write_str(&redact_url(url)),
            Self::Postgres(url) => url.fmt(f),
        }
    }
}

/// `queue.url`.
#[derive(Clone, Debug, PartialEq)]
pub enum QueueUrl {
    /// No broker: `enqueue` records payments in the SQLite database.
    Embedded,
    /// No broker: `enqueue` records payments in PostgreSQL.
    Database,
    Amqp(SecretUrl),
}

impl QueueUrl {
    /// # Errors
    /// When the text is not a URL of a supported broker.
    pub fn parse(text: &str) -> Result<Self, ValueProblem> {
        match text {
            EMBEDDED => return Ok(Self::Embedded),
            DATABASE => return Ok(Self::Database),
            _ => {}
        }
        let forms = "embedded:, database: or amqps://USER:PASSWORD@HOST/VHOST";
        let url = parse_url(text, &["amqp", "amqps"], forms)?;
        require_host(&url)?;
        Ok(Self::Amqp(SecretUrl::new(text, &url)))
    }
}

impl fmt::Display for QueueUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str(EMBEDDED),
            Self::Database => f.write_str(DATABASE),
            Self::Amqp(url) => url.fmt(f),
        }
    }
}

/// `limiter.url`.
#[derive(Clone, Debug, PartialEq)]
pub enum LimiterUrl {
    /// In this process.
    Embedded,
    Redis(SecretUrl),
    /// One URL per node, each with the same credentials.
    RedisCluster(Vec<SecretUrl>),
}

impl LimiterUrl {
    /// # Errors
    /// When the text is not a URL of a supported limiter.
    pub fn parse(text: &str) -> Result<Self, ValueProblem> {
        const FORMS: &str = "embedded:, rediss://USER:PASSWORD@HOST or rediss+cluster://HOST,HOST";
        if text == EMBEDDED {
            return Ok(Self::Embedded);
        }
        let cluster = [("redis+cluster://", "redis://"), ("rediss+cluster://", "rediss://")];
        for (long, short) in cluster {
            let Some(rest) = text.strip_prefix(long) else { continue };
            let (credentials, hosts) = rest.rsplit_once('@').map_or(("", rest), |(left, hosts)| (left, hosts));
            let at = if credentials.is_empty() { "" } else { "@" };
            let nodes = hosts.trim_end_matches('/').split(',').map(str::trim);
            let nodes: Result<_, ValueProblem> =
                nodes.map(|host| redis_url(&format!("{short}{credentials}{at}{host}"), FORMS)).collect();
            return Ok(Self::RedisCluster(nodes?));
        }
        Ok(Self::Redis(redis_url(text, FORMS)?))
    }

    /// The nodes' URLs; none when embedded.
    pub fn nodes(&self) -> &[SecretUrl] {
        match self {
            Self::Embedded => &[],
            Self::Redis(url) => std::slice::from_ref(url),
            Self::RedisCluster(nodes) => nodes,
        }
    }
}

impl fmt::Display for LimiterUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str(EMBEDDED),
            Self::Redis(url) => url.fmt(f),
            Self::RedisCluster(nodes) => {
                let nodes: Vec<String> = nodes.iter().map(ToString::to_string).collect();
                f.write_str(&nodes.join(","))
            }
        }
    }
}

const EMBEDDED: &str = "embedded:";
const DATABASE: &str = "database:";

/// Why a value is invalid, and the fix; neither repeats the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueProblem {
    pub message: String,
    pub fix: String,
}

impl ValueProblem {
    fn new(message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { message: message.into(), fix: fix.into() }
    }
}

/// Scheme and host of a URL that has both.
pub fn scheme_and_host(url: &SecretUrl) -> Option<(String, String)> {
    let url = Url::parse(url.expose()).ok()?;
    Some((url.scheme().to_owned(), url.host_str()?.to_owned()))
}

fn parse_url(text: &str, schemes: &[&str], forms: &str) -> Result<Url, ValueProblem> {
    let fix = format!("Write {forms}");
    if text.is_empty() {
        return Err(ValueProblem::new("is empty", fix));
    }
    let url = Url::parse(text).map_err(|error| {
        ValueProblem::new(
            format!("is not a URL ({error})"),
            format!("{fix}; percent-encode special characters of a password"),
        )
    })?;
    if !schemes.contains(&url.scheme()) {
        // The text before the first colon may be a user, and the rest a password.
        return Err(ValueProblem::new("does not begin with a scheme for this key", fix));
    }
    if url[Position::BeforePath..].contains('@') {
        // `amqps://u:/SECRET@host/` has the host `u`: its path is the rest of a password.
        let what = "has an `@` after the host, as with a password that contains `/`, `?` or `#`";
        return Err(ValueProblem::new(
            what,
            "Percent-encode special characters: `/` is %2F, `?` is %3F, `#` is %23, `@` is %40",
        ));
    }
    Ok(url)
}

fn require_host(url: &Url) -> Result<(), ValueProblem> {
    if url.host_str().is_none_or(str::is_empty) {
        return Err(ValueProblem::new("names no host", format!("Write {}://HOST", url.scheme())));
    }
    Ok(())
}

fn redis_url(text: &str, forms: &str) -> Result<SecretUrl, ValueProblem> {
    let url = parse_url(text, &["redis", "rediss"], forms)?;
    require_host(&url)?;
    if url.fragment().is_some() {
        // `#insecure` makes the driver accept any certificate.
        return Err(ValueProblem::new(
            "has a fragment (#…)",
            "Remove it; `#insecure` would turn certificate checks off",
        ));
    }
    Ok(SecretUrl::new(text, &url))
}

enum UrlCredentials<'a> {
    None,
    User(&'a str),
    /// A user without a password, which is not shown: it may be a token.
    Hidden,
    UserAndPassword(&'a str),
}

fn credentials(url: &Url) -> UrlCredentials<'_> {
    match (url.username(), url.password()) {
        ("", None) => UrlCredentials::None,
        // PostgreSQL's user is no secret, and errors name it.
        (user, None) if url.scheme().starts_with("postgres") => UrlCredentials::User(user),
        (_, None) => UrlCredentials::Hidden,
        (user, Some(_)) => UrlCredentials::UserAndPassword(user),
    }
}

/// The URL without the password and without the values of parameters.
fn redacted(url: &Url) -> String {
    let credentials = match credentials(url) {
        UrlCredentials::None => String::new(),
        UrlCredentials::User(user) => format!("{user}@"),
        UrlCredentials::Hidden => "***@".to_owned(),
        UrlCredentials::UserAndPassword(user) => format!("{user}:***@"),
    };
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let parameters = if url.query().is_some() { "?…" } else { "" };
    format!("{}://{credentials}{}{port}{}{parameters}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
}
