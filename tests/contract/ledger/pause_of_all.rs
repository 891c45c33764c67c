//! The pause of all providers: it pauses what sends, and a resume of all resumes exactly that, whatever happened meanwhile.

use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::pause_of_all::{PauseAllResult, ResumeAllResult};
use sluicegate::ops::change;

use super::*;

on_every_database!(
    resume_of_all_resumes_what_it_paused,
    provider_changed_meanwhile_is_left_alone,
    second_pause_of_all_extends_the_first,
    concurrent_pauses_of_all_are_one,
    deleted_provider_leaves_the_pause,
    pause_of_all_is_audited_and_ends_once,
    invalid_row_is_paused_too,
);

fn by(reason: &str) -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some(reason.to_owned()) }
}

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

impl Fixture {
    async fn with_providers(kind: Kind, names: &[&str]) -> Self {
        let fixture = Self::migrated(kind).await;
        for name in names {
            fixture.add_provider(name).await;
        }
        fixture
    }

    async fn add_provider(&self, name: &str) {
        let row = format!("INSERT INTO providers (name, url) VALUES ('{name}', 'https://x.example/')");
        self.sql(&row).await.unwrap();
    }

    /// The names of the paused providers.
    async fn paused(&self) -> Vec<String> {
        let rows = self.database.readable_rows(None).await.unwrap();
        rows.into_iter().filter(|row| row.paused).map(|row| row.name).collect()
    }

    async fn pause_all(&self, reason: &str) -> PauseAllResult {
        self.database.pause_all(&by(reason)).await.unwrap()
    }

    async fn resume_all(&self) -> ResumeAllResult {
        self.database.resume_all(&by("over")).await.unwrap()
    }

    async fn set(&self, provider: &str, paused: bool) -> bool {
        change::set_paused(&self.database, &name(provider), paused, Some(&by("by hand"))).await.unwrap()
    }
}

async fn resume_of_all_resumes_what_it_paused(kind: Kind) {
    let fixture = Fixture::with_providers(kind, &["acme", "bolt", "corp"]).await;
    fixture.set("bolt", true).await;
    assert_eq!(fixture.resume_all().await, ResumeAllResult { still_paused: strings(&["bolt"]), ..Default::default() });
    let paused = fixture.pause_all("incident 12").await;
    let expected = PauseAllResult {
        id: Some(1),
        paused: strings(&["acme", "corp"]),
        held: Vec::new(),
        paused_before: strings(&["bolt"]),
    };
    assert_eq!((paused, fixture.paused().await), (expected, strings(&["acme", "bolt", "corp"])));
    let pause = fixture.database.pause_of_all().await.unwrap().unwrap();
    assert_eq!((pause.id, pause.by.as_str(), pause.because.as_deref()), (1, "alice@desk", Some("incident 12")));
    assert_eq!(pause.providers, ["acme", "corp"]);
    let resumed = fixture.resume_all().await;
    let expected = ResumeAllResult {
        id: Some(1),
        resumed: strings(&["acme", "corp"]),
        resumed_before: Vec::new(),
        still_paused: strings(&["bolt"]),
    };
    assert_eq!((resumed, fixture.paused().await), (expected, strings(&["bolt"])));
    assert_eq!(fixture.database.pause_of_all().await.unwrap(), None);
    // The next one is another action.
    assert_eq!(fixture.pause_all("again").await.id, Some(2));
    // A provider's own wait is not lifted.
    let lifted = fixture.one("SELECT count(*) FROM providers WHERE resumed_at IS NOT NULL").await;
    assert_eq!(lifted, "0");
}

async fn provider_changed_meanwhile_is_left_alone(kind: Kind) {
    let fixture = Fixture::with_providers(kind, &["acme", "bolt", "corp", "dash", "echo"]).await;
    fixture.pause_all("incident 12").await;
    // Resumed by hand, and resumed and paused again by hand.
    assert!(fixture.set("acme", false).await);
    assert!(fixture.set("bolt", false).await && fixture.set("bolt", true).await);
    // Paused by itself while the pause of all held it; the second time changes nothing.
    assert!(fixture.set("corp", true).await && !fixture.set("corp", true).await);
    // By SQL, and by a provider file, which writes the same pause again.
    fixture.sql("UPDATE providers SET paused = false WHERE name = 'dash'").await.unwrap();
    fixture.sql("UPDATE providers SET paused = true, workers = 8 WHERE name = 'echo'").await.unwrap();
    assert_eq!(fixture.database.pause_of_all().await.unwrap().unwrap().providers, ["echo"]);
    let resumed = fixture.resume_all().await;
    let expected = ResumeAllResult {
        id: Some(1),
        resumed: strings(&["echo"]),
        resumed_before: strings(&["acme", "dash"]),
        still_paused: strings(&["bolt", "corp"]),
    };
    assert_eq!((resumed, fixture.paused().await), (expected, strings(&["bolt", "corp"])));
}

async fn second_pause_of_all_extends_the_first(kind: Kind) {
    let fixture = Fixture::with_providers(kind, &["acme", "bolt"]).await;
    fixture.pause_all("incident 12").await;
    assert!(fixture.set("acme", false).await);
    fixture.add_provider("corp").await;
    let again = fixture.pause_all("it goes on").await;
    let expected = PauseAllResult {
        id: Some(1),
        paused: strings(&["acme", "corp"]),
        held: strings(&["bolt"]),
        paused_before: Vec::new(),
    };
    assert_eq!(again, expected);
    let pause = fixture.database.pause_of_all().await.unwrap().unwrap();
    assert_eq!((pause.id, pause.because.as_deref(), pause.providers.len()), (1, Some("incident 12"), 3));
    let unchanged = fixture.pause_all("third").await;
    assert_eq!((unchanged.id, unchanged.paused.len(), unchanged.held.len()), (Some(1), 0, 3));
    assert_eq!(fixture.resume_all().await.resumed, ["acme", "bolt", "corp"]);
}

async fn concurrent_pauses_of_all_are_one(kind: Kind) {
    let names = ["acme", "bolt", "corp", "dash"];
    let fixture = Fixture::with_providers(kind, &names).await;
    let (alice, bob, carol) = (by("alice"), by("bob"), by("carol"));
    let ledger = &fixture.database;
    let (one, two, three) = tokio::join!(ledger.pause_all(&alice), ledger.pause_all(&bob), ledger.pause_all(&carol));
    let results = [one.unwrap(), two.unwrap(), three.unwrap()];
    assert!(results.iter().all(|result| result.id == Some(1)), "{results:?}");
    let paused: usize = results.iter().map(|result| result.paused.len()).sum();
    assert_eq!((paused, fixture.one("SELECT count(*) FROM pauses_of_all").await.as_str()), (4, "4"));
    let (one, two) = tokio::join!(ledger.resume_all(&alice), ledger.resume_all(&bob));
    assert_eq!(one.unwrap().resumed.len() + two.unwrap().resumed.len(), 4);
    assert_eq!(fixture.paused().await, Vec::<String>::new());
}

async fn deleted_provider_leaves_the_pause(kind: Kind) {
    let fixture = Fixture::with_providers(kind, &["acme", "bolt"]).await;
    fixture.pause_all("incident 12").await;
    fixture.sql("DELETE FROM providers WHERE name = 'acme'").await.unwrap();
    fixture.sql("INSERT INTO providers (name, url, paused) VALUES ('acme', 'https://x.example/', true)").await.unwrap();
    let resumed = fixture.resume_all().await;
    assert_eq!((resumed.resumed, resumed.still_paused), (strings(&["bolt"]), strings(&["acme"])));
    let ends = "SELECT ended FROM pauses_of_all WHERE provider = 'acme'";
    assert_eq!(fixture.one(ends).await, "deleted");
}

async fn pause_of_all_is_audited_and_ends_once(kind: Kind) {
    let fixture = Fixture::with_providers(kind, &["acme", "bolt"]).await;
    fixture.pause_all("incident 12").await;
    let audited = fixture.database.settings_audit(Some(&name("bolt")), 1).await.unwrap().remove(0);
    assert_eq!((audited.what.as_str(), audited.because.as_deref()), ("paused false → true", Some("incident 12")));
    // The author is not for the statement to choose.
    fixture.sql("UPDATE pauses_of_all SET ended = 'kept' WHERE provider = 'acme'").await.unwrap();
    fixture.sql("INSERT INTO pauses_of_all (pause, provider, who) VALUES (1, 'corp', 'mallory')").await.unwrap();
    assert_eq!(fixture.one("SELECT count(*) FROM pauses_of_all WHERE who = 'mallory'").await, "0");
    assert_eq!(fixture.one("SELECT count(*) FROM pauses_of_all WHERE ended_at IS NULL").await, "2");
    for (change, rule) in [
        ("UPDATE pauses_of_all SET ended = NULL", "once"),
        ("UPDATE pauses_of_all SET ended = 'resumed' WHERE provider = 'acme'", "once"),
        ("UPDATE pauses_of_all SET provider = 'x', ended = 'kept' WHERE provider = 'bolt'", "once"),
        ("UPDATE pauses_of_all SET ended = 'over' WHERE provider = 'bolt'", "pause_end_is_known"),
        ("INSERT INTO pauses_of_all (pause, provider) VALUES (0, 'x')", "pause_is_1_or_more"),
        ("INSERT INTO pauses_of_all (pause, provider) VALUES (1, '')", "paused_provider_is_1_to_63_characters"),
        ("INSERT INTO pauses_of_all (pause, provider) VALUES (1, 'bolt')", "pauses_of_all"),
    ] {
        let error = fixture.sql(change).await.expect_err(change);
        assert!(error.contains(rule), "{change}: {error}");
    }
}

/// A provider without a limit has no valid row. Workers may still use its last valid one.
async fn invalid_row_is_paused_too(kind: Kind) {
    let fixture = Fixture::with_providers(kind, &["acme"]).await;
    assert_eq!(fixture.pause_all("incident 12").await.paused, ["acme"]);
    let all = fixture.database.load_settings().await.unwrap().providers;
    assert!(all[0].as_ref().is_err_and(|invalid| invalid.paused), "{all:?}");
    assert_eq!(fixture.resume_all().await.resumed, ["acme"]);
}
