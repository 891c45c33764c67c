use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

/// A socket under test, and the peer's end of its connection.
async fn pair(deadline: Instant) -> (Arc<Socket>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (theirs, _) = listener.accept().await.unwrap();
    (Socket::new(ours, deadline).unwrap(), theirs)
}

fn in_10_s() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn user_timeout_leaves_time_for_the_first_retransmission() {
    let seconds = Duration::from_secs_f64;
    for (left, wanted) in [(10.0, 9.0), (2.0, 1.0), (1.0, 0.5), (0.002, 0.001), (0.0, 0.001)] {
        assert_eq!(user_timeout(seconds(left)), seconds(wanted), "{left} s left");
    }
}

#[tokio::test]
async fn dropped_request_resets_and_finished_one_closes() {
    let (socket, mut peer) = pair(in_10_s()).await;
    SocketStream(socket).write_all(b"half a request").await.unwrap();
    let reset = peer.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(reset.kind(), io::ErrorKind::ConnectionReset);

    let (socket, mut peer) = pair(in_10_s()).await;
    SocketStream(Arc::clone(&socket)).write_all(b"a request").await.unwrap();
    assert!(!socket.wrote_nothing());
    socket.end_request();
    drop(socket);
    let mut received = Vec::new();
    peer.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, b"a request");
}

#[tokio::test]
async fn nothing_is_written_after_the_deadline() {
    let (socket, mut peer) = pair(Instant::now()).await;
    let mut stream = SocketStream(Arc::clone(&socket));
    let late = stream.write_all(b"a late request").await.unwrap_err();
    assert_eq!((late.kind(), socket.wrote_nothing()), (io::ErrorKind::TimedOut, true));
    // The next request has a time of its own.
    socket.begin_request(in_10_s()).unwrap();
    stream.write_all(b"in time").await.unwrap();
    let mut received = [0; 7];
    peer.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"in time");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn each_write_renews_tcp_user_timeout() {
    let (socket, _peer) = pair(in_10_s()).await;
    let given = || SockRef::from(&socket.stream).tcp_user_timeout().unwrap().unwrap();
    let mut stream = SocketStream(Arc::clone(&socket));
    stream.write_all(b"x").await.unwrap();
    assert!(given() <= Duration::from_secs(9), "{:?}", given());
    socket.begin_request(Instant::now() + Duration::from_secs(2)).unwrap();
    stream.write_all(b"x").await.unwrap();
    assert!(given() <= Duration::from_secs(1), "{:?}", given());
}

/// The runtime asks the kernel for events when no task can go on, so it cannot know of these bytes.
#[tokio::test]
async fn bytes_are_read_before_runtime_readiness() {
    let (socket, peer) = pair(in_10_s()).await;
    let mut stream = SocketStream(Arc::clone(&socket));
    let mut bytes = [0; 8];
    let mut read_once = || {
        let mut buffer = ReadBuf::new(&mut bytes);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        Pin::new(&mut stream).poll_read(&mut cx, &mut buffer).map(|read| read.map(|()| buffer.filled().len()).unwrap())
    };
    assert_eq!(read_once(), Poll::Pending);
    assert_eq!(peer.try_write(b"stray").unwrap(), 5);
    assert_eq!(read_once(), Poll::Ready(5));
    assert_eq!(read_once(), Poll::Pending);
    drop(peer);
    assert_eq!(read_once(), Poll::Ready(0));
}
