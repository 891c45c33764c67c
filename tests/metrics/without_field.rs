//! Jobs to which account or reference limits do not apply, because their messages lack the field. Their counts equal
//! the provider's charges.

use serde_json::json;

use crate::rig::{Rig, jobs};

const WITH: u32 = 4;
const WITHOUT: u64 = 9;

/// Limits of `acme` that are never reached; a rule of `bolt` for an account that no message has; `crate` has neither.
const COUNTING: &str = "[[provider.limit]]\nname = \"per-account\"\nscope = \"account\"\nmax_requests = 50\nwindow_ms = 1000\n\
                        [[provider.limit]]\nname = \"per-reference\"\nscope = \"reference\"\nmax_requests = 50\nwindow_ms = 1000\n\n";
const RULE: &str = "[[provider.account]]\naccount = \"nobody\"\nrule = \"blocked\"\n\n";

fn row_of(name: &str) -> String {
    format!("[[provider]]\nname = \"{name}\"\n")
}

fn nameless(lane: &'static str, number: u64) -> (&'static str, String) {
    let id = format!("nameless-{lane}-{number}");
    (lane, json!({"id": id, "amount": 100, "currency": "EUR", "reference": "bill-1"}).to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_without_limit_fields_are_counted() {
    let mut rig = Rig::prepare().await;
    let (bolt, last) = (row_of("bolt"), row_of("crate"));
    let rows = rig.rows.replace(&bolt, &format!("{COUNTING}{bolt}")).replace(&last, &format!("{RULE}{last}"));
    rig.apply(&rows);
    rig.publish(jobs("acme", WITH)).await;
    rig.publish((0..WITHOUT).map(|number| nameless("acme", number))).await;
    // A duplicate message is one payment, and a payment that is first refused counts once.
    rig.publish([nameless("acme", 0)]).await;
    rig.publish((0..12).map(|number| nameless("bolt", number))).await;
    rig.publish((0..2).map(|number| nameless("crate", number))).await;
    rig.run();
    rig.await_succeeded(u64::from(WITH) + WITHOUT + 12 + 2).await;

    let scrape = rig.scrape().await;
    let counted = |field: &str, provider| {
        let value = scrape.value(&format!("sluicegate_jobs_without_{field}_total"), &[("provider", provider)]);
        format!("{value}").parse::<u64>().unwrap()
    };
    let charges = |provider| rig.report(provider).charges;
    assert_eq!(counted("account", "acme"), charges("acme") - u64::from(WITH));
    assert_eq!((counted("account", "bolt"), rig.report("bolt").refused_429 > 0), (charges("bolt"), true));
    assert_eq!(counted("account", "crate"), 0, "`crate` has neither a limit nor a rule per account");
    assert_eq!([counted("reference", "acme"), counted("reference", "bolt")], [u64::from(WITH), 0]);

    let warned = |warnings: &[String], words: &str| warnings.iter().any(|warning| warning.contains(words));
    let account = "acme: its account limits and rules did not apply to 9 jobs without `account`";
    let of_bolt = "bolt: its account limits and rules did not apply to 12 jobs";
    let warnings = rig.await_warnings("counted", |seen| warned(seen, account) && warned(seen, of_bolt)).await;
    for words in [of_bolt, "set require = [\"account\"] in its row"] {
        assert!(warned(&warnings, words), "{words}: {warnings:?}");
    }
    assert!(
        warned(&warnings, "acme: its reference limits did not apply to 4 jobs without `reference`"),
        "{warnings:?}"
    );
    assert!(!warned(&warnings, "crate: "), "{warnings:?}");
    assert!(rig.sluicegate(&["status"]).contains(account));

    let acme = row_of("acme");
    rig.apply(&rows.replace(&acme, &format!("{acme}require = [\"account\"]\n")));
    let warnings = rig.await_warnings("required", |warnings| !warned(warnings, account)).await;
    assert!(warned(&warnings, "acme: its reference limits") && warned(&warnings, "bolt: its account"), "{warnings:?}");
}
