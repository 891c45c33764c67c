//! A minimal OTLP/HTTP collector: it stores the bodies that are posted to `/v1/traces`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Json;
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::{Value, json};

#[derive(Clone, Default)]
pub struct Collector {
    posted: Arc<Mutex<Vec<Value>>>,
}

/// One span of the protocol. <https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding>
#[derive(Clone, Debug)]
pub struct Span {
    pub name: String,
    pub trace: String,
    pub id: String,
    pub parent: String,
    pub kind: i64,
    /// Nanoseconds since the Unix epoch.
    pub began_ns: u64,
    pub ended_ns: u64,
    pub attributes: BTreeMap<String, String>,
    /// Status code; 2 is an error.
    pub status: i64,
}

impl Collector {
    /// Serves on a loopback port until the test ends; returns its address.
    pub async fn serve(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let posted = Arc::clone(&self.posted);
        let take = move |Json(body): Json<Value>| async move {
            posted.lock().unwrap().push(body);
            (StatusCode::OK, Json(json!({})))
        };
        let router = axum::Router::new().route("/v1/traces", post(take));
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    /// All bodies so far, unparsed.
    pub fn text(&self) -> String {
        self.posted.lock().unwrap().iter().map(|body| format!("{body}\n")).collect()
    }

    /// Resource attributes, which all spans share.
    pub fn resource(&self) -> BTreeMap<String, String> {
        let posted = self.posted.lock().unwrap();
        attributes(&posted[0]["resourceSpans"][0]["resource"])
    }

    pub fn spans(&self) -> Vec<Span> {
        let posted = self.posted.lock().unwrap();
        let all = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
        let resources = posted.iter().flat_map(|body| all(body, "resourceSpans"));
        let scopes = resources.flat_map(|resource| all(&resource, "scopeSpans"));
        scopes.flat_map(|scope| all(&scope, "spans")).map(|span| read(&span)).collect()
    }
}

fn read(span: &Value) -> Span {
    let text = |key: &str| span[key].as_str().unwrap_or_default().to_owned();
    Span {
        name: text("name"),
        trace: text("traceId"),
        id: text("spanId"),
        parent: text("parentSpanId"),
        kind: span["kind"].as_i64().unwrap(),
        // This encoding writes 64-bit integers as text.
        began_ns: text("startTimeUnixNano").parse().unwrap(),
        ended_ns: text("endTimeUnixNano").parse().unwrap(),
        attributes: attributes(span),
        status: span["status"]["code"].as_i64().unwrap_or_default(),
    }
}

fn attributes(of: &Value) -> BTreeMap<String, String> {
    let pairs = of["attributes"].as_array().cloned().unwrap_or_default();
    let text = |pair: &Value| {
        let value = pair["value"].as_object().unwrap().values().next().unwrap();
        (pair["key"].as_str().unwrap().to_owned(), value.as_str().map_or(value.to_string(), str::to_owned))
    };
    pairs.iter().map(text).collect()
}
