//! A TCP proxy with one address, behind which the server can be exchanged, as in a fail-over.

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub struct Switch {
    pub port: u16,
    target: watch::Sender<u16>,
}

impl Switch {
    /// Forwards to a port of this machine, until the runtime ends.
    pub async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (target, targets) = watch::channel(target);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let mut targets = targets.clone();
                let port = *targets.borrow_and_update();
                tokio::spawn(async move {
                    tokio::select! {
                        _ = carry(client, port) => {}
                        _ = targets.changed() => {}
                    }
                });
            }
        });
        Self { port, target }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Closes every connection; the next ones go to another port.
    pub fn turn_to(&self, target: u16) {
        self.target.send_replace(target);
    }
}

async fn carry(mut client: TcpStream, port: u16) -> std::io::Result<(u64, u64)> {
    let mut server = TcpStream::connect(("127.0.0.1", port)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await
}
