//! The user who runs this command, as the operating system knows it, for the audit.
//!
//! It is no proof: a program with write access to the database can write any name. It distinguishes honest users.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

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
}
