//! A producer that sends what no client library would: AMQP frames made by hand, over a plain socket.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use sluicegate::queue::QueueError;

use super::super::{PATIENCE, provider, publish_all, take};
use super::{bench, connect};
use crate::support::rabbitmq::RabbitNode;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;

/// A connection with channel 1 open and in confirm mode.
struct Hand(TcpStream);

impl Hand {
    fn open(vhost: &str) -> Self {
        let mut hand = Self(TcpStream::connect(("127.0.0.1", RabbitNode::shared().port())).unwrap());
        hand.0.write_all(b"AMQP\0\0\x09\x01").unwrap();
        hand.expect(10, 10);
        hand.method(0, 10, 11, &[&[0; 4][..], &short("PLAIN"), &long(b"\0guest\0guest"), &short("en_US")].concat());
        hand.expect(10, 30);
        hand.method(0, 10, 31, &[&2_u16.to_be_bytes()[..], &131_072_u32.to_be_bytes(), &[0; 2]].concat());
        hand.method(0, 10, 40, &[&short(vhost)[..], &[0, 0]].concat());
        hand.expect(10, 41);
        hand.method(1, 20, 10, &[0]);
        hand.expect(20, 11);
        hand.method(1, 85, 10, &[0]);
        hand.expect(85, 11);
        hand
    }

    /// Publishes to a queue with this header table, byte for byte. Returns once the broker has confirmed.
    fn publish(&mut self, queue: &str, headers: &[u8], body: &[u8]) {
        self.publish_with(queue, [0x20, 0], &long(headers), body);
    }

    /// Publishes with the properties of these flags, byte for byte.
    fn publish_with(&mut self, queue: &str, flags: [u8; 2], properties: &[u8], body: &[u8]) {
        self.method(1, 60, 40, &[&[0; 2][..], &short(""), &short(queue), &[0]].concat());
        let size = (body.len() as u64).to_be_bytes();
        self.frame(HEADER, 1, &[&[0, 60, 0, 0][..], &size, &flags, properties].concat());
        self.frame(BODY, 1, body);
        self.expect(60, 80);
    }

    fn method(&mut self, channel: u16, class: u16, method: u16, arguments: &[u8]) {
        self.frame(METHOD, channel, &[&class.to_be_bytes()[..], &method.to_be_bytes(), arguments].concat());
    }

    fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) {
        let head = [&[kind][..], &channel.to_be_bytes(), &(payload.len() as u32).to_be_bytes()].concat();
        self.0.write_all(&[&head[..], payload, &[0xce]].concat()).unwrap();
    }

    fn expect(&mut self, class: u16, method: u16) {
        let mut head = [0; 7];
        self.0.read_exact(&mut head).unwrap();
        let mut payload = vec![0; u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize + 1];
        self.0.read_exact(&mut payload).unwrap();
        let received = (u16::from_be_bytes([payload[0], payload[1]]), u16::from_be_bytes([payload[2], payload[3]]));
        assert_eq!(received, (class, method), "{}", String::from_utf8_lossy(&payload));
    }
}

fn short(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&[text.len() as u8][..], text].concat()
}

fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

/// One header whose value is this many arrays, one inside the other.
fn nested(levels: usize) -> Vec<u8> {
    let mut value = Vec::with_capacity(5 * levels);
    for level in 0..levels {
        value.push(b'A');
        value.extend((5 * (levels - 1 - level) as u32).to_be_bytes());
    }
    [&short("deep")[..], &value].concat()
}

/// Five bytes per level: a frame of 128 KiB holds 26,000 levels, and a recursive parser needs stack for each.
#[tokio::test(flavor = "multi_thread")]
async fn deeply_nested_headers_are_accepted() {
    let name = "deeply_nested_headers_are_accepted";
    let bench = bench(name).await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let mut hand = Hand::open(name);
    for levels in [1, 100, 1_000, 5_000, 26_000] {
        hand.publish("payments.stripe", &nested(levels), format!("{levels}").as_bytes());
    }
    publish_all(&*bench.queue, "stripe", &["plain"]).await;
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    for expected in ["1", "100", "1000", "5000", "26000", "plain"] {
        let delivery = take(&mut *lane).await;
        assert_eq!(delivery.body, expected);
        delivery.receipt.ack().await.unwrap();
    }
}

/// The broker forwards these bytes, and for each of them lapin would close the connection of all lanes.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_utf8_short_strings_keep_the_connection() {
    let name = "invalid_utf8_short_strings_keep_the_connection";
    let bench = bench(name).await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let mut hand = Hand::open(name);
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let named = [&short(b"caf\xe9")[..], b"t\x01"].concat();
    for (what, flags, properties) in [
        ("a correlation id", [0x04, 0], short(b"\x01\xff\xfe\x80")),
        ("a header's name", [0x20, 0], long(&named)),
        ("a type behind headers", [0x20, 0x20], [long(&named), short(b"\xe9")].concat()),
    ] {
        hand.publish_with("payments.stripe", flags, &properties, what.as_bytes());
        publish_all(&*bench.queue, "stripe", &["plain"]).await;
        for expected in [what, "plain"] {
            let delivery = take(&mut *lane).await;
            assert_eq!((&delivery.body[..], delivery.redelivered), (expected.as_bytes(), false));
            delivery.receipt.ack().await.unwrap();
        }
    }
}

/// A peer that sends no AMQP, or broken AMQP, costs one connection attempt, and the next one follows.
#[tokio::test(flavor = "multi_thread")]
async fn malformed_peer_is_unavailable() {
    let endless_frame = b"\x01\0\0\xff\xff\xff\xff\0\x0a\0\x0a".to_vec();
    let start_with_a_broken_table = b"\x01\0\0\0\0\0\x0e\0\x0a\0\x0a\0\x09\xff\xff\xff\xff\x01aA\xce".to_vec();
    // Without a limit, this one would overflow the stack of the client library.
    let properties = [&b"\0\x0a\0\x0a\0\x09"[..], &long(&nested(20_000)), &long(b"PLAIN"), &long(b"en_US")].concat();
    let deep_start = [&b"\x01\0\0"[..], &long(&properties), b"\xce"].concat();
    let wrong_end = b"\x08\0\0\0\0\0\0\xcd".to_vec();
    for nonsense in [
        Vec::new(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        b"AMQP\0\x01\0\0".to_vec(),
        endless_frame,
        start_with_a_broken_table,
        deep_start,
        wrong_end,
        vec![0; 300_000],
        vec![0xff; 300_000],
    ] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (counter, mut counted) = tokio::sync::watch::channel(0);
        let (shown, written) = (format!("{nonsense:?}"), nonsense);
        let answering = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                counter.send_modify(|connections| *connections += 1);
                let written = written.clone();
                tokio::spawn(async move {
                    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
                    // Either call may fail once the client has closed the connection.
                    let _ = stream.write_all(&written).await;
                    let _ = stream.shutdown().await;
                    let _ = stream.read_to_end(&mut Vec::new()).await;
                });
            }
        });
        let queue = connect(&format!("amqp://127.0.0.1:{port}/?connection_timeout=300"));
        let shown = &shown[..shown.len().min(60)];
        assert!(matches!(queue.ping().await, Err(QueueError::Unavailable(_) | QueueError::Refused(_))), "{shown}");
        let again = tokio::time::timeout(PATIENCE, counted.wait_for(|connections| *connections > 1));
        again.await.expect("no further connection attempt").unwrap();
        answering.abort();
    }
}
