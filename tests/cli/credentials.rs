//! Credentials in provider rows and files, tested with the program itself: rejected or reported, and never printed.

use assert_cmd::Command;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::provider_row::ProviderRow;

const SECRET: &str = "aHVudGVyMg";

fn sluicegate(dir: &tempfile::TempDir) -> Command {
    let mut command = Command::cargo_bin("sluicegate").unwrap();
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(dir.path());
    command
}

fn file(more: &str) -> String {
    let limit = "[[provider.limit]]\nname = \"all\"\nmax_requests = 5\nwindow_ms = 1000\n";
    format!("[[provider]]\nname = \"acme\"\nurl = \"https://api.example.com/charges\"\n{more}\n{limit}")
}

/// Exit code and the whole output, whatever the width of its columns.
fn run(mut command: Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let printed = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code(), printed.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Results of `apply` and `check --providers` for a file.
fn judged(dir: &tempfile::TempDir, text: &str) -> [(Option<i32>, String); 2] {
    std::fs::write(dir.path().join("providers.toml"), text).unwrap();
    let with = |line: &[&str]| {
        let mut command = sluicegate(dir);
        command.args(line);
        run(command)
    };
    [with(&["provider", "apply", "providers.toml"]), with(&["check", "--no-connect", "--providers", "providers.toml"])]
}

#[test]
fn literal_credential_is_always_rejected() {
    let dir = tempfile::tempdir().unwrap();
    for (more, place) in [
        (format!("headers = {{ Authorization = \"Basic {SECRET}\" }}"), "the value of `Authorization`"),
        (format!("headers = {{ X-API-Key = \"{SECRET}\" }}"), "the value of `X-API-Key`"),
        (
            format!("lookup = {{ url = \"https://a.example/${{job:id}}?token={SECRET}\" }}"),
            "lookup.url: the parameter `token`",
        ),
    ] {
        for (exit, output) in judged(&dir, &file(&more)) {
            assert_eq!(exit, Some(78), "{output}");
            assert!(
                output.contains("provider `acme`: ") && output.contains(place) && output.contains("${file:PATH}"),
                "{output}"
            );
            assert!(!output.contains(SECRET), "{output}");
        }
    }
    assert!(!dir.path().join("sluicegate.db").exists());
    for (exit, output) in judged(&dir, &file("headers = { Authorization = \"Basic ${env:ACME}\", X-Version = \"3\" }"))
    {
        assert_eq!(exit, Some(0), "{output}");
    }
}

#[tokio::test]
async fn existing_literal_credential_is_reported_but_works() {
    let dir = tempfile::tempdir().unwrap();
    let database = Database::open(&format!("sqlite://{}/sluicegate.db", dir.path().display()), 1).unwrap();
    database.migrate().await.unwrap();
    let row: ProviderRow = serde_json::from_value(serde_json::json!({
        "name": "acme",
        "url": "https://api.example.com/charges",
        "headers": { "X-Auth-Token": SECRET },
        "limit": [{ "name": "all", "max_requests": 5, "window_ms": 1000 }],
    }))
    .unwrap();
    database.apply_settings(&[row], false).await.unwrap();
    assert!(database.load_settings().await.unwrap().providers[0].is_ok());
    database.close().await;
    let mut check = sluicegate(&dir);
    check.arg("check");
    let (exit, output) = run(check);
    assert_eq!(exit, Some(0), "{output}");
    assert!(
        output.contains("warning provider acme headers: the value of `X-Auth-Token`") && !output.contains(SECRET),
        "{output}"
    );
}

/// The output of `provider show` is incomplete; with `--reveal` it is complete.
#[test]
fn masked_url_is_always_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let whole = file("").replace("/charges", "/charges?version=3");
    assert_eq!(judged(&dir, &whole)[0].0, Some(0));
    let shown = |more: &[&str]| {
        let mut command = sluicegate(&dir);
        let output = command.args(["provider", "show", "acme"]).args(more).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let copied = shown(&[]);
    assert!(copied.contains("/charges?version=…"), "{copied}");
    for (exit, output) in judged(&dir, &copied) {
        assert_eq!(exit, Some(78), "{output}");
        assert!(output.contains("provider `acme`: url holds `…`") && output.contains("--reveal"), "{output}");
    }
    let (exit, output) = judged(&dir, &shown(&["--reveal"]))[0].clone();
    assert!(exit == Some(0) && output.contains("nothing to change"), "{output}");
}
