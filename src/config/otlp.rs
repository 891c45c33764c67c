//! `telemetry.otlp_endpoint`: where spans go, in a build that has any.
//!
//! Refuses what such a build cannot do, and plain text to other machines: spans tell who pays whom when.

use super::raw::RawTelemetry;
use super::validated::ProblemCollector;
use crate::tls::is_plaintext_allowed;

const KEY: &str = "telemetry.otlp_endpoint";

/// `Some(None)`: spans go nowhere. `None`: it has been complained about.
pub fn validate_endpoint(
    written: &RawTelemetry,
    plaintext_hosts: &[String],
    complaints: &mut ProblemCollector,
) -> Option<Option<String>> {
    let text = written.otlp_endpoint.as_str();
    if text == "none" {
        return Some(None);
    }
    if !cfg!(feature = "otlp") {
        let what = "is set, and this build has no OpenTelemetry";
        complaints.add(KEY, what, "Build with `cargo build --release --features otlp`, or set it to `none`");
        return None;
    }
    let url = url::Url::parse(text).ok().filter(|url| {
        let is_bare = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https") && is_bare && url.fragment().is_none()
    });
    let Some((scheme, host)) = url.as_ref().and_then(|url| Some((url.scheme(), url.host_str()?))) else {
        complaints.add(KEY, "is no address of a collector", "Write http://127.0.0.1:4318 or https://HOST, or `none`");
        return None;
    };
    if scheme == "http" && !is_plaintext_allowed(host, plaintext_hosts) {
        let what = format!("the connection to {host} would be plain text");
        complaints.add(KEY, what, format!("Use https://; or add \"{host}\" to tls.plaintext_hosts at your own risk"));
        return None;
    }
    Some(Some(text.to_owned()))
}
