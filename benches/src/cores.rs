//! The CPU cores of server and client: separate ones, so that neither waits for the other.
//!
//! Without Linux, `taskset` or a second core nothing is pinned, and the report says so.

use std::process::{Command, Stdio};

/// The server's core; the client has the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    pub server: usize,
    client: String,
}

impl Cores {
    /// Splits the cores that this process may use; `None` if that is not possible.
    pub fn detect() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        let cores = Self::split(&listed(list.trim())?)?;
        let found = Command::new("taskset").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        found.is_ok_and(|status| status.success()).then_some(cores)
    }

    fn split(allowed: &[usize]) -> Option<Self> {
        let (server, client) = allowed.split_last()?;
        let client: Vec<String> = client.iter().map(ToString::to_string).collect();
        (!client.is_empty()).then(|| Self { server: *server, client: client.join(",") })
    }

    /// Moves this process off the server's core. Returns whether that worked.
    pub fn leave_to_server(&self) -> bool {
        let pid = std::process::id().to_string();
        let mut command = Command::new("taskset");
        command.args(["--all-tasks", "--cpu-list", "--pid", &self.client, &pid]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

/// Parses `0-2,5` into numbers.
fn listed(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cores.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_has_the_last_core_for_itself() {
        let parted = |list: &str| Cores::split(&listed(list).unwrap());
        assert_eq!(parted("0-2,5"), Some(Cores { server: 5, client: "0,1,2".to_owned() }));
        assert_eq!(parted("3"), None);
        assert_eq!(listed("0,x"), None);
    }
}
