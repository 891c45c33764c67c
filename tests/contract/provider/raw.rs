//! A server at the TCP level that records every byte of every request and misbehaves by script.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The server's reaction to a request.
#[derive(Clone, Debug)]
pub enum Then {
    /// Exactly these bytes, then the connection is closed.
    Raw(Vec<u8>),
    /// A complete answer; the connection stays open.
    Answer(Vec<u8>),
    /// A complete answer that promises keep-alive, then the connection is closed.
    AnswerAndClose,
    Reset,
    /// Reset before the request is read.
    ResetUnread,
    Close,
    Silence,
    /// A valid head, then a space every 50 ms.
    Drip,
    /// A valid head, then an endless body.
    Flood,
    /// The first bytes, then the second ones repeatedly, with a pause between.
    Repeat(&'static [u8], &'static [u8], Duration),
}

impl Then {
    pub fn answer(status: &str, headers: &str, body: &str) -> Self {
        let length = body.len();
        Self::Answer(format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{headers}\r\n{body}").into_bytes())
    }

    pub fn ok() -> Self {
        Self::answer("200 OK", "content-type: application/json\r\n", r#"{"id":"ch_1"}"#)
    }
}

#[derive(Default)]
struct Seen {
    requests: Mutex<Vec<Vec<u8>>>,
    connections: AtomicUsize,
}

pub struct RawServer {
    address: SocketAddr,
    seen: Arc<Seen>,
    flooded: watch::Receiver<Option<usize>>,
    task: tokio::task::JoinHandle<()>,
}

impl RawServer {
    /// Plays the script, one step per request; the last step repeats.
    pub async fn start(script: Vec<Then>) -> Self {
        Self::start_with(script, true).await
    }

    /// Plays `then` after the first bytes, whatever they are.
    pub async fn start_reading_anything(then: Then) -> Self {
        Self::start_with(vec![then], false).await
    }

    async fn start_with(script: Vec<Then>, http: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let (flooded_to, flooded) = watch::channel(None);
        let play = Play { script, http, seen: seen.clone(), flooded_to };
        let task = tokio::spawn(async move {
            let play = Arc::new(play);
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                play.seen.connections.fetch_add(1, Ordering::SeqCst);
                let play = play.clone();
                connections.spawn(async move { play.connection(stream).await });
            }
        });
        Self { address, seen, flooded, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    pub fn requests(&self) -> Vec<Vec<u8>> {
        self.seen.requests.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// Idempotency keys in the order received.
    pub fn keys(&self) -> Vec<String> {
        let key = |bytes: &Vec<u8>| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            text.lines().find_map(|line| line.strip_prefix("Idempotency-Key: ").map(str::to_owned)).unwrap()
        };
        self.requests().iter().map(key).collect()
    }

    /// Bytes of a flood that were written before the client closed the connection.
    pub async fn flooded(&self) -> usize {
        self.flooded.clone().wait_for(Option::is_some).await.unwrap().unwrap()
    }
}

impl Drop for RawServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Play {
    script: Vec<Then>,
    http: bool,
    seen: Arc<Seen>,
    flooded_to: watch::Sender<Option<usize>>,
}

impl Play {
    async fn connection(&self, mut stream: TcpStream) {
        if matches!(self.script[0], Then::ResetUnread) {
            return stream.set_zero_linger().unwrap();
        }
        while let Some(step) = self.receive(&mut stream).await {
            let then = self.script.get(step).or(self.script.last()).unwrap();
            if !self.play(then, &mut stream).await {
                return;
            }
        }
    }

    /// Records one complete request and returns its number.
    async fn receive(&self, stream: &mut TcpStream) -> Option<usize> {
        let mut bytes = Vec::new();
        while !self.http && bytes.is_empty() || self.http && !is_whole(&bytes) {
            if stream.read_buf(&mut bytes).await.ok()? == 0 {
                return None;
            }
        }
        let mut requests = self.seen.requests.lock().unwrap();
        requests.push(bytes);
        Some(requests.len() - 1)
    }

    /// Plays a step; returns whether the connection stays open.
    async fn play(&self, then: &Then, stream: &mut TcpStream) -> bool {
        match then {
            Then::Answer(bytes) => stream.write_all(bytes).await.is_ok(),
            Then::Raw(bytes) => {
                stream.write_all(bytes).await.unwrap();
                // A close with unread bytes would be a reset, so it waits until the client closes.
                stream.shutdown().await.unwrap();
                let _ = stream.read_to_end(&mut Vec::new()).await;
                false
            }
            Then::AnswerAndClose => {
                let Then::Answer(bytes) = Then::ok() else { unreachable!() };
                stream.write_all(&bytes).await.unwrap();
                false
            }
            Then::Reset | Then::ResetUnread => {
                stream.set_zero_linger().unwrap();
                false
            }
            Then::Close => false,
            Then::Silence => {
                let _ = stream.read_to_end(&mut Vec::new()).await;
                false
            }
            Then::Drip => {
                let head = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n";
                let mut going = stream.write_all(head).await.is_ok();
                while going {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    going = stream.write_all(b" ").await.is_ok();
                }
                false
            }
            Then::Flood => {
                let head = b"HTTP/1.1 200 OK\r\ncontent-length: 9999999999\r\n\r\n";
                stream.write_all(head).await.unwrap();
                let mut written = 0;
                while let Ok(bytes) = stream.write(&[b' '; 16 * 1024]).await {
                    written += bytes;
                }
                self.flooded_to.send_replace(Some(written));
                false
            }
            Then::Repeat(head, piece, pause) => {
                let mut going = stream.write_all(head).await.is_ok();
                let mut written = 0;
                while going {
                    tokio::time::sleep(*pause).await;
                    going = stream.write_all(piece).await.is_ok();
                    written += piece.len();
                }
                self.flooded_to.send_replace(Some(written));
                false
            }
        }
    }
}

/// Whether the head and the announced body are complete.
fn is_whole(bytes: &[u8]) -> bool {
    let Some(head_end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(&bytes[..head_end]).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    bytes.len() >= head_end + 4 + length.unwrap_or(0)
}
