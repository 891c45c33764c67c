//! TLS rules for all backends: which hosts may be plain text, which authorities are trusted, and how to fix failed
//! handshakes.
//!
//! Nothing here, and no configuration key, turns certificate verification off.

use std::error::Error;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use rustls::CertificateError;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use crate::files::{self, CERTIFICATES_BYTES_MAX, FileReadError};

/// Whether plain text is allowed to a host: on this machine, or where `tls.plaintext_hosts` names it.
pub fn is_plaintext_allowed(host: &str, plaintext_hosts: &[String]) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    is_local(host, bare) || plaintext_hosts.iter().any(|name| name.eq_ignore_ascii_case(bare))
}

/// Whether the host is this machine; a path is a local socket.
fn is_local(host: &str, bare: &str) -> bool {
    host.starts_with('/')
        || host.eq_ignore_ascii_case("localhost")
        || bare.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Why `tls.ca_file` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthoritiesError {
    #[error("cannot be read: {0}")]
    Unread(#[from] FileReadError),
    #[error("holds no certificate in PEM")]
    Empty,
    #[error("holds a certificate that cannot be read")]
    Invalid,
}

/// Certificates of additional trusted authorities, as PEM; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Authorities(Option<Arc<str>>);

impl Authorities {
    /// Reads `tls.ca_file`.
    ///
    /// # Errors
    /// When the file cannot be read, holds no certificate, or holds an invalid one.
    pub fn read(path: &Path) -> Result<Self, AuthoritiesError> {
        let pem = files::read_trusted(path, CERTIFICATES_BYTES_MAX)?.text;
        let certificates = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
        let mut store = rustls::RootCertStore::empty();
        match certificates {
            Ok(found) if found.is_empty() => Err(AuthoritiesError::Empty),
            Ok(found) if found.iter().all(|certificate| store.add(certificate.clone()).is_ok()) => {
                Ok(Self(Some(pem.into())))
            }
            _ => Err(AuthoritiesError::Invalid),
        }
    }

    /// The file's text, for the driver.
    pub fn pem(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

/// Explanation of a TLS error with its fix; `None` when TLS had no part in the failure.
pub fn explain_tls_error(error: &(dyn Error + 'static)) -> Option<String> {
    let mut link = Some(error);
    while let Some(inner) = link {
        if let Some(tls) = inner.downcast_ref::<rustls::Error>() {
            return Some(format!("TLS: {tls}{}", fix_for(tls)));
        }
        // A shared error hides its type (Redis' driver), and an I/O error does not list what it wraps as its source.
        if let Some(shared) = inner.downcast_ref::<Arc<dyn Error + Send + Sync>>() {
            return explain_tls_error(&**shared);
        }
        let wrapped = inner.downcast_ref::<io::Error>().and_then(|io| io.get_ref());
        if let Some(found) = wrapped.and_then(|wrapped| explain_tls_error(wrapped)) {
            return Some(found);
        }
        link = inner.source();
    }
    None
}

/// Fix for a server without TLS where TLS was requested.
pub const FIX_NO_TLS: &str = "; it does not speak TLS there: turn TLS on at the server, or name its TLS port";

fn fix_for(error: &rustls::Error) -> &'static str {
    match error {
        // `BadSignature`: an authority of the same name with another key, most likely a renewed one.
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "; its authority is not trusted here: name the authority's certificate in tls.ca_file"
        }
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "; write the host's name as its certificate has it, or have the certificate issued for this name",
        rustls::Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "; have the server's certificate renewed"
        }
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
        ) => "; set this machine's clock, or wait until the certificate is valid",
        rustls::Error::InvalidMessage(_) => FIX_NO_TLS,
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapped_tls_errors_are_found_with_their_fix() {
        let wrapped = |tls: rustls::Error| io::Error::other(io::Error::new(io::ErrorKind::InvalidData, tls));
        for (error, part) in [
            (CertificateError::UnknownIssuer, "tls.ca_file"),
            (CertificateError::BadSignature, "tls.ca_file"),
            (CertificateError::NotValidForName, "as its certificate has it"),
            (CertificateError::Expired, "renewed"),
            (CertificateError::NotValidYet, "clock"),
        ] {
            let text = explain_tls_error(&wrapped(error.into())).unwrap();
            assert!(text.starts_with("TLS: ") && text.contains(part), "{text}");
        }
        let shared: Arc<dyn Error + Send + Sync> = Arc::new(wrapped(CertificateError::Expired.into()));
        assert!(explain_tls_error(&shared).unwrap().contains("renewed"));
        let plain = rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType);
        assert!(explain_tls_error(&wrapped(plain)).unwrap().contains("does not speak TLS"));
        assert_eq!(explain_tls_error(&io::Error::from(io::ErrorKind::ConnectionRefused)), None);
    }

    #[test]
    fn a_file_without_a_certificate_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        for (text, problem) in [
            ("", "no certificate"),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
            ("-----BEGIN CERTIFICATE-----\n%\n-----END CERTIFICATE-----\n", "cannot be read"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(Authorities::read(&path).unwrap_err().to_string().contains(problem), "{text}");
        }
        assert!(Authorities::read(&dir.path().join("missing")).unwrap_err().to_string().contains("cannot be read"));
    }
}
