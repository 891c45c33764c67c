//! A Prometheus server that scrapes the workers each second and evaluates the queries of Grafana and of the alerts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::ask::get;
use crate::support::process::{Server, free_port, private_dir};

const START_MAX: Duration = Duration::from_secs(60);
/// Titles of the dashboard's panels about the backlog.
pub const PANELS: [&str; 3] = ["Waiting", "Oldest", "Clears in"];

pub struct Prometheus {
    port: u16,
    dir: PathBuf,
    panels: Vec<(&'static str, String)>,
    alerts: Vec<(String, String)>,
    _server: Server,
}

impl Prometheus {
    /// Starts it without targets. Its data are deleted when it is dropped.
    pub fn start() -> Self {
        let (dir, port) = (private_dir("prometheus"), free_port());
        let targets = dir.join("targets.json");
        std::fs::write(&targets, "[]").unwrap();
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nscrape_configs:\n- job_name: sluicegate\n  \
             file_sd_configs: [{{files: ['{}'], refresh_interval: 1s}}]\n",
            targets.display()
        );
        let file = dir.join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        let [config, data, listen] = [
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", dir.join("data").display()),
            format!("--web.listen-address=127.0.0.1:{port}"),
        ];
        let command = ["prometheus", &config, &data, &listen, "--log.level=warn"];
        let server = Server::start(&command, &[], &dir.join("log"), Some(&dir), "");
        server.await_port(port);
        let deadline = Instant::now() + START_MAX;
        while get(port, "/-/ready").is_none_or(|(status, _)| status != 200) {
            assert!(Instant::now() < deadline, "not ready:\n{}", server.log_text());
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { port, dir, panels: panels(), alerts: alerts(), _server: server }
    }

    /// Scrapes these ports from now on.
    pub fn scrape(&self, ports: &[u16]) {
        let targets: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let groups = serde_json::json!([{ "targets": targets }]).to_string();
        let aside = self.dir.join("targets.new");
        std::fs::write(&aside, groups).unwrap();
        std::fs::rename(aside, self.dir.join("targets.json")).unwrap();
    }

    /// Values of the panels by provider, as Grafana would show them now.
    pub fn panels(&self) -> BTreeMap<String, BTreeMap<String, f64>> {
        let value = |series: &Value| {
            let provider = series["metric"]["provider"].as_str().unwrap_or_default().to_owned();
            Some((provider, series["value"][1].as_str()?.parse().ok()?))
        };
        let panel = |(title, expression): &(&'static str, String)| {
            let result = self.query(expression)?;
            Some(((*title).to_owned(), result.iter().filter_map(value).collect()))
        };
        self.panels.iter().filter_map(panel).collect()
    }

    /// Names of the alerts whose expression is true now, whatever their `for` duration; `None`: no response.
    pub fn alerts(&self) -> Option<Vec<String>> {
        let mut found = Vec::new();
        for (name, expression) in &self.alerts {
            if !self.query(expression)?.is_empty() {
                found.push(name.clone());
            }
        }
        Some(found)
    }

    fn query(&self, expression: &str) -> Option<Vec<Value>> {
        let (status, text) = get(self.port, &format!("/api/v1/query?query={}", escaped(expression)))?;
        assert_eq!(status, 200, "{expression}: {text}");
        let body: Value = serde_json::from_str(&text).ok()?;
        body["data"]["result"].as_array().cloned()
    }
}

fn read(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path);
    std::fs::read_to_string(path).unwrap()
}

/// First expression of each panel in [`PANELS`].
fn panels() -> Vec<(&'static str, String)> {
    let dashboard: Value = serde_json::from_str(&read("grafana/sluicegate.json")).unwrap();
    let mut open: Vec<&Value> = dashboard["panels"].as_array().unwrap().iter().collect();
    let mut found = Vec::new();
    while let Some(panel) = open.pop() {
        open.extend(panel["panels"].as_array().into_iter().flatten());
        let Some(title) = PANELS.into_iter().find(|title| panel["title"] == **title) else { continue };
        let expression = panel["targets"][0]["expr"].as_str().unwrap();
        found.push((title, expression.replace("$provider", ".*")));
    }
    assert_eq!(found.len(), PANELS.len(), "the dashboard has other panels: {found:?}");
    found
}

/// Name and expression of each alert.
fn alerts() -> Vec<(String, String)> {
    let (text, mut name, mut found) = (read("prometheus/alerts.yml"), String::new(), Vec::new());
    for line in text.lines().map(str::trim_start) {
        if let Some(alert) = line.strip_prefix("- alert: ") {
            alert.clone_into(&mut name);
        } else if let Some(expression) = line.strip_prefix("expr: ") {
            found.push((name.clone(), expression.to_owned()));
        }
    }
    assert!(found.len() > 10, "{found:?}");
    found
}

fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut escaped, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => escaped.push(char::from(byte)),
            _ => {
                let _ = write!(escaped, "%{byte:02X}");
            }
        }
        escaped
    })
}
