//! Invalid command lines: the exit code tells a usage error from a configuration error, and the message names the
//! mistake and the right form.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use assert_cmd::Command;

fn sluicegate(dir: &tempfile::TempDir) -> Command {
    let mut command = Command::cargo_bin("sluicegate").unwrap();
    command.env_clear().env("PATH", "/usr/bin:/bin").env("NO_COLOR", "1").current_dir(dir.path());
    command
}

/// Exit code, part of the message, and the command line.
const LINES: [(i32, &str, &str); 50] = [
    (2, "Usage: sluicegate", ""),
    (2, "'frobnicate'", "frobnicate"),
    (2, "'--bogus'", "run --bogus"),
    (2, "'extra'", "run extra"),
    (2, "'--jobs <JOBS>'", "demo --jobs many"),
    (2, "0 is not in 1..=1000000", "demo --jobs 0"),
    (2, "write N/DURATION, like 100/1s", "demo --limit 100"),
    (2, "between 1 ms and 31 days", "demo --limit 1/0s"),
    (2, "--limit 0/… is closed", "demo --limit 0/1s"),
    (2, "[possible values: blocking, requeue]", "demo --mode maybe"),
    (2, "'--seed <SEED>'", "demo --seed x"),
    (2, "'--no-connect'", "check --no-connect=1"),
    (2, "<FILE>", "provider apply"),
    (78, "missing.toml: No such file", "provider apply missing.toml"),
    (2, "<NAME>", "provider pause"),
    (2, "cannot be used with '--all'", "provider pause acme --all"),
    (2, "'frob'", "provider frob"),
    (2, "use 1 to 63 of a-z 0-9 _ -", "provider show Acme"),
    (2, "'--json'", "provider list --json=yes"),
    (2, "<RATE>", "limits set acme second"),
    (2, "write N/DURATION, like 100/1s", "limits set acme second 100"),
    (2, "use ms, s, m, h or d", "limits set acme second 100/1y"),
    (2, "at most 1000000", "limits set acme second 1000001/1s"),
    (2, "is not a number of requests", "limits set acme second 18446744073709551616/1s"),
    (2, "is too long", "limits set acme second 1/18446744073709551615d"),
    (2, "'-1'", "limits set acme second -1/1s"),
    (2, "<PROVIDER>", "limits peek"),
    (2, "--currency <CURRENCY>", "enqueue"),
    (2, "12.99 EUR is 1299", "enqueue --provider acme --amount x --currency EUR"),
    (2, "12.99 EUR is 1299", "enqueue --provider acme --amount 12.99 --currency EUR"),
    (2, "12.99 EUR is 1299", "enqueue --provider acme --amount 1e3 --currency EUR"),
    (2, "12.99 EUR is 1299", "enqueue --provider acme --amount -5 --currency EUR"),
    (2, "up to 2^63 - 1", "enqueue --provider acme --amount 9223372036854775808 --currency EUR"),
    (2, "use 1 to 63 of a-z 0-9 _ -", "enqueue --provider Acme --amount 1 --currency EUR"),
    (2, "'--amount <AMOUNT>'", "enqueue --file x --amount 1"),
    (2, "'--listen <LISTEN>'", "fake-provider --listen nowhere"),
    (2, "like 100/1s", "fake-provider --limit 5"),
    (2, "is not between 0 and 1", "fake-provider --error-rate 2"),
    (2, "write 250ms, 1s", "fake-provider --latency x"),
    (2, "'frob'", "dlq frob"),
    (2, "[possible values: bash", "completions tcsh"),
    (2, "'extra'", "man extra"),
    (2, "'--set <SECTION.KEY=VALUE>'", "--set"),
    (78, "Write --set section.key=value", "--set x provider list"),
    (78, "there is no such key", "--set a.b=c provider list"),
    (78, "Check --config and SLUICEGATE_CONFIG", "--config missing.toml provider list"),
    (78, "Check --config and SLUICEGATE_CONFIG", "--config . provider list"),
    (2, "'--config <FILE>'", "--config"),
    (2, "write it once", "--config a migrate --config b"),
    (2, "'now'", "migrate now"),
];

#[test]
fn invalid_command_line_is_reported_with_its_fix() {
    let dir = tempfile::tempdir().unwrap();
    for (code, words, line) in LINES {
        let output = sluicegate(&dir).args(line.split_whitespace()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}: {stderr}");
        assert!(stderr.contains(words), "{line}: {stderr}");
        assert!(output.stdout.is_empty() && !stderr.contains("panicked"), "{line}: {stderr}");
    }
}

#[test]
fn non_utf8_or_huge_arguments_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let long = "a".repeat(100_000);
    let not_text = OsStr::from_bytes(b"\xff\xfe");
    for (line, code) in [
        (vec![OsStr::new("provider"), OsStr::new("show"), not_text], 2),
        (vec![not_text], 2),
        (vec![OsStr::new("--set"), not_text, OsStr::new("migrate")], 2),
        (vec![OsStr::new("--config"), not_text, OsStr::new("migrate")], 78),
        (vec![OsStr::new("provider"), OsStr::new("show"), OsStr::new(&long)], 2),
        (vec![OsStr::new(&long)], 2),
        (vec![OsStr::new("limits"), OsStr::new("set"), OsStr::new("a"), OsStr::new("b"), OsStr::new(&long)], 2),
    ] {
        let output = sluicegate(&dir).args(&line).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{}", &stderr[..stderr.len().min(500)]);
        assert!(!stderr.contains("panicked") && output.stdout.is_empty());
    }
}

#[test]
fn foreign_files_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("deep.toml"), format!("a = {}{}", "[".repeat(100_000), "]".repeat(100_000)))
        .unwrap();
    std::fs::write(dir.path().join("bytes.toml"), b"\xff\xfe\x00\x01").unwrap();
    for (line, code) in [
        ("provider apply deep.toml", 78),
        ("provider apply bytes.toml", 78),
        ("check --no-connect --providers deep.toml", 78),
        ("--config deep.toml migrate", 78),
        ("--config bytes.toml migrate", 78),
        ("enqueue --provider acme --file missing.jsonl", 1),
    ] {
        let output = sluicegate(&dir).args(line.split_whitespace()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {}", &stderr[..stderr.len().min(500)]);
        assert!(!stderr.contains("panicked"), "{line}");
    }
}
