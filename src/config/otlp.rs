//! Validation of `telemetry.otlp_endpoint`, the address that spans are sent to.
//!
//! A build without the feature `otlp` accepts only `none`. Plain text to other machines is rejected, because spans tell
//! who pays whom when.

use super::raw::RawTelemetry;
use super::validated::ProblemCollector;
use crate::tls::is_plaintext_allowed;

const KEY: &str = "telemetry.otlp_endpoint";

/// Validates the endpoint. `Some(None)`: no spans are sent. `None`: a problem was added.
pub fn validate_endpoint(
    raw: &RawTelemetry,
    plaintext_hosts: &[String],
    problems: &mut ProblemCollector,
) -> Option<Option<String>> {
    let text = raw.otlp_endpoint.as_str();
    if text == "none" {
        return Some(None);
    }
    if !cfg!(feature = "otlp") {
        let what = "is set, and this build has no OpenTelemetry";
        problems.add(KEY, what, "Build with `cargo build --release --features otlp`, or set it to `none`");
        return None;
    }
    let url = url::Url::parse(text).ok().filter(|url| {
        let is_bare = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https") && is_bare && url.fragment().is_none()
    });
    let Some((scheme, host)) = url.as_ref().and_then(|url| Some((url.scheme(), url.host_str()?))) else {
        problems.add(
            KEY,
            "is not the address of a collector",
            "Write http://127.0.0.1:4318 or https://HOST, or `none`",
        );
        return None;
    };
    if scheme == "http" && !is_plaintext_allowed(host, plaintext_hosts) {
        let what = format!("the connection to {host} would be plain text");
        problems.add(KEY, what, format!("Use https://; or add \"{host}\" to tls.plaintext_hosts at your own risk"));
        return None;
    }
    Some(Some(text.to_owned()))
}
