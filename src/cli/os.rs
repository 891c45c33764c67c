//! What the operating system knows and sends: the user of this command, for the audit, and signals.
//!
//! The user is no proof: a program with write access to the database can write any name. It distinguishes honest users.
//! A process that dies by a stray signal abandons its requests. So every request to stop drains: from terminals,
//! supervisors, a power failure, or a CPU time limit. The other signals are ignored and logged. Signals that report a
//! fault of the program itself (SIGSEGV, SIGABRT and the like) keep their default.

use std::os::unix::fs::MetadataExt as _;
use std::task::Poll;
use std::{fs, io};

use Reaction::{Drain, Ignore};
use futures_util::future::poll_fn;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// `user@host`; with `sudo` also the caller: `root (sudo alice)@host`.
pub fn user_at_host() -> String {
    let host = host();
    let user =
        process_owner().unwrap_or_else(|| from_environment("LOGNAME").unwrap_or_else(|| "unknown user".to_owned()));
    match from_environment("SUDO_USER") {
        Some(caller) => format!("{user} (sudo {caller})@{host}"),
        None => format!("{user}@{host}"),
    }
}

/// The name of this machine.
pub fn host() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| fs::read_to_string("/etc/hostname"));
    host.map_or_else(|_| "unknown host".to_owned(), |name| name.trim().to_owned())
}

/// The owner of this process, if there is `/proc`; a number when `/etc/passwd` does not name it.
fn process_owner() -> Option<String> {
    let uid = fs::metadata("/proc/self").ok()?.uid();
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    Some(passwd_name(&passwd, uid).unwrap_or_else(|| uid.to_string()))
}

fn passwd_name(passwd: &str, uid: u32) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, id) = (fields.next()?, fields.nth(1)?);
        (id.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

fn from_environment(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|name| !name.is_empty())
}

/// The reaction to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    Drain,
    Ignore,
}

/// Signals whose default is to end the process, by name, with their numbers on Linux (x86, ARM, RISC-V), see signal(7).
/// SIGPIPE is ignored by Rust's runtime.
fn handled_signals() -> impl Iterator<Item = (String, SignalKind, Reaction)> {
    let raw = SignalKind::from_raw;
    let named = [
        ("SIGTERM", SignalKind::terminate(), Drain),
        ("SIGINT", SignalKind::interrupt(), Drain),
        ("SIGHUP", SignalKind::hangup(), Drain),
        ("SIGQUIT", SignalKind::quit(), Drain),
        ("SIGUSR1", SignalKind::user_defined1(), Ignore),
        ("SIGUSR2", SignalKind::user_defined2(), Ignore),
        ("SIGALRM", SignalKind::alarm(), Ignore),
        ("SIGIO", SignalKind::io(), Ignore),
        ("SIGPWR", raw(30), Drain),
        // The soft limit of CPU time; the hard limit kills the process.
        ("SIGXCPU", raw(24), Drain),
        // A write beyond the file size limit fails like any other write.
        ("SIGXFSZ", raw(25), Ignore),
        ("SIGVTALRM", raw(26), Ignore),
        ("SIGPROF", raw(27), Ignore),
        ("SIGSTKFLT", raw(16), Ignore),
    ];
    let named = named.into_iter().map(|(name, kind, reaction)| (name.to_owned(), kind, reaction));
    // The first two of the kernel's real-time signals belong to the C library.
    named.chain((34..=64).map(move |number| (format!("real-time signal {number}"), raw(number), Ignore)))
}

/// The watched signals.
pub struct Signals(Vec<(String, Signal, Reaction)>);

impl Signals {
    /// Watches every signal of the table, except a SIGHUP that this process inherited as ignored (`nohup`).
    pub fn watch() -> io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let hangup = SignalKind::hangup();
        let is_watched = |kind: SignalKind| kind != hangup || !is_ignored(&status, hangup);
        let watched = handled_signals().filter(|(_, kind, _)| is_watched(*kind));
        watched.map(|(name, kind, reaction)| Ok((name, signal(kind)?, reaction))).collect::<io::Result<_>>().map(Self)
    }

    /// Waits for a stop signal and returns its name.
    pub async fn wait_for_stop(&mut self) -> String {
        loop {
            match self.next().await {
                (name, Drain) => return name,
                (name, Ignore) => tracing::warn!(signal = name, "signal ignored; SIGTERM stops this process"),
            }
        }
    }

    async fn next(&mut self) -> (String, Reaction) {
        poll_fn(|context| {
            for (name, signal, reaction) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    return Poll::Ready((name.clone(), *reaction));
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Whether `/proc/self/status` says that this process ignores the signal.
fn is_ignored(status: &str, kind: SignalKind) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let bit = u32::try_from(kind.as_raw_value() - 1).ok().and_then(|bit| 1_u64.checked_shl(bit));
    bit.is_some_and(|bit| mask & bit != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uid_maps_to_passwd_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nalice:x:1000:1000::/home/alice:/bin/sh\n";
        assert_eq!(passwd_name(passwd, 1_000).as_deref(), Some("alice"));
        assert_eq!(passwd_name(passwd, 7), None);
        assert!(user_at_host().contains('@'));
    }

    #[test]
    fn nohup_is_detected_from_ignored_signals() {
        let status = "Name:\tsluicegate\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, SignalKind::hangup()));
        assert!(!is_ignored(status, SignalKind::terminate()));
        assert!(!is_ignored("", SignalKind::hangup()));
    }
}
