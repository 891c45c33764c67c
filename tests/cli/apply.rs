//! `provider apply` on the embedded backends: rows that no worker could use, and pauses that a file does not mention.

use sluicegate::cli::Exit;

use crate::jobs::{Desk, exit};

/// Secrets that the rows of these tests may send.
const GRANTED: &str =
    "outbound.secrets=env:SLUICEGATE_NO_SUCH_VARIABLE@x.example,file:/nowhere/key@x.example,env:PATH@x.example";
const LIMIT: &str = "[[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n";

/// Lines without which a row has warnings.
const SAFE: &str = "idempotency_retention_s = 86400\nreuse_connections = false\n\
                    statuses = { 200 = \"accepted\", 202 = \"in_progress\" }";

/// A file with one provider `acme` that has these additional lines.
fn acme(desk: &Desk, lines: &str) -> String {
    let url = if lines.contains("url = ") { "" } else { "url = \"https://x.example/\"\n" };
    desk.file(&format!("[[provider]]\nname = \"acme\"\n{url}{lines}\n{LIMIT}"))
}

#[tokio::test]
async fn unusable_rows_are_not_applied() {
    let desk = Desk::open().await;
    for (lines, words) in [
        (
            "headers = { A = \"${job:amount}\" }",
            "header `A`: placeholders of a header can only be ${env:NAME}, ${file:PATH} and ${job:account}",
        ),
        ("headers = { A = \"x${\" }", "header `A`: a `${` is never closed"),
        ("headers = { A = \"${env:}\" }", "header `A`: placeholders of a header can only be ${env:NAME}"),
        ("headers = { Host = \"x\" }", "header `Host`: is set by the client"),
        ("headers = { 'Idempotency-Key' = \"x\" }", "header `Idempotency-Key`: is set by the client"),
        ("headers = { 'Content-Type' = \"${env:X}\" }", "header `content-type`: must be plain text"),
        ("request = { template = { a = \"${nothing}\" } }", "request template: "),
        // A URL that is blocked in this configuration does not hide a header that is invalid in every one.
        ("url = \"http://10.0.0.1/c\"\nheaders = { Host = \"x\" }", "header `Host`: is set by the client"),
    ] {
        for rest in [&[][..], &["--dry-run"]] {
            let ran = desk.run(&[&["provider", "apply", &acme(&desk, lines)], rest].concat()).await;
            let (error, code) = ran.failure();
            assert_eq!(code, Exit::BadConfiguration, "{lines}: {error}");
            assert!(error.contains("provider `acme`: ") && error.contains(words), "{lines}: {error}");
        }
    }
    let both = acme(&desk, "headers = { A = \"x${\", Host = \"x\" }");
    let (error, _) = desk.run(&["provider", "apply", &both]).await.failure();
    assert!(error.contains("header `A`") && error.contains("header `Host`"), "not every problem is reported: {error}");
    assert_eq!(desk.run(&["provider", "show", "acme", "--json"]).await.json()["headers"], serde_json::json!({}));
}

#[tokio::test]
async fn locally_missing_secret_is_a_warning() {
    let desk = Desk::open().await;
    for (lines, words) in [
        ("headers = { A = \"${env:SLUICEGATE_NO_SUCH_VARIABLE}\" }", "`SLUICEGATE_NO_SUCH_VARIABLE` is not set"),
        ("headers = { A = \"${file:/nowhere/key}\" }", "file `/nowhere/key`"),
        (
            "headers = { A = \"${env:HOME}\" }",
            "header `a`: `${env:HOME}` may not be sent to x.example: to allow it, add \
             \"env:HOME@x.example\" to outbound.secrets in the workers' configuration",
        ),
        ("url = \"http://10.0.0.1/c\"", "plain http: use https, or add `http://10.0.0.1:80` to outbound.allow"),
    ] {
        let ran = desk.run_set(GRANTED, &["provider", "apply", &acme(&desk, lines)]).await;
        assert_eq!(exit(&ran), Exit::Success, "{lines}: {:?}", ran.result);
        assert!(ran.err.contains("warning: provider `acme`: ") && ran.err.contains(words), "{lines}: {}", ran.err);
        assert!(ran.out.contains("acme: changed ") && !ran.out.contains("warning"), "{lines}: {}", ran.out);
    }
    let path = acme(&desk, &format!("headers = {{ A = \"${{env:PATH}}\" }}\n{SAFE}"));
    let fine = desk.run_set(GRANTED, &["provider", "apply", &path]).await;
    assert!(!fine.err.contains("warning"), "{}", fine.err);
    // Without any grant yet, the message gives the whole line to add.
    let none = desk.run(&["provider", "apply", &path]).await;
    assert!(none.err.contains("write `secrets = [\"env:PATH@x.example\"]` below [outbound]"), "{}", none.err);
}

#[tokio::test]
async fn undecided_success_is_a_warning() {
    let desk = Desk::open().await;
    let warned = desk.run(&["provider", "apply", &acme(&desk, "")]).await;
    assert_eq!(exit(&warned), Exit::Success);
    for words in ["no case for 200: a refusal in the body counts as paid", "no case for 202: it counts as in progress"]
    {
        let line = warned.err.lines().find(|line| line.contains(words));
        assert!(line.is_some_and(|line| line.starts_with("warning: provider `acme`: ")), "{words}: {}", warned.err);
    }
    let decided = desk.run(&["provider", "apply", &acme(&desk, SAFE)]).await;
    assert!(!decided.err.contains("warning"), "{}", decided.err);
}

/// The pace is a comment, so the output is still a valid provider file.
#[tokio::test]
async fn show_says_the_pace() {
    let desk = Desk::open().await;
    let slow = acme(&desk, "leak_per_second = 5.0");
    assert_eq!(exit(&desk.run(&["provider", "apply", &slow]).await), Exit::Success);
    let shown = desk.run(&["provider", "show", "acme"]).await.out;
    let pace = shown.lines().next().unwrap();
    assert!(
        pace.starts_with("# pace: up to ") && pace.ends_with("egress 5/s per process (leak_per_second)"),
        "{shown}"
    );
    assert_eq!(desk.run(&["provider", "apply", &desk.file(&shown)]).await.out, "");
    let json = desk.run(&["provider", "show", "acme", "--json"]).await.json();
    assert_eq!((&json["leak_per_second"], &json["pace"]["egress_per_s"]), (&5.0.into(), &5.0.into()));
    assert_eq!(json["pace"]["text"], pace.trim_start_matches("# pace: "));
}

#[tokio::test]
async fn apply_keeps_an_unmentioned_pause() {
    let desk = Desk::open().await;
    let paused = async || desk.run(&["provider", "show", "acme", "--json"]).await.json()["paused"] == true;
    let file = acme(&desk, "workers = 8");
    assert_eq!(exit(&desk.run(&["provider", "pause", "acme", "--because", "incident 77"]).await), Exit::Success);
    for (rest, out) in
        [(&["--dry-run"][..], "acme: changed workers 32 → 8\n"), (&[], "acme: changed workers 32 → 8\n"), (&[], "")]
    {
        let ran = desk.run(&[&["provider", "apply", &file], rest].concat()).await;
        assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Success, out), "{}", ran.err);
        let words =
            "acme stays paused, because the file does not set `paused`: `sluicegate provider resume acme` resumes it";
        assert!(ran.err.contains(words), "{}", ran.err);
        assert!(paused().await);
    }
    // A `paused` in the file applies.
    let ran = desk.run(&["provider", "apply", &acme(&desk, "workers = 8\npaused = false")]).await;
    assert_eq!(ran.out, "acme: changed paused true → false\n");
    assert!(!ran.err.contains("stays paused") && !paused().await, "{}", ran.err);
    let ran = desk.run(&["provider", "apply", &acme(&desk, "workers = 8\npaused = true")]).await;
    assert_eq!(ran.out, "acme: changed paused false → true\n");
    assert!(!ran.err.contains("stays paused") && paused().await, "{}", ran.err);
    // A new row gets the default.
    let new = desk.file(&format!("[[provider]]\nname = \"new\"\nurl = \"https://x.example/\"\n{LIMIT}"));
    assert!(!desk.run(&["provider", "apply", &new]).await.err.contains("stays paused"));
    assert_eq!(desk.run(&["provider", "show", "new", "--json"]).await.json()["paused"], false);
}

/// A limit of requests in flight has no window, in the file, the database and every output.
#[tokio::test]
async fn concurrency_limits_are_applied_and_shown() {
    let desk = Desk::open().await;
    let slots = slots_of("slots");
    let own = "[[provider.limit]]\nname = \"own\"\nalgorithm = \"concurrency\"\nmax_requests = 2\nscope = \"account\"\n\
               [[provider.account]]\naccount = \"big\"\nlimit_name = \"own\"\nrule = \"limit\"\nmax_requests = 4\n";
    let file = acme(&desk, &format!("{slots}{own}"));
    let ran = desk.run(&["provider", "apply", &file]).await;
    assert_eq!(exit(&ran), Exit::Success, "{}", ran.err);
    for words in ["limit slots added 5 at once", "limit own added 2 at once per account", "limit 4 at once"] {
        assert!(ran.out.contains(words), "{words}: {}", ran.out);
    }
    let shown = desk.run(&["provider", "show", "acme"]).await.out;
    assert!(shown.starts_with("# pace: up to 100/s (limit per-second), 5 at once (limit slots); "), "{shown}");
    assert_eq!(desk.run(&["provider", "apply", &desk.file(&shown)]).await.out, "", "a round trip changes nothing");
    let set = desk.run(&["limits", "set", "acme", "slots", "7 at once", "--because", "agreed"]).await;
    assert_eq!(exit(&set), Exit::Success, "{}", set.err);
    let listed = desk.run(&["limits", "list", "--json"]).await.json();
    let slots = listed.as_array().unwrap().iter().find(|line| line["limit"] == "slots").unwrap();
    assert_eq!((&slots["rate"], &slots["window_ms"]), (&"7 at once".into(), &serde_json::Value::Null));
    let history = desk.run(&["limits", "history", "acme"]).await.out;
    assert!(history.contains("limit slots added, 5 at once") && history.contains("max_requests 5 → 7"), "{history}");
    for (limit, rate, words) in [
        ("slots", "7/1s", "window_ms is not supported by `concurrency`"),
        ("per-second", "7 at once", "window_ms is missing"),
    ] {
        let (error, _) = desk.run(&["limits", "set", "acme", limit, rate, "--because", "a typo"]).await.failure();
        assert!(error.contains(words), "{limit} {rate}: {error}");
    }
    let check = desk.run(&["check", "--no-connect"]).await;
    assert!(!check.out.contains("limit slots uses"), "a warning about its algorithm: {}", check.out);
    let given = desk.run(&["provider", "apply", &acme(&desk, &format!("{}window_ms = 1000\n", slots_of("x")))]).await;
    let (error, code) = given.failure();
    assert_eq!(code, Exit::BadConfiguration);
    assert!(error.contains("limit `x`: window_ms is not supported by `concurrency`"), "{error}");
}

fn slots_of(name: &str) -> String {
    format!("[[provider.limit]]\nname = \"{name}\"\nalgorithm = \"concurrency\"\nmax_requests = 5\n")
}

/// Each message names the change, its author and the reason. With `--reset` the file wins.
#[tokio::test]
async fn changes_by_hand_stay_or_stop_the_file() {
    let desk = Desk::open().await;
    let apply = async |lines: &str, flags: &[&str]| {
        desk.run(&[&["provider", "apply", &acme(&desk, lines)], flags].concat()).await
    };
    assert_eq!(exit(&apply("workers = 8", &[]).await), Exit::Success);
    for line in [
        &["accounts", "set", "acme", "shop-7", "blocked", "--because", "fraud, ticket 12"][..],
        &["limits", "set", "acme", "per-second", "50/1s", "--because", "they asked"],
    ] {
        let ran = desk.run(line).await;
        assert_eq!(exit(&ran), Exit::Success, "{line:?}: {}", ran.err);
    }
    let kept = apply("workers = 9\naccounts = []", &[]).await;
    assert_eq!((exit(&kept), kept.out.as_str()), (Exit::Success, "acme: changed workers 8 → 9\n"), "{}", kept.err);
    for words in [
        "acme: account shop-7 stays blocked, changed by ",
        " (fraud, ticket 12); the file says none",
        "acme: rate of limit per-second stays 50/1s, changed by ",
        " (they asked); the file says 100/1s",
    ] {
        assert!(kept.err.contains(words), "{words}: {}", kept.err);
    }
    let refuse = "workers = 10\n[[provider.account]]\naccount = \"shop-7\"\nrule = \"refuse\"\n";
    let dry = apply(refuse, &["--dry-run"]).await.failure();
    let (error, code) = apply(refuse, &[]).await.failure();
    assert_eq!((code, &dry.0.split_once(':').unwrap().1), (Exit::Failed, &error.split_once(':').unwrap().1));
    for words in [
        "nothing was applied",
        "--reset",
        "acme: account shop-7 is blocked, changed by ",
        "(fraud, ticket 12); the file says refuse",
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
    assert_eq!(desk.run(&["provider", "show", "acme", "--json"]).await.json()["workers"], 9);
    let again = apply("workers = 9\naccounts = []", &["--json"]).await.json();
    let account = again["kept"].as_array().unwrap().iter().find(|kept| kept["what"] == "account shop-7").unwrap();
    assert_eq!((&account["by_hand"], &account["because"]), (&"blocked".into(), &"fraud, ticket 12".into()));
    assert_eq!(exit(&apply(refuse, &["--reset"]).await), Exit::Success);
    let rules = desk.run(&["accounts", "list", "acme", "--json"]).await.json();
    assert_eq!((&rules[0]["rule"], rules.as_array().unwrap().len()), (&"refuse".into(), 1));
    assert!(!apply(refuse, &[]).await.err.contains(" stays "));
}
