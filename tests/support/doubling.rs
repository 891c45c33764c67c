//! A provider that sends each answer twice on kept-alive connections, as a broken gateway does.
//!
//! Payments have ids `pay-0`, `pay-1`, and so on; those with an even number are accepted, the others declined. An
//! answer repeats its payment's id in `/order/id` and in the header `X-Key`. A repeated request gets its answer once.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// When an answer is sent for the second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stray {
    /// In one piece with the first.
    Glued,
    /// When the test calls [`DoublingServer::send_again`].
    OnCall,
    /// When the next request has arrived, before its own answer.
    Overtaking,
    /// Each of the others in turn; instead of `OnCall`, some milliseconds after the first. Few overtake: unknown
    /// outcomes in a row open a circuit breaker.
    Mixed,
}

pub struct DoublingServer {
    pub url: String,
    shared: Arc<Mutex<Shared>>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    connections: usize,
    answered: BTreeSet<usize>,
    /// The connection that answered last, and its answer.
    last: Option<(Arc<OwnedWriteHalf>, Vec<u8>)>,
}

pub fn is_accepted(number: usize) -> bool {
    number.is_multiple_of(2)
}

pub fn answer_to(number: usize) -> Vec<u8> {
    let (status, code) = if is_accepted(number) { ("200 OK", "done") } else { ("402 No", "card_declined") };
    let body = format!(r#"{{"id":"ch_{number}","code":"{code}","order":{{"id":"pay-{number}","amount":1299}}}}"#);
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nx-key: pay-{number}\r\n\r\n{body}", body.len()).into_bytes()
}

impl DoublingServer {
    pub async fn start(stray: Stray) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let shared = Arc::new(Mutex::new(Shared::default()));
        let known = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                known.lock().unwrap().connections += 1;
                tokio::spawn(serve(stream, stray, Arc::clone(&known)));
            }
        });
        Self { url, shared, task }
    }

    /// Sends the last answer again. On loopback it has arrived when this returns.
    pub fn send_again(&self) {
        let shared = self.shared.lock().unwrap();
        let (writer, answer) = shared.last.as_ref().unwrap();
        let _ = writer.try_write(answer);
    }

    pub fn connections(&self) -> usize {
        self.shared.lock().unwrap().connections
    }
}

impl Drop for DoublingServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(stream: TcpStream, stray: Stray, shared: Arc<Mutex<Shared>>) {
    stream.set_nodelay(true).unwrap();
    let (mut reader, writer) = stream.into_split();
    let writer = Arc::new(writer);
    let mut overtaking = Vec::new();
    let mut request = Vec::new();
    loop {
        request.clear();
        let number = loop {
            match reader.read_buf(&mut request).await {
                Ok(1..) => {}
                _ => return,
            }
            if let Some(number) = number_of(&request) {
                break number;
            }
        };
        // The socket's buffer has space for a few such answers.
        let _ = writer.try_write(&std::mem::take(&mut overtaking));
        let answer = answer_to(number);
        let mut shared = shared.lock().unwrap();
        let is_doubled = shared.answered.insert(number);
        shared.last = Some((Arc::clone(&writer), answer.clone()));
        let way = match (stray, number % 12) {
            (Stray::Mixed, 0..6) => Stray::Glued,
            (Stray::Mixed, 6) => Stray::Overtaking,
            (way, _) => way,
        };
        match way {
            Stray::Glued if is_doubled => drop(writer.try_write(&[&answer[..], &answer].concat())),
            Stray::Overtaking if is_doubled => {
                overtaking.clone_from(&answer);
                let _ = writer.try_write(&answer);
            }
            Stray::Mixed if is_doubled => {
                let _ = writer.try_write(&answer);
                let writer = Arc::clone(&writer);
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    let _ = writer.try_write(&answer);
                });
            }
            _ => drop(writer.try_write(&answer)),
        }
    }
}

/// The payment's number in a request that has arrived completely.
fn number_of(request: &[u8]) -> Option<usize> {
    let text = String::from_utf8_lossy(request);
    let (_, behind) = text.strip_suffix('}')?.split_once(r#""id":"pay-"#)?;
    behind.split_once('"')?.0.parse().ok()
}
