//! Hostile texts from outside in the output of every command: one line per row, no hidden characters, no parameter
//! value of a URL.
//!
//! The commands are those of `WALK`, so a new one is tested too.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use sluicegate::domain::printable::is_hidden;

use crate::every_command::{WALK, desk, has_json, leaf};
use crate::jobs::Desk;
use crate::support::hostile::{HOSTILE, SIGNATURE};

/// Replaces [`HOSTILE`] for comparison: every check that rejects the one rejects the other, so the number of lines is
/// equal.
const HARMLESS: &str = "x y z";
/// Command lines besides those of `WALK`.
const MORE: [&[&str]; 7] = [
    &["provider", "show", "bolt"],
    &["provider", "show", "acme", "--reveal"],
    &["limits", "history", "bolt"],
    &["jobs", "show", "waits"],
    &["jobs", "explain", "waits"],
    &["jobs", "explain", "dead-2"],
    &["jobs", "list", "--state", "review"],
];

fn hidden(text: &str) -> Vec<char> {
    text.chars().filter(|c| is_hidden(*c) && *c != '\n').collect()
}

/// Output of a command line, in both formats.
struct Shown {
    line: String,
    plain: String,
    errors: String,
    json: String,
}

async fn run(desk: &Desk, args: &[&str]) -> Shown {
    let args = [&["--set", "ops.listen=none"], args].concat();
    let ran = desk.run(&args).await;
    let ended = ran.result.as_ref().err().map(|error| desk.error_of(error)).unwrap_or_default();
    Shown { line: String::new(), plain: ran.out, errors: format!("{}{ended}", ran.err), json: String::new() }
}

/// Output of every command while all texts in the ledger are this one.
async fn walked(text: &str) -> Vec<Shown> {
    let (desk, file) = desk().await;
    let row = std::fs::read_to_string(&file).unwrap();
    let signed = |value: &str| row.replace("/of/this/provider", &format!("/of/this/provider?sig={value}"));
    std::fs::write(&file, signed(SIGNATURE)).unwrap();
    desk.run(&["provider", "apply", "--reset", &file]).await.result.unwrap();
    std::fs::write(&file, signed(&format!("{SIGNATURE}-2"))).unwrap();
    let mut shown = Vec::new();
    for line in WALK.iter().map(|(line, _)| *line).chain(MORE) {
        let args: Vec<&str> = line.iter().map(|word| if *word == "FILE" { file.as_str() } else { word }).collect();
        desk.fill_with(text).await;
        let mut both = Shown { line: line.join(" "), ..run(&desk, &args).await };
        if has_json(&leaf(line)) {
            both.json = run(&desk, &[&args[..], &["--json"]].concat()).await.plain;
        }
        shown.push(both);
    }
    shown
}

#[tokio::test]
async fn hostile_text_adds_no_output_lines() {
    let (hostile, harmless) = tokio::join!(walked(HOSTILE), walked(HARMLESS));
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (Shown { line, plain, errors, json }, like) in hostile.iter().zip(&harmless) {
        for (form, text) in [("stdout", plain), ("stderr", errors), ("json", json)] {
            let found = hidden(text);
            if !found.is_empty() {
                wrong.push(format!("{line}, {form}: {found:?}\n{text}"));
            }
            let is_revealed = line.contains("--reveal") && form != "stderr";
            if text.contains(SIGNATURE) != is_revealed {
                wrong.push(format!("{line}, {form}: shows the value of a parameter, or does not reveal it\n{text}"));
            }
            seen += usize::from(text.contains("\\u{202e}") || text.contains("\\u202e"));
        }
        for (form, text, like) in [("stdout", plain, &like.plain), ("stderr", errors, &like.errors)] {
            let (lines, wanted) = (text.lines().count(), like.lines().count());
            if lines != wanted {
                wrong.push(format!("{line}, {form}: {lines} lines instead of {wanted}\n{text}\n{like}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} views:\n{}", wrong.len(), wrong.join("\n\n"));
    assert!(seen > 20, "only {seen} outputs contained hostile texts");
}

/// A server that speaks enough PostgreSQL to return an error to every client.
fn database_that_refuses(message: &str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let fields = ["SFATAL", "VFATAL", "C57P03", &format!("M{message}")].map(|field| format!("{field}\0")).concat();
    let length = u32::try_from(4 + fields.len() + 1).unwrap().to_be_bytes();
    let refusal = [&b"E"[..], &length, fields.as_bytes(), b"\0"].concat();
    // The thread ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = [0; 8];
            // A client may first ask for TLS.
            while stream.read_exact(&mut head).is_ok() && head[4..] == 80_877_103_u32.to_be_bytes() {
                stream.write_all(b"N").unwrap_or_default();
            }
            stream.write_all(&refusal).unwrap_or_default();
        }
    });
    port
}

#[test]
fn backend_text_cannot_control_the_terminal() {
    let message = format!("starting {HOSTILE}");
    let url = format!("postgres://app:{SIGNATURE}@127.0.0.1:{}/app", database_that_refuses(&message));
    let dir = tempfile::tempdir().unwrap();
    let command = |line: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
        let others = ["--set", "ops.listen=none", "--set", "queue.url=amqp://127.0.0.1:1"];
        command.current_dir(dir.path()).env_clear().env("SLUICEGATE_DATABASE__URL", &url).args(others).args(line);
        command
    };
    for line in
        [&["check"][..], &["check", "--json"], &["jobs", "list"], &["jobs", "list", "--json"], &["provider", "list"]]
    {
        let output = command(line).output().unwrap();
        let text =
            format!("{}{}", String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(hidden(&text).is_empty(), "{line:?}: {text}");
        assert!(text.contains("starting x\\n"), "{line:?}: {text}");
        assert!(!text.contains(SIGNATURE), "{line:?}: {text}");
    }
    for format in ["log.format=text", "log.format=json"] {
        let mut worker = command(&["--set", format, "run"]).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = std::io::BufReader::new(worker.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("starting x") {
            line.clear();
            assert!(std::io::BufRead::read_line(&mut log, &mut line).unwrap() > 0, "{format}: the program has ended");
        }
        worker.kill().unwrap();
        worker.wait().unwrap();
        assert!(hidden(&line).is_empty(), "{format}: {line}");
        assert!(line.contains("y 0"), "{format}: one line: {line}");
    }
}

#[test]
fn hostile_argument_adds_no_error_lines() {
    let usage = |argument: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_sluicegate")).args(["jobs", "show", argument]).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let ((code, hostile), (_, harmless)) = (usage(HOSTILE), usage(HARMLESS));
    assert_eq!((code, hidden(&hostile)), (Some(2), Vec::new()), "{hostile}");
    assert_eq!(hostile.lines().count(), harmless.lines().count(), "{hostile}\n{harmless}");
}
