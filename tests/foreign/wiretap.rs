//! A wiretap: a TCP proxy on loopback that records the bytes of clients and parses them as HTTP requests.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Bytes of each connection, in the order of the connections.
type Heard = Arc<Mutex<Vec<Arc<Mutex<Vec<u8>>>>>>;

pub struct Wiretap {
    pub port: u16,
    heard: Heard,
}

/// One recorded request.
#[derive(Debug)]
pub struct Request {
    /// Method and target.
    pub line: String,
    /// Header names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Wiretap {
    /// Listens in front of a loopback port. Its threads end with the connections, or with the process.
    pub fn before(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let heard = Heard::default();
        let ear = Arc::clone(&heard);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(("127.0.0.1", server)).unwrap());
                let bytes = Arc::new(Mutex::new(Vec::new()));
                ear.lock().unwrap().push(Arc::clone(&bytes));
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || pass(from, to, Some(&bytes)));
                std::thread::spawn(move || pass(server, client, None));
            }
        });
        Self { port, heard }
    }

    /// All complete requests so far.
    pub fn requests(&self) -> Vec<Request> {
        let connections = self.heard.lock().unwrap().clone();
        connections.iter().flat_map(|bytes| requests(&bytes.lock().unwrap())).collect()
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, bytes: Option<&Mutex<Vec<u8>>>) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if let Some(bytes) = bytes {
            bytes.lock().unwrap().extend_from_slice(&buffer[..length]);
        }
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    // Either side may be closed already.
    let _ = to.shutdown(Shutdown::Write);
}

fn requests(bytes: &[u8]) -> Vec<Request> {
    let mut text = String::from_utf8(bytes.to_vec()).unwrap();
    let mut requests = Vec::new();
    while let Some((head, rest)) = text.split_once("\r\n\r\n") {
        let mut lines = head.lines();
        let line = lines.next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
        let headers: BTreeMap<String, String> = lines
            .map(|line| line.split_once(": ").unwrap_or_else(|| panic!("{line}")))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        let Some((body, more)) = rest.split_at_checked(length) else { break };
        requests.push(Request { line, headers, body: body.to_owned() });
        text = more.to_owned();
    }
    requests
}

#[test]
fn requests_are_parsed() {
    let wire = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nX-Y: z\r\n\r\na=bGET /b HTTP/1.1\r\nHost: h\r\n\r\nPOST /c";
    let requests = requests(wire);
    assert_eq!(requests.iter().map(|request| request.line.as_str()).collect::<Vec<_>>(), ["POST /a", "GET /b"]);
    assert_eq!((requests[0].body.as_str(), requests[0].headers["x-y"].as_str()), ("a=b", "z"));
}
