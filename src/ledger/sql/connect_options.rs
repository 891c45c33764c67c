//! The PostgreSQL driver's options from `database.url`, with every file that the URL names read beforehand.
//!
//! The driver itself would read certificates at each connection, and a password file while it parses. It would wait
//! forever for a FIFO or for a hanging mount. Errors never quote the URL: it holds a password.

use std::path::Path;
use std::str::FromStr;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use url::Url;

use crate::domain::sensitive::secret::{is_plain_word, path_if_safe};
use crate::files::{self, CERTIFICATES_BYTES_MAX, FileReadError, READ_TIMEOUT};
use crate::ledger::LedgerError;
use crate::tls::Authorities;

/// A file that the driver reads: a parameter of the URL names it, or else an environment variable.
struct TlsFile {
    /// The driver's names for one parameter; the last one in the URL counts.
    parameters: &'static [&'static str],
    variable: &'static str,
    set: fn(PgConnectOptions, Vec<u8>) -> PgConnectOptions,
}

const ROOT_CERTIFICATE: TlsFile = TlsFile {
    parameters: &["sslrootcert", "ssl-root-cert", "ssl-ca"],
    variable: "PGSSLROOTCERT",
    set: PgConnectOptions::ssl_root_cert_from_pem,
};
const CLIENT_FILES: [TlsFile; 2] = [
    TlsFile {
        parameters: &["sslcert", "ssl-cert"],
        variable: "PGSSLCERT",
        set: |options, pem| options.ssl_client_cert_from_pem(pem),
    },
    TlsFile {
        parameters: &["sslkey", "ssl-key"],
        variable: "PGSSLKEY",
        set: |options, pem| options.ssl_client_key_from_pem(pem),
    },
];

/// Parameters of a URL that the driver knows (sqlx 0.9), beside `options[NAME]`.
const PARAMETERS: [&str; 18] = [
    "application_name",
    "dbname",
    "host",
    "hostaddr",
    "options",
    "password",
    "port",
    "ssl-ca",
    "ssl-cert",
    "ssl-key",
    "ssl-mode",
    "ssl-root-cert",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "statement-cache-capacity",
    "user",
];

/// Whether the driver knows a parameter of this name.
pub fn is_postgres_parameter(name: &str) -> bool {
    PARAMETERS.contains(&name) || name.starts_with("options[")
}

/// Parses the URL and reads the files that it names. Trusts the given authorities unless it names its own.
///
/// # Errors
/// [`LedgerError::StatementFailed`] when the URL is invalid, or a file that it names cannot be read.
pub fn connect_options(url: &str, trusted: &Authorities) -> Result<PgConnectOptions, LedgerError> {
    connect_options_with(url, trusted, |name| std::env::var(name).ok())
}

/// The value of a variable of the environment.
type Variables = fn(&str) -> Option<String>;

fn connect_options_with(
    url: &str,
    trusted: &Authorities,
    variables: Variables,
) -> Result<PgConnectOptions, LedgerError> {
    let mut options = match trusted.pem() {
        Some(pem) if ROOT_CERTIFICATE.parameter(url).is_none() => {
            parse(url)?.ssl_root_cert_from_pem(pem.as_bytes().to_vec())
        }
        _ => ROOT_CERTIFICATE.read(url, parse(url)?, variables)?,
    };
    for file in CLIENT_FILES {
        options = file.read(url, options, variables)?;
    }
    let named = options.get_application_name().is_some();
    let options = if named { options } else { options.application_name("sluicegate") };
    // Statements are constants and their timing is a metric; arguments are never logged in any case. Poolers reject the
    // driver's own start parameter, and newer servers print all digits without it.
    Ok(options.extra_float_digits(None).disable_statement_logging())
}

fn parse(url: &str) -> Result<PgConnectOptions, LedgerError> {
    let url = without_unknown_parameters(url);
    // The parser's own message may quote the URL.
    match files::run_with_timeout(READ_TIMEOUT, move || PgConnectOptions::from_str(&url).ok()) {
        Ok(Some(options)) => Ok(options),
        Ok(None) => Err(LedgerError::StatementFailed(
            "database.url is not a PostgreSQL URL: write postgres://user@host:5432/database".to_owned(),
        )),
        Err(unread) => Err(LedgerError::StatementFailed(format!(
            "database.url: the password file of PGPASSFILE, or ~/.pgpass: {unread}"
        ))),
    }
}

/// The driver would log an unknown parameter with its value, which may be a misspelt password.
fn without_unknown_parameters(text: &str) -> String {
    let Ok(mut url) = Url::parse(text) else { return text.to_owned() };
    let (known, unknown): (Vec<_>, Vec<_>) =
        url.query_pairs().into_owned().partition(|(name, _)| is_postgres_parameter(name));
    if unknown.is_empty() {
        return text.to_owned();
    }
    for (name, _) in unknown {
        let parameter = if is_plain_word(&name) { name.as_str() } else { "(not shown)" };
        tracing::warn!(parameter, "unknown parameter of database.url is ignored: check its name");
    }
    url.query_pairs_mut().clear().extend_pairs(known);
    url.into()
}

/// Where the path of a file was written.
enum PathSource {
    Url,
    Variable,
}

impl TlsFile {
    fn parameter(&self, url: &str) -> Option<String> {
        let url = Url::parse(url).ok()?;
        let named = url.query_pairs().filter(|(key, _)| self.parameters.contains(&key.as_ref()));
        named.last().map(|(_, path)| path.into_owned())
    }

    /// The file, and what names it.
    fn path_and_source(&self, url: &str, variables: Variables) -> Option<(String, PathSource)> {
        if let Some(path) = self.parameter(url) {
            return Some((path, PathSource::Url));
        }
        // The variable may hold the certificate itself, and an empty one counts as unset, as in libpq.
        let is_path = |text: &String| !text.is_empty() && !text.trim_start().starts_with("-----BEGIN");
        Some((variables(self.variable).filter(is_path)?, PathSource::Variable))
    }

    fn read(
        &self,
        url: &str,
        options: PgConnectOptions,
        variables: Variables,
    ) -> Result<PgConnectOptions, LedgerError> {
        let Some((path, source)) = self.path_and_source(url, variables) else { return Ok(options) };
        let requires_tls =
            matches!(options.get_ssl_mode(), PgSslMode::Require | PgSslMode::VerifyCa | PgSslMode::VerifyFull);
        match (files::read_trusted(Path::new(&path), CERTIFICATES_BYTES_MAX), &source) {
            (Ok(file), _) => Ok((self.set)(options, file.text.into_bytes())),
            // Left over from another program: the driver opens it only if the server offers TLS.
            (Err(FileReadError::Io(_)), PathSource::Variable) if !requires_tls => Ok(options),
            (Err(unread), source) => {
                let name = match source {
                    PathSource::Url => {
                        format!("database.url: {}", self.parameters.first().copied().unwrap_or_default())
                    }
                    PathSource::Variable => self.variable.to_owned(),
                };
                let path = path_if_safe(Path::new(&path));
                Err(LedgerError::StatementFailed(format!("{name} {path} cannot be read: {unread}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::captured_log::capture_log;

    #[test]
    fn invalid_url_is_not_repeated() {
        let error = connect_options("postgres://u:secret@db:port/d", &Authorities::default()).unwrap_err().to_string();
        assert!(error.contains("database.url") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn certificate_files_are_read_before_connecting() {
        let dir = tempfile::tempdir().unwrap();
        let (file, fifo) = (dir.path().join("file.pem"), dir.path().join("fifo"));
        std::fs::write(&file, "-----BEGIN X-----").unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for parameter in ["sslrootcert", "ssl-ca", "sslcert", "sslkey"] {
            let options = |path: &Path| {
                let url = format!("postgres://u:secret@localhost/d?{parameter}={}", path.display());
                connect_options(&url, &Authorities::default())
            };
            let read = format!("{:?}", options(&file).unwrap());
            assert!(!read.contains("file.pem"), "{parameter}: the driver reads it again: {read}");
            let error = options(&fifo).unwrap_err().to_string();
            assert!(error.contains("fifo cannot be read: not a regular file"), "{parameter}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn unused_certificate_variables_stop_no_start() {
        let options = |mode: &str, variables| {
            let url = format!("postgres://u@127.0.0.1/pay?sslmode={mode}");
            connect_options_with(&url, &Authorities::default(), variables)
        };
        options("verify-full", |_| Some(String::new())).unwrap();
        options("prefer", |_| Some("/nonexistent.pem".to_owned())).unwrap();
        let error = options("require", |_| Some("hunter2hunter2".to_owned())).unwrap_err().to_string();
        assert!(error.contains("PGSSLROOTCERT (a path that is not shown) cannot be read"), "{error}");
    }

    #[test]
    fn value_of_an_unknown_parameter_is_not_logged() {
        let (log, guard) = capture_log();
        let url = "postgres://u@db/pay?sslmode=require&pasword=hunter2&application_name=a%26b&Geheim%20=hunter3";
        // The driver parses on another thread, which has no such subscriber.
        let clean = without_unknown_parameters(url);
        let options = PgConnectOptions::from_str(&clean).unwrap();
        drop(guard);
        assert_eq!(options.get_application_name(), Some("a&b"));
        let log = log.text();
        assert!(log.contains("pasword") && log.contains("(not shown)"), "{log}");
        assert!(!log.contains("hunter") && !log.contains("Geheim"), "{log}");
    }
}
