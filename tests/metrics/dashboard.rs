//! Every expression of the dashboard and of the alerts, evaluated by a Prometheus that scrapes a worker.

use std::path::Path;

use serde_json::Value;

use crate::alerts::{folder, unknown, values};
use crate::prometheus::Prometheus;
use crate::rig::{Rig, jobs};

/// Title and expression of every target, in folded rows too, and of the variables.
pub fn expressions() -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/grafana/sluicegate.json");
    let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut found = Vec::new();
    let mut panels: Vec<&Value> = dashboard["panels"].as_array().unwrap().iter().collect();
    while let Some(panel) = panels.pop() {
        panels.extend(panel["panels"].as_array().into_iter().flatten());
        for target in panel["targets"].as_array().into_iter().flatten() {
            found.push((panel["title"].as_str().unwrap().to_owned(), target["expr"].as_str().unwrap().to_owned()));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap().iter().filter(|entry| entry["type"] == "query")
    {
        let query = variable["query"]["query"].as_str().unwrap();
        let metric = query.strip_prefix("label_values(").unwrap().split(',').next().unwrap();
        found.push((format!("variable {}", variable["name"]), metric.to_owned()));
    }
    found
}

/// The expression with the interval variables that Grafana would fill in at this scrape interval.
pub fn filled(expression: &str) -> String {
    let filled = expression.replace("$__rate_interval", "10s").replace("$__range", "1m").replace("$provider", ".*");
    assert!(!filled.contains('$'), "{filled}");
    filled
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_expression_returns_data() {
    let mut rig = Rig::prepare().await;
    // Enough jobs for a visible rate, and one event for every panel.
    rig.publish(jobs("acme", 300)).await;
    rig.publish(jobs("crate", 12)).await;
    rig.publish([("acme", "no job".to_owned())]).await;
    rig.run();
    let prometheus = Prometheus::start(&[rig.port]).await;
    prometheus.until("up{job=\"sluicegate\"} == 1").await;
    prometheus.until("rate(sluicegate_jobs_total{provider=\"acme\", outcome=\"succeeded\"}[10s]) > 1").await;
    // Each alone: what is refused and what is requeued have a label in common only by chance.
    prometheus.until("sluicegate_permits_refused_total > 0").await;
    prometheus.until("sluicegate_requeues_total > 0").await;
    prometheus.until("count_over_time(sluicegate_rejected_messages_total[30s]) > 2").await;

    let expressions = expressions();
    assert!(expressions.len() > 20, "{expressions:?}");
    for (title, expression) in &expressions {
        assert_eq!(unknown(expression), Vec::<String>::new(), "{title}");
        let result = prometheus.query(&filled(expression)).await;
        assert!(!result.is_empty(), "{title}: nothing for {expression}");
    }
    // The panel's limit is one that applies to every charge, not a tighter one for other calls.
    let limit =
        expressions.iter().find(|(_, expression)| expression.starts_with("min by (provider) (sluicegate_limit"));
    let limit = prometheus.query(&filled(&limit.unwrap().1)).await;
    let acme = limit.iter().find(|of| of["metric"]["provider"] == "acme").unwrap();
    assert_eq!(acme["value"][1], "20", "{limit:?}");
    // Prometheus has loaded the rules; this worker gives no cause for an alert.
    let rules = std::fs::read_to_string(folder().join("alerts.yml")).unwrap();
    for expression in values(&rules, "expr") {
        let result = prometheus.query(&expression).await;
        // The limit that is used in full, and the invalid message.
        let earned = ["limit_in_use", "rejected_messages"].iter().any(|metric| expression.contains(metric));
        assert!(result.is_empty() || earned, "{expression}: {result:?}");
    }
    let groups = prometheus.get("rules", &[]).await["groups"].as_array().unwrap().clone();
    let rules: Vec<&Value> = groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).collect();
    assert!(rules.len() >= 8);
    for rule in rules {
        assert_ne!(rule["health"], "err", "{rule}");
    }
}
