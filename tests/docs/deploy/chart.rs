//! The Helm chart: Helm lints and renders it, its objects are valid for Kubernetes, and the files of deploy/kubernetes
//! are what it renders.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::cli::Cli;
use sluicegate::domain::person::Role;

use super::containers::{Container, assert_unprivileged};
use super::{documents_of, loaded, object_of, pod, stop_takes_at_most};
use crate::page::Page;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const CHART: &str = "deploy/helm/sluicegate";
const ALERTS: &str = "deploy/prometheus/alerts.yml";
/// The oldest version that Chart.yaml accepts, and the newest whose schemas are known.
const KUBERNETES: [&str; 2] = ["1.25.0", "1.37.0"];
/// Objects of the Prometheus operator, of which no registry has the schema.
const WITHOUT_SCHEMA: &str = "monitoring.coreos.com/v1";

/// Every value that is off or empty by default.
const EVERYTHING: &str = r#"
image:
  repository: registry.example.com/sluicegate
  digest: sha256:0000000000000000000000000000000000000000000000000000000000000000
  pullSecrets: [{ name: registry }]
name: pay
workers:
  replicas: 3
  drainTimeoutMs: 90500
  env: [{ name: TOKIO_WORKER_THREADS, value: "1" }]
  podLabels: { team: payments }
  podAnnotations: { example.com/note: a }
  nodeSelector: { disk: ssd }
  tolerations: [{ key: payments, operator: Exists }]
  affinity: { podAntiAffinity: {} }
  priorityClassName: high
ops: { port: 9999, tokenRole: operator }
configuration:
  outbound:
    allow: ["10.0.0.0/8"]
    secrets: ["file:/run/secrets/sluicegate/acme@api.acme.example"]
  certificateAuthority: |
    -----BEGIN CERTIFICATE-----
    AAAA
    -----END CERTIFICATE-----
  more: |
    [queue]
    prefix = "billing"
secrets:
  more: [{ name: acme, items: [{ key: api-key, path: acme }] }]
backends:
  database:
    worker: { name: pay-db, key: worker-uri }
    owner: { name: pay-db, key: owner-uri }
  limiter: { name: pay-redis, key: uri }
opsToken: { name: pay-ops, key: token }
operator: { enabled: true }
serviceAccount: { annotations: { example.com/role: pay } }
podDisruptionBudget: { maxUnavailable: 34% }
networkPolicy:
  opsFrom: [{ namespaceSelector: { matchLabels: { name: monitoring } } }]
  backendTo: [{ ipBlock: { cidr: 10.0.0.0/8 } }]
serviceMonitor: { enabled: true, labels: { release: prometheus } }
prometheusRule: { enabled: true, labels: { release: prometheus }, runbook: "https://git.example.com/pay/docs/runbook.md" }
"#;

/// Values that leave out what can be left out.
const LEAST: &str = r"
workers: { replicas: null }
migrate: { enabled: false }
serviceAccount: { create: false }
podDisruptionBudget: { enabled: false }
podMonitor: { enabled: true }
";

/// The folder of the programs, which the first call may fetch unless tests/run has done so.
fn tools() -> &'static Path {
    static TOOLS: OnceLock<PathBuf> = OnceLock::new();
    TOOLS.get_or_init(|| {
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let output = Command::new(format!("{ROOT}/tests/docs/deploy/prepare")).arg(kept).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        kept.join("chart-tools/bin")
    })
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

fn helm(args: &[&str], values: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("values.yaml");
    std::fs::write(&file, values).unwrap();
    let mut helm = Command::new(tools().join("helm"));
    // Helm keeps its own files in the home folder.
    helm.args(args).arg("--values").arg(&file).env("HOME", dir.path()).current_dir(ROOT);
    helm.output().unwrap()
}

/// The text of the release `sluicegate` with these values.
fn rendered(values: &str) -> String {
    let output = helm(&["template", "sluicegate", CHART, "--namespace", "pay"], values);
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn kubernetes_files_are_the_rendered_chart() {
    let dir = tempfile::tempdir().unwrap();
    let mut render = Command::new(format!("{ROOT}/deploy/helm/render"));
    let output = render.arg(dir.path()).env("HELM", tools().join("helm")).env("HOME", dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir.path()).unwrap().map(Result::unwrap).filter(|it| it.path().is_file()) {
        let path = format!("deploy/kubernetes/{}", entry.file_name().into_string().unwrap());
        let expected = std::fs::read_to_string(entry.path()).unwrap();
        assert_eq!(Page::read(&path).text, expected, "{path}: run deploy/helm/render");
        files.push(path);
    }
    let kept = std::fs::read_dir(format!("{ROOT}/deploy/kubernetes")).unwrap().count();
    assert_eq!(files.len() + 1, kept, "secrets.example.yaml alone is not rendered: {files:?}");
}

#[test]
fn rendered_objects_are_valid_for_kubernetes() {
    for values in ["", EVERYTHING, LEAST] {
        let linted = helm(&["lint", CHART, "--strict"], values);
        assert!(linted.status.success(), "{}", said(&linted));
        let text = rendered(values);
        let documents = documents_of(&text);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &text).unwrap();
        for version in KUBERNETES {
            let mut validate = Command::new(tools().join("kubernetes-validate"));
            let output = validate.args(["--strict", "-k", version]).arg(file.path()).output().unwrap();
            let said = said(&output);
            assert!(output.status.success(), "{version}: {said}");
            let without_schema = documents.iter().filter(|it| it["apiVersion"] == WITHOUT_SCHEMA).count();
            assert_eq!(said.matches("WARN").count(), without_schema, "{version}: {said}");
            assert_eq!(said.matches("passed for resource").count(), documents.len() - without_schema, "{said}");
        }
    }
}

/// The validation above would find an unknown field, and a value of a wrong type.
#[test]
fn an_invalid_object_is_not_accepted() {
    let text = rendered(LEAST);
    for (field, wrong) in [("automountServiceAccountToken: false", "automount: false"), ("port: 9464", "port: x")] {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text.replacen(field, wrong, 1)).unwrap();
        let mut validate = Command::new(tools().join("kubernetes-validate"));
        let output = validate.args(["--strict", "-k", KUBERNETES[1]]).arg(file.path()).output().unwrap();
        assert!(!output.status.success(), "{wrong}: {}", said(&output));
    }
}

#[test]
fn wrong_values_are_rejected_by_name() {
    for (values, named) in [
        ("workers: { replicaCount: 3 }", "replicaCount"),
        ("workers: { replicas: two }", "/workers/replicas"),
        ("workers: { drainTimeoutMs: 0 }", "/workers/drainTimeoutMs"),
        ("image: { digest: latest }", "/image/digest"),
        ("ops: { tokenRole: root }", "/ops/tokenRole"),
        ("backends: { queue: { name: broker } }", "/backends/queue"),
        ("configuration: { outbound: { secrets: [stripe] } }", "/configuration/outbound/secrets"),
        ("networkPolicy: { backendPorts: [amqps] }", "/networkPolicy/backendPorts"),
        ("podMonitor: { enabled: true }\nserviceMonitor: { enabled: true }", "not"),
        ("database: {}", "database"),
    ] {
        let output = helm(&["template", "sluicegate", CHART], values);
        assert!(!output.status.success() && said(&output).contains(named), "{values}: {}", said(&output));
    }
}

/// The Secrets that `values` name, with the keys of secrets.example.yaml.
fn with_secrets(mut documents: Vec<Value>) -> Vec<Value> {
    documents.extend(documents_of(&Page::read("deploy/kubernetes/secrets.example.yaml").text));
    let secret = |name: &str, data: Value| json!({"kind": "Secret", "metadata": {"name": name}, "stringData": data});
    let (worker, owner) =
        ("postgres://pay:PASSWORD@db.example.com/pay", "postgres://owner:PASSWORD@db.example.com/pay");
    let uris = json!({"worker-uri": format!("{worker}?sslmode=verify-full"), "owner-uri": format!("{owner}?sslmode=verify-full")});
    documents.push(secret("pay-db", uris));
    documents.push(secret("pay-redis", json!({"uri": "rediss://pay:PASSWORD@cache.example.com:6380"})));
    documents.push(secret("pay-ops", json!({"token": "fedcba9876543210fedcba9876543210"})));
    documents.push(secret("acme", json!({"api-key": "KEY"})));
    documents
}

/// Each pod of the chart starts with an existing command, a configuration that loads, and every file that it names.
#[test]
fn pods_of_the_chart_load_their_configuration() {
    for (values, name, worker) in [("", "sluicegate", "sluicegate_worker"), (EVERYTHING, "pay", "pay")] {
        let documents = with_secrets(documents_of(&rendered(values)));
        let mut pods = vec![("Deployment", name.to_owned()), ("Job", format!("{name}-migrate"))];
        pods.extend((name == "pay").then(|| ("Pod", format!("{name}-operator"))));
        for (kind, name) in pods {
            let container = Container::of(&documents, kind, &name);
            if kind != "Pod" {
                let line = ["sluicegate"].into_iter().chain(container.args.iter().map(String::as_str));
                Cli::from_arguments(line.map(Into::into)).unwrap();
            }
            assert_unprivileged(pod(&object_of(&documents, kind, &name)));
        }
        let container = Container::of(&documents, "Deployment", name);
        let url = std::fs::read_to_string(container.secret("database_url")).unwrap();
        assert!(url.starts_with(&format!("postgres://{worker}:")), "{url}");
        let owner = Container::of(&documents, "Job", &format!("{name}-migrate"));
        let url = std::fs::read_to_string(owner.secret("database_url")).unwrap();
        assert!(url.contains("owner:"), "{url}");
    }
}

/// The drain, the port and the labels of the values reach every object that needs them.
#[test]
fn values_reach_the_objects() {
    let documents = documents_of(&rendered(EVERYTHING));
    let deployment = object_of(&documents, "Deployment", "pay");
    let (spec, labels) = (pod(&deployment), &deployment["spec"]["template"]["metadata"]["labels"]);
    let text = object_of(&documents, "ConfigMap", "pay")["data"]["sluicegate.toml"].as_str().unwrap().to_owned();
    // The certificate is no real one.
    let (before, after) = text.split_once("[tls]\nca_file = \"/etc/sluicegate/ca.pem\"\n").unwrap();
    let config = loaded(&format!("{before}{after}"));
    let grace = spec["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert_eq!(config.worker.drain_timeout, Duration::from_millis(90_500));
    assert!(Duration::from_secs(grace) > stop_takes_at_most(&config), "{grace} s");
    assert_eq!(config.ops.people.token_role.0, Role::Operator);
    assert_eq!((config.queue.prefix.as_str(), config.ops.listen.unwrap().port()), ("billing", 9999));
    assert_eq!(spec["containers"][0]["ports"][0]["containerPort"], 9999);
    assert_eq!(spec["containers"][0]["image"].as_str().unwrap().split("@sha256:").count(), 2);
    let is_selected = |selector: &Value| selector.as_object().unwrap().iter().all(|(key, value)| labels[key] == *value);
    for (kind, name, field) in [
        ("Deployment", "pay", "/spec/selector/matchLabels"),
        ("Service", "pay-ops", "/spec/selector"),
        ("PodDisruptionBudget", "pay", "/spec/selector/matchLabels"),
        ("NetworkPolicy", "pay", "/spec/podSelector/matchLabels"),
    ] {
        let object = object_of(&documents, kind, name);
        assert!(is_selected(object.pointer(field).unwrap()), "{kind}: {labels}");
    }
    let monitor = object_of(&documents, "ServiceMonitor", "pay");
    let service = object_of(&documents, "Service", "pay-ops")["metadata"]["labels"].clone();
    let selector = monitor["spec"]["selector"]["matchLabels"].as_object().unwrap();
    assert!(selector.iter().all(|(key, value)| service[key] == *value), "{service}");
    // The rules of alerts.yml select this job.
    assert_eq!(service[monitor["spec"]["jobLabel"].as_str().unwrap()], "sluicegate");
    assert_eq!(
        monitor["spec"]["endpoints"][0]["authorization"]["credentials"],
        json!({"name": "pay-ops", "key": "token"})
    );
}

/// Whoever installs the chart as it is gets no more than it needs, and neither does whoever follows its example.
#[test]
fn defaults_give_the_least_rights() {
    let documents = documents_of(&rendered(""));
    let text = object_of(&documents, "ConfigMap", "sluicegate")["data"]["sluicegate.toml"].as_str().unwrap().to_owned();
    assert_eq!(loaded(&text).ops.people.token_role.0, Role::Viewer);
    let policy = object_of(&documents, "NetworkPolicy", "sluicegate");
    assert_eq!(
        (&policy["spec"]["ingress"], &policy["spec"]["egress"][0]["ports"][0]["port"]),
        (&json!([]), &json!(53))
    );
    let values = Page::read("deploy/helm/sluicegate/values.yaml").text;
    let trusted = values.lines().find_map(|line| line.trim_start_matches(['#', ' ']).strip_prefix("proxy_trusted = "));
    let trusted: Vec<std::net::IpAddr> = serde_json::from_str(trusted.unwrap()).unwrap();
    assert_eq!(trusted.len(), 1);
}

/// A hook runs before the other objects exist, so it may only use its own, and Secrets of the user.
#[test]
fn migration_hook_needs_no_object_of_the_release() {
    let documents = documents_of(&rendered(""));
    let weight = |object: &Value| {
        let annotations = &object["metadata"]["annotations"];
        assert_eq!(annotations["helm.sh/hook"], "pre-install,pre-upgrade", "{object}");
        annotations["helm.sh/hook-weight"].as_str().unwrap().parse::<i32>().unwrap()
    };
    let job = object_of(&documents, "Job", "sluicegate-migrate");
    let name = pod(&job)["volumes"][0]["configMap"]["name"].as_str().unwrap().to_owned();
    let configuration = object_of(&documents, "ConfigMap", &name);
    assert!(weight(&configuration) < weight(&job));
    assert_eq!(configuration["data"], object_of(&documents, "ConfigMap", "sluicegate")["data"]);
    assert!(pod(&job)["serviceAccountName"].is_null(), "the account does not exist yet");
}

/// The chart reads deploy/prometheus/alerts.yml itself, and changes nothing but the address of the runbook.
#[test]
fn chart_embeds_the_alert_rules() {
    let base = "https://git.example.com/pay/docs/runbook.md#";
    let alerts = documents_of(&Page::read(ALERTS).text).remove(0);
    let rule = object_of(&documents_of(&rendered(EVERYTHING)), "PrometheusRule", "pay");
    let moved = alerts.to_string().replace("\"docs/runbook.md#", &format!("\"{base}"));
    assert_eq!(rule["spec"].to_string(), moved);
    let all = alerts["groups"][0]["rules"].as_array().unwrap().len();
    assert_eq!(rule["spec"].to_string().matches(base).count(), all);
    let unchanged =
        object_of(&documents_of(&rendered("prometheusRule: { enabled: true }")), "PrometheusRule", "sluicegate");
    assert_eq!(unchanged["spec"], alerts);
}

#[test]
fn network_policy_lets_in_and_out_what_a_worker_needs() {
    let policy = object_of(&documents_of(&rendered(EVERYTHING)), "NetworkPolicy", "pay");
    let ports = |rule: &Value| -> Vec<Value> {
        rule["ports"].as_array().unwrap().iter().map(|port| port["port"].clone()).collect()
    };
    let rules = |field: &str| policy["spec"][field].as_array().unwrap().iter().map(ports).collect::<Vec<_>>();
    assert_eq!(rules("ingress"), [vec![json!("ops")]]);
    assert_eq!(
        rules("egress"),
        [vec![json!(53), json!(53)], vec![json!(5432), json!(5671), json!(6380)], vec![json!(443)]]
    );
    // Without peers, no pod reaches the ops server.
    let closed = object_of(&documents_of(&rendered(LEAST)), "NetworkPolicy", "sluicegate");
    assert_eq!(closed["spec"]["ingress"], json!([]));
}
