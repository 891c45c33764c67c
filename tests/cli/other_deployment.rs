//! Commands that read the process on `ops.listen`, which belongs to another deployment.

use std::path::Path;
use std::process::Output;

use assert_cmd::Command;

use crate::support::process::{Server, free_port};

const ASKING: [&[&str]; 4] =
    [&["status"], &["status", "--json"], &["limits", "peek", "acme"], &["jobs", "explain", "p1"]];

fn sluicegate(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::cargo_bin("sluicegate").unwrap();
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(dir).args(args).output().unwrap()
}

fn done(dir: &Path, args: &[&str]) -> String {
    let output = sluicegate(dir, args);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{args:?}: {out}{err}");
    out
}

/// A temporary directory with a database in it.
fn deployment() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let file = "[[provider]]\nname = 'acme'\nurl = 'https://acme.example/'\n\
                [[provider.limit]]\nname = 'second'\nmax_requests = 5\nwindow_ms = 1000\n";
    std::fs::write(dir.path().join("acme.toml"), file).unwrap();
    done(dir.path(), &["provider", "apply", "acme.toml"]);
    dir
}

fn running(dir: &Path, port: u16) -> Server {
    let program = assert_cmd::cargo::cargo_bin("sluicegate").display().to_string();
    let database = format!("database.url=sqlite://{}", dir.join("sluicegate.db").display());
    let listen = format!("ops.listen=127.0.0.1:{port}");
    let command = [&program, "--set", &database, "--set", &listen, "run"];
    let server = Server::start(&command, &[], &dir.join("run.log"), None, "");
    server.await_open(port);
    server
}

#[test]
fn a_command_refuses_the_process_of_another_deployment() {
    let (theirs, ours, nothing) = (deployment(), deployment(), tempfile::tempdir().unwrap());
    let port = free_port();
    let listen = format!("ops.listen=127.0.0.1:{port}");
    let _server = running(theirs.path(), port);
    for asking in ASKING {
        let args = [&["--set", &listen], asking].concat();
        if asking[0] != "jobs" {
            let output = done(theirs.path(), &args);
            assert!(output.contains("acme") || output.contains("second"), "{asking:?}: {output}");
        }
        let refused = sluicegate(ours.path(), &args);
        let (out, err) = (String::from_utf8(refused.stdout).unwrap(), String::from_utf8(refused.stderr).unwrap());
        assert_eq!(refused.status.code(), Some(1), "{asking:?}: {out}{err}");
        assert!(asking.contains(&"--json") || out.is_empty(), "{asking:?}: {out}");
        for needed in [
            "works for another deployment",
            &format!("127.0.0.1:{port}"),
            &theirs.path().join("sluicegate.db").display().to_string(),
            &ours.path().join("sluicegate.db").display().to_string(),
            "ops.listen",
            "--config",
        ] {
            assert!(err.contains(needed), "{asking:?}: no {needed:?} in {err}");
        }
        let absent = sluicegate(nothing.path(), &args);
        let err = String::from_utf8(absent.stderr).unwrap();
        assert_eq!(absent.status.code(), Some(1), "{asking:?}: {err}");
        assert!(err.contains("no deployment here") && err.contains("sluicegate.db"), "{asking:?}: {err}");
        assert!(!String::from_utf8(absent.stdout).unwrap().contains("acme"), "{asking:?}");
    }
}
