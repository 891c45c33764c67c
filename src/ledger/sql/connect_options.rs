//! What the PostgreSQL driver is told from `database.url`, with every file that the URL names read beforehand.
//!
//! The driver itself would read certificates with each connection and a password file while it parses, and wait for ever where
//! one of them is a FIFO or on a mount that hangs. Errors never quote the URL: it holds a password.

use std::path::Path;
use std::str::FromStr;

use sqlx::ConnectOptions;
use sqlx::postgres::PgConnectOptions;
use url::Url;

use crate::files::{self, CERTIFICATES_BYTES_MAX, FileReadError, READ_TIMEOUT};
use crate::ledger::LedgerError;
use crate::tls::Authorities;

/// A file that the driver takes from a parameter of the URL, or from a variable without one.
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

/// Reads the URL and the files that it names. Trusts these authorities unless it names its own.
///
/// # Errors
/// [`LedgerError::Refused`] when the URL cannot be meant, or a file that it names cannot be read.
pub(super) fn connect_options(url: &str, trusted: &Authorities) -> Result<PgConnectOptions, LedgerError> {
    let mut options = match trusted.pem() {
        Some(pem) if ROOT_CERTIFICATE.parameter(url).is_none() => {
            parse(url)?.ssl_root_cert_from_pem(pem.as_bytes().to_vec())
        }
        _ => ROOT_CERTIFICATE.read(url, parse(url)?)?,
    };
    for file in CLIENT_FILES {
        options = file.read(url, options)?;
    }
    let named = options.get_application_name().is_some();
    let options = if named { options } else { options.application_name("sluicegate") };
    // Statements are constants and their timing is a metric; arguments are never logged in any case. The driver's own start
    // parameter is none that a pooler takes, and newer servers print all digits without it.
    Ok(options.extra_float_digits(None).disable_statement_logging())
}

fn parse(url: &str) -> Result<PgConnectOptions, LedgerError> {
    let url = url.to_owned();
    // The parser's own message may quote the URL.
    match files::run_with_timeout(READ_TIMEOUT, move || PgConnectOptions::from_str(&url).ok()) {
        Ok(Some(options)) => Ok(options),
        Ok(None) => Err(LedgerError::Refused(
            "database.url is not a PostgreSQL URL: write postgres://user@host:5432/database".to_owned(),
        )),
        Err(unread) => {
            Err(LedgerError::Refused(format!("database.url: the file of PGPASSFILE, or ~/.pgpass: {unread}")))
        }
    }
}

impl TlsFile {
    fn parameter(&self, url: &str) -> Option<String> {
        let url = Url::parse(url).ok()?;
        let named = url.query_pairs().filter(|(key, _)| self.parameters.contains(&key.as_ref()));
        named.last().map(|(_, path)| path.into_owned())
    }

    /// The file, and what names it.
    fn path_and_source(&self, url: &str) -> Option<(String, String)> {
        if let Some(path) = self.parameter(url) {
            let name = self.parameters.first().copied().unwrap_or_default();
            return Some((path, format!("database.url: {name}")));
        }
        // The variable may hold the certificate itself.
        let path = std::env::var(self.variable).ok().filter(|text| !text.trim_start().starts_with("-----BEGIN"))?;
        Some((path, self.variable.to_owned()))
    }

    fn read(&self, url: &str, options: PgConnectOptions) -> Result<PgConnectOptions, LedgerError> {
        let Some((path, name)) = self.path_and_source(url) else { return Ok(options) };
        let refused = |unread: FileReadError| LedgerError::Refused(format!("{name} `{path}` cannot be read: {unread}"));
        let file = files::read_trusted(Path::new(&path), CERTIFICATES_BYTES_MAX).map_err(refused)?;
        Ok((self.set)(options, file.text.into_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!(error.contains("fifo` cannot be read: not a regular file"), "{parameter}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
