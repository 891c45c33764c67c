//! From job to request, for any message and row: each part of the request is within its bound, or the job is rejected
//! as too large.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use sluicegate::domain::expansion::{HEADERS_BYTES_MAX, REQUEST_BODY_BYTES_MAX, URL_BYTES_MAX};
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::provider::FreezeError;
use sluicegate::provider::http::{OutboundPolicy, RequestBuilder};
use sluicegate::provider::secret_grants::SecretGrants;
use sluicegate::queue::message::{CardNumbers, decode};

use super::{Bytes, lane};

/// Input: a row as JSON and a message, separated by a form feed.
pub fn holds(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    if let Ok(row) = serde_json::from_slice::<ProviderRow>(bytes.until(b'\x0c')) {
        within_bounds(&row, bytes.0);
    }
}

/// Checks valid rows and messages; reads no file.
pub fn within_bounds(row: &ProviderRow, message: &[u8]) {
    let Ok(provider) = row.validate(7) else { return };
    let Ok(decoded) = decode(message, &lane(), CardNumbers::Off) else { return };
    let grants = SecretGrants::parse(&["env:PATH@127.0.0.1".to_owned()]).unwrap();
    let policy = OutboundPolicy::parse(&["loopback".to_owned()]).unwrap().with_secret_grants(&grants, &[]);
    let Ok(expansion) = RequestBuilder::new(&provider, &policy) else { return };
    if provider.headers.values().any(|value| value.contains("${file:")) {
        return;
    }
    let job = &decoded.job;
    let Ok(sum) = provider.amounts.sum_of(job) else { return };
    let (frozen, question) = (at_once(expansion.freeze(job, sum)), expansion.lookup_url(job));
    if let Err(too_large) = expansion.check_size(job, sum) {
        let message = too_large.to_string();
        assert!(message.len() < 300 && !message.chars().any(char::is_control), "{message}");
        // The first problem found is named, and it may be another one.
        let refuses = |error: Option<FreezeError>| matches!(error, Some(FreezeError::Job(_) | FreezeError::Url { .. }));
        return assert!(refuses(frozen.err()) || refuses(question.and_then(Result::err)), "{message}");
    }
    if let Ok(frozen) = frozen {
        assert!(frozen.body.len() <= REQUEST_BODY_BYTES_MAX && frozen.url.len() <= URL_BYTES_MAX);
        // A value that a header cannot hold is never sent.
        let headers = at_once(expansion.header_bytes(&frozen)).unwrap_or_default();
        assert!(headers <= HEADERS_BYTES_MAX, "{headers}");
        // The same bytes each time.
        assert!(at_once(expansion.freeze(job, sum)).is_ok_and(|again| again == frozen));
    }
    if let Some(Ok(url)) = question {
        assert!(url.len() <= URL_BYTES_MAX, "{}", url.len());
    }
}

/// The result of a future that never waits.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("no file is read, so nothing is waited for"),
    }
}
