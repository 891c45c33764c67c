use std::collections::BTreeSet;
use std::path::Path as FilePath;

use super::super::tests::start;
use super::*;

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
