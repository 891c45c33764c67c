//! The routes of the web page: hand-written HTML, CSS and ES modules that are part of the binary.
//!
//! The page gets its data from `/api/v1`, behind the same guard. The server never reads a file of the disk. A content
//! security policy forbids other origins, inline scripts and styles, and frames.

use std::collections::HashMap;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest as _, Sha256};

/// Scripts and styles are files of this server. Nothing else is loaded, nothing is sent elsewhere, and no text becomes
/// markup (<https://www.w3.org/TR/CSP3/>, <https://www.w3.org/TR/trusted-types/>).
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                                       connect-src 'self'; base-uri 'none'; form-action 'none'; \
                                       frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// The headers that differ from those of all responses, which `guard` adds.
const HEADERS: [(HeaderName, HeaderValue); 2] = [
    (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY)),
    // File names do not change with their content, so the browser revalidates a copy each time by its ETag.
    (header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache")),
];

/// One file of the page.
pub struct Asset {
    /// Path below `/assets/`.
    pub path: &'static str,
    pub content_type: &'static str,
    pub body: &'static [u8],
}

/// The ETag of each file, by path.
static ETAGS: LazyLock<HashMap<&'static str, String>> = LazyLock::new(|| {
    let etag = |asset: &Asset| {
        let digest = Sha256::digest(asset.body);
        (asset.path, format!("\"{}\"", hex::encode(&digest[..12])))
    };
    ASSETS.iter().chain([&INDEX]).map(etag).collect()
});

/// The routes `/` and `/assets/…`.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/", get(index)).route("/assets/{*path}", get(asset))
}

async fn index(headers: HeaderMap) -> Response {
    asset_response(&INDEX, &headers)
}

async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Response {
    match ASSETS.iter().find(|asset| asset.path == path) {
        Some(asset) => asset_response(asset, &headers),
        None => (StatusCode::NOT_FOUND, HEADERS, "no such file\n").into_response(),
    }
}

fn asset_response(asset: &Asset, request: &HeaderMap) -> Response {
    let etag = ETAGS.get(asset.path).map(String::as_str).unwrap_or_default();
    let tagged = [(header::ETAG, etag), (header::CONTENT_TYPE, asset.content_type)];
    if request.get(header::IF_NONE_MATCH).is_some_and(|known| etag_matches(known, etag)) {
        return (StatusCode::NOT_MODIFIED, HEADERS, tagged).into_response();
    }
    (HEADERS, tagged, asset.body).into_response()
}

/// Weak comparison, as `If-None-Match` asks for (<https://www.rfc-editor.org/rfc/rfc9110#section-13.1.2>).
fn etag_matches(known: &HeaderValue, etag: &str) -> bool {
    let known = known.to_str().unwrap_or_default();
    known.split(',').map(|tag| tag.trim().trim_start_matches("W/")).any(|tag| tag == etag || tag == "*")
}

const JS: &str = "text/javascript; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";

macro_rules! file {
    ($path:literal, $content_type:expr) => {
        Asset { path: $path, content_type: $content_type, body: include_bytes!(concat!("assets/", $path)) }
    };
}

macro_rules! files {
    ($($content_type:ident: $($path:literal)+;)+) => { &[$($(file!($path, $content_type)),+),+] };
}

const INDEX: Asset = file!("index.html", "text/html; charset=utf-8");

/// All files that a browser can get, by their path below `/assets/`. A test compares the list with the folder.
static ASSETS: &[Asset] = files! {
    CSS:
        "css/base.css" "css/overview.css" "css/parts.css" "css/payment.css" "css/shell.css" "css/views.css"
        "vendor/uplot/uPlot.min.css";
    SVG: "icon.svg";
    JS:
        "js/announce.js" "js/api.js" "js/chart.js" "js/clears.js" "js/clock.js" "js/copy.js" "js/cutoff.js"
        "js/cutoff_change.js" "js/decisions.js" "js/dialog.js" "js/dom.js" "js/early.js" "js/format.js"
        "js/histogram.js" "js/history.js" "js/incidents.js" "js/instants.js" "js/limits.js" "js/main.js" "js/parts.js" "js/person.js"
        "js/poll.js" "js/printable.js" "js/recorded.js" "js/recorded_chart.js" "js/selection.js" "js/shell.js"
        "js/spark.js" "js/theme.js" "js/urgency.js" "js/words.js"
        "js/views/account_rules.js" "js/views/ask_provider.js" "js/views/attention.js" "js/views/batch.js" "js/views/batch_bar.js"
        "js/views/batch_dialog.js" "js/views/batches.js" "js/views/card.js" "js/views/change_limit.js"
        "js/views/decide.js" "js/views/filter_bar.js" "js/views/headline.js" "js/views/job.js" "js/views/job_table.js"
        "js/views/job_totals.js" "js/views/jobs.js" "js/views/lane_table.js" "js/views/limit_until.js"
        "js/views/overview.js" "js/views/pause.js" "js/views/pause_all.js" "js/views/provider.js"
        "js/views/recorded.js" "js/views/rejected.js" "js/views/row.js" "js/views/sums.js" "js/views/throttling.js"
        "js/views/timeline.js" "js/views/unrecorded.js" "js/views/waiting_accounts.js" "js/views/workers.js"
        "vendor/uplot/uPlot.iife.min.js";
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path as FilePath;

    use super::*;
    use crate::ops::tests::start;

    /// Fetches a URL; returns status, headers and body.
    async fn fetch_page(url: &str, headers: &[(&str, &str)]) -> (u16, reqwest::header::HeaderMap, String) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut request = reqwest::Client::new().get(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.headers().clone(), answer.text().await.unwrap())
    }

    fn files(folder: &FilePath, root: &FilePath, into: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files(&path, root, into);
            } else {
                into.insert(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }

    #[test]
    fn binary_contains_every_page_file() {
        let root = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("src/ops/page/assets");
        let mut on_disk = BTreeSet::new();
        files(&root, &root, &mut on_disk);
        let notes = ["index.html", "vendor/uplot/LICENSE", "vendor/uplot/README.md"];
        on_disk.retain(|path| !notes.contains(&path.as_str()));
        let served: BTreeSet<String> = ASSETS.iter().map(|asset| asset.path.to_owned()).collect();
        assert_eq!(served, on_disk);
    }

    #[test]
    fn index_references_every_script_and_style() {
        let index = std::str::from_utf8(INDEX.body).unwrap();
        for asset in ASSETS {
            assert!(index.contains(&format!("\"/assets/{}\"", asset.path)), "{} is not preloaded", asset.path);
        }
    }

    #[test]
    fn vendored_code_matches_its_readme() {
        let readme = include_str!("assets/vendor/uplot/README.md");
        let vendored: Vec<_> = ASSETS.iter().filter(|asset| asset.path.starts_with("vendor/")).collect();
        assert_eq!(vendored.len(), 2);
        for asset in vendored {
            let digest: String = Sha256::digest(asset.body).iter().map(|byte| format!("{byte:02x}")).collect();
            let name = asset.path.rsplit('/').next().unwrap();
            assert!(readme.contains(&format!("| {name} | {digest} |")), "{name}: {digest}");
        }
    }

    #[tokio::test]
    async fn page_has_type_policy_and_etag() {
        let (address, _progress, stop) = start(None).await;
        for (path, kind) in [
            ("/", "text/html; charset=utf-8"),
            ("/assets/js/main.js", "text/javascript; charset=utf-8"),
            ("/assets/css/base.css", "text/css; charset=utf-8"),
            ("/assets/icon.svg", "image/svg+xml"),
        ] {
            let url = format!("{address}{path}");
            let (status, headers, body) = fetch_page(&url, &[]).await;
            assert_eq!((status, headers["content-type"].to_str().unwrap()), (200, kind), "{path}");
            assert!(
                !body.is_empty() && headers["content-security-policy"].to_str().unwrap().contains("script-src 'self';")
            );
            assert_eq!(
                (&headers["x-content-type-options"], &headers["cache-control"]),
                (&"nosniff".parse().unwrap(), &"private, no-cache".parse().unwrap())
            );
            let etag = headers["etag"].to_str().unwrap();
            let (status, headers, body) = fetch_page(&url, &[("if-none-match", &format!("\"old\", W/{etag}"))]).await;
            assert_eq!((status, headers["etag"].to_str().unwrap(), body.as_str()), (304, etag, ""), "{path}");
            assert_eq!(fetch_page(&url, &[("if-none-match", "\"old\"")]).await.0, 200);
        }
        for path in ["/assets/", "/assets/nothing.js", "/assets/../mod.rs", "/assets/js", "/assets/index.html"] {
            assert_eq!(fetch_page(&format!("{address}{path}"), &[]).await.0, 404, "{path}");
        }
        stop.cancel();
    }

    #[tokio::test]
    async fn the_page_is_guarded_like_the_api() {
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        for path in ["/", "/assets/js/main.js"] {
            let url = format!("{address}{path}");
            assert_eq!(fetch_page(&url, &[]).await.0, 401, "{path}");
            assert_eq!(fetch_page(&url, &[("authorization", "Bearer let-me-in")]).await.0, 200, "{path}");
        }
        stop.cancel();
    }
}
