//! A message of 64 KiB that would expand to gigabytes of form: the program's memory stays bounded. It rejects the
//! message with the reason and records the payment behind it.

use std::path::Path;
use std::process::Output;

use assert_cmd::Command;

/// Memory that a debug build uses anyway, plus a few bodies of 1 MiB.
const MEMORY_MAX_KB: u64 = 200_000;

fn sluicegate(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::cargo_bin("sluicegate").unwrap();
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(dir).args(args).output().unwrap()
}

fn printed(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs a program, and prints the most memory that it had, in kB.
const MEASURED: &str = "import resource, subprocess, sys\n\
    code = subprocess.call(sys.argv[1:])\n\
    print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n\
    sys.exit(code)";

/// The door judges the expansion before it records a payment, and needs little memory for that.
#[test]
fn oversized_expansion_is_rejected_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let row = "[[provider]]\nname = 'acme'\nurl = 'http://127.0.0.1:9/'\nrequest = { body = 'form' }\n\
         [[provider.limit]]\nname = 'second'\nmax_requests = 50\nwindow_ms = 1000\n";
    std::fs::write(at("acme.toml"), row).unwrap();
    let payload = format!("{{\"{}\":[{}]}}", "k".repeat(32_000), ["1"; 16_500].join(","));
    let huge = format!(r#"{{"id":"huge","amount":1,"currency":"EUR","payload":{payload}}}"#);
    assert!(huge.len() > 65_000 && huge.len() <= 65_536, "{}", huge.len());
    let behind = r#"{"id":"behind","amount":1,"currency":"EUR","payload":{"a":1}}"#;
    std::fs::write(at("jobs.jsonl"), format!("{huge}\n{behind}\n")).unwrap();
    let applied = sluicegate(dir.path(), &["provider", "apply", "acme.toml"]);
    assert!(applied.status.success(), "{}", printed(&applied));
    let program = assert_cmd::cargo::cargo_bin("sluicegate");
    let output = Command::new("/usr/bin/python3")
        .args(["-c", MEASURED])
        .arg(program)
        .args(["enqueue", "--provider", "acme", "--file", "jobs.jsonl"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let shown = printed(&output);
    assert!(
        shown.contains("1 recorded, 1 invalid") && shown.contains("line 1: too_large: payload: the request body"),
        "{shown}"
    );
    let peak_kb: u64 = shown.lines().find_map(|line| line.strip_prefix("peak ")).unwrap().parse().unwrap();
    assert!(peak_kb < MEMORY_MAX_KB, "{peak_kb} kB");
}
