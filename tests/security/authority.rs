//! A certificate authority for tests, made with the openssl program, and the certificates that it signs.

use std::path::{Path, PathBuf};
use std::process::Command;

use sluicegate::tls::Authorities;

const CA: &str = "[req]\ndistinguished_name = dn\nprompt = no\nx509_extensions = ca\n[dn]\nCN = Test authority\n\
    [ca]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign\nsubjectKeyIdentifier = hash\n";
const LEAF: &str = "[req]\ndistinguished_name = dn\nprompt = no\n[dn]\nCN = leaf\n";
const SIGNING: &str = "[ca]\ndefault_ca = own\n[own]\ndatabase = index.txt\nserial = serial\nnew_certs_dir = .\n\
    default_md = sha256\npolicy = any\n[any]\ncommonName = supplied\n";
const NEW_KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
/// Start and end of validity of valid and of expired certificates.
const VALID: (&str, &str) = ("20200101000000Z", "20991231000000Z");
const EXPIRED: (&str, &str) = ("20200101000000Z", "20200201000000Z");

pub struct Authority {
    dir: PathBuf,
}

/// A server's certificate and key.
#[derive(Clone)]
pub struct Identity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    /// Creates the authority in an existing, empty directory.
    pub fn create(dir: &Path) -> Self {
        let authority = Self { dir: dir.to_owned() };
        for (name, text) in [("ca.cnf", CA), ("leaf.cnf", LEAF), ("sign.cnf", SIGNING), ("index.txt", "")] {
            std::fs::write(dir.join(name), text).unwrap();
        }
        std::fs::write(dir.join("index.txt.attr"), "unique_subject = no\n").unwrap();
        std::fs::write(dir.join("serial"), "01\n").unwrap();
        let mut args = vec!["req", "-x509", "-config", "ca.cnf", "-days", "30", "-keyout", "ca.key", "-out", "ca.pem"];
        args.extend(NEW_KEY);
        authority.openssl(&args);
        authority
    }

    pub fn file(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }

    pub fn authorities(&self) -> Authorities {
        Authorities::read(&self.file()).unwrap()
    }

    /// Issues a certificate for `host`, a DNS name.
    pub fn issue(&self, name: &str, host: &str) -> Identity {
        self.sign(name, host, VALID)
    }

    pub fn issue_expired(&self, name: &str, host: &str) -> Identity {
        self.sign(name, host, EXPIRED)
    }

    fn sign(&self, name: &str, host: &str, (first, last): (&str, &str)) -> Identity {
        let file = |ending: &str| format!("{name}.{ending}");
        let (key, request, certificate, extensions) = (file("key"), file("csr"), file("pem"), file("ext"));
        let text = format!("basicConstraints = CA:FALSE\nsubjectAltName = DNS:{host}\nextendedKeyUsage = serverAuth\n");
        std::fs::write(self.dir.join(&extensions), text).unwrap();
        let mut args = vec!["req", "-new", "-config", "leaf.cnf", "-keyout", &key, "-out", &request];
        args.extend(NEW_KEY);
        self.openssl(&args);
        let mut args = vec!["ca", "-batch", "-notext", "-config", "sign.cnf", "-cert", "ca.pem", "-keyfile", "ca.key"];
        args.extend(["-startdate", first, "-enddate", last, "-extfile", &extensions]);
        args.extend(["-in", &request, "-out", &certificate]);
        self.openssl(&args);
        Identity { certificate: self.dir.join(&certificate), key: self.dir.join(&key) }
    }

    fn openssl(&self, args: &[&str]) {
        let output = Command::new("openssl").args(args).current_dir(&self.dir).output().unwrap();
        assert!(output.status.success(), "openssl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
