//! Secrets that a row names: they are sent only to hosts that the process's configuration lists for them.

use std::path::PathBuf;

use sluicegate::domain::outcome::{LookupResult, Outcome};
use sluicegate::domain::provider::Provider;
use sluicegate::provider::http::{HttpProvider, OutboundPolicy};
use sluicegate::provider::secret_grants::SecretGrants;
use sluicegate::provider::{FreezeError, PaymentProvider as _};

use super::raw::{RawServer, Then};
use super::{SUM, charge, job, policy, row};

/// A policy for loopback with these secrets granted.
pub fn granting(entries: &[&str]) -> OutboundPolicy {
    let entries: Vec<String> = entries.iter().map(|entry| (*entry).to_owned()).collect();
    policy().with_secret_grants(&SecretGrants::parse(&entries).unwrap(), &[])
}

fn with_key(url: &str) -> Provider {
    Provider { headers: [("authorization".to_owned(), "Bearer ${env:PATH}".to_owned())].into(), ..row(url) }
}

fn refusal(row: &Provider, policy: &OutboundPolicy) -> String {
    match HttpProvider::new(row, policy) {
        Err(error @ FreezeError::Header { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

fn asked_at(url: &str, row: Provider) -> Provider {
    Provider { lookup: Some(super::fake::lookup(url)), ..row }
}

#[tokio::test]
async fn ungranted_secret_makes_row_unusable() {
    let server = RawServer::start(vec![Then::ok()]).await;
    let row = with_key(&server.url());
    let none = refusal(&row, &policy());
    let line = "header `authorization`: `${env:PATH}` may not be sent to 127.0.0.1: to allow it, \
                write `secrets = [\"env:PATH@127.0.0.1\"]` below [outbound] in the workers' configuration";
    assert_eq!(none, line);
    for entries in [
        &["env:PATH@localhost"][..],
        &["env:HOME@127.0.0.1"],
        &["file:/PATH@127.0.0.1"],
        &["env:PATH@127.0.0.2", "env:PATH@[::1]"],
    ] {
        let message = refusal(&row, &granting(entries));
        assert!(
            message.ends_with("add \"env:PATH@127.0.0.1\" to outbound.secrets in the workers' configuration"),
            "{message}"
        );
    }
    let granted = HttpProvider::new(&row, &granting(&["env:PATH@127.0.0.1"])).unwrap();
    assert!(matches!(charge(&granted, &job("pay-1")).await.outcome, Outcome::Accepted { .. }));
    assert_eq!(server.requests().len(), 1);
}

/// A look-up sends the same headers, so its host needs a grant too.
#[tokio::test]
async fn lookup_on_another_host_needs_own_grant() {
    let server = RawServer::start(vec![Then::answer("404 Not Found", "", "")]).await;
    let elsewhere = server.url().replace("127.0.0.1", "localhost");
    let row = asked_at(&elsewhere, with_key(&server.url()));
    let message = refusal(&row, &granting(&["env:PATH@127.0.0.1"]));
    assert!(
        message.contains("may not be sent to localhost") && message.contains("\"env:PATH@localhost\""),
        "{message}"
    );
    let both = HttpProvider::new(&row, &granting(&["env:PATH@127.0.0.1", "env:PATH@LOCALHOST"])).unwrap();
    let mut question = both.lookup_request(&job("pay-1"), SUM).unwrap();
    assert_eq!(both.look_up(&question).await.outcome, LookupResult::NotFound);
    // The host that is called decides, not the host of the row.
    question.url = server.url().replace("127.0.0.1", "127.0.0.2");
    let elsewhere = both.look_up(&question).await.outcome;
    assert!(
        matches!(&elsewhere, LookupResult::LocalFault(fault) if fault.to_string().contains("127.0.0.2")),
        "{elsewhere:?}"
    );
    assert_eq!(server.requests().len(), 1);
}

/// A row that has moved since has grants for its new host alone.
#[tokio::test]
async fn frozen_request_to_ungranted_host_is_refused() {
    let server = RawServer::start(vec![Then::ok()]).await;
    let there = HttpProvider::new(&with_key(&server.url()), &granting(&["env:PATH@127.0.0.1"])).unwrap();
    let frozen = there.freeze(&job("pay-1"), SUM).await.unwrap();
    let moved = with_key(&server.url().replace("127.0.0.1", "localhost"));
    let moved = HttpProvider::new(&moved, &granting(&["env:PATH@localhost"])).unwrap();
    match moved.send(&job("pay-1"), &frozen).await.outcome {
        Outcome::LocalFault(fault) => assert!(fault.to_string().contains("env:PATH@127.0.0.1"), "{fault}"),
        other => panic!("{other:?}"),
    }
    assert!(server.requests().is_empty());
}

/// A grant does not expose the program's own configuration files to a provider.
#[tokio::test]
async fn own_configuration_files_are_refused_as_secrets() {
    let server = RawServer::start(vec![Then::ok()]).await;
    let dir = tempfile::tempdir().unwrap();
    let (token, name) = (dir.path().join("ops.token"), dir.path().join("acme"));
    std::fs::write(&token, "hunter2").unwrap();
    std::fs::hard_link(&token, &name).unwrap();
    let reference = format!("file:{}", name.display());
    let headers = [("authorization".to_owned(), format!("${{{reference}}}"))].into();
    let row = Provider { headers, ..row(&server.url()) };
    let grants = SecretGrants::parse(&[format!("{reference}@127.0.0.1")]).unwrap();
    let own: [PathBuf; 1] = [token];
    let provider = HttpProvider::new(&row, &policy().with_secret_grants(&grants, &own)).unwrap();
    let error = provider.freeze(&job("pay-1"), SUM).await.unwrap_err().to_string();
    assert!(error.contains("holds a key of this program's own configuration") && !error.contains("hunter2"), "{error}");
    let named: Vec<String> = provider.unreadable_secrets().await.iter().map(ToString::to_string).collect();
    assert_eq!(named, [error]);
    assert!(server.requests().is_empty());
}
