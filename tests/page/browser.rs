//! A person at the page: goes to a view, waits until something is said, and is sure at the end that nothing went wrong
//! that one does not see: no error on the console, no request to anybody else.

use std::ops::Deref;
use std::time::{Duration, Instant};

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

    /// Goes to another view without loading the page anew.
    pub async fn visit(&self, hash: &str) {
        self.run_with("location.hash = args[0]", json!([hash])).await;
    }

    /// What a person sees inside of an element, with plain spaces; empty if it is not there.
    pub async fn text(&self, css: &str) -> String {
        let script = "return document.querySelector(args[0])?.innerText ?? ''";
        self.run_with(script, json!([css])).await.as_str().unwrap().replace('\u{a0}', " ")
    }

    /// Waits until an element says so.
    pub async fn await_text(&self, css: &str, wanted: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.text(css).await.contains(wanted) {
            assert!(Instant::now() < deadline, "`{css}` never says `{wanted}`:\n{}", self.text("body").await);
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

    /// Every address that was asked for since this was called last.
    pub async fn requests(&self) -> Vec<String> {
        let entries = self.log("performance").await;
        let messages = entries.iter().filter_map(|entry| entry["message"].as_str());
        let events = messages.filter_map(|text| serde_json::from_str::<Value>(text).ok());
        let sent = events.filter(|event| event["message"]["method"] == "Network.requestWillBeSent");
        sent.filter_map(|event| event["message"]["params"]["request"]["url"].as_str().map(str::to_owned)).collect()
    }

    /// The end of every flow. `refusals` are answers that the flow wanted to be refused: browsers log those themselves.
    pub async fn nothing_went_wrong(self, refusals: &[&str]) {
        let logged = self.log("browser").await;
        let said: Vec<&str> = logged.iter().filter_map(|entry| entry["message"].as_str()).collect();
        let errors: Vec<&&str> =
            said.iter().filter(|text| !refusals.iter().any(|wanted| text.contains(wanted))).collect();
        assert!(errors.is_empty(), "on the console: {errors:#?}");
        let asked = self.requests().await;
        assert!(asked.iter().any(|url| url.contains("/api/v1/overview")), "nothing was recorded: {asked:?}");
        let browsers_own =
            |url: &str| ["data:", "about:", "chrome:", "blob:null"].iter().any(|own| url.starts_with(own));
        // A name and a password in an address lead to nobody else.
        let nameless = |url: &str| match url.strip_prefix("http://").and_then(|rest| rest.split_once('@')) {
            Some((name, rest)) if !name.contains('/') => format!("http://{rest}"),
            _ => url.to_owned(),
        };
        let elsewhere: Vec<&String> =
            asked.iter().filter(|url| !nameless(url).starts_with(&self.origin) && !browsers_own(url)).collect();
        assert!(elsewhere.is_empty(), "asked of others: {elsewhere:?}");
    }
}
