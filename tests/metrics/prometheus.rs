//! A Prometheus server that scrapes workers each second, and queries of its data over HTTP.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::alerts::folder;
use crate::support::process::{Server, free_port, private_dir};

const PATIENCE: Duration = Duration::from_secs(60);

pub struct Prometheus {
    _server: Server,
    port: u16,
}

impl Prometheus {
    /// Scrapes the ops servers on these ports. Its data are deleted when it is dropped.
    pub async fn start(targets: &[u16]) -> Self {
        let (dir, port) = (private_dir("prometheus"), free_port());
        let rules = folder().join("alerts.yml");
        let targets: Vec<String> = targets.iter().map(|target| format!("'127.0.0.1:{target}'")).collect();
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n\
             - job_name: sluicegate\n  static_configs: [{{targets: [{}]}}]\n",
            rules.display(),
            targets.join(", ")
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
        let deadline = Instant::now() + PATIENCE;
        while !reqwest::get(format!("http://127.0.0.1:{port}/-/ready"))
            .await
            .is_ok_and(|response| response.status() == 200)
        {
            assert!(Instant::now() < deadline, "not ready:\n{}", server.log_text());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Self { _server: server, port }
    }

    pub async fn get(&self, path: &str, query: &[(&str, &str)]) -> Value {
        let address = format!("http://127.0.0.1:{}/api/v1/{path}", self.port);
        let address = url::Url::parse_with_params(&address, query).unwrap();
        let text = reqwest::get(address).await.unwrap().text().await.unwrap();
        let answer: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{path}: {text}"));
        assert_eq!(answer["status"], "success", "{query:?}: {answer}");
        answer["data"].clone()
    }

    pub async fn query(&self, expression: &str) -> Vec<Value> {
        self.get("query", &[("query", expression)]).await["result"].as_array().unwrap().clone()
    }

    pub async fn until(&self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.query(expression).await.is_empty() {
            assert!(Instant::now() < deadline, "not so: {expression}: {:?}", self.get("targets", &[]).await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}
