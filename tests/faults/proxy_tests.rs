//! Tests of the fault proxy: each rule has its effect on real connections, and connections find their worker's path.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

use crate::connection_owner;
use crate::proxy::{Asking, Flow, Road, Rules, Whose, listen};

/// Time without bytes after which a response counts as missing.
const SILENCE: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(10);

/// An echo server, and a network path to it.
async fn echo() -> (u16, Arc<Road>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                // Ends when the client closes the connection or the proxy cuts it.
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
            });
        }
    });
    let road = Road::new();
    (listen(target, Whose::Known(Arc::clone(&road))).await, road)
}

async fn connect(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).await.unwrap()
}

async fn ask(stream: &mut TcpStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = vec![0; text.len()];
    timeout(PATIENCE, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    String::from_utf8(answer).unwrap()
}

/// Sends a text and gets no response, although the connection is open.
async fn unheard(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
    let heard = timeout(SILENCE, stream.read_u8()).await;
    assert!(heard.is_err(), "{heard:?}");
}

#[tokio::test]
async fn proxy_forwards_bytes_and_close_both_ways() {
    let (port, road) = echo().await;
    let mut stream = connect(port).await;
    assert_eq!(ask(&mut stream, "hello").await, "hello");
    let large = "x".repeat(1 << 20);
    let (mut reader, mut writer) = stream.split();
    let mut heard = Vec::new();
    let writing = async {
        writer.write_all(large.as_bytes()).await.unwrap();
        writer.shutdown().await.unwrap();
    };
    let (read, ()) = tokio::join!(timeout(PATIENCE, reader.read_to_end(&mut heard)), writing);
    read.unwrap().unwrap();
    assert_eq!((heard.len(), road.troubled()), (large.len(), 0));
}

#[tokio::test]
async fn silent_cut_drops_bytes_but_keeps_connection() {
    let silent_back = Rules { to_client: Flow::Discard, ..Rules::PASS };
    let silent_there = Rules { to_server: Flow::Discard, ..Rules::PASS };
    for rules in [Rules::CUT, silent_back, silent_there] {
        let (port, road) = echo().await;
        let mut stream = connect(port).await;
        assert_eq!(ask(&mut stream, "before").await, "before");
        road.set(rules);
        unheard(&mut stream, "during").await;
        road.set(Rules::PASS);
        // Bytes after a gap are not delivered.
        unheard(&mut stream, "after").await;
        assert_eq!(ask(&mut connect(port).await, "anew").await, "anew");
        assert!(road.troubled() >= 1);
    }
}

#[tokio::test]
async fn a_reset_reaches_old_connections_and_new_ones() {
    let (port, road) = echo().await;
    let mut stream = connect(port).await;
    assert_eq!(ask(&mut stream, "before").await, "before");
    road.set(Rules::RESET);
    for mut stream in [stream, connect(port).await] {
        let error = timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    road.set(Rules::PASS);
    assert_eq!(ask(&mut connect(port).await, "anew").await, "anew");
}

#[tokio::test]
async fn delayed_bytes_come_later_in_order_and_complete() {
    let (port, road) = echo().await;
    let mut stream = connect(port).await;
    let wait = Duration::from_millis(200);
    road.set(Rules { to_server: Flow::Delay(wait), to_client: Flow::Delay(wait), reset: false });
    let asked = Instant::now();
    stream.write_all(b"late").await.unwrap();
    tokio::time::sleep(wait / 2).await;
    // Bytes without a delay still wait for earlier, delayed ones.
    road.set(Rules { to_server: Flow::Pass, to_client: Flow::Delay(wait), reset: false });
    stream.write_all(b" again").await.unwrap();
    let mut answer = [0; 10];
    timeout(PATIENCE, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"late again");
    assert!(asked.elapsed() >= 2 * wait);
}

#[tokio::test]
async fn truncated_stream_ends_at_the_limit() {
    for rules in
        [Rules { to_client: Flow::Truncate(4), ..Rules::PASS }, Rules { to_server: Flow::Truncate(4), ..Rules::PASS }]
    {
        let (port, road) = echo().await;
        road.set(rules);
        let mut stream = connect(port).await;
        stream.write_all(b"0123456789").await.unwrap();
        let mut heard = Vec::new();
        // The end is orderly or a reset, depending on unread bytes.
        let _ = timeout(PATIENCE, stream.read_to_end(&mut heard)).await.unwrap();
        assert!(b"0123".starts_with(&heard), "{heard:?}");
        if rules.to_client == Flow::Truncate(4) {
            assert_eq!(heard, b"0123");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn proxy_distinguishes_clients_by_process() {
    let (target, _) = echo().await;
    // The first worker is another process; the second is this one.
    let pids = Arc::new(Mutex::new(vec![1, std::process::id()]));
    let (others, ours) = (Road::new(), Road::new());
    let roads = Arc::new(Mutex::new(vec![Arc::clone(&others), Arc::clone(&ours)]));
    let asking = Asking { questions: connection_owner::serve(pids), roads };
    let port = listen(target, Whose::Asked(asking)).await;
    let mut stream = connect(port).await;
    assert_eq!(ask(&mut stream, "before").await, "before");
    others.set(Rules::CUT);
    assert_eq!(ask(&mut stream, "still").await, "still");
    assert_eq!(ask(&mut connect(port).await, "new").await, "new");
    ours.set(Rules::CUT);
    unheard(&mut connect(port).await, "cut").await;
    // A connection that passed at once obeys the rules as soon as its path is known.
    unheard(&mut stream, "cut too").await;
    let counted = async {
        while ours.troubled() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, counted).await.unwrap();
    assert_eq!(others.troubled(), 0);
}
