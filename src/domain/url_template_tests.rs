//! Addresses of look-ups: what a job's fields may and may not do to them.

use super::super::job::Token;
use super::super::provider::ProviderName;
use super::*;

fn job() -> Job {
    Job {
        id: Token::new("pay-1").unwrap(),
        provider: ProviderName::new("acme").unwrap(),
        amount: 1_299,
        currency: "EUR".to_owned(),
        account: None,
        reference: None,
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: None,
    }
}

#[test]
fn a_jobs_fields_are_encoded_into_the_address() {
    let full = Job {
        account: Some(Token::new("a_1").unwrap()),
        reference: Some("a/b?c=d&e#é %2e+".to_owned()),
        idempotency_key: Some(Token::new("key-9").unwrap()),
        ..job()
    };
    let table = [
        ("https://x.example/charges?id=${job:id}", "https://x.example/charges?id=pay-1"),
        ("https://x.example/charges/${id}", "https://x.example/charges/pay-1"),
        ("https://x.example/${job:account}/${job:idempotency_key}", "https://x.example/a_1/key-9"),
        ("https://x.example?k=${idempotency_key}", "https://x.example?k=key-9"),
        (
            "https://x.example/c/${job:reference}/state",
            "https://x.example/c/a%2Fb%3Fc%3Dd%26e%23%C3%A9%20%252e%2B/state",
        ),
    ];
    for (url, address) in table {
        assert_eq!(LookupUrl::parse(url).unwrap().of(&full).unwrap(), address);
    }
}

#[test]
fn what_a_job_lacks_or_what_would_climb_cannot_be_asked() {
    let url = LookupUrl::parse("https://x.example/charges/${job:reference}/state").unwrap();
    let of = |reference: Option<&str>| url.of(&Job { reference: reference.map(str::to_owned), ..job() });
    for missing in [None, Some("")] {
        assert_eq!(of(missing).unwrap_err(), "the job has no reference, which lookup.url needs");
    }
    for climbs in ["..", "."] {
        assert!(of(Some(climbs)).unwrap_err().contains("would change the path"), "{climbs}");
    }
    assert_eq!(of(Some("...")).unwrap(), "https://x.example/charges/.../state");
    for half in [".", "%2E"] {
        let half = LookupUrl::parse(&format!("https://x.example/charges/{half}${{job:reference}}")).unwrap();
        let job = Job { reference: Some(".".to_owned()), ..job() };
        assert!(half.of(&job).unwrap_err().contains("would change the path"));
    }
    let query = LookupUrl::parse("https://x.example/charges?id=${job:reference}").unwrap();
    assert!(query.of(&Job { reference: Some("../..".to_owned()), ..job() }).is_ok());
}

#[test]
fn addresses_that_cannot_be_meant_are_refused_with_the_mend() {
    let table = [
        ("", "names no payment"),
        ("${job:id}", "has a place in its host"),
        ("https://x.example/charges", "names no payment"),
        ("https://x.example/${job:account}", "names no payment"),
        ("https://${job:id}.example/", "has a place in its host"),
        ("https://x.example${job:id}/a", "has a place in its host"),
        ("https://x.example/${job:id", "never closed"),
        ("https://x.example/${job:amount}", "has a place that is none: use ${job:id}"),
        ("https://x.example/${env:KEY}/${job:id}", "has a place that is none"),
    ];
    for (url, problem) in table {
        let said = LookupUrl::parse(url).unwrap_err();
        assert!(said.contains(problem), "{url}: {said}");
    }
}
