//! Network tests: networks fail under a deployment whose provider, backends and workers are separate hosts, in network
//! namespaces.
//!
//! The provider's own records decide, as in the fault tests. `tests/network/run` accepts a seed and a number of faults.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../faults/broker.rs"]
mod broker;
mod faults;
mod hosts;
mod inside;
#[path = "../faults/oracle.rs"]
mod oracle;
#[allow(dead_code, reason = "the fault harness uses the rest")]
#[path = "../faults/provider.rs"]
mod provider;
#[allow(dead_code, reason = "the fault harness uses the rest")]
#[path = "../faults/records.rs"]
mod records;
mod scenario;
mod stand;
#[path = "../support/mod.rs"]
mod support;
#[path = "../faults/watch.rs"]
mod watch;

use self::inside::inside;
use self::scenario::{ALIVE, KILLED, result};

/// The kernel of a running worker holds requests that have timed out, and must not deliver them.
#[test]
fn lost_packets_are_not_delivered_late() {
    inside("lost_packets_are_not_delivered_late", || {
        result().assert_exact(ALIVE);
    });
}

/// The kernel of a killed worker holds its requests, and must not deliver them.
#[test]
fn a_killed_worker_delivers_nothing_late() {
    inside("a_killed_worker_delivers_nothing_late", || {
        result().assert_exact(KILLED);
    });
}

/// Loss, delay, reordering, partitions, a worker killed behind one: all oracles of the fault tests.
#[test]
fn bad_network_causes_no_loss_duplicate_or_breach() {
    inside("bad_network_causes_no_loss_duplicate_or_breach", || {
        result().assert_faultless();
    });
}
