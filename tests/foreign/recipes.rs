//! The provider rows of `config/providers`: they match docs/recipes.md and can be applied unchanged.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use sluicegate::domain::job::{Identifier, Job};
use sluicegate::domain::limit::{AppliesTo, Scope};
use sluicegate::domain::provider::Provider;
use sluicegate::domain::response::{Echo, EchoField, EchoedField};
use sluicegate::ledger::database::Database;
use sluicegate::ledger::provider_row::parse_provider_file;
use sluicegate::provider::http::request::RequestPlan;
use sluicegate::provider::http::{HttpProvider, OutboundPolicy};
use sluicegate::provider::secret_grants::SecretGrants;

use crate::embedded::Embedded;
use crate::page::{Page, plain};
use crate::support::postgres::Postgres;
use crate::support::rabbitmq::RabbitNode;

const PROVIDERS: [&str; 6] = ["adyen", "checkout", "paypal", "razorpay", "stripe", "vipps"];

fn path(name: &str) -> String {
    format!("config/providers/{name}.toml")
}

fn meant(name: &str) -> Provider {
    let rows = parse_provider_file(&Page::read(&path(name)).text).unwrap();
    let [row] = rows.as_slice() else { panic!("{name}: {rows:?}") };
    assert_eq!(row.name, name);
    row.validate(0).unwrap()
}

#[test]
fn every_file_of_the_folder_is_listed() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("config/providers");
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, PROVIDERS.map(|name| format!("{name}.toml")));
}

/// The table of docs/recipes.md matches the files.
#[test]
fn page_figures_match_the_files() {
    let page = Page::read("docs/recipes.md");
    let table = page.table("## The files", "provider");
    let named: Vec<&str> = table.iter().map(|row| plain(&row[0])).collect();
    assert_eq!(named, PROVIDERS);
    for row in &table {
        let provider = meant(plain(&row[0]));
        assert_eq!(row[1..], cells(&provider), "{}", provider.name);
    }
}

/// Limits, key header, retention, echoed fields, look-up.
fn cells(provider: &Provider) -> [String; 5] {
    let limits: Vec<String> = provider
        .limits
        .iter()
        .map(|limit| {
            let scope = match limit.scope {
                Scope::Provider => "",
                Scope::Account => " per account",
                Scope::Reference => " per reference",
            };
            let kind = match limit.applies_to {
                AppliesTo::All => "",
                AppliesTo::Charge => " for charges",
                AppliesTo::Lookup => " for look-ups",
            };
            format!("`{}` {}{scope}{kind}", limit.name, limit.rate)
        })
        .collect();
    let header = provider.request.key_header.as_deref().unwrap_or("Idempotency-Key");
    let kept = provider.idempotency_retention.map_or("not relied on".to_owned(), |kept| match kept.as_secs() {
        days if days % 86_400 == 0 && days > 86_400 => format!("{} d", days / 86_400),
        hours => format!("{} h", hours / 3_600),
    });
    let repeated = echoed(&provider.request.echo);
    let lookup = if provider.lookup.is_some() { "yes" } else { "no" };
    // Responses to look-ups and to charges identify their payment by the same fields.
    assert!(provider.lookup.iter().all(|lookup| echoed(&lookup.echo) == repeated), "{}", provider.name);
    [limits.join(", "), format!("`{header}`"), kept, repeated, lookup.to_owned()]
}

fn echoed(echo: &Echo) -> String {
    let name = |echoed: &EchoedField| match echoed.field {
        EchoField::Id => "`id`",
        EchoField::IdempotencyKey => "`idempotency_key`",
        EchoField::Reference => "`reference`",
        EchoField::Amount => "`amount`",
    };
    let except: Vec<String> = echo.exempt_statuses.iter().map(|status| format!(", but with {status}")).collect();
    format!("{}{}", echo.fields.iter().map(name).collect::<Vec<_>>().join(", "), except.join(""))
}

/// Every file names its sources with their date, and every section of the page lists assumptions and questions for the
/// provider.
#[test]
fn recipes_name_sources_and_open_questions() {
    let page = Page::read("docs/recipes.md");
    for name in PROVIDERS {
        let text = Page::read(&path(name)).text;
        assert!(text.contains("Facts as published on 20") && text.contains("  https://"), "{name}");
        let link = format!("(../{})", path(name));
        let section = page.text.split("\n## ").find(|section| section.contains(&link));
        let section = section.unwrap_or_else(|| panic!("no section links {link}"));
        assert!(section.contains("**Assumed") && section.contains("**Ask"), "{name}");
    }
}

/// No row leaves it to the default table whether a success is a payment.
#[test]
fn every_row_decides_successes() {
    for name in PROVIDERS {
        let statuses = meant(name).statuses;
        assert!([200, 202].iter().all(|status| statuses.contains_key(status)), "{name}: {statuses:?}");
    }
}

/// A payment of these ISO 4217 minor units, and the amount on the wire; `None`: it is invalid.
type Wire = (&'static str, i64, Option<&'static str>);

/// Each provider's published table, as each recipe names its source.
const WIRE: [(&str, &[Wire]); 6] = [
    (
        "adyen",
        &[
            ("EUR", 1_299, Some("1299")),
            ("JPY", 500, Some("500")),
            ("KWD", 5_124, Some("5124")),
            ("ISK", 500, Some("50000")),
            ("CLP", 500, Some("50000")),
            ("CVE", 1_200, Some("12")),
            ("CVE", 1_250, None),
            ("IDR", 1_000_000, Some("10000")),
            ("IDR", 1, None),
            ("UGX", 5, Some("5")),
            ("MRU", 100, Some("100")),
            ("XAU", 1, None),
        ],
    ),
    (
        "checkout",
        &[
            ("EUR", 1_299, Some("1299")),
            ("ISK", 500, Some("500")),
            ("JPY", 100, Some("100")),
            ("UGX", 5, Some("5")),
            ("BHD", 100_000, Some("100000")),
            ("BHD", 1_001, None),
            ("IQD", 1_310, Some("1310")),
            ("TND", 1_312, None),
            ("HUF", 1_299, Some("1299")),
            ("CLP", 500, Some("50000")),
        ],
    ),
    (
        "paypal",
        &[
            ("EUR", 1_299, Some("\"12.99\"")),
            ("USD", 5, Some("\"0.05\"")),
            ("JPY", 500, Some("\"500\"")),
            ("HUF", 120_000, Some("\"1200\"")),
            ("HUF", 120_050, None),
            ("TWD", 80_000, Some("\"800\"")),
            ("TWD", 80_045, None),
            ("ISK", 500, None),
        ],
    ),
    ("razorpay", &[("INR", 1_000_000, Some("1000000")), ("USD", 1_299, None)]),
    (
        "stripe",
        &[
            ("USD", 1_000, Some("1000")),
            ("JPY", 500, Some("500")),
            ("ISK", 5, Some("500")),
            ("UGX", 5, Some("500")),
            ("MGA", 500, Some("5")),
            ("MGA", 501, None),
            ("HUF", 1_045, Some("1045")),
            ("TWD", 80_045, Some("80045")),
            ("KWD", 5_120, Some("5120")),
            ("KWD", 5_124, None),
            ("CLP", 500, Some("500")),
            ("XAF", 500, Some("500")),
            ("GHS", 100, None),
        ],
    ),
    (
        "vipps",
        &[("NOK", 49_900, Some("49900")), ("DKK", 100, Some("100")), ("EUR", 100, Some("100")), ("USD", 100, None)],
    ),
];

/// The amount in a body: a form's field, or the only JSON value that a recipe's template fills with it.
fn amount_on_the_wire(provider: &Provider, body: &str) -> String {
    if provider.request.form_encoded {
        let field = body.split('&').find_map(|pair| pair.strip_prefix("amount="));
        return field.unwrap().to_owned();
    }
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    let places = ["/purchase_units/0/amount/value", "/amount/value", "/amount"];
    places.into_iter().find_map(|place| body.pointer(place)).unwrap().to_string()
}

fn payment(provider: &Provider, currency: &str, amount: i64) -> Job {
    Job {
        id: Identifier::new("pay-1").unwrap(),
        provider: provider.name.clone(),
        amount,
        currency: currency.into(),
        account: None,
        reference: Some("invoice-1".into()),
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: None,
    }
}

#[test]
fn recipes_send_what_the_provider_counts() {
    assert_eq!(WIRE.map(|(name, _)| name), PROVIDERS);
    for (name, table) in WIRE {
        let provider = meant(name);
        assert!(provider.amounts.currencies.is_some(), "{name} lists no currencies");
        let plan = RequestPlan::parse(&provider.request, None).unwrap();
        for (currency, amount, expected) in table {
            let job = payment(&provider, currency, *amount);
            let sum = provider.amounts.sum_of(&job).ok();
            let body = sum.map(|sum| String::from_utf8(plan.body(&job, sum).unwrap()).unwrap());
            let sent = body.map(|body| amount_on_the_wire(&provider, &body));
            assert_eq!(sent.as_deref(), *expected, "{name}: {amount} {currency}");
        }
    }
}

/// The entries of `outbound.secrets` in the comment of a file.
fn entries(name: &str) -> Vec<String> {
    let text = Page::read(&path(name)).text;
    let named = text.lines().filter_map(|line| line.strip_prefix("#   \"")?.strip_suffix("\","));
    named.map(str::to_owned).collect()
}

/// The rows pass the default outbound policy with exactly the entries that their files list. They name every secret by
/// reference.
#[test]
fn every_row_loads_with_its_listed_grants() {
    for name in PROVIDERS {
        let (provider, entries) = (meant(name), entries(name));
        let made = |entries: &[String]| {
            let grants = SecretGrants::parse(entries).unwrap();
            HttpProvider::new(&provider, &OutboundPolicy::default().with_secret_grants(&grants, &[]))
        };
        made(&entries).unwrap_or_else(|error| panic!("{name}: {error}"));
        for entry in &entries {
            let others: Vec<String> = entries.iter().filter(|other| *other != entry).cloned().collect();
            made(&others).unwrap_err();
        }
        let secret = provider.headers.values().any(|value| value.contains("${file:/run/secrets/sluicegate/"));
        assert!(secret && provider.url.starts_with("https://"), "{name}");
    }
}

#[tokio::test]
async fn the_files_apply_to_sqlite() {
    let embedded = Embedded::new(&[]);
    applied(|args| embedded.run(args));
    loaded(&format!("sqlite://{}", embedded.dir.join("sluicegate.db").display())).await;
}

#[tokio::test]
async fn the_files_apply_to_postgresql() {
    let url = Postgres::shared().create_database("recipes");
    // PostgreSQL needs a broker.
    let broker = RabbitNode::shared().create_vhost("recipes");
    let run = |args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_sluicegate");
        let output = Command::new(program)
            .args(args)
            .env("SLUICEGATE_DATABASE__URL", &url)
            .env("SLUICEGATE_QUEUE__URL", &broker)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    run(&["migrate"]);
    applied(run);
    loaded(&url).await;
}

/// Applies all files: as a dry run, for real, and again.
fn applied(run: impl Fn(&[&str]) -> String) {
    for name in PROVIDERS {
        let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path(name));
        let file = file.to_str().unwrap();
        let dry = run(&["provider", "apply", file, "--dry-run"]);
        assert!(dry.starts_with(&format!("{name}: created\n")), "{dry}");
        assert_eq!(run(&["provider", "apply", file]), dry, "the result differs from the dry run");
        assert_eq!(run(&["provider", "apply", file]), "", "{name}");
    }
}

/// The rows in the database equal the validated files.
async fn loaded(url: &str) {
    let database = Database::open(url, 2).unwrap();
    let snapshot = database.load_settings().await.unwrap();
    let loaded: BTreeMap<String, Provider> = snapshot
        .providers
        .into_iter()
        .map(|provider| provider.unwrap())
        .map(|provider| (provider.name.to_string(), provider))
        .collect();
    assert_eq!(loaded.len(), PROVIDERS.len());
    for name in PROVIDERS {
        let (mut ours, theirs) = (meant(name), loaded[name].clone());
        ours.version = theirs.version;
        ours.limits.sort_by(|a, b| a.name.cmp(&b.name));
        let mut limits = theirs.limits.clone();
        limits.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(ours, Provider { limits, ..theirs });
    }
    database.close().await;
}
