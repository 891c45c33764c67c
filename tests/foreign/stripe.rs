//! `config/providers/stripe.toml` with localstripe (PyPI), an independent implementation of Stripe's API, read by
//! Stripe's own library.
//!
//! localstripe does not deduplicate, so a payment that was sent twice would exist twice.

use std::collections::BTreeMap;
use std::process::Command;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::embedded::Embedded;
use crate::page::Page;
use crate::python::{python, script};
use crate::support::process::{Server, free_port, private_dir};
use crate::wiretap::{Request, Wiretap};

/// Content of the secret's file; localstripe accepts any key of this form.
const KEY: &str = "sk_test_localstripe_4242";
const ACCOUNT: &str = "acct_1KzSluice";

struct Localstripe {
    _server: Server,
    port: u16,
}

/// One PaymentIntent, as the SDK returns it.
#[derive(Debug, Deserialize)]
struct Intent {
    id: String,
    status: String,
    amount: i64,
    currency: String,
    customer: Option<String>,
    metadata: BTreeMap<String, String>,
    error: Option<String>,
}

impl Localstripe {
    fn start() -> Self {
        let (port, dir) = (free_port(), private_dir("localstripe"));
        let (script, port_text) = (script("serve_localstripe.py"), port.to_string());
        let command = [python().to_str().unwrap(), &script, &port_text];
        let server = Server::start(&command, &[], &dir.join("localstripe.log"), Some(&dir), "");
        server.await_port(port);
        Self { _server: server, port }
    }

    fn read(&self, command: &str) -> String {
        let base = format!("http://127.0.0.1:{}", self.port);
        let output = Command::new(python()).arg(script("read_stripe.py")).args([&base, command]).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn intents(&self) -> Vec<Intent> {
        self.read("intents").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// The file with two changes: Stripe's URL and the path of the key.
fn adapted(port: u16, key_file: &str) -> String {
    let file = Page::read("config/providers/stripe.toml").text;
    for (old, times) in [("https://api.stripe.com", 2), ("/run/secrets/sluicegate/stripe", 2)] {
        assert_eq!(file.matches(old).count(), times, "{old}");
    }
    file.replace("https://api.stripe.com", &format!("http://127.0.0.1:{port}"))
        .replace("/run/secrets/sluicegate/stripe", key_file)
}

/// `good` for the payer's own account, `connected` for another account, `poor` with a declined card, `odd` with an
/// invalid payment method.
fn messages(customer: &str) -> Vec<Value> {
    let message = |kind: &str, n: i64, method: &str| {
        json!({
            "id": format!("{kind}-{n}"), "amount": 1_000 + n, "currency": "EUR", "reference": format!("invoice {n}"),
            "payload": { "customer": customer, "payment_method": method },
        })
    };
    let connected = |n: i64| {
        let mut message = message("connected", 100 + n, "pm_card_visa");
        message["account"] = ACCOUNT.into();
        message
    };
    let good = (0..30).map(|n| message("good", n, "pm_card_visa"));
    let poor = (0..4).map(|n| message("poor", 200 + n, "pm_card_chargeCustomerFail"));
    let odd = (0..3).map(|n| message("odd", 300 + n, "cash"));
    good.chain((0..6).map(connected)).chain(poor).chain(odd).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payment_intents_are_made_once_and_read_back() {
    let stripe = Localstripe::start();
    let wire = Wiretap::before(stripe.port);
    let customer = stripe.read("customer");
    let messages = messages(&customer);

    let mut embedded = Embedded::new(&[]);
    let key_file = embedded.write("key", &format!("{KEY}\n"));
    embedded.grant(&[std::path::Path::new(&key_file)]);
    embedded.apply(&adapted(wire.port, &key_file));
    // Published twice, as a producer in doubt does.
    embedded.enqueue("stripe", &messages);
    embedded.enqueue("stripe", &messages);
    embedded.start();
    let states = embedded.await_finished(messages.len() as u64).await;
    let wanted = [("declined", 4), ("review", 3), ("succeeded", 36)].map(|(state, jobs)| (state.to_owned(), jobs));
    assert_eq!(states, BTreeMap::from(wanted));
    embedded.stop();

    let intents = stripe.intents();
    assert_same_as_stripe(&embedded, &messages, &intents, &customer).await;
    as_stripe_wants_it(&wire.requests(), &messages);
    assert!(!embedded.log_text().contains(KEY));
}

/// Checks that the ledger and Stripe agree on every payment.
async fn assert_same_as_stripe(embedded: &Embedded, messages: &[Value], intents: &[Intent], customer: &str) {
    let select = "SELECT id, state, coalesce(provider_reference, ''), coalesce(reason, '') FROM jobs";
    let jobs: Vec<(String, String, String, String)> = embedded.rows(select).await;
    assert_eq!(jobs.len(), messages.len());
    for (id, state, reference, reason) in &jobs {
        let message = messages.iter().find(|message| message["id"] == id.as_str()).unwrap();
        let made: Vec<&Intent> = intents.iter().filter(|intent| intent.metadata["job_id"] == *id).collect();
        let [intent] = made.as_slice() else {
            assert!(made.is_empty() && id.starts_with("odd-"), "{id}: {made:?}");
            assert_eq!((state.as_str(), reason.as_str()), ("review", "provider answered 400: invalid_request_error"));
            continue;
        };
        assert_eq!((intent.amount, intent.currency.as_str()), (message["amount"].as_i64().unwrap(), "EUR"), "{id}");
        assert_eq!(
            (&intent.metadata["reference"], intent.customer.as_deref()),
            (&text(&message["reference"]), Some(customer))
        );
        if id.starts_with("poor-") {
            assert_eq!(
                (intent.status.as_str(), intent.error.as_deref()),
                ("requires_payment_method", Some("card_declined"))
            );
            assert_eq!((state.as_str(), reason.as_str()), ("declined", "provider answered 402: card_declined"), "{id}");
        } else {
            assert_eq!(
                (intent.status.as_str(), state.as_str(), reference),
                ("succeeded", "succeeded", &intent.id),
                "{id}"
            );
        }
    }
    assert_eq!(intents.len(), 40, "Stripe has an intent that no job made");
}

/// Checks every request: one per payment, in Stripe's format, with the key, the secret and the account.
fn as_stripe_wants_it(requests: &[Request], messages: &[Value]) {
    assert_eq!(requests.len(), messages.len());
    for message in messages {
        let id = text(&message["id"]);
        let sent: Vec<&Request> = requests.iter().filter(|request| request.headers["idempotency-key"] == id).collect();
        let [request] = sent.as_slice() else { panic!("{id}: {sent:?}") };
        assert_eq!(request.line, "POST /v1/payment_intents");
        assert_eq!(request.headers["authorization"], format!("Bearer {KEY}"));
        assert_eq!(request.headers["content-type"], "application/x-www-form-urlencoded");
        let account = message.get("account").map(text);
        assert_eq!(request.headers.get("stripe-account"), account.as_ref(), "{id}");
        let form: BTreeMap<String, String> =
            url::form_urlencoded::parse(request.body.as_bytes()).into_owned().collect();
        let payload = &message["payload"];
        let wanted = [
            ("amount", message["amount"].to_string()),
            ("confirm", "true".to_owned()),
            ("currency", "EUR".to_owned()),
            ("customer", text(&payload["customer"])),
            ("metadata[job_id]", id),
            ("metadata[reference]", text(&message["reference"])),
            ("off_session", "true".to_owned()),
            ("payment_method", text(&payload["payment_method"])),
            ("payment_method_types[0]", "card".to_owned()),
        ];
        assert_eq!(form, BTreeMap::from(wanted.map(|(name, value)| (name.to_owned(), value))));
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}
