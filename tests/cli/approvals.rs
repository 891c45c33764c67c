//! Actions that need two people by commands: every command is gated, listed as ungated, or changes nothing; and another
//! person approves, refuses or withdraws.

use sluicegate::cli::Exit;

use crate::every_command::all;
use crate::jobs::{Desk, exit};

const ALWAYS: &str = "approvals.require=succeeded, declined, resend, cancel, replay, discard, limit, pause, resume";

/// Commands that change payments, limits or pauses, each with a line that would.
const GATED: [(&str, &[&str]); 12] = [
    ("jobs resolve", &["r1", "--as", "succeeded"]),
    ("jobs resolve", &["r1", "--as", "declined"]),
    ("jobs resolve", &["r1", "--as", "resend", "--confirm", "r1"]),
    ("jobs cancel", &["w1"]),
    ("jobs cancel", &["unseen", "--provider", "acme"]),
    ("dlq replay", &["d1"]),
    ("dlq discard", &["d1", "--yes"]),
    ("limits set", &["acme", "per-second", "50/s"]),
    ("provider pause", &["acme"]),
    ("provider resume", &["acme"]),
    ("provider pause", &["--all"]),
    ("provider resume", &["--all"]),
];

/// Commands that change something and need no second person, with the reason.
const UNGATED: [(&str, &str); 18] = [
    ("migrate", "changes the schema alone"),
    ("run", "gates each call of its API"),
    ("demo", "has its own database in memory"),
    ("init", "writes a file"),
    ("provider apply", "refuses what needs a second person, below"),
    ("enqueue", "a new payment"),
    ("jobs assign", "a note"),
    ("jobs comment", "a note"),
    ("jobs erase", "finished payments lose personal data, and keep their state"),
    ("rejected republish", "a message that is no payment yet"),
    ("rejected discard", "a message that is no payment"),
    ("batches stop", "stops decisions"),
    ("approvals approve", "the second person itself"),
    ("approvals refuse", "changes nothing else"),
    ("approvals withdraw", "changes nothing else"),
    ("fake-provider", "has no database"),
    ("completions", "has no database"),
    ("man", "has no database"),
];

const READING: [&str; 19] = [
    "approvals list",
    "approvals show",
    "batches list",
    "batches show",
    "check",
    "dlq list",
    "dlq show",
    "jobs explain",
    "jobs list",
    "jobs show",
    "limits history",
    "limits list",
    "limits peek",
    "provider flows",
    "provider list",
    "provider show",
    "rejected list",
    "rejected show",
    "status",
];

async fn desk() -> Desk {
    let desk = Desk::open().await;
    for (id, state) in [("r1", "review"), ("r2", "review"), ("d1", "dead"), ("d2", "dead"), ("w1", "waiting")] {
        desk.payment(id, "acme", state).await;
    }
    desk
}

/// The state of everything that a gated command could change.
async fn changeable(desk: &Desk) -> String {
    let mut states = Vec::new();
    for id in ["r1", "r2", "d1", "d2", "w1"] {
        states.push(desk.state(id).await);
    }
    let rows = desk.database.readable_rows(None).await.unwrap();
    format!("{states:?} {rows:?} {:?}", desk.database.list_batches(None, 9).await.unwrap())
}

/// Every request is made by another person than the user of the tests.
async fn by_zoe(desk: &Desk) {
    desk.sql("UPDATE pending_approvals SET requested_by = 'zoe@desk', requested_as = 'zoe@desk (admin, os)'").await;
}

#[test]
fn every_command_is_gated_or_listed() {
    for command in all() {
        let gated = GATED.iter().any(|(name, _)| *name == command);
        let ungated = UNGATED.iter().any(|(name, _)| *name == command);
        let reading = READING.contains(&command.as_str()) || command.starts_with("simulate");
        let found = [gated, ungated, reading].into_iter().filter(|found| *found).count();
        assert_eq!(found, 1, "`{command}`: gate it, list it as ungated with the reason, or as reading");
    }
}

#[tokio::test]
async fn gated_commands_change_nothing() {
    for (command, arguments) in GATED {
        let desk = desk().await;
        if arguments == ["--all"] && command == "provider resume" {
            desk.run(&["provider", "pause", "--all"]).await;
        }
        let before = changeable(&desk).await;
        let words: Vec<&str> = command.split(' ').chain(arguments.iter().copied()).collect();
        let ran = desk.run_set(ALWAYS, &words).await;
        assert_eq!(exit(&ran), Exit::Failed, "{words:?}: {}", ran.err);
        assert!(ran.err.contains("nothing was changed: awaits a second person: approval "), "{words:?}: {}", ran.err);
        assert!(ran.err.contains("sluicegate approvals approve "), "{words:?}: {}", ran.err);
        assert_eq!(changeable(&desk).await, before, "{words:?}");
        // The same user, on another host too.
        let json = desk.run(&["approvals", "list", "--json"]).await.json();
        let id = json["approvals"][0]["id"].as_str().unwrap().to_owned();
        let own = desk.run(&["approvals", "approve", &id]).await;
        assert!(own.failure().0.contains("a second person decides"), "{:?}", own.failure());
        assert_eq!(changeable(&desk).await, before, "{words:?}");
        by_zoe(&desk).await;
        let done = desk.run(&["approvals", "approve", &id, "--json"]).await;
        assert_eq!(
            (exit(&done), done.json()["state"].as_str()),
            (Exit::Success, Some("approved")),
            "{words:?} {}",
            done.err
        );
        // Its payment was not recorded before.
        assert!(
            changeable(&desk).await != before || arguments[0] == "unseen" || command == "provider resume",
            "{words:?}"
        );
        let again = desk.run(&["approvals", "approve", &id]).await;
        assert!(again.failure().0.contains("is approved already"), "{:?}", again.failure());
    }
}

#[tokio::test]
async fn many_payments_are_shown_first() {
    let desk = desk().await;
    let file = desk.file("r1\nw1\n");
    for line in [
        &["jobs", "resolve", "--file", &file, "--as", "declined"][..],
        &["jobs", "cancel", "--file", &file],
        &["dlq", "replay"],
        &["dlq", "replay", "--yes"],
        &["dlq", "replay", "--provider", "acme"],
        &["dlq", "discard", "--filter", ""],
    ] {
        let before = changeable(&desk).await;
        let ran = desk.run_set(ALWAYS, line).await;
        assert!(exit(&ran) == Exit::Failed && ran.err.contains("--confirm"), "{line:?}: {}", ran.err);
        assert_eq!(changeable(&desk).await, before, "{line:?}");
    }
    let with_provider = ["jobs", "cancel", "--file", &file, "--provider", "acme"];
    let ran = desk.run_set(ALWAYS, &with_provider).await;
    assert!(ran.failure().0.contains("needs two people"), "{:?}", ran.failure());
    let line = ["dlq", "replay", "--provider", "acme"];
    let preview = desk.run_set(ALWAYS, &[&line[..], &["--dry-run", "--json"]].concat()).await.json();
    assert_eq!(preview["jobs"], 2);
    let confirmed =
        [&line[..], &["--confirm", preview["digest"].as_str().unwrap(), "--because", "back", "--json"]].concat();
    let ran = desk.run_set(ALWAYS, &confirmed).await;
    let id = ran.json()["awaits_approval"].as_str().unwrap().to_owned();
    assert!(exit(&ran) == Exit::Failed && desk.state("d1").await == "dead");
    by_zoe(&desk).await;
    let shown = desk.run(&["approvals", "show", &id]).await;
    assert!(shown.out.contains("replay 2 payments at 50/1s") && shown.out.contains("EUR"), "{}", shown.out);
    let done = desk.run(&["approvals", "approve", &id, "--because", "checked", "--json"]).await.json();
    let batch = desk.run(&["batches", "show", done["result_batch"].as_str().unwrap(), "--json"]).await.json();
    let author = batch["created_by"].as_str().unwrap();
    assert!(author.starts_with("zoe@desk (admin, os), approved by ") && author.ends_with("(admin, os)"), "{author}");
}

#[tokio::test]
async fn dry_runs_and_small_actions_pass() {
    let desk = desk().await;
    for line in [
        &["jobs", "resolve", "r1", "--as", "declined", "--dry-run"][..],
        &["dlq", "replay", "d1", "--dry-run"],
        &["dlq", "discard", "d1", "--yes", "--dry-run"],
        &["limits", "set", "acme", "per-second", "50/s", "--dry-run"],
    ] {
        assert_eq!(exit(&desk.run_set(ALWAYS, line).await), Exit::Success, "{line:?}");
    }
    let small = "approvals.require=declined:payments=2, discard:amount=13.00 EUR, cancel:amount=1.00 EUR";
    assert_eq!(exit(&desk.run_set(small, &["jobs", "resolve", "r1", "--as", "declined"]).await), Exit::Success);
    assert_eq!(exit(&desk.run_set(small, &["dlq", "discard", "d1", "--yes"]).await), Exit::Success);
    assert_eq!(exit(&desk.run_set(small, &["jobs", "cancel", "w1"]).await), Exit::Failed);
    assert_eq!((desk.state("r1").await, desk.state("d1").await), ("declined".to_owned(), "cancelled".to_owned()));
    assert_eq!(desk.state("w1").await, "waiting");
}

#[tokio::test]
async fn requests_are_refused_and_withdrawn() {
    let desk = desk().await;
    let ask = async || {
        let ran = desk.run_set(ALWAYS, &["jobs", "resolve", "r1", "--as", "declined", "--json"]).await;
        ran.json()["awaits_approval"].as_str().unwrap().to_owned()
    };
    let id = ask().await;
    let withdrawn = desk.run(&["approvals", "withdraw", &id, "--json"]).await.json();
    assert_eq!(withdrawn["state"], "withdrawn");
    let id = ask().await;
    by_zoe(&desk).await;
    let foreign = desk.run(&["approvals", "withdraw", &id]).await;
    assert!(foreign.failure().0.contains("only zoe@desk, who requested it"), "{:?}", foreign.failure());
    let silent = desk.run(&["approvals", "refuse", &id]).await;
    assert_eq!(exit(&silent), Exit::Usage);
    let refused = desk.run(&["approvals", "refuse", &id, "--because", "wrong payment"]).await;
    assert!(exit(&refused) == Exit::Success && refused.out.contains("wrong payment"), "{}", refused.out);
    assert_eq!(desk.state("r1").await, "review");
    assert!(desk.run(&["approvals", "list"]).await.err.contains("no action awaits a second person"));
    assert!(desk.run(&["approvals", "list", "--all"]).await.out.contains("refused"));
}

#[tokio::test]
async fn provider_file_is_no_way_around() {
    let desk = desk().await;
    let file = |limits: u32, rest: &str| {
        let text = format!(
            "[[provider]]\nname = \"acme\"\nurl = \"https://x.example/\"\n{rest}\n[[provider.limit]]\nname = \"per-second\"\n\
             max_requests = {limits}\nwindow_ms = 1000\n"
        );
        desk.file(&text)
    };
    for (limits, rest, action) in [
        (101, "", "limit"),
        (100, "reserve_percent = 10", "limit"),
        (100, "quota = \"other\"", "limit"),
        (100, "paused = true", "pause"),
        (100, "enabled = false", "pause"),
    ] {
        let path = file(limits, rest);
        let before = changeable(&desk).await;
        let ran = desk.run_set(ALWAYS, &["provider", "apply", &path]).await;
        let words = format!("acme: `{action}` needs two people");
        assert!(ran.failure().0.contains(&words), "{limits} {rest}: {:?}", ran.failure());
        assert_eq!(changeable(&desk).await, before);
    }
    let path = file(100, "timeout_ms = 9000");
    assert_eq!(exit(&desk.run_set(ALWAYS, &["provider", "apply", &path]).await), Exit::Success);
}
