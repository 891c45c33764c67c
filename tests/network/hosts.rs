//! Hosts on one switch: each is a network namespace with one interface, and rules at the switch drop packets.
//!
//! Packets are dropped at the switch, because a host's own firewall would notify the sending process.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::support::process::{Host, Server};

const WIRE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/network/wire.py");

/// The switch with its hosts; this process is one of them.
pub struct Network {
    switch: Host,
    /// Processes that keep the namespaces of switch and hosts.
    _keepers: Vec<Server>,
    pub here: Host,
    hosts: Vec<Host>,
    wires: Mutex<Vec<Wire>>,
}

/// A bad cable between a host and the switch.
struct Wire {
    host: usize,
    _process: Server,
}

/// Effects of a bad cable on packets.
#[derive(Clone, Copy, Debug)]
pub struct Cable {
    /// Each packet is delayed by this and up to `jitter_ms` more, so packets overtake each other.
    pub delay_ms: u32,
    pub jitter_ms: u32,
    pub loss_percent: u32,
}

/// Packets that a rule of the switch drops.
#[derive(Clone, Debug)]
pub struct Drop {
    pub from: String,
    pub to: String,
    /// Port of the destination or the source; `None`: all ports.
    pub port: Option<u16>,
    pub percent: u32,
}

impl Network {
    /// This process gets the first address, the hosts the following ones.
    pub fn new(dir: &Path, hosts: usize) -> Self {
        let mut keepers = vec![keeper(dir, 0)];
        let switch = Host { address: String::new(), namespace: Some(keepers[0].pid) };
        sh(&switch, "ip link set lo up && ip link add br0 type bridge && ip link set br0 up");
        sh(&switch, "nft add table bridge faults");
        sh(&switch, "nft add chain bridge faults drops '{ type filter hook forward priority 0; policy accept; }'");
        let here = Host { address: "10.77.0.1".to_owned(), namespace: Some(std::process::id()) };
        plug(&switch, &here, 0);
        let mut others = Vec::new();
        for number in 1..=hosts {
            let keeper = keeper(dir, number);
            let host = Host { address: format!("10.77.0.{}", number + 1), namespace: Some(keeper.pid) };
            plug(&switch, &host, number);
            keepers.push(keeper);
            others.push(host);
        }
        Self { switch, _keepers: keepers, here, hosts: others, wires: Mutex::default() }
    }

    pub fn host(&self, number: usize) -> Host {
        self.hosts[number].clone()
    }

    /// Adds a rule.
    pub fn drop(&self, packets: &Drop) {
        let Drop { from, to, port, percent } = packets;
        let chance = if *percent < 100 { format!("numgen random mod 100 '<' {percent} ") } else { String::new() };
        let rule = |port: &str| {
            format!("nft add rule bridge faults drops ip saddr {from} ip daddr {to} {port}{chance}counter drop")
        };
        let ports = port
            .map_or(vec![String::new()], |port| ["dport", "sport"].map(|end| format!("tcp {end} {port} ")).to_vec());
        for port in ports {
            sh(&self.switch, &rule(&port));
        }
    }

    /// Drops all packets between two hosts, in both directions.
    pub fn part(&self, one: &str, other: &str, port: Option<u16>) {
        for (from, to) in [(one, other), (other, one)] {
            self.drop(&Drop { from: from.to_owned(), to: to.to_owned(), port, percent: 100 });
        }
    }

    /// Removes all rules and returns the number of packets that they dropped.
    pub fn heal(&self) -> u64 {
        let rules = sh(&self.switch, "nft list table bridge faults");
        sh(&self.switch, "nft flush chain bridge faults drops");
        let counted = rules.split("counter packets ").skip(1);
        counted.filter_map(|rest| rest.split(' ').next()?.parse::<u64>().ok()).sum()
    }

    /// Inserts a bad cable between a host and the switch.
    pub fn spoil(&self, dir: &Path, host: usize, cable: Cable) {
        let port = host + 1;
        let script = format!(
            "ip link add wire{port} type veth peer name plug{port} && ip link set wire{port} up && \
             ip link set plug{port} master br0 up && ip link set port{port} nomaster"
        );
        sh(&self.switch, &script);
        let Cable { delay_ms, jitter_ms, loss_percent } = cable;
        let numbers = [delay_ms, jitter_ms, loss_percent].map(|number| number.to_string());
        let [left, right] = ["port", "wire"].map(|name| format!("{name}{port}"));
        let mut command = vec!["/usr/bin/python3", WIRE, "carry", &left, &right];
        command.extend(numbers.iter().map(String::as_str));
        let command = self.switch.command(&command);
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let process = Server::start(&command, &[], &dir.join("wire.log"), None, "");
        process.await_that("the cable carries nothing", || process.log_text().contains("carries"));
        self.wires.lock().unwrap_or_else(PoisonError::into_inner).push(Wire { host, _process: process });
    }

    /// Replaces a host's bad cable by a good one.
    pub fn mend(&self, host: usize) {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner).retain(|wire| wire.host != host);
        let port = host + 1;
        sh(&self.switch, &format!("ip link del wire{port} && ip link set port{port} master br0"));
    }
}

/// A process whose only purpose is to keep its namespace.
fn keeper(dir: &Path, number: usize) -> Server {
    let log = dir.join(format!("host-{number}.log"));
    let keeper = Server::start(&["unshare", "--net", "sleep", "infinity"], &[], &log, None, "");
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let apart = || namespace(&keeper.pid.to_string()).is_some_and(|own| Some(own) != namespace("self"));
    keeper.await_that("no network namespace", apart);
    keeper
}

fn plug(switch: &Host, host: &Host, number: usize) {
    let pid = host.namespace.unwrap();
    sh(switch, &format!("ip link add port{number} type veth peer name eth0 netns {pid}"));
    sh(switch, &format!("ip link set port{number} master br0 up"));
    let address = &host.address;
    sh(host, &format!("ip link set lo up && ip addr add {address}/24 dev eth0 && ip link set eth0 up"));
    // A bad cable carries packets as they are, so their checksums must be complete before they leave.
    sh(host, &format!("/usr/bin/python3 {WIRE} prepare eth0"));
}

/// Runs a shell command on a host.
fn sh(host: &Host, script: &str) -> String {
    // The PATH of some users lacks the system's own programs.
    let script = format!("PATH=\"$PATH:/usr/sbin:/sbin\"; {script}");
    let command = host.command(&["sh", "-c", &script]);
    let output = Command::new(&command[0]).args(&command[1..]).output().expect("nsenter (util-linux) is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`{script}` failed; the kernel may lack what it needs: {error}");
    String::from_utf8(output.stdout).unwrap()
}
