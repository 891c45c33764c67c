//! `simulate` as a process, on provider files: variants compared, and errors in the arguments.

use std::path::PathBuf;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"https://acme.example.com/charges\"\n\
    idempotency_retention_s = 86400\n\n[[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\n\
    window_ms = 1000\n\n[[provider.limit]]\nname = \"per-account\"\nscope = \"account\"\nmax_requests = 5\n\
    window_ms = 10000\n";

struct Desk(TempDir);

impl Desk {
    fn new() -> Self {
        let desk = Self(tempfile::tempdir().unwrap());
        desk.put("providers.toml", ROWS);
        desk
    }

    fn put(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Exit code, stdout and stderr.
    fn run(&self, line: &[&str]) -> (i32, String, String) {
        let mut command = Command::cargo_bin("sluicegate").unwrap();
        command.env_clear().current_dir(self.0.path()).args(["simulate", "--providers", "providers.toml"]).args(line);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    fn json(&self, line: &[&str]) -> Value {
        let (code, out, err) = self.run(&[line, &["--json"]].concat());
        assert_eq!(code, 0, "{out}{err}");
        serde_json::from_str(&out).unwrap()
    }
}

const START: [&str; 2] = ["--start", "2026-11-30T12:00:00Z"];

#[test]
fn variants_are_compared_with_clear_times() {
    let desk = Desk::new();
    let line = [&START[..], &["--burst", "2000", "--variant", "at 50/s: limit.per-second=50/1s"]];
    let (code, out, err) = desk.run(&line.concat());
    assert_eq!(code, 0, "{err}");
    let of = |title: &str| {
        let line = out.lines().find(|line| line.trim_start().starts_with(title));
        line.unwrap_or_else(|| panic!("{title}: {out}")).to_owned()
    };
    assert!(of("as it is").contains("at 50/s"), "{out}");
    assert!(of("most in a window, per-second").contains("100 of 100 (100/1s)"), "{out}");
    assert!(of("clears at").contains("12:00:2") && of("clears at").contains("UTC"), "{out}");
}

#[test]
fn unmeasured_values_are_not_printed() {
    let desk = Desk::new();
    // Half a turn of the limit has no rate.
    let (code, out, err) = desk.run(&[&START[..], &["--burst", "50"]].concat());
    let of = |title: &str| out.lines().find(|line| line.trim_start().starts_with(title)).unwrap().to_owned();
    assert_eq!(code, 0, "{err}");
    assert!(of("rate").contains('–') && of("utilisation").contains('–') && !of("wait p50").contains('–'), "{out}");
    // No request was sent, so there is no wait to report.
    let shut = desk.json(&[&START[..], &["--burst", "5", "--with", "limit.per-second=0/1s"]].concat());
    let figures = &shut["variants"][0]["figures"];
    assert_eq!((&figures["requests"], &figures["wait"]["p50_ms"]), (&Value::from(0), &Value::Null), "{shut}");
    assert_eq!(figures["utilisation"], Value::Null);
}

#[test]
fn simulation_json_is_reproducible() {
    let desk = Desk::new();
    let line = [&START[..], &["--rate", "80/s", "--for", "30s", "--variant", "limit.per-second=40/1s"]].concat();
    let json = desk.json(&line);
    assert_eq!(json, desk.json(&line));
    assert_ne!(json, desk.json(&[&line[..], &["--seed", "2"]].concat()));
    let [now, half] = &json["variants"].as_array().unwrap()[..] else { panic!("{json}") };
    assert_eq!((now["holds"].as_bool(), half["name"].as_str()), (Some(true), Some("limit.per-second=40/1s")));
    // Jobs come at 80/s for half a minute. At 100/s more than half of them leave in time; at 40/s they wait.
    assert!(now["figures"]["wait"]["p50_ms"].as_u64().unwrap() < 1_000, "{json}");
    assert!(half["figures"]["clears_in_ms"].as_u64().unwrap() > 55_000, "{json}");
    assert!(half["drained_at"].as_str().unwrap().starts_with("2026-11-30T12:0"), "{json}");
    assert_eq!(half["figures"]["windows"][1]["largest"], 40, "{json}");
}

#[test]
fn burst_accepts_common_number_formats() {
    let desk = Desk::new();
    let figures = |burst| desk.json(&[&START[..], &["--burst", burst]].concat())["variants"][0]["figures"].clone();
    let plain = figures("2000");
    assert_eq!(plain["succeeded"], 2_000);
    assert_eq!((&figures("2_000"), &figures("2k")), (&plain, &plain));
    let (_, _, err) = desk.run(&["--burst", "1"]);
    assert!(err.starts_with("1 job simulated in "), "{err}");
}

#[test]
fn trace_provides_accounts_and_deadlines() {
    let desk = Desk::new();
    let lines: String = (0..20).map(|n| format!("{},busy,1,0,{}\n", 1_000 + n, 13_000)).collect();
    desk.put("trace.csv", &format!("at_ms,account,cost,priority,expires_at_ms\n{lines}"));
    let json = desk.json(&[&START[..], &["--trace", "trace.csv"]].concat());
    let figures = &json["variants"][0]["figures"];
    // Five at once and five after ten seconds; the others miss their deadline.
    assert_eq!((figures["succeeded"].as_u64(), figures["deadlines_missed"].as_u64()), (Some(10), Some(10)), "{json}");
    assert_eq!(figures["windows"][0]["account"], "busy");
}

#[test]
fn invalid_simulation_input_is_reported() {
    let desk = Desk::new();
    let trace = desk.put("bad.csv", "at_ms,cost\n1,1\nsoon,1\n2,0\n");
    let latency = desk.put("latency.csv", "ms\n1\nfast\n");
    let (trace, latency) = (trace.to_str().unwrap(), latency.to_str().unwrap());
    for (line, words) in
        [(vec!["--trace", trace], "bad.csv:3: at_ms is `soon`"), (vec!["--trace", trace], "bad.csv:4: cost is 0")]
    {
        let (code, out, err) = desk.run(&line);
        assert_eq!((code, out.as_str()), (78, ""), "{line:?}: {err}");
        assert!(err.contains(words), "{line:?}: {err}");
    }
    for (line, words) in [
        (vec!["--burst", "10", "--latency", latency], "latency.csv: line 3: `fast`"),
        (vec!["--burst", "10", "--latency", "80ms..20ms"], "--latency: `80ms..20ms` ends before it begins"),
        (vec!["--burst", "10", "--with", "limit=5/1s"], "name the limit, as limit.NAME=…: per-second, per-account"),
        (vec!["--burst", "10", "--with", "limit.x=5/1s"], "there is no limit `x`"),
        (vec!["--burst", "10", "--with", "workrs=5"], "unknown field `workrs`"),
        (vec!["--burst", "10", "--with", "workers=0"], "workers is 0"),
        (vec!["--burst", "10", "--with", "paused=true"], "acme is paused: add --with paused=false"),
        (vec!["--burst", "10", "--variant", "odd: mode=drop"], "odd: mode is `drop`"),
        (vec!["--burst", "0"], "no job arrives"),
        (vec!["--burst", "300 k"], "`300 k` is not a number of jobs: write 5000, 300_000 or 300k"),
        (vec!["--burst", "99999999"], "at most 10000000 jobs"),
        (vec!["--rate", "30000/1s", "--for", "6m"], "at most 10000000 jobs"),
        (vec!["--burst", "1", "--faults", "2"], "--faults: `2` must be a share"),
        (vec!["--burst", "1", "--with", "limit.x=5/1s", "--with", "workrs=5"], "--with workrs=5: unknown field"),
        (vec!["--burst", "1", "--with", "limit.x=5/1s", "--with", "workrs=5"], "--with limit.x=5/1s: there is no"),
    ] {
        let (code, out, err) = desk.run(&line);
        assert_eq!((code, out.as_str()), (2, ""), "{line:?}: {err}");
        assert!(err.contains(words), "{line:?}: {err}");
    }
    let (code, _, err) = desk.run(&["--provider", "other", "--burst", "1"]);
    let words = "there is no provider `other` in providers.toml: it has acme";
    assert!(code == 2 && err.contains(words), "{code} {err}");
    desk.put("providers.toml", &format!("{ROWS}{}", ROWS.replace("acme", "bolt")));
    let (code, _, err) = desk.run(&["--burst", "1"]);
    assert!(code == 2 && err.contains("name one with --provider: acme, bolt"), "{code} {err}");
    for line in [&["--rate", "5/s"][..], &[], &["--history", "today"], &["--burst", "x"]] {
        assert_eq!(desk.run(line).0, 2, "{line:?}");
    }
}
