//! A message of 64 KiB that would expand to gigabytes of form: the program's memory stays bounded. It rejects the
//! message with the reason and makes the payment behind it.

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use assert_cmd::Command;

use crate::support::process::{Server, free_port};

/// Memory that a debug build uses anyway, plus a few bodies of 1 MiB.
const MEMORY_MAX_KB: u64 = 200_000;

fn sluicegate(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::cargo_bin("sluicegate").unwrap();
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(dir).args(args).output().unwrap()
}

fn printed(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Peak memory of a process, in kB. <https://man7.org/linux/man-pages/man5/proc_pid_status.5.html>
fn peak_kb(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the worker is running");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn oversized_expansion_does_not_kill_the_worker() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let program = assert_cmd::cargo::cargo_bin("sluicegate").display().to_string();
    let (provider, ops) = (free_port(), free_port());
    let listen = format!("127.0.0.1:{provider}");
    let command = [&program, "fake-provider", "--listen", &listen, "--limit", "100/1s"];
    let fake = Server::start(&command, &[], &at("fake.log"), None, "");
    fake.await_open(provider);
    let row = format!(
        "[[provider]]\nname = 'acme'\nurl = 'http://{listen}/'\nrequest = {{ body = 'form' }}\n\
         [[provider.limit]]\nname = 'second'\nmax_requests = 50\nwindow_ms = 1000\n"
    );
    std::fs::write(at("acme.toml"), row).unwrap();
    let payload = format!("{{\"{}\":[{}]}}", "k".repeat(32_000), ["1"; 16_500].join(","));
    let huge = format!(r#"{{"id":"huge","amount":1,"currency":"EUR","payload":{payload}}}"#);
    assert!(huge.len() > 65_000 && huge.len() <= 65_536, "{}", huge.len());
    let behind = r#"{"id":"behind","amount":1,"currency":"EUR","payload":{"a":1}}"#;
    std::fs::write(at("jobs.jsonl"), format!("{huge}\n{behind}\n")).unwrap();
    for args in
        [["provider", "apply", "acme.toml"].as_slice(), &["enqueue", "--provider", "acme", "--file", "jobs.jsonl"]]
    {
        let output = sluicegate(dir.path(), args);
        assert!(output.status.success(), "{args:?}: {}", printed(&output));
    }
    let (database, set) =
        (format!("database.url=sqlite://{}", at("sluicegate.db").display()), format!("ops.listen=127.0.0.1:{ops}"));
    let worker = Server::start(&[&program, "--set", &database, "--set", &set, "run"], &[], &at("run.log"), None, "");
    worker.await_open(ops);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let peak_kb = peak_kb(worker.pid);
        assert!(peak_kb < MEMORY_MAX_KB, "{peak_kb} kB");
        let (explained, shown) = (
            printed(&sluicegate(dir.path(), &["--set", &set, "jobs", "explain", "huge"])),
            printed(&sluicegate(dir.path(), &["jobs", "show", "behind", "--json"])),
        );
        if explained.contains("too_large") && shown.contains(r#""state": "succeeded""#) {
            assert!(explained.contains("payload: the request body"), "{explained}");
            break;
        }
        let log = std::fs::read_to_string(&worker.log).unwrap_or_default();
        assert!(Instant::now() < deadline, "{explained}\n{shown}\n{log}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
