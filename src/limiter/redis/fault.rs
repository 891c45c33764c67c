//! What a failed command means: whether asking again can mend it, and what a person should do.
//!
//! Refuses to pass on the library's wording alone: every answer that Redis is known to refuse with names its mend. Text
//! of the server is shown; addresses with credentials never get here.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::limiter::LimiterError;
use crate::tls;

/// What stands behind `limiter.url`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topology {
    Single,
    Cluster,
}

/// How long a refusal lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lasts {
    /// It passes, or another connection may not meet it.
    Awhile,
    /// Until somebody mends it.
    UntilMended,
}

use Lasts::{Awhile, UntilMended};

const ALLOW: &str = "allow limiter.url's user FCALL, FUNCTION LOAD, INFO, PING, CLUSTER SLOTS and what our functions call, on \
                     the keys of limiter.prefix";

/// First words of the replies by which Redis refuses, with the mend. The codes are those of Redis 7
/// (<https://github.com/redis/redis/blob/7.0/src/server.c>, `createSharedObjects`, and `cluster.c`).
const REFUSALS: &[(&str, Lasts, &str)] = &[
    ("OOM", Awhile, "raise maxmemory, or free memory; keep maxmemory-policy noeviction"),
    ("MISCONF", Awhile, "it cannot write to its disk: free space there and read its log"),
    ("READONLY", Awhile, "it is a replica: name the primary in limiter.url, or wait for the failover to end"),
    ("MASTERDOWN", Awhile, "it is a replica without its primary: name the primary in limiter.url"),
    ("NOREPLICAS", Awhile, "min-replicas-to-write is not met: bring its replicas back"),
    ("LOADING", Awhile, "it is reading its data from disk: wait"),
    ("BUSY", Awhile, "a script of another program holds it up: SCRIPT KILL, and give that program its own Redis"),
    ("UNKILLABLE", Awhile, "a script of another program has written and will not end: SHUTDOWN NOSAVE and restart it"),
    ("TRYAGAIN", Awhile, "its keys are being moved to another node: wait"),
    (
        "CLUSTERDOWN",
        Awhile,
        "a slot has no master: bring the lost node back (CLUSTER INFO); cluster-require-full-coverage no \
     keeps the others going",
    ),
    ("NOAUTH", UntilMended, "put user and password into limiter.url"),
    ("WRONGPASS", UntilMended, "mend user and password in limiter.url"),
    ("NOPERM", UntilMended, ALLOW),
    ("WRONGTYPE", UntilMended, "another program uses a key of ours: choose another limiter.prefix, or delete that key"),
    ("CROSSSLOT", UntilMended, "the keys of one quota lie on several nodes: leave braces out of limiter.prefix"),
    ("EXECABORT", UntilMended, "something between us and Redis makes transactions of our calls: connect directly"),
    ("NOPROTO", UntilMended, "remove `protocol` from limiter.url, or use Redis 7"),
    ("DENIED", UntilMended, "protected mode: set a password and `bind`, and put the password into limiter.url"),
    (
        "ARGUMENT",
        UntilMended,
        "our function does not understand this program: run one version everywhere, and report it",
    ),
    ("DAMAGED", Awhile, "the limiter starts cold; find out who writes to the keys of limiter.prefix"),
];

/// What the texts of plain `ERR` replies that are known say, with the mend.
const PLAIN: &[(&str, Lasts, &str)] = &[
    ("user executing the script", UntilMended, ALLOW),
    ("Function not found", Awhile, "functions are being flushed: stop whoever calls FUNCTION FLUSH again and again"),
    ("max number of clients", Awhile, "raise maxclients, or end connections that nobody needs"),
    ("cluster support disabled", UntilMended, "it is no cluster: write redis:// or rediss:// in limiter.url"),
    ("SELECT is not allowed in cluster mode", UntilMended, "remove the database number from limiter.url"),
    ("unknown command", UntilMended, "use Redis 7 or later, without renamed commands"),
];

/// Server states that pass or that another connection may not meet count as away; the rest will not mend by itself.
pub(super) fn fault(error: &RedisError, topology: Topology) -> LimiterError {
    if let Some(text) = tls::explain(error) {
        return LimiterError::Away(text);
    }
    let said = said(error);
    let (lasts, mend) = judge(error, topology);
    let text = if mend.is_empty() { said } else { format!("{said}; {mend}") };
    match lasts {
        Awhile => LimiterError::Away(text),
        UntilMended => LimiterError::Refused(text),
    }
}

/// Whether a new connection could do what this one could not: state that passed, and credentials that were changed.
pub(super) fn ends_link(error: &RedisError) -> bool {
    let (lasts, _) = judge(error, Topology::Cluster);
    lasts == Awhile || matches!(error.code(), Some("NOAUTH" | "WRONGPASS")) || is_authentication(error)
}

fn judge(error: &RedisError, topology: Topology) -> (Lasts, &'static str) {
    if is_authentication(error) {
        return (UntilMended, "mend user and password in limiter.url");
    }
    match error.kind() {
        ErrorKind::UnexpectedReturnType => return (UntilMended, "is it Redis 7 or later, and nothing in between?"),
        // Redis quotes the bytes of a command that it does not know, which are no text.
        ErrorKind::Parse => return (Awhile, "use Redis 7 or later, without renamed commands, and nothing in between"),
        ErrorKind::Io => return (Awhile, "is it running, and does the network let us through?"),
        ErrorKind::InvalidClientConfig => return (UntilMended, "mend limiter.url"),
        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask) => {
            return match topology {
                Topology::Single => (UntilMended, "it is one node of a cluster: write redis+cluster:// in limiter.url"),
                Topology::Cluster => (Awhile, "its keys have another node now"),
            };
        }
        _ => {}
    }
    let Some(code) = error.code() else { return (Awhile, "") };
    if code == "ERR" {
        let detail = error.detail().unwrap_or_default();
        let known = PLAIN.iter().find(|(text, ..)| detail.contains(text));
        return known.map_or((UntilMended, ""), |(_, lasts, mend)| (*lasts, *mend));
    }
    let known = REFUSALS.iter().find(|(known, ..)| *known == code);
    known.map_or((Awhile, ""), |(_, lasts, mend)| (*lasts, *mend))
}

fn is_authentication(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed
}

fn said(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {}", without_script(detail)),
        _ => error.to_string(),
    }
}

/// Redis appends which script it was, by its hash: of no use to anybody here.
fn without_script(detail: &str) -> &str {
    detail.split(" script: ").next().unwrap_or(detail).trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the server would have sent it.
    fn reply(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    fn shown(line: &str, topology: Topology) -> (bool, String) {
        match fault(&reply(line), topology) {
            LimiterError::Away(text) => (false, text),
            LimiterError::Refused(text) => (true, text),
        }
    }

    #[test]
    fn every_known_refusal_is_named_and_has_its_mend() {
        for (code, lasts, mend) in REFUSALS {
            let (refused, text) =
                shown(&format!("{code} what it says. script: abc, on @user_script:1."), Topology::Single);
            assert_eq!(refused, *lasts == UntilMended, "{text}");
            assert_eq!(text, format!("{code} what it says; {mend}"));
        }
        for (said, lasts, mend) in PLAIN {
            let (refused, text) = shown(&format!("ERR {said}"), Topology::Single);
            assert_eq!((refused, text), (*lasts == UntilMended, format!("ERR {said}; {mend}")));
        }
    }

    #[test]
    fn what_is_not_known_is_told_as_it_is() {
        assert_eq!(shown("ERR something new", Topology::Single), (true, "ERR something new".to_owned()));
        assert_eq!(shown("NEWS of tomorrow", Topology::Single), (false, "NEWS of tomorrow".to_owned()));
    }

    #[test]
    fn a_key_that_moved_is_asked_for_anew_in_a_cluster_and_a_wrong_address_without_one() {
        let (refused, text) = shown("MOVED 7 127.0.0.1:7001", Topology::Single);
        assert!(refused && text.contains("redis+cluster://"), "{text}");
        for line in
            ["MOVED 7 127.0.0.1:7001", "ASK 7 127.0.0.1:7001", "TRYAGAIN Multiple keys request during rehashing"]
        {
            assert!(!shown(line, Topology::Cluster).0);
            assert!(ends_link(&reply(line)), "{line}");
        }
    }

    #[test]
    fn a_link_is_kept_only_where_another_would_hear_the_same() {
        for (line, ends) in [
            ("WRONGTYPE x", false),
            ("NOPERM x", false),
            ("ARGUMENT x", false),
            ("NOAUTH x", true),
            ("WRONGPASS x", true),
            ("READONLY x", true),
            ("LOADING x", true),
        ] {
            assert_eq!(ends_link(&reply(line)), ends, "{line}");
        }
    }
}
