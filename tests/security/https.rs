//! A provider behind TLS that charges, and one that quotes requests in its responses, credentials included.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{WantsServerCert, WebPkiClientVerifier};
use rustls::{ConfigBuilder, RootCertStore, ServerConfig, ServerConnection, StreamOwned, SupportedProtocolVersion};

use crate::authority::{Authority, Identity};

pub struct HttpsProvider {
    pub port: u16,
    requests: Arc<Mutex<Vec<String>>>,
}

impl HttpsProvider {
    /// Serves until the process ends.
    pub fn start(identity: &Identity) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self::serve(identity, ServerConfig::builder().with_no_client_auth())
    }

    /// Demands a client certificate of this authority.
    pub fn start_demanding(
        identity: &Identity,
        authority: &Authority,
        version: &'static SupportedProtocolVersion,
    ) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority.file()).unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
        let builder = ServerConfig::builder_with_protocol_versions(&[version]);
        Self::serve(identity, builder.with_client_cert_verifier(verifier))
    }

    fn serve(identity: &Identity, builder: ConfigBuilder<ServerConfig, WantsServerCert>) -> Self {
        let chain = vec![CertificateDer::from_pem_file(&identity.certificate).unwrap()];
        let key = PrivateKeyDer::from_pem_file(&identity.key).unwrap();
        let config = builder.with_single_cert(chain, key).unwrap();
        let (config, requests) = (Arc::new(config), Arc::<Mutex<Vec<String>>>::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let record = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (config, record) = (Arc::clone(&config), Arc::clone(&record));
                std::thread::spawn(move || answer(stream.unwrap(), config, &record));
            }
        });
        Self { port, requests }
    }

    /// Heads and bodies of the requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn answer(stream: TcpStream, config: Arc<ServerConfig>, record: &Mutex<Vec<String>>) {
    let mut tls = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4_096]);
    while !is_whole(&bytes) {
        match tls.read(&mut buffer) {
            // A client that does not trust the certificate closes the connection.
            Err(_) | Ok(0) => return,
            Ok(read) => bytes.extend_from_slice(&buffer[..read]),
        }
    }
    let request = String::from_utf8(bytes).unwrap();
    // A careless provider: its errors and look-ups quote the request.
    let (status, body) = if request.starts_with("GET") {
        ("200 OK", serde_json::json!({ "id": "ch_2", "state": "succeeded", "message": request }).to_string())
    } else if request.contains("forget-me") {
        ("500 Internal Server Error", serde_json::json!({ "error": { "message": request } }).to_string())
    } else if request.contains("echo-me") {
        let message = serde_json::json!({ "error": { "code": "bad", "message": request } });
        ("400 Bad Request", message.to_string())
    } else {
        let id = format!("ch_of_request_{}", record.lock().unwrap().len());
        ("200 OK", serde_json::json!({ "id": id, "state": "succeeded" }).to_string())
    };
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close");
    let quoted = format!("x-quoted: {}", request.lines().find(|line| line.starts_with("Authorization")).unwrap_or("-"));
    record.lock().unwrap().push(request);
    let _ = write!(tls, "{head}\r\n{quoted}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    tls.conn.send_close_notify();
    let _ = tls.flush();
}

fn is_whole(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    body.len() >= length.unwrap_or(0)
}
