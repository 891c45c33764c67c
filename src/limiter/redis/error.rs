//! The meaning of a failed Redis command: whether a retry can help, and what an operator should do.
//!
//! Every error with which Redis is known to reject a command has a fix. The server's text is shown with it. Addresses
//! with credentials never get here.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::domain::printable::without_error_number;
use crate::limiter::LimiterError;
use crate::tls;

/// The kind of deployment that `limiter.url` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RedisTopology {
    Single,
    Cluster,
}

/// How long an error lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ErrorDuration {
    /// It passes by itself, or a new connection may not meet it.
    Transient,
    /// It lasts until an operator fixes it.
    UntilFixed,
}

use ErrorDuration::{Transient, UntilFixed};

const PERMISSIONS_FIX: &str = "allow limiter.url's user FCALL, FUNCTION LOAD, INFO, PING, CLUSTER SLOTS and what our \
                               functions call, on the keys of limiter.prefix";

/// Error codes of Redis, each with its duration and fix. The codes are those of Redis 7
/// (<https://github.com/redis/redis/blob/7.0/src/server.c>, `createSharedObjects`, and `cluster.c`).
const KNOWN_CODES: &[(&str, ErrorDuration, &str)] = &[
    ("OOM", Transient, "raise maxmemory, or free memory; keep maxmemory-policy noeviction"),
    ("MISCONF", Transient, "it cannot write to its disk: free space there and read its log"),
    ("READONLY", Transient, "it is a replica: name the primary in limiter.url, or wait until the failover ends"),
    ("MASTERDOWN", Transient, "it is a replica without its primary: name the primary in limiter.url"),
    ("NOREPLICAS", Transient, "min-replicas-to-write is not met: bring its replicas back"),
    ("LOADING", Transient, "it is reading its data from disk: wait"),
    ("BUSY", Transient, "a script of another program blocks it: SCRIPT KILL, and give that program its own Redis"),
    (
        "UNKILLABLE",
        Transient,
        "a script of another program has written and does not end: SHUTDOWN NOSAVE and restart it",
    ),
    ("TRYAGAIN", Transient, "its keys are being moved to another node: wait"),
    (
        "CLUSTERDOWN",
        Transient,
        "a slot has no master: bring the lost node back (CLUSTER INFO); cluster-require-full-coverage no \
     keeps the others going",
    ),
    ("NOAUTH", UntilFixed, "put user and password into limiter.url"),
    ("WRONGPASS", UntilFixed, "correct user and password in limiter.url"),
    ("NOPERM", UntilFixed, PERMISSIONS_FIX),
    (
        "WRONGTYPE",
        UntilFixed,
        "another program uses a key of the limiter: choose another limiter.prefix, or delete that key",
    ),
    ("CROSSSLOT", UntilFixed, "the keys of one quota lie on several nodes: leave braces out of limiter.prefix"),
    ("EXECABORT", UntilFixed, "a proxy makes transactions of the limiter's calls: connect to Redis directly"),
    ("NOPROTO", UntilFixed, "remove `protocol` from limiter.url, or use Redis 7"),
    ("DENIED", UntilFixed, "protected mode: set a password and `bind`, and put the password into limiter.url"),
    (
        "ARGUMENT",
        UntilFixed,
        "the limiter's function rejects this program's call: run one version everywhere, and report it",
    ),
    ("DAMAGED", Transient, "the limiter starts cold; a key of limiter.prefix was evicted, deleted or overwritten"),
];

/// Parts of the texts of plain `ERR` replies, each with its duration and fix.
const KNOWN_ERR_TEXTS: &[(&str, ErrorDuration, &str)] = &[
    ("user executing the script", UntilFixed, PERMISSIONS_FIX),
    (
        "Function not found",
        Transient,
        "functions are being flushed: stop the program that calls FUNCTION FLUSH repeatedly",
    ),
    ("max number of clients", Transient, "raise maxclients, or end unused connections"),
    ("cluster support disabled", UntilFixed, "it is no cluster: write redis:// or rediss:// in limiter.url"),
    ("SELECT is not allowed in cluster mode", UntilFixed, "remove the database number from limiter.url"),
    ("unknown command", UntilFixed, "use Redis 7 or later, without renamed commands"),
];

/// Transient errors become [`LimiterError::Unavailable`]; all others last until an operator fixes them.
pub(super) fn to_limiter_error(error: &RedisError, topology: RedisTopology) -> LimiterError {
    if let Some(text) = tls::explain_tls_error(error) {
        return LimiterError::Unavailable(text);
    }
    let server_text = server_text(error);
    let (duration, fix) = classify(error, topology);
    let text = if fix.is_empty() { server_text } else { format!("{server_text}; {fix}") };
    match duration {
        Transient => LimiterError::Unavailable(text),
        UntilFixed => LimiterError::Refused(text),
    }
}

/// Whether a new connection may succeed: after a transient error, and after credentials were changed.
pub(super) fn ends_connection(error: &RedisError) -> bool {
    let (duration, _) = classify(error, RedisTopology::Cluster);
    duration == Transient || matches!(error.code(), Some("NOAUTH" | "WRONGPASS")) || is_authentication(error)
}

fn classify(error: &RedisError, topology: RedisTopology) -> (ErrorDuration, &'static str) {
    if is_authentication(error) {
        return (UntilFixed, "correct user and password in limiter.url");
    }
    match error.kind() {
        ErrorKind::UnexpectedReturnType => {
            return (UntilFixed, "check that it is Redis 7 or later, without a proxy in between");
        }
        // Redis quotes the bytes of a command that it does not know, and they may be no valid text.
        ErrorKind::Parse => {
            return (Transient, "use Redis 7 or later, without renamed commands or a proxy in between");
        }
        ErrorKind::Io => return (Transient, "check that Redis runs and that the network allows the connection"),
        ErrorKind::InvalidClientConfig => return (UntilFixed, "correct limiter.url"),
        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask) => {
            return match topology {
                RedisTopology::Single => {
                    (UntilFixed, "it is one node of a cluster: write redis+cluster:// in limiter.url")
                }
                RedisTopology::Cluster => (Transient, "its keys moved to another node: retrying there"),
            };
        }
        _ => {}
    }
    let Some(code) = error.code() else { return (Transient, "") };
    if code == "ERR" {
        let detail = error.detail().unwrap_or_default();
        let known = KNOWN_ERR_TEXTS.iter().find(|(text, ..)| detail.contains(text));
        return known.map_or((UntilFixed, ""), |(_, duration, fix)| (*duration, *fix));
    }
    let known = KNOWN_CODES.iter().find(|(known, ..)| *known == code);
    known.map_or((Transient, ""), |(_, duration, fix)| (*duration, *fix))
}

fn is_authentication(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed
}

fn server_text(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {}", without_script(detail)),
        _ => without_error_number(&error.to_string()),
    }
}

/// The text without the script's hash that Redis appends, which helps no operator.
fn without_script(detail: &str) -> &str {
    detail.split(" script: ").next().unwrap_or(detail).trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error as the server would send it.
    fn reply(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    fn limiter_error_text(line: &str, topology: RedisTopology) -> (bool, String) {
        match to_limiter_error(&reply(line), topology) {
            LimiterError::Unavailable(text) => (false, text),
            LimiterError::Refused(text) => (true, text),
        }
    }

    #[test]
    fn every_known_error_is_shown_with_its_fix() {
        for (code, duration, fix) in KNOWN_CODES {
            let (refused, text) = limiter_error_text(
                &format!("{code} what it says. script: abc, on @user_script:1."),
                RedisTopology::Single,
            );
            assert_eq!(refused, *duration == UntilFixed, "{text}");
            assert_eq!(text, format!("{code} what it says; {fix}"));
        }
        for (known, duration, fix) in KNOWN_ERR_TEXTS {
            let (refused, text) = limiter_error_text(&format!("ERR {known}"), RedisTopology::Single);
            assert_eq!((refused, text), (*duration == UntilFixed, format!("ERR {known}; {fix}")));
        }
    }

    #[test]
    fn unknown_errors_are_shown_verbatim() {
        assert_eq!(
            limiter_error_text("ERR something new", RedisTopology::Single),
            (true, "ERR something new".to_owned())
        );
        assert_eq!(
            limiter_error_text("NEWS of tomorrow", RedisTopology::Single),
            (false, "NEWS of tomorrow".to_owned())
        );
    }

    #[test]
    fn moved_key_is_retried_only_in_a_cluster() {
        let (refused, text) = limiter_error_text("MOVED 7 127.0.0.1:7001", RedisTopology::Single);
        assert!(refused && text.contains("redis+cluster://"), "{text}");
        for line in
            ["MOVED 7 127.0.0.1:7001", "ASK 7 127.0.0.1:7001", "TRYAGAIN Multiple keys request during rehashing"]
        {
            assert!(!limiter_error_text(line, RedisTopology::Cluster).0);
            assert!(ends_connection(&reply(line)), "{line}");
        }
    }

    #[test]
    fn connection_is_kept_if_another_cannot_help() {
        for (line, ends) in [
            ("WRONGTYPE x", false),
            ("NOPERM x", false),
            ("ARGUMENT x", false),
            ("NOAUTH x", true),
            ("WRONGPASS x", true),
            ("READONLY x", true),
            ("LOADING x", true),
        ] {
            assert_eq!(ends_connection(&reply(line)), ends, "{line}");
        }
    }
}
