//! Words for an operator about a connection that PostgreSQL did not accept, or that has ended. The operating system and
//! the driver say it by numbers.

use std::io;

use crate::domain::printable::without_error_number;

pub fn describe(error: &io::Error) -> String {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof};
    match error.kind() {
        ConnectionRefused => "PostgreSQL accepts no connections at this address: Connection refused".to_owned(),
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof => {
            "PostgreSQL has closed the connection".to_owned()
        }
        _ => without_error_number(&error.to_string()),
    }
}

/// A load balancer without a server closes the connection before the first byte. The driver reads that as an answer to
/// its request for TLS.
pub fn name_closed(error: sqlx::Error) -> sqlx::Error {
    match error {
        sqlx::Error::Protocol(text) if text.contains("SSLRequest: 0x00") => {
            sqlx::Error::Io(io::ErrorKind::UnexpectedEof.into())
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use sqlx::Connection as _;
    use sqlx::postgres::{PgConnectOptions, PgConnection};
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;
    use crate::ledger::LedgerError;
    use crate::ledger::sql::result::ConnectFailure;

    #[tokio::test]
    async fn connection_that_is_closed_at_once_means_that_the_server_is_down() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            // All of the request, because unread bytes would reset the connection.
            let (mut client, _) = listener.accept().await.unwrap();
            client.read_exact(&mut [0; 8]).await.unwrap();
        });
        let options = PgConnectOptions::new_without_pgpass().host("127.0.0.1").port(port).username("u");
        let error = name_closed(PgConnection::connect_with(&options).await.unwrap_err());
        assert_eq!(LedgerError::from(&error).to_string(), "database unavailable: PostgreSQL has closed the connection");
        assert!(ConnectFailure::from(error).is_down());
    }

    #[test]
    fn driver_texts_are_not_shown() {
        for (error, words) in [
            (
                io::Error::from_raw_os_error(111),
                "PostgreSQL accepts no connections at this address: Connection refused",
            ),
            (io::Error::from_raw_os_error(104), "PostgreSQL has closed the connection"),
            (
                io::Error::new(io::ErrorKind::UnexpectedEof, "expected to read 5 bytes, got 0 bytes at EOF"),
                "PostgreSQL has closed the connection",
            ),
            (io::Error::from_raw_os_error(113), "No route to host"),
            (io::Error::other("PostgreSQL did not answer within 3 s"), "PostgreSQL did not answer within 3 s"),
        ] {
            assert_eq!(describe(&error), words);
        }
    }
}
