//! `demo --serve`: the page shows the demo's data while it runs and after its proof, until a signal.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn page_stays_open_on_the_demos_data() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    demo.args(["demo", "--serve", "--jobs", "60", "--limit", "100/1s"]).env_clear().stdout(Stdio::null());
    let mut demo = demo.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(demo.stderr.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.find_map(|line| Some(line.strip_prefix("the page: http://")?.strip_suffix('/')?.to_owned()));
    let address = address.unwrap();
    assert!(get(&address, "/livez").starts_with("HTTP/1.1 200"));
    lines.find(|line| line.starts_with("the page stays open")).unwrap();
    assert!(get(&address, "/").starts_with("HTTP/1.1 200"));
    let finished = get(&address, "/api/v1/reconciliation");
    assert!(finished.contains("\"recorded\":60"), "{finished}");
    assert!(get(&address, "/api/v1/overview").contains("\"demo\""));
    assert!(Command::new("kill").args(["-INT", &demo.id().to_string()]).status().unwrap().success());
    assert!(demo.wait().unwrap().success());
    assert!(TcpStream::connect(&address).is_err());
}
