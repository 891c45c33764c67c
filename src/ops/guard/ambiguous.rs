//! Requests whose head can be read in two ways: a header twice of which one value decides, or two names of the host.
//!
//! A proxy before the ops server may have judged the other value. <https://www.rfc-editor.org/rfc/rfc9112#section-3.2>

use axum::extract::Request;
use axum::http::{HeaderName, header};

/// Headers that decide something here.
const SINGLE: [HeaderName; 5] = [
    header::HOST,
    header::AUTHORIZATION,
    header::ORIGIN,
    header::CONTENT_TYPE,
    HeaderName::from_static("sec-fetch-site"),
];

/// What has two meanings; never a value.
pub(super) fn problem(request: &Request) -> Option<String> {
    let headers = request.headers();
    if let Some(name) = SINGLE.iter().find(|name| headers.get_all(*name).iter().nth(1).is_some()) {
        return Some(format!("the request has more than one header `{name}`: send it once"));
    }
    let target = request.uri().authority()?.as_str();
    let is_host = headers.get(header::HOST).is_some_and(|host| host.as_bytes().eq_ignore_ascii_case(target.as_bytes()));
    (!is_host).then(|| "the request's address names another host than its header `host`".to_owned())
}
