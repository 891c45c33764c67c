//! A user at the page: opens views, waits for texts, and checks at the end for invisible faults. These are errors on
//! the console and requests to other servers.

use std::ops::Deref;
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::{Value, json};

use crate::webdriver::{Driver, PATIENCE};

pub struct Browser {
    driver: Driver,
    origin: String,
}

impl Deref for Browser {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}

impl Browser {
    /// Opens a view of the server at this origin.
    pub async fn open(origin: &str, hash: &str) -> Self {
        let browser = Self { driver: Driver::start().await, origin: origin.to_owned() };
        browser.goto(&format!("{origin}/{hash}")).await;
        browser.find("h1").await;
        browser
    }

    /// Goes to another view without reloading the page.
    pub async fn visit(&self, hash: &str) {
        self.run_with("location.hash = args[0]", json!([hash])).await;
    }

    /// Visible text of an element, with plain spaces; empty if the element does not exist.
    pub async fn text(&self, css: &str) -> String {
        let script = "return document.querySelector(args[0])?.innerText ?? ''";
        self.run_with(script, json!([css])).await.as_str().unwrap().replace('\u{a0}', " ")
    }

    /// Waits until an element contains the text.
    pub async fn await_text(&self, css: &str, wanted: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.text(css).await.contains(wanted) {
            assert!(Instant::now() < deadline, "`{css}` does not show `{wanted}`:\n{}", self.text("body").await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until a script returns true.
    pub async fn await_true(&self, script: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.run(script).await != json!(true) {
            assert!(Instant::now() < deadline, "never true: {script}\n{}", self.text("body").await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Writes what the browser shows as `NAME.png` to the folder that the variable `SCREENSHOTS` names, if it is set.
    pub async fn keep_screenshot(&self, name: &str) {
        let Some(folder) = std::env::var_os("SCREENSHOTS") else { return };
        let shown = self.cdp("Page.captureScreenshot", json!({"captureBeyondViewport": true})).await;
        let image = base64::engine::general_purpose::STANDARD.decode(shown["data"].as_str().unwrap()).unwrap();
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.png")), image).unwrap();
    }

    /// Every URL requested since the last call.
    pub async fn requests(&self) -> Vec<String> {
        let entries = self.log("performance").await;
        let messages = entries.iter().filter_map(|entry| entry["message"].as_str());
        let events = messages.filter_map(|text| serde_json::from_str::<Value>(text).ok());
        let sent = events.filter(|event| event["message"]["method"] == "Network.requestWillBeSent");
        sent.filter_map(|event| event["message"]["params"]["request"]["url"].as_str().map(str::to_owned)).collect()
    }

    /// Checks at the end of every flow. `refusals`: errors that the flow expects; browsers log them too.
    pub async fn nothing_went_wrong(self, refusals: &[&str]) {
        let logged = self.log("browser").await;
        let messages: Vec<&str> = logged.iter().filter_map(|entry| entry["message"].as_str()).collect();
        let errors: Vec<&&str> =
            messages.iter().filter(|text| !refusals.iter().any(|wanted| text.contains(wanted))).collect();
        assert!(errors.is_empty(), "errors on the console: {errors:#?}");
        let asked = self.requests().await;
        assert!(asked.iter().any(|url| url.contains("/api/v1/overview")), "nothing was recorded: {asked:?}");
        let browsers_own =
            |url: &str| ["data:", "about:", "chrome:", "blob:null"].iter().any(|own| url.starts_with(own));
        // A user name and password in a URL do not change the server.
        let nameless = |url: &str| match url.strip_prefix("http://").and_then(|rest| rest.split_once('@')) {
            Some((name, rest)) if !name.contains('/') => format!("http://{rest}"),
            _ => url.to_owned(),
        };
        let elsewhere: Vec<&String> =
            asked.iter().filter(|url| !nameless(url).starts_with(&self.origin) && !browsers_own(url)).collect();
        assert!(elsewhere.is_empty(), "requests to other servers: {elsewhere:?}");
    }
}
