//! A small WebDriver client (<https://www.w3.org/TR/webdriver2/>): a new tab of a headless Chromium.
//!
//! A start takes as long as many a test. So a browser serves one test after the other, and ends with the process. Each test
//! has a tab and an origin of its own, with its own storage. A browser whose test failed is not used again.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::process::{Server, free_port, private_dir};

const CHROMIUM: &str = "/usr/bin/chromium";
const CHROMEDRIVER: &str = "/usr/bin/chromedriver";
const FLAGS: [&str; 10] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
];
/// Key of an element reference in W3C WebDriver.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";
/// Longest wait for any condition; an idle machine needs a hundredth of it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Browsers that no test uses now.
static IDLE: Mutex<Vec<Process>> = Mutex::new(Vec::new());

/// One chromedriver and one Chromium with a profile of its own.
struct Process {
    session: String,
    /// Dropped, it kills the driver and, in its process group, the browser.
    _server: Server,
}

pub struct Driver {
    client: reqwest::Client,
    /// `None` only while it is dropped.
    process: Option<Process>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            IDLE.lock().unwrap().extend(self.process.take());
        }
    }
}

/// One element of the page.
#[derive(Clone, Debug)]
pub struct Element(String);

impl Process {
    async fn start(client: &reqwest::Client) -> Self {
        let (port, dir) = (free_port(), private_dir("browser"));
        let port_flag = format!("--port={port}");
        let home = dir.to_str().unwrap().to_owned();
        let server = Server::start(
            &[CHROMEDRIVER, &port_flag],
            // The page shows local times: those of the tests are UTC everywhere.
            &[("HOME", &home), ("TMPDIR", &home), ("TZ", "UTC")],
            &dir.join("driver.log"),
            Some(&dir),
            "",
        );
        server.await_port(port);
        let root = format!("http://127.0.0.1:{port}/session");
        let profile = format!("--user-data-dir={home}/profile");
        let flags: Vec<&str> = FLAGS.into_iter().chain([profile.as_str()]).collect();
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "goog:chromeOptions": {"binary": CHROMIUM, "args": flags},
        }}});
        let answer = send(client, Method::POST, &root, Some(wanted)).await.unwrap();
        Self { session: format!("{root}/{}", answer["sessionId"].as_str().unwrap()), _server: server }
    }
}

impl Driver {
    pub async fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE * 2).build().unwrap();
        let idle = IDLE.lock().unwrap().pop();
        let (process, was_used) = match idle {
            Some(process) => (process, true),
            None => (Process::start(&client).await, false),
        };
        let driver = Self { client, process: Some(process) };
        if was_used {
            driver.replace_tabs().await;
        }
        driver
    }

    /// Opens a new tab, closes those of the test before, and forgets what was logged.
    async fn replace_tabs(&self) {
        let handles = self.command(Method::GET, "/window/handles", None).await.unwrap();
        let tab = self.post("/window/new", json!({ "type": "tab" })).await["handle"].clone();
        for handle in handles.as_array().unwrap() {
            self.post("/window", json!({ "handle": handle })).await;
            self.command(Method::DELETE, "/window", None).await.unwrap();
        }
        self.post("/window", json!({ "handle": tab })).await;
        self.log("browser").await;
        self.log("performance").await;
    }

    /// Sends one command; an error is its name and message.
    pub async fn command(&self, method: Method, path: &str, body: Option<Value>) -> Result<Value, String> {
        let session = &self.process.as_ref().unwrap().session;
        send(&self.client, method, &format!("{session}{path}"), body).await
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        self.command(Method::POST, path, Some(body)).await.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    pub async fn goto(&self, url: &str) {
        self.post("/url", json!({ "url": url })).await;
    }

    /// Runs a function body in the page; it may await.
    pub async fn run(&self, script: &str) -> Value {
        self.run_with(script, json!([])).await
    }

    pub async fn run_with(&self, script: &str, args: Value) -> Value {
        let script = format!("return (async (...args) => {{ {script} }})(...arguments)");
        self.post("/execute/sync", json!({ "script": script, "args": args })).await
    }

    /// Sends a command of the Chrome DevTools Protocol.
    pub async fn cdp(&self, command: &str, parameters: Value) -> Value {
        self.post("/goog/cdp/execute", json!({ "cmd": command, "params": parameters })).await
    }

    /// Waits for an element and returns the first match. `xpath` begins with `/`; anything else is CSS.
    pub async fn find(&self, what: &str) -> Element {
        let using = if what.starts_with('/') { "xpath" } else { "css selector" };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.command(Method::POST, "/element", Some(json!({"using": using, "value": what}))).await;
            match found {
                Ok(element) => return Element(element[ELEMENT].as_str().unwrap().to_owned()),
                Err(error) if Instant::now() > deadline => {
                    let shown = self.run("return document.body.innerText").await;
                    panic!("no `{what}`: {error}\n{}", shown.as_str().unwrap_or_default())
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Clicks like a user. An element that was drawn again, or is covered for a moment, is searched again.
    pub async fn click(&self, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let Element(id) = self.find(what).await;
            match self.command(Method::POST, &format!("/element/{id}/click"), Some(json!({}))).await {
                Ok(_) => return,
                Err(error) if Instant::now() > deadline => panic!("`{what}` cannot be clicked: {error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Replaces a field's text, key by key.
    pub async fn fill(&self, what: &str, text: &str) {
        let Element(id) = self.find(what).await;
        self.post(&format!("/element/{id}/clear"), json!({})).await;
        self.post(&format!("/element/{id}/value"), json!({ "text": text })).await;
    }

    /// Presses keys at the current focus. Special keys: `\u{E004}` Tab, `\u{E007}` Enter, `\u{E00C}` Esc.
    pub async fn press(&self, keys: &str) {
        let strokes = keys.chars().flat_map(|key| {
            let stroke = |kind: &str| json!({ "type": kind, "value": key.to_string() });
            [stroke("keyDown"), stroke("keyUp")]
        });
        let source = json!({ "type": "key", "id": "keyboard", "actions": strokes.collect::<Vec<_>>() });
        self.post("/actions", json!({ "actions": [source] })).await;
    }

    /// Presses a key while Shift is held.
    pub async fn press_with_shift(&self, key: &str) {
        let stroke = |kind: &str, key: &str| json!({ "type": kind, "value": key });
        let (shift, strokes) = ("\u{E008}", ["keyDown", "keyUp"].map(|kind| stroke(kind, key)));
        let [down, up] = strokes;
        let actions = [stroke("keyDown", shift), down, up, stroke("keyUp", shift)];
        let source = json!({ "type": "key", "id": "keyboard", "actions": actions });
        self.post("/actions", json!({ "actions": [source] })).await;
    }

    /// Log entries of a kind (`browser`, `performance`) since the last call.
    pub async fn log(&self, kind: &str) -> Vec<Value> {
        self.post("/se/log", json!({ "type": kind })).await.as_array().unwrap().clone()
    }

    /// Opens a tab in front of the current one, which is hidden from then on. Returns the handle of the current one.
    pub async fn cover(&self) -> String {
        let handle = self.command(Method::GET, "/window", None).await.unwrap().as_str().unwrap().to_owned();
        let other = self.post("/window/new", json!({ "type": "tab" })).await;
        self.cdp("Target.activateTarget", json!({ "targetId": other["handle"] })).await;
        handle
    }

    pub async fn uncover(&self, handle: &str) {
        self.cdp("Target.activateTarget", json!({ "targetId": handle })).await;
    }
}

async fn send(client: &reqwest::Client, method: Method, url: &str, body: Option<Value>) -> Result<Value, String> {
    let mut request = client.request(method, url);
    if let Some(body) = body {
        request = request.json(&body);
    }
    let answer = request.send().await.map_err(|error| error.to_string())?;
    let fine = answer.status().is_success();
    let mut reply: Value = answer.json().await.map_err(|error| error.to_string())?;
    let value = reply["value"].take();
    if fine { Ok(value) } else { Err(format!("{}: {}", value["error"], value["message"])) }
}
