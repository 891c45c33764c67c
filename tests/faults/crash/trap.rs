//! A proxy that fails once, when certain bytes pass through it.
//!
//! Neither chance nor time decides: the proxy of the random run is switched from outside, this one by its traffic.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Trap(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// While true, bytes from the server are held back.
    held: watch::Sender<bool>,
    /// Once these bytes have reached the server, its response is dropped and the connection is cut.
    bait: Vec<u8>,
    armed: AtomicBool,
    sprung: AtomicBool,
}

impl Trap {
    /// Drops the response to the first statement that contains these bytes.
    pub fn on(bait: &[u8]) -> Self {
        Self(Arc::new(Inner { bait: bait.to_owned(), armed: AtomicBool::new(true), ..Inner::default() }))
    }

    /// From now on, holds back the server's responses, until `release`.
    pub fn hold(&self) {
        self.0.held.send_replace(true);
    }

    pub fn release(&self) {
        self.0.held.send_replace(false);
    }

    pub fn sprung(&self) -> bool {
        self.0.sprung.load(Ordering::SeqCst)
    }

    /// Listens on a new port that leads to the server through this trap, and returns the port.
    pub async fn guard(&self, server: u16) -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let trap = self.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).await.unwrap();
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                tokio::spawn(trap.clone().carry(client, server));
            }
        });
        port
    }

    /// Ends when either direction ends. Both connections are then closed.
    async fn carry(self, client: TcpStream, server: TcpStream) {
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let swallow = AtomicBool::new(false);
        tokio::select! {
            () = self.up(from_client, to_server, &swallow) => {}
            () = self.down(from_server, to_client, &swallow) => {}
        }
    }

    async fn up(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, swallow: &AtomicBool) {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            let bait = &self.0.bait;
            let taken = !bait.is_empty() && buffer[..count].windows(bait.len()).any(|bytes| bytes == bait);
            if taken && self.0.armed.swap(false, Ordering::SeqCst) {
                swallow.store(true, Ordering::SeqCst);
            }
            if to.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    }

    async fn down(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, swallow: &AtomicBool) {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            if swallow.load(Ordering::SeqCst) {
                self.0.sprung.store(true, Ordering::SeqCst);
                return;
            }
            let released = self.0.held.subscribe().wait_for(|held| !held).await.is_ok();
            if !released || to.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    }
}
