//! Tests of bounded buffers, and of addresses with placeholders: what a job's fields may and may not change in them.

use proptest::prelude::*;

use super::super::job::Identifier;
use super::super::job::tests::job;
use super::*;

proptest! {
    #[test]
    fn writes_never_reserve_beyond_the_bound(
        bytes_max in 0_usize..2_000,
        lengths in prop::collection::vec(0_usize..300, 0..40),
    ) {
        let mut bounded = BoundedBuffer::new(bytes_max);
        let mut written = 0;
        for length in lengths {
            let fits = written + length <= bytes_max;
            prop_assert_eq!(bounded.push(&"x".repeat(length)).is_ok(), fits);
            written += if fits { length } else { 0 };
            prop_assert_eq!(bounded.bytes.len(), written);
            prop_assert!(bounded.bytes.capacity() <= bytes_max);
        }
    }
}

#[test]
fn a_jobs_fields_are_encoded_into_the_address() {
    let full = Job {
        account: Some(Identifier::new("a_1").unwrap()),
        reference: Some("a/b?c=d&e#é %2e+".into()),
        idempotency_key: Some(Identifier::new("key-9").unwrap()),
        ..job("pay-1")
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
        assert_eq!(UrlTemplate::parse(url).unwrap().for_job(&full, RequestPart::Url).unwrap(), address);
    }
}

#[test]
fn missing_fields_and_dot_segments_are_rejected() {
    let url = UrlTemplate::parse("https://x.example/charges/${job:reference}/state").unwrap();
    let address_of = |reference: Option<&str>| {
        url.for_job(&Job { reference: reference.map(Into::into), ..job("pay-1") }, RequestPart::Url)
    };
    for missing in [None, Some("")] {
        assert_eq!(address_of(missing).unwrap_err().to_string(), "the job has no reference, which url needs");
    }
    for climbs in ["..", "."] {
        assert!(address_of(Some(climbs)).unwrap_err().to_string().contains("would change the path"), "{climbs}");
    }
    assert_eq!(address_of(Some("...")).unwrap(), "https://x.example/charges/.../state");
    for half in [".", "%2E"] {
        let half = UrlTemplate::parse(&format!("https://x.example/charges/{half}${{job:reference}}")).unwrap();
        let job = Job { reference: Some(".".into()), ..job("pay-1") };
        assert!(half.for_job(&job, RequestPart::Url).unwrap_err().to_string().contains("would change the path"));
    }
    let query = UrlTemplate::parse("https://x.example/charges?id=${job:reference}").unwrap();
    assert!(query.for_job(&Job { reference: Some("../..".into()), ..job("pay-1") }, RequestPart::Url).is_ok());
}

#[test]
fn invalid_addresses_are_rejected_with_a_fix() {
    let table = [
        ("${job:id}", "has a placeholder in its host"),
        ("https://${job:id}.example/", "has a placeholder in its host"),
        ("https://x.example${job:id}/a", "has a placeholder in its host"),
        ("https://x.example:${job:id}/a", "has a placeholder in its host"),
        ("https://${job:id}@x.example/a", "has a placeholder in its host"),
        ("https:///${job:id}.example/a", "has a placeholder in its host"),
        ("https:\\\\${job:id}/a", "has a placeholder in its host"),
        ("https:${job:id}/a", "has a placeholder in its host"),
        ("${job:id}://x.example/a", "has a placeholder in its host"),
        ("https://x.example/${job:id", "never closed"),
        ("https://x.example/${job:amount}", "has an unknown placeholder: use ${job:id}"),
        ("https://x.example/${env:KEY}/${job:id}", "has an unknown placeholder"),
    ];
    for (url, problem) in table {
        let error = UrlTemplate::parse(url).unwrap_err();
        assert!(error.to_string().contains(problem), "{url}: {error}");
    }
}

/// A row may repeat a field, and each character of a reference may become twelve in an address.
#[test]
fn an_address_beyond_its_bound_names_the_field() {
    let url = UrlTemplate::parse(&format!("https://x.example/{}", "${job:reference}".repeat(3))).unwrap();
    let address_of =
        |reference: String| url.for_job(&Job { reference: Some(reference.into()), ..job("pay-1") }, RequestPart::Url);
    assert!(address_of("é".repeat(255)).is_ok());
    let too_large = address_of("\u{1f600}".repeat(255)).unwrap_err();
    let expected = "reference: the url that the provider's row makes of it exceeds 8192 bytes: send a shorter one";
    assert_eq!(too_large.to_string(), expected);
    let ids = UrlTemplate::parse(&format!("https://x.example/{}", "${id}".repeat(2_000))).unwrap();
    assert!(
        ids.for_job(&job("pay-1"), RequestPart::LookupUrl).unwrap_err().to_string().starts_with("id: the lookup.url")
    );
}

/// A text without placeholders is neither changed nor validated here.
#[test]
fn url_without_placeholders_is_unchanged() {
    for url in ["https://x.example/a/../b?c=%2e%2e#d", "https://x.example", "no address"] {
        let template = UrlTemplate::parse(url).unwrap();
        assert!(!template.has_placeholders() && !template.names_payment());
        assert_eq!(
            (template.for_job(&job("pay-1"), RequestPart::Url).as_deref(), template.sample().as_str()),
            (Ok(url), url)
        );
    }
}

proptest! {
    /// Whatever the job's fields are, the address leads to the same host, and the path has the same number of segments.
    #[test]
    fn job_fields_cannot_change_the_target(
        reference in "[./\\\\?#%@:&= a-z\u{0}-\u{1f}é\u{202e}]{0,8}|\\PC{0,12}",
        host in "https?://[a-z@:/\\\\.]{0,6}",
        query in any::<bool>(),
    ) {
        let job = Job { reference: Some(reference.as_str().into()), ..job("pay-1") };
        let text = if query { format!("{host}/a?r=${{reference}}&b=1") } else { format!("{host}/a/${{reference}}/b") };
        let Ok(template) = UrlTemplate::parse(&text) else { return Ok(()) };
        let (sample, address) = (url::Url::parse(&template.sample()), template.for_job(&job, RequestPart::Url));
        let (Ok(sample), Ok(address)) = (sample, address) else { return Ok(()) };
        let url = url::Url::parse(&address).unwrap();
        prop_assert_eq!(url.origin(), sample.origin());
        prop_assert_eq!((url.username(), url.password()), (sample.username(), sample.password()));
        prop_assert_eq!(url.fragment(), None);
        let segments = |url: &url::Url| url.path_segments().map_or(0, Iterator::count);
        prop_assert_eq!(segments(&url), segments(&sample));
        if query {
            prop_assert_eq!(url.path(), sample.path());
            prop_assert_eq!(url.query_pairs().next().unwrap().1, reference.as_str());
        }
    }
}
