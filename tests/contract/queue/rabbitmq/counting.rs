//! A proxy between a client and the broker that counts the client's calls of one method.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::watch;

use crate::support::rabbitmq::RabbitNode;

/// Class and method, with which a frame's payload begins.
pub const PUBLISH: [u8; 4] = [0, 60, 0, 40];
pub const ACK: [u8; 4] = [0, 60, 0, 80];
pub const CONFIRM_SELECT: [u8; 4] = [0, 85, 0, 10];

pub struct Counting {
    pub url: String,
    pub counted: watch::Receiver<usize>,
    /// Whether the broker's responses are held back.
    pub held: watch::Sender<bool>,
}

impl Counting {
    pub async fn before(url: &str, method: [u8; 4]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let broker = RabbitNode::shared().port();
        let url = url.replace(&format!(":{broker}/"), &format!(":{}/", listener.local_addr().unwrap().port()));
        let ((counting, counted), held) = (watch::channel(0), watch::Sender::new(false));
        let answers = held.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (from_client, to_client) = client.into_split();
                let (from_broker, to_broker) = TcpStream::connect(("127.0.0.1", broker)).await.unwrap().into_split();
                tokio::spawn(count(from_client, to_broker, (method, counting.clone())));
                tokio::spawn(hold(from_broker, to_client, answers.subscribe()));
            }
        });
        Self { url, counted, held }
    }
}

/// Forwards frames, and counts those of this method.
async fn count(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    (method, counting): ([u8; 4], watch::Sender<usize>),
) {
    let mut greeting = [0; 8];
    from.read_exact(&mut greeting).await.unwrap();
    to.write_all(&greeting).await.unwrap();
    let mut head = [0; 7];
    while from.read_exact(&mut head).await.is_ok() {
        let [kind, _, _, size @ ..] = head;
        let mut rest = vec![0; u32::from_be_bytes(size) as usize + 1];
        if from.read_exact(&mut rest).await.is_err() || to.write_all(&[&head[..], &rest].concat()).await.is_err() {
            return;
        }
        if kind == 1 && rest.starts_with(&method) {
            counting.send_modify(|count| *count += 1);
        }
    }
}

async fn hold(mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf, mut held: watch::Receiver<bool>) {
    let mut bytes = vec![0; 65_536];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        if held.wait_for(|held| !held).await.is_err() || to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}
