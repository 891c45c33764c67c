//! `jobs`, `dlq` and `status` on the embedded backends, each desk in a temporary directory of its own.

use std::io::Write;
use std::time::Duration;

use clap::Parser as _;
use serde_json::Value;
use sluicegate::app::Services;
use sluicegate::cli::console::TableShape;
use sluicegate::cli::{Cli, CommandError, Console, Exit};
use sluicegate::config;
use sluicegate::domain::job::{Identifier, Job};
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::sum::SentSum;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, RequestTiming};
use sluicegate::provider::FrozenRequest;
use sluicegate::queue::message::{CardNumbers, decode, encode};
use sqlx::AssertSqlSafe;

use crate::fakes::{Page, Ran};
use crate::support::claiming::{Claim, ClaimById as _};
use crate::support::{hostile, without_constraints};

pub struct Desk {
    pub dir: tempfile::TempDir,
    pub database: Database,
}

impl Desk {
    /// Two providers, no payments.
    pub async fn open() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&format!("sqlite://{}/ledger.db", dir.path().display()), 1).unwrap();
        database.migrate().await.unwrap();
        let desk = Self { dir, database };
        for provider in ["acme", "bolt"] {
            desk.sql(&format!("INSERT INTO providers (name, url) VALUES ('{provider}', 'https://x.example/')")).await;
            desk.sql(&format!(
                "INSERT INTO provider_limits (provider, name, max_requests, window_ms) \
                 VALUES ('{provider}', 'per-second', 100, 1000)"
            ))
            .await;
        }
        desk
    }

    pub async fn sql(&self, sql: &str) {
        let pool = self.database.sqlite_pool().unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&pool).await.unwrap();
    }

    /// Replaces every text in the ledger that comes from outside with this one.
    pub async fn fill_with(&self, text: &str) {
        hostile::fill(&self.database.sqlite_pool().unwrap(), text).await;
    }

    /// Executes a statement without the database's constraints and triggers.
    pub async fn without_constraints(&self, sql: &str) {
        without_constraints::on_sqlite(&self.database.sqlite_pool().unwrap(), sql).await.unwrap();
    }

    /// Adds a payment in this state, with one attempt unless it is `waiting`.
    pub async fn payment(&self, id: &str, provider: &str, state: &str) -> Job {
        let job = Job {
            id: Identifier::new(id).unwrap(),
            provider: ProviderName::new(provider).unwrap(),
            amount: 1_299,
            currency: "EUR".into(),
            account: None,
            reference: Some("invoice 7".into()),
            idempotency_key: None,
            cost: 1,
            priority: 0,
            not_before: None,
            expires_at: None,
            payload: Some(r#"{ "token" : "tok_secret" }"#.into()),
        };
        let ledger = self.database.clone();
        let hash = decode(&encode(&job), &job.provider, CardNumbers::Off).unwrap().hash;
        let Claim::Claimed(claimed) = ledger.claim(&job, hash, "worker-a").await.unwrap() else {
            panic!("{id} exists already")
        };
        let Some(state) = FinalState::from_name(state) else {
            assert_eq!(ledger.release(&claimed.lease).await.unwrap(), FencedWrite::Applied);
            return job;
        };
        let request = FrozenRequest {
            method: "POST".into(),
            url: "https://x.example/".into(),
            idempotency_key: id.into(),
            content_type: "application/json".into(),
            body: r#"{"body":"secret"}"#.into(),
            account: None,
            sum: SentSum { units: 1_299, decimals: 2 },
            credential_fingerprint: "0123456789abcdef".into(),
        };
        assert_eq!(
            ledger.begin_attempt(&claimed.lease, &request, RequestTiming::immediate(Duration::ZERO)).await.unwrap(),
            BeginResult::Attempt(1)
        );
        let outcome = if state == FinalState::Review { "unknown" } else { "not_sent" };
        let end = AttemptEnd { number: 1, outcome, status: None, detail: "why".to_owned(), counts: true };
        let next = JobState::Final { state, reason: "gave up".to_owned(), reference: None };
        assert_eq!(ledger.finish_attempt(&claimed.lease, &end, &next).await.unwrap(), FencedWrite::Applied);
        job
    }

    pub async fn run(&self, line: &[&str]) -> Ran {
        self.run_in(TableShape::Plain, line).await
    }

    pub async fn run_in(&self, shape: TableShape, line: &[&str]) -> Ran {
        self.run_with(shape, None, &[], line).await
    }

    /// Runs it at a terminal at which an operator types this text.
    pub async fn run_answered(&self, typed: &'static str, line: &[&str]) -> Ran {
        self.run_with(TableShape::Plain, Some(typed), &[], line).await
    }

    /// Runs it with this configuration value.
    pub async fn run_set(&self, set: &str, line: &[&str]) -> Ran {
        self.run_with(TableShape::Plain, None, &["--set", set], line).await
    }

    async fn run_with(&self, shape: TableShape, typed: Option<&'static str>, sets: &[&str], line: &[&str]) -> Ran {
        let database = format!("database.url=sqlite://{}/ledger.db", self.dir.path().display());
        let always = ["sluicegate", "--set", &database, "--set", "ops.listen=none"];
        let cli = Cli::try_parse_from(always.iter().chain(sets).chain(line)).unwrap();
        let config = config::load(None, [], &cli.set).unwrap();
        let (out, err) = (Page::default(), Page::default());
        let words = ["sluicegate"].iter().chain(line).map(|word| (*word).to_owned());
        let mut console = Console::new(Box::new(out.clone()), Box::new(err.clone()), shape).with_command_line(words);
        if let Some(typed) = typed {
            console = console.with_input(Box::new(typed.as_bytes()));
        }
        let services = Services::default();
        let result = sluicegate::cli::execute(&cli.command, &config, &services, &mut console).await;
        console.flush().unwrap();
        services.close().await;
        let (out, err) = (out.text(), err.text());
        let shown = format!("{out}{err}").replace("outbound.secrets", "").replace("secrets = [", "");
        assert!(!shown.contains("secret"), "{line:?}: {out}{err}");
        Ran { result, out, err }
    }

    /// The text that the program prints for a command's error.
    pub fn error_of(&self, error: &CommandError) -> String {
        let err = Page::default();
        let mut console = Console::new(Box::new(Page::default()), Box::new(err.clone()), TableShape::Plain);
        console.error(error).unwrap();
        err.text()
    }

    pub async fn state(&self, id: &str) -> String {
        let sql = AssertSqlSafe(format!("SELECT state FROM jobs WHERE id = '{id}'"));
        sqlx::query_scalar(sql).fetch_one(&self.database.sqlite_pool().unwrap()).await.unwrap()
    }

    /// The one text that a query returns.
    pub async fn text(&self, sql: &str) -> String {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
            .fetch_one(&self.database.sqlite_pool().unwrap())
            .await
            .unwrap()
    }

    pub fn file(&self, text: &str) -> String {
        let path = self.dir.path().join("ids");
        std::fs::File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

pub fn exit(ran: &Ran) -> Exit {
    ran.result.as_ref().map_or_else(sluicegate::cli::CommandError::exit, |exit| *exit)
}

#[tokio::test]
async fn dead_payment_is_replayed_with_its_message() {
    let desk = Desk::open().await;
    let job = desk.payment("p1", "acme", "dead").await;
    let ran = desk.run(&["dlq", "replay", "p1", "--because", "the provider is back"]).await;
    assert_eq!((exit(&ran), ran.out.as_str(), ran.err.as_str()), (Exit::Success, "p1: dead → waiting\n", ""));
    let again = decode(&encode(&job), &job.provider, CardNumbers::Refuse).unwrap();
    let claim = desk.database.claim(&again.job, again.hash, "worker-b").await.unwrap();
    assert!(matches!(claim, Claim::Claimed(_)), "{claim:?}");

    let again = desk.run(&["dlq", "replay", "p1"]).await;
    assert_eq!(exit(&again), Exit::Failed);
    assert_eq!(again.err, "p1: the job is `waiting`; only a job that is `dead` can be replayed\n");
    let (other, _) = desk.run(&["dlq", "replay", "p1", "--provider", "other"]).await.failure();
    assert_eq!(other, "p1 is a payment of acme, not of other: nothing was replayed");
    let unknown = desk.run(&["dlq", "replay", "p2"]).await;
    assert_eq!((exit(&unknown), unknown.err.as_str()), (Exit::Failed, "p2: the ledger has no such job\n"));

    let details = desk.run(&["jobs", "show", "p1", "--json"]).await.json();
    let audit = &details["audit"][0];
    assert_eq!((audit["old_state"].as_str(), audit["because"].as_str()), (Some("dead"), Some("the provider is back")));
    assert!(audit["os_user"].as_str().unwrap().contains('@'), "{audit}");
}

#[tokio::test]
async fn unreplayable_payment_stays_unchanged() {
    let desk = Desk::open().await;
    for id in ["emptied", "altered", "orphan", "card"] {
        desk.payment(id, "acme", "dead").await;
    }
    desk.sql("UPDATE jobs SET payload = NULL WHERE id = 'emptied'").await;
    desk.without_constraints("UPDATE jobs SET amount = 9 WHERE id = 'altered'").await;
    desk.without_constraints("UPDATE jobs SET provider = 'gone' WHERE id = 'orphan'").await;
    desk.without_constraints(r#"UPDATE jobs SET payload = '{"n":"4242424242424242"}' WHERE id = 'card'"#).await;
    for (id, part) in [
        ("emptied", "was emptied"),
        ("altered", "no longer says what was recorded"),
        ("orphan", "provider `gone` has no row"),
        ("card", "no longer says what was recorded"),
    ] {
        let ran = desk.run(&["dlq", "replay", id]).await;
        assert_eq!(exit(&ran), Exit::Failed);
        assert!(ran.err.starts_with(&format!("{id}: ")) && ran.err.contains(part), "{}", ran.err);
        assert!(!ran.err.contains("4242"), "{}", ran.err);
        assert_eq!(desk.state(id).await, "dead");
    }
}

#[tokio::test]
async fn replay_needs_no_broker() {
    let desk = Desk::open().await;
    desk.payment("p1", "acme", "dead").await;
    let ran = desk.run(&["--set", "queue.url=amqp://127.0.0.1:1/%2f", "dlq", "replay", "p1"]).await;
    assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Success, "p1: dead → waiting\n"));
    assert_eq!(desk.state("p1").await, "waiting");
}

#[tokio::test]
async fn review_is_resolved_or_resent() {
    let desk = Desk::open().await;
    for id in ["p1", "p2", "p3"] {
        desk.payment(id, "acme", "review").await;
    }
    let dry = desk.run(&["jobs", "resolve", "p1", "--as", "declined", "--dry-run", "--json"]).await;
    assert_eq!((&dry.json()["would_change"]["acme"], desk.state("p1").await.as_str()), (&1.into(), "review"));
    let ran = desk.run(&["jobs", "resolve", "p1", "--as", "succeeded", "--reference", "ch_7"]).await;
    assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Success, "p1: review → succeeded\n"));
    let ran = desk.run(&["jobs", "resolve", "p2", "--as", "declined"]).await;
    assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Success, "p2: review → declined\n"));
    let ran = desk.run(&["jobs", "resolve", "p3", "--as", "resend", "--confirm", "p3"]).await;
    assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Success, "p3: review → waiting\n"));
    let details = desk.run(&["jobs", "show", "p1", "--json"]).await.json();
    assert_eq!((&details["state"], &details["provider_reference"]), (&"succeeded".into(), &"ch_7".into()));
    for finding in ["succeeded", "declined", "resend"] {
        let ran = desk.run(&["jobs", "resolve", "p1", "--as", finding, "--confirm", "p1"]).await;
        assert_eq!(exit(&ran), Exit::Failed);
        assert!(ran.err.starts_with("p1: the job is `succeeded`; only a job that is `review`"), "{}", ran.err);
    }
}

#[tokio::test]
async fn lists_are_paged_and_details_complete() {
    let desk = Desk::open().await;
    for (id, provider, state) in
        [("p1", "acme", "dead"), ("p2", "bolt", "dead"), ("p3", "acme", "review"), ("p4", "acme", "waiting")]
    {
        desk.payment(id, provider, state).await;
    }
    let ids = |json: &Value| -> Vec<String> {
        json["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    };
    let page = desk.run(&["jobs", "list", "--limit", "3", "--json"]).await.json();
    assert_eq!((ids(&page), &page["next"]), (vec!["p4".into(), "p3".into(), "p2".into()], &"p2".into()));
    let page = desk.run(&["jobs", "list", "--limit", "3", "--after", "p2", "--json"]).await.json();
    assert_eq!((ids(&page), &page["next"]), (vec!["p1".into()], &Value::Null));
    let page = desk.run(&["jobs", "list", "--state", "review", "--provider", "acme", "--json"]).await.json();
    assert_eq!(ids(&page), ["p3"]);
    assert_eq!(ids(&desk.run(&["dlq", "list", "--json"]).await.json()), ["p2", "p1"]);
    let table = desk.run(&["dlq", "list", "--limit", "1"]).await;
    let next = "next page: sluicegate dlq list --limit 1 --after p2\n";
    assert!(table.out.contains("EUR 12.99") && table.err == next, "{}{}", table.out, table.err);

    assert_eq!(exit(&desk.run(&["dlq", "discard", "p1", "--yes", "--because", "a test"]).await), Exit::Success);
    let waited = "UPDATE jobs SET wait_reason = 'limit', wait_limit = 'per-account', wait_detail = 'as before', \
                  wait_since = 0, wait_until = 60000, wait_request = 2 WHERE id = 'p1'";
    desk.sql(waited).await;
    let shown = desk.run(&["jobs", "show", "p1"]).await;
    let waited = "waited for limit per-account: as before from 1970-01-01T00:00:00.000Z until \
                  1970-01-01T00:01:00.000Z, before request 2";
    assert!(shown.out.contains(waited), "{}", shown.out);
    for part in [
        "26 bytes, sha256",
        "17 bytes, sha256",
        "not_sent",
        "cancelled",
        "no broker",
        "discarded by an operator: a test",
    ] {
        assert!(shown.out.contains(part), "{part}: {}", shown.out);
    }
    let (error, code) = desk.run(&["dlq", "show", "p1"]).await.failure();
    assert!(error.contains("`cancelled`, not `dead`") && code == Exit::Failed, "{error}");
    assert!(desk.run(&["jobs", "show", "nobody"]).await.failure().0.contains("no such job"));
    assert_eq!(exit(&desk.run(&["dlq", "show", "p2"]).await), Exit::Success);
}

#[tokio::test]
async fn the_status_counts_every_payment_once() {
    let desk = Desk::open().await;
    for (id, provider, state) in
        [("p1", "acme", "dead"), ("p2", "acme", "dead"), ("p3", "acme", "waiting"), ("p4", "bolt", "review")]
    {
        desk.payment(id, provider, state).await;
    }
    desk.without_constraints("UPDATE jobs SET provider = 'gone' WHERE id = 'p4'").await;
    desk.sql("UPDATE providers SET paused = 1 WHERE name = 'bolt'").await;
    let ran = desk.run(&["status", "--json"]).await;
    assert!(ran.err.contains("; showing database and queue only"), "{}", ran.err);
    let status = ran.json();
    let line = |at: usize| &status["providers"][at];
    assert_eq!((&line(0)["name"], &line(0)["state"]), (&"acme".into(), &"no_worker".into()));
    assert_eq!((&line(0)["dead"], &line(0)["waiting"]), (&2.into(), &1.into()));
    assert_eq!((&line(1)["state"], &line(1)["limits"][0]["max_requests"]), (&"paused".into(), &100.into()));
    assert_eq!((&line(2)["state"], &line(2)["review"]), (&"disabled".into(), &1.into()));
    let accounts = status["reconciliation"].as_array().unwrap().iter();
    let jobs = accounts.filter_map(|account| account["recorded"].as_u64()).sum::<u64>();
    assert_eq!(jobs, 4);
    let table = desk.run(&["status"]).await.out;
    assert!(table.contains("└ no `sluicegate run` reports: nothing is sent"), "{table}");
    // Its one payment was moved to another provider by SQL; reconciliation cannot detect that.
    assert!(table.ends_with("all 4 recorded payments accounted for\n"), "{table}");
}

#[tokio::test]
async fn status_without_worker_shows_waiting_payments_and_pauses() {
    let desk = Desk::open().await;
    let enqueued =
        desk.run(&["enqueue", "--provider", "acme", "--id", "q1", "--amount", "1", "--currency", "EUR"]).await;
    assert_eq!((exit(&enqueued), enqueued.out.as_str()), (Exit::Success, "q1\n"));
    let status = desk.run(&["status", "--json"]).await.json();
    assert_eq!(
        (&status["providers"][0]["waiting"], &status["providers"][0]["queued"]),
        (&1.into(), &0.into()),
        "{status:#}"
    );
    let explain = async |id: &str| desk.run(&["--set", "ops.listen=none", "jobs", "explain", id, "--json"]).await;
    let ran = explain("q1").await;
    assert_eq!(exit(&ran), Exit::Success);
    let explained = ran.json();
    assert_eq!((&explained["state"], &explained["provider"]), (&"waiting".into(), &"acme".into()), "{explained:#}");
    assert!(explained["blocked_at"]["starts_at"].is_null(), "it is unknown whether it is sent at all: {explained:#}");
    let unknown = explain("q2").await;
    assert_eq!(
        (exit(&unknown), &unknown.json()["summary"]),
        (Exit::Failed, &"the ledger has no job q2: it was never recorded".into())
    );
    assert_eq!(exit(&desk.run(&["provider", "pause", "acme", "--because", "they asked"]).await), Exit::Success);
    let table = desk.run(&["status"]).await.out;
    let note = table.lines().find(|line| line.contains(" paused it at ")).unwrap_or_default();
    assert!(note.ends_with("Z (they asked): its payments are recorded and wait"), "{table}");
}
