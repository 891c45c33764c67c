//! One attempt to connect, with a time limit.
//!
//! lapin's I/O thread would wait for ever for a peer that accepts and says nothing. So a copy of the socket is kept,
//! and shut down when the time is up.

use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use lapin::tcp::AsyncTcpStream;
use lapin::uri::AMQPScheme;
use lapin::{Connection, ConnectionProperties};

use super::failure::CallFailure;
use super::sanitized_stream::{SanitizedStream, sanitizing_runtime};
use super::sanitizer::Sanitizer;
use super::settings::RabbitSettings;

/// Connects; `name` is what the broker's own lists show. With the broker's version, if it tells it.
pub(super) async fn connect(
    settings: &RabbitSettings,
    name: &str,
) -> Result<(Connection, Option<String>), CallFailure> {
    // No `enable_auto_recover`: the supervisor rebuilds everything as one generation.
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    let tokio = lapin::runtime::default_runtime().map_err(CallFailure::Broker)?;
    let runtime = sanitizing_runtime(&tokio);
    let (tls, limit) = (settings.tls.clone(), settings.connect_limit);
    let socket: Arc<Mutex<Option<TcpStream>>> = Arc::default();
    let kept = Arc::clone(&socket);
    let version: Arc<OnceLock<String>> = Arc::default();
    let announced = Arc::clone(&version);
    let connecting = Connection::connector(
        settings.uri.clone(),
        runtime,
        async move |uri, _| {
            let stream = async {
                let addresses = tokio.to_socket_addrs((uri.authority.host.clone(), uri.authority.port));
                let stream = AsyncTcpStream::connect(&tokio, addresses).await?;
                if let AsyncTcpStream::Plain(tcp) = &stream {
                    let copy = TcpStream::from(tcp.get_ref().as_fd().try_clone_to_owned()?);
                    *kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(copy);
                }
                match uri.scheme {
                    AMQPScheme::AMQP => Ok(stream),
                    AMQPScheme::AMQPS => stream.into_tls(&uri.authority.host, tls.as_ref()).await,
                }
            };
            // lapin's own connect knows no time limit; without one this thread would outlive the attempt.
            match tokio::time::timeout(limit, stream).await {
                Ok(stream) => {
                    let sanitizer = Sanitizer::with_version(Arc::clone(&announced));
                    Ok(AsyncTcpStream::Plain(SanitizedStream::new(stream?, sanitizer)))
                }
                Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            }
        },
        properties,
    );
    let ended = tokio::time::timeout(limit, connecting).await;
    let socket = socket.lock().unwrap_or_else(PoisonError::into_inner).take();
    match ended {
        Ok(connection) => Ok((connection.map_err(CallFailure::Broker)?, version.get().cloned())),
        Err(_) => {
            if let Some(Err(error)) = socket.map(|socket| socket.shutdown(Shutdown::Both)) {
                tracing::debug!(%error, "socket of a connection attempt was gone already");
            }
            Err(CallFailure::TimedOut)
        }
    }
}
