//! A page of another site in the browser of a machine with an open ops server: the server answers none of its requests,
//! and a link on it opens our page.

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::browser::Browser;
use crate::stand::Stand;

/// Serves one page to everyone, and returns its address. `localhost` is another site than 127.0.0.1.
async fn serve_page(html: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let head =
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\ncontent-length: {}", html.len());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4_096]).await;
            let _ = stream.write_all(format!("{head}\r\n\r\n{html}").as_bytes()).await;
        }
    });
    format!("http://localhost:{port}/")
}

/// Statuses of the responses to requests whose address has this text, since the last call. A response that the browser
/// keeps from the page has its status in the extra information alone.
async fn statuses(browser: &Browser, part: &str) -> Vec<u64> {
    let entries = browser.log("performance").await;
    let messages = entries.iter().filter_map(|entry| entry["message"].as_str());
    let events: Vec<Value> =
        messages.filter_map(|text| Some(serde_json::from_str::<Value>(text).ok()?["message"].take())).collect();
    let of = |method: &'static str| {
        events.iter().filter(move |event| event["method"] == method).map(|event| &event["params"])
    };
    let is_asked = |sent: &&Value| sent["request"]["url"].as_str().is_some_and(|url| url.contains(part));
    let asked: Vec<&Value> = of("Network.requestWillBeSent").filter(is_asked).map(|sent| &sent["requestId"]).collect();
    let read = of("Network.responseReceivedExtraInfo").filter(|extra| asked.contains(&&extra["requestId"]));
    read.filter_map(|extra| extra["statusCode"].as_u64()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_page_gets_no_answer_and_its_link_opens_ours() {
    let origin = tokio::task::spawn_blocking(Stand::shared).await.unwrap().origin.clone();
    let address = serve_page(format!("<h1>Elsewhere</h1><a href='{origin}/#/jobs'>payments</a>")).await;
    let browser = Browser::open(&address, "").await;
    let script = "const asked = ['overview', 'jobs?limit=1000', 'job-export'].map(
            (path) => fetch(`${args[0]}/api/v1/${path}`, { mode: 'no-cors' }).catch(() => null));
        await Promise.all(asked);
        await new Promise((done) => { const image = new Image(); image.onerror = done; image.src = `${args[0]}/api/v1/history`; });";
    browser.run_with(script, serde_json::json!([origin])).await;
    assert_eq!(statuses(&browser, "/api/v1/").await, [403; 4]);
    browser.click("a").await;
    let is_answered = "return performance.getEntriesByType('resource').some(
        ({ name, responseEnd }) => name.includes('/api/v1/') && responseEnd > 0)";
    browser.await_true(is_answered).await;
    let answered = statuses(&browser, "/api/v1/").await;
    assert!(!answered.is_empty() && answered.iter().all(|status| *status == 200), "{answered:?}");
}
