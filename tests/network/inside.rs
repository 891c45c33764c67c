//! A second run of the test binary, in a network namespace of its own.
//!
//! The namespace, with everything in it, is removed with its last process. Without root it belongs to a user namespace.
//! There the user keeps its id (PostgreSQL refuses to run as root) and has the rights of the network's owner.

use std::process::Command;
use std::sync::OnceLock;

const INSIDE: &str = "SLUICEGATE_TESTS_INSIDE_NETWORK";

/// Runs a test in the namespace. Outside, it waits for the run inside, which all tests of the binary share, and reads
/// its result.
pub fn inside(name: &str, test: fn()) {
    static OUTPUT: OnceLock<String> = OnceLock::new();
    if std::env::var_os(INSIDE).is_some() {
        return test();
    }
    let output = OUTPUT.get_or_init(run);
    println!("{output}");
    assert!(output.contains(&format!("test {name} ... ok")), "failed inside the namespace: see above");
}

fn run() -> String {
    let mut command = Command::new("unshare");
    if !is_root() {
        command.args(["--user", "--map-current-user", "--keep-caps"]);
    }
    command.arg("--net").arg(std::env::current_exe().unwrap());
    command.args(std::env::args().skip(1).filter(|argument| argument != "--nocapture"));
    command.args(["--show-output", "--test-threads=3"]).env(INSIDE, "1");
    let output = command.output().unwrap_or_else(|error| panic!("{NEEDED} ({error})"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("\nrunning "), "{NEEDED}\n{text}");
    text
}

const NEEDED: &str = "no network namespace can be made: these tests need unshare and nsenter (util-linux), ip (iproute2), \
                      nft (nftables), a kernel with network and user namespaces, and root or the right to make user \
                      namespaces (sysctl kernel.unprivileged_userns_clone=1, no AppArmor restriction)";

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    String::from_utf8_lossy(&id.stdout).trim() == "0"
}
