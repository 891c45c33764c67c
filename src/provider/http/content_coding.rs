//! Content codings of responses. Every request asks for none (`Accept-Encoding: identity`), yet some servers and gateways
//! compress.
//!
//! One layer of gzip is read, within the bound of a body. Any other coding leaves the body undecodable.

use std::io::Read as _;

use flate2::bufread::MultiGzDecoder;
use reqwest::header::{CONTENT_ENCODING, HeaderMap, HeaderName, TRANSFER_ENCODING};

use super::classify::ResponseBody;
use crate::domain::response::RESPONSE_BODY_BYTES_MAX;

/// Content codings that browsers know. Browsers ignore other labels, such as `utf-8`.
const KNOWN: [&str; 7] = ["gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"];

/// The body as its sender encoded it, decoded by what the headers say. An empty body has nothing to decode.
pub fn decode(headers: &HeaderMap, bytes: Vec<u8>) -> ResponseBody {
    let content = codings(headers, &CONTENT_ENCODING);
    let is_transfer_coded = !codings(headers, &TRANSFER_ENCODING).is_empty();
    match content.as_slice() {
        _ if bytes.is_empty() => ResponseBody::Whole(bytes),
        [] if !is_transfer_coded => ResponseBody::Whole(bytes),
        [coding] if !is_transfer_coded && coding.ends_with("gzip") => gunzip(&bytes),
        _ => ResponseBody::Undecodable,
    }
}

/// The known codings that a header names, in lower case.
fn codings(headers: &HeaderMap, name: &HeaderName) -> Vec<String> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let labels = values.flat_map(|value| value.split(',')).map(|label| label.trim().to_ascii_lowercase());
    labels.filter(|label| KNOWN.contains(&label.as_str())).collect()
}

fn gunzip(bytes: &[u8]) -> ResponseBody {
    let mut decoded = Vec::new();
    let bound = u64::try_from(RESPONSE_BODY_BYTES_MAX).unwrap_or(u64::MAX);
    let read = MultiGzDecoder::new(bytes).take(bound + 1).read_to_end(&mut decoded);
    match read {
        Ok(length) if length > RESPONSE_BODY_BYTES_MAX => ResponseBody::TooLarge,
        Ok(_) => ResponseBody::Whole(decoded),
        Err(_) => ResponseBody::Undecodable,
    }
}
