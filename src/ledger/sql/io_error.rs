//! Words for an operator about a connection that PostgreSQL did not accept, or that has ended. The operating system and
//! the driver say it by numbers.

use std::io;

pub fn describe(error: &io::Error) -> String {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof};
    match error.kind() {
        ConnectionRefused => "PostgreSQL accepts no connections at this address: Connection refused".to_owned(),
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof => {
            "PostgreSQL has closed the connection".to_owned()
        }
        _ => {
            let text = error.to_string();
            text.split_once(" (os error").map_or(text.clone(), |(words, _)| words.to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
