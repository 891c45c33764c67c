//! Each change that the API and the commands offer, made under the rights of docs/security.md: the worker's role for the
//! API, which the page uses, and the operator's role for commands. A new route or command fails until it is made here.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use clap::{Command, CommandFactory as _};
use reqwest::blocking::Client;
use serde_json::{Value, json};
use sluicegate::cli::Cli;

use crate::deployment::{DATABASE, Deployment, PAUSED, PROVIDER, password, text};

/// Payments of the paused lane, in the state that their name says.
const JOBS: [&str; 19] = [
    "waiting-api-1",
    "waiting-api-2",
    "waiting-api-3",
    "waiting-cli-1",
    "waiting-cli-2",
    "waiting-cli-3",
    "waiting-cli-4",
    "review-api-1",
    "review-api-2",
    "review-api-3",
    "review-cli-1",
    "review-cli-2",
    "review-cli-3",
    "review-sql-1",
    "dead-api-1",
    "dead-api-2",
    "dead-cli-1",
    "dead-cli-2",
    "waiting-cli-5",
];
/// Its payments can be erased.
const ACCOUNT: &str = "acct_1";
const INVALID_MESSAGES: usize = 4;

/// Commands that change nothing of a deployment, or run as another role.
const READS: &str = "man, run, demo, init, check, migrate, provider list, provider show, provider flows, limits list, limits peek, \
    limits history, accounts list, status, jobs show, jobs explain, jobs list, dlq list, dlq show, rejected list, \
    rejected show, batches list, batches show, fake-provider, simulate, completions";

/// A statement, and the result that proves the change.
#[derive(Clone)]
struct Proof(String, &'static str);

fn state_of(job: &str, state: &'static str) -> Proof {
    Proof(format!("SELECT state FROM jobs WHERE id = '{job}'"), state)
}

fn paused(provider: &str, answer: &'static str) -> Proof {
    Proof(format!("SELECT paused FROM providers WHERE name = '{provider}'"), answer)
}

fn max_requests(number: &'static str) -> Proof {
    Proof(format!("SELECT max_requests FROM provider_limits WHERE provider = '{PROVIDER}'"), number)
}

fn decision(message: i64, decision: &'static str) -> Proof {
    Proof(format!("SELECT decision FROM rejected_messages WHERE id = {message}"), decision)
}

fn last_batch(state: &'static str) -> Proof {
    Proof("SELECT state FROM decision_batches ORDER BY created_at DESC LIMIT 1".to_owned(), state)
}

fn all_paused(answer: &'static str) -> Proof {
    Proof("SELECT bool_and(paused) FROM providers".to_owned(), answer)
}

fn unchanged() -> Proof {
    Proof("SELECT true".to_owned(), "t")
}

/// What earlier answers named, for later requests.
#[derive(Default)]
struct Named {
    digest: String,
    batch: String,
}

impl Named {
    fn learn(&mut self, answer: &str) {
        let Ok(answer) = serde_json::from_str::<Value>(answer) else { return };
        if let Some(digest) = answer["digest"].as_str() {
            digest.clone_into(&mut self.digest);
        }
        if let Some(batch) = answer["id"].as_str().filter(|_| answer["applied"].is_u64()) {
            batch.clone_into(&mut self.batch);
        }
    }

    fn fill(&self, text: &str) -> String {
        text.replace("{digest}", &self.digest).replace("{batch}", &self.batch)
    }
}

/// Route as the API describes it, path, body, proof.
type Request = (&'static str, String, Value, Proof);

fn request(route: &'static str, id: &str, body: Value, proof: Proof) -> Request {
    (
        route,
        route.replace("{id}", id).replace("{name}", PROVIDER).replace("{limit}", "all").replace("{account}", "acct_9"),
        body,
        proof,
    )
}

fn rule_of(account: &str, rule: &'static str) -> Proof {
    let rules = format!("FROM account_overrides WHERE provider = '{PROVIDER}' AND account = '{account}'");
    Proof(format!("SELECT coalesce((SELECT rule {rules}), 'none')"), rule)
}

fn requests_about_settings() -> Vec<Request> {
    let why = || json!({ "because": "ticket 4711" });
    let [pause, resume] = ["/api/v1/providers/{name}/pause", "/api/v1/providers/{name}/resume"];
    let limit = "/api/v1/providers/{name}/limits/{limit}";
    let account = "/api/v1/providers/{name}/accounts/{account}";
    let unset = "/api/v1/providers/{name}/accounts/{account}/unset";
    vec![
        request(pause, "", why(), paused(PROVIDER, "t")),
        request(resume, "", why(), paused(PROVIDER, "f")),
        request("/api/v1/pause-all", "", why(), all_paused("t")),
        // One that the pause of all holds, paused and resumed by itself.
        request(pause, "", why(), paused(PROVIDER, "t")),
        request(resume, "", why(), paused(PROVIDER, "f")),
        request("/api/v1/resume-all", "", why(), all_paused("f")),
        request(account, "", json!({ "rule": "blocked", "because": "ticket" }), rule_of("acct_9", "blocked")),
        request(account, "", json!({ "rule": "5/1s", "until": "06:00", "because": "x" }), rule_of("acct_9", "limit")),
        request(unset, "", why(), rule_of("acct_9", "none")),
        request(limit, "", json!({ "rate": "90/1s" }), max_requests("90")),
        request(limit, "", json!({ "rate": "80/1s", "until": "06:00 Europe/Berlin" }), max_requests("80")),
    ]
}

fn requests_about_payments(rejected: &[i64]) -> Vec<Request> {
    let why = || json!({ "because": "ticket 4711" });
    let resolve = "/api/v1/jobs/{id}/resolve";
    let [republish, discard] = [rejected[0], rejected[1]];
    let selection = json!({ "ids": ["waiting-api-2", "waiting-api-3"] });
    let preview = json!({ "decision": "cancel", "selection": selection });
    let begin =
        json!({ "decision": "cancel", "selection": selection, "digest": "{digest}", "rate": "1/1h", "because": "x" });
    let charged = json!({ "as": "succeeded", "reference": "ch_9" });
    let again = json!({ "as": "resend", "confirm_id": "review-api-3" });
    vec![
        request("/api/v1/jobs/{id}/cancel", "waiting-api-1", why(), state_of("waiting-api-1", "cancelled")),
        request(resolve, "review-api-1", charged, state_of("review-api-1", "succeeded")),
        request(resolve, "review-api-2", json!({ "as": "declined" }), state_of("review-api-2", "declined")),
        request(resolve, "review-api-3", again, state_of("review-api-3", "waiting")),
        request("/api/v1/dlq/{id}/replay", "dead-api-1", why(), state_of("dead-api-1", "waiting")),
        request("/api/v1/dlq/{id}/discard", "dead-api-2", why(), state_of("dead-api-2", "cancelled")),
        request("/api/v1/rejected/{id}/republish", &republish.to_string(), why(), decision(republish, "republished")),
        request("/api/v1/rejected/{id}/discard", &discard.to_string(), why(), decision(discard, "discarded")),
        request("/api/v1/batches/preview", "", preview, unchanged()),
        request("/api/v1/batches", "", begin, last_batch("running")),
        request("/api/v1/batches/{id}/stop", "{batch}", why(), last_batch("stopped")),
    ]
}

/// Command line, proof. `BLOCKED`: a provider file with an account that is blocked.
fn lines(rejected: &[i64]) -> Vec<(String, Proof)> {
    let [republish, discard] = [rejected[2], rejected[3]];
    let line = |line: &str, proof| (line.to_owned(), proof);
    vec![
        line("provider apply BLOCKED --because stop", rule_of("acct_2", "blocked")),
        line(&format!("accounts set {PROVIDER} acct_8 refuse --because ticket"), rule_of("acct_8", "refuse")),
        line(&format!("accounts set {PROVIDER} acct_8 5/1s --until 06:00 --because x"), rule_of("acct_8", "limit")),
        line(&format!("accounts unset {PROVIDER} acct_8 --because ticket"), rule_of("acct_8", "none")),
        line(&format!("provider pause {PROVIDER} --because stop"), paused(PROVIDER, "t")),
        line(&format!("provider resume {PROVIDER}"), paused(PROVIDER, "f")),
        line("provider pause --all --because stop", all_paused("t")),
        line("provider resume --all", all_paused("f")),
        line(&format!("limits set {PROVIDER} all 70/1s"), max_requests("70")),
        line(&format!("limits set {PROVIDER} all 60/1s --until 06:00"), max_requests("60")),
        line(
            &format!("enqueue --provider {PROVIDER} --amount 1299 --currency EUR --id new-1"),
            state_of("new-1", "succeeded"),
        ),
        line("jobs resolve review-cli-1 --as succeeded --reference ch_8", state_of("review-cli-1", "succeeded")),
        line("jobs resolve review-cli-2 --as declined --because seen", state_of("review-cli-2", "declined")),
        line("jobs resolve review-cli-3 --as resend --confirm review-cli-3", state_of("review-cli-3", "waiting")),
        line("jobs cancel waiting-cli-1 --because ticket", state_of("waiting-cli-1", "cancelled")),
        line(&format!("jobs cancel unseen-1 --provider {PAUSED}"), state_of("unseen-1", "cancelled")),
        line("jobs cancel --filter state=waiting&provider=control-bolt --dry-run --json", unchanged()),
        line(
            "jobs cancel --filter state=waiting&provider=control-bolt --confirm {digest} --because stop --rate 1/1h --json",
            last_batch("running"),
        ),
        line("batches stop {batch}", last_batch("stopped")),
        line("dlq replay dead-cli-1", state_of("dead-cli-1", "waiting")),
        line("dlq discard dead-cli-2 --yes", state_of("dead-cli-2", "cancelled")),
        line(&format!("rejected republish {republish}"), decision(republish, "republished")),
        line(&format!("rejected discard {discard} --yes"), decision(discard, "discarded")),
        line(
            &format!("jobs erase --account {ACCOUNT} --because ticket"),
            Proof("SELECT account IS NULL FROM jobs WHERE id = 'waiting-cli-1'".to_owned(), "t"),
        ),
    ]
}

/// Changes by SQL that docs/review.md and docs/configuration.md show.
const STATEMENTS: [&str; 5] = [
    "UPDATE providers SET paused = true WHERE name = 'control-acme'",
    "UPDATE providers SET paused = false WHERE name = 'control-acme'",
    "INSERT INTO account_overrides (provider, account, rule) VALUES ('control-acme', 'acct_3', 'blocked')",
    "UPDATE provider_limits SET max_requests = 0 WHERE provider = 'control-acme'",
    "SELECT jobs_decide('review-sql-1', 'review', 'declined', 'a person says so')",
];

fn leaves(command: &Command, path: &str, found: &mut BTreeSet<String>) {
    let mut below = command.get_subcommands().filter(|sub| sub.get_name() != "help").peekable();
    if below.peek().is_none() {
        found.insert(path.trim().to_owned());
    }
    below.for_each(|sub| leaves(sub, &format!("{path} {}", sub.get_name()), found));
}

/// A worker with jobs in each state, and rejected messages.
struct Pressed {
    deployment: Deployment,
    ops: u16,
    rejected: Vec<i64>,
    _worker: crate::support::process::Server,
}

impl Pressed {
    fn start() -> Self {
        let deployment = Deployment::prepared();
        let job = |id: &&str| json!({ "id": id, "amount": 1299, "currency": "EUR", "account": ACCOUNT }).to_string();
        let mut messages: Vec<Value> = JOBS.iter().map(|id| json!({ "key": PAUSED, "body": job(id) })).collect();
        messages.extend((0..INVALID_MESSAGES).map(|n| json!({ "key": PAUSED, "body": format!("no job {n}") })));
        let input: String = messages.iter().map(|message| format!("{message}\n")).collect();
        deployment.python("broker.py", &["publish", &deployment.amqp("shop")], &input);
        let (worker, ops) = deployment.start_worker();
        worker.await_open(ops);
        let mut pressed = Self { deployment, ops, rejected: Vec::new(), _worker: worker };
        pressed.sees("recording", &Proof("SELECT count(*) FROM jobs WHERE holder IS NULL".to_owned(), "19"));
        pressed.sees("rejecting", &Proof("SELECT count(*) FROM rejected_messages".to_owned(), "4"));
        for state in ["review", "dead"] {
            pressed.deployment.sql(&format!("UPDATE jobs SET state = '{state}' WHERE id LIKE '{state}-%'"));
        }
        let ids = pressed.deployment.sql("SELECT id FROM rejected_messages ORDER BY id");
        pressed.rejected = ids.lines().map(|id| id.trim().parse().unwrap()).collect();
        pressed
    }

    /// Waits until the ledger proves the change: workers make some of them.
    fn sees(&self, what: &str, Proof(statement, expected): &Proof) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let found = self.deployment.sql(statement);
            if found.trim() == *expected {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {statement}: {found}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn post(&self, path: &str, body: &str) -> (u16, String) {
        let request = Client::new().post(format!("http://127.0.0.1:{}{path}", self.ops));
        let request = request.bearer_auth(password("(the ops token)")).header("content-type", "application/json");
        let answer = request.body(body.to_owned()).send().unwrap();
        (answer.status().as_u16(), answer.text().unwrap())
    }

    /// Routes that change something, as the running program describes itself.
    fn described(&self) -> BTreeSet<String> {
        let request = Client::new().get(format!("http://127.0.0.1:{}/api/v1/openapi.json", self.ops));
        let api = request.bearer_auth(password("(the ops token)")).send().unwrap().text().unwrap();
        let api: Value = serde_json::from_str(&api).unwrap();
        let changes = |path: &Value| path.as_object().unwrap().keys().any(|method| method != "get");
        api["paths"]
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, path)| changes(path))
            .map(|(path, _)| path.clone())
            .collect()
    }

    fn press_api(&self, refused: &mut Vec<String>) {
        let requests = [requests_about_settings(), requests_about_payments(&self.rejected)].concat();
        let pressed: BTreeSet<String> = requests.iter().map(|(route, ..)| (*route).to_owned()).collect();
        assert_eq!(pressed, self.described(), "routes that are pressed, and those that exist");
        let mut named = Named::default();
        for (_, path, body, proof) in requests {
            let (path, body) = (named.fill(&path), named.fill(&body.to_string()));
            let (status, answer) = self.post(&path, &body);
            named.learn(&answer);
            if (200..300).contains(&status) {
                self.sees(&path, &proof);
            } else {
                refused.push(format!("POST {path} {body} as the worker's role: {status} {answer}"));
            }
        }
    }

    fn press_commands(&self, refused: &mut Vec<String>) {
        let blocked = self.deployment.dir.join("blocked.toml");
        let rule = "[[provider.account]]\naccount = \"acct_2\"\nrule = \"blocked\"\n[[provider.limit]]";
        std::fs::write(&blocked, self.deployment.rows().replacen("[[provider.limit]]", rule, 1)).unwrap();
        let environment = self.deployment.environment("sluicegate_operator", &format!("127.0.0.1:{}", self.ops));
        let (mut named, mut pressed) = (Named::default(), BTreeSet::new());
        for (line, proof) in lines(&self.rejected) {
            let line = named.fill(&line).replace("BLOCKED", blocked.to_str().unwrap());
            let words: Vec<&str> = line.split(' ').collect();
            if line.contains("erase") {
                self.sees("publishing", &Proof(crate::support::UNPUBLISHED.to_owned(), "0"));
            }
            let output = self.deployment.run(&environment, &words);
            let (out, err) = (text(&output.stdout), text(&output.stderr));
            // The account has unfinished payments: these stay, and `erase` says so with 1.
            let expected = if line.contains("erase") { Some(1) } else { Some(0) };
            named.learn(&out);
            if output.status.code() == expected {
                self.sees(&line, &proof);
            } else {
                refused.push(format!("`{line}` as the operator's role: {out}{err}"));
            }
            pressed.insert(words.iter().take(2).copied().collect::<Vec<_>>().join(" "));
            pressed.insert(words[0].to_owned());
        }
        let mut all = BTreeSet::new();
        leaves(&Cli::command(), "", &mut all);
        let missing: Vec<&String> = all
            .iter()
            .filter(|leaf| !READS.split(", ").any(|read| read == leaf.as_str()) && !pressed.contains(*leaf))
            .collect();
        assert!(missing.is_empty(), "commands that no line presses: {missing:?}");
    }

    fn press_sql(&self, refused: &mut Vec<String>) {
        for statement in STATEMENTS {
            let output =
                self.deployment.postgres.psql(DATABASE).args(["-U", "sluicegate_operator", "-c", statement]).output();
            let output = output.unwrap();
            if !output.status.success() {
                refused.push(format!("{statement}: {}", text(&output.stderr)));
            }
        }
    }
}

#[test]
fn every_change_works_under_the_documented_rights() {
    let pressed = Pressed::start();
    let mut refused = Vec::new();
    pressed.press_api(&mut refused);
    pressed.press_commands(&mut refused);
    pressed.press_sql(&mut refused);
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}
