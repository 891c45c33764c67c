//! The manifests and the unit in deploy/: they parse, name existing keys, files and arguments, and allow more time than
//! a stop takes. The image contains all build inputs.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;
use sluicegate::cli::Cli;
use sluicegate::config::{self, Config};
use sluicegate::ledger::provider_row::{ProviderRow, parse_provider_file};

use crate::page::Page;
use crate::settings::{keys, wrong};

mod chart;
mod containers;
mod image;
mod secrets;

/// Debian's own interpreter, which finds Debian's python3-yaml.
const PYTHON: &str = "/usr/bin/python3";
const MANIFESTS: [&str; 7] = [
    "deploy/kubernetes/configuration.yaml",
    "deploy/kubernetes/secrets.example.yaml",
    "deploy/kubernetes/migrate.yaml",
    "deploy/kubernetes/deployment.yaml",
    "deploy/kubernetes/operator.yaml",
    "deploy/kubernetes/podmonitor.yaml",
    "deploy/keda/scaledobject.yaml",
];
const UNIT: &str = "deploy/systemd/sluicegate.service";
const MACHINE: &str = "config/example.production.toml";
/// Bounds of the steps of a stop after the drain, one after the other: the last releases and events, the worker's last
/// report, and backends that do not close.
const AFTER_THE_DRAIN: [(&str, &str); 4] = [
    ("src/worker/supervisor.rs", "FINAL_FLUSH_MAX"),
    ("src/cli/run.rs", "LAST_HEARTBEAT_TIMEOUT"),
    ("src/app.rs", "CLOSE_MAX"),
    ("src/main.rs", "FLUSH_TIMEOUT"),
];
/// Bound of the last step where spans are sent: the remaining spans.
const SPANS: (&str, &str) = ("src/telemetry/otlp.rs", "EXPORT_TIMEOUT");
/// Files that document how much longer a stop may take than its drain.
const STOP_TIME_PAGES: [&str; 5] =
    ["docs/deploying.md", "docker-compose.yml", "deploy/kubernetes/configuration.yaml", UNIT, MACHINE];

/// Every document of every manifest, read once, because one interpreter per file would take longer than all tests
/// together.
fn documents() -> &'static [Value] {
    static ALL: OnceLock<Vec<Value>> = OnceLock::new();
    ALL.get_or_init(|| documents_of(&MANIFESTS.map(|path| Page::read(path).text).join("\n---\n")))
}

/// The documents of a YAML text.
fn documents_of(text: &str) -> Vec<Value> {
    let script = "import json, sys, yaml\n\
                  print(json.dumps([it for it in yaml.safe_load_all(sys.stdin) if it is not None]))";
    let mut python = Command::new(PYTHON);
    python.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut reader = python.spawn().unwrap();
    reader.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = reader.wait_with_output().unwrap();
    assert!(output.status.success(), "{text}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one document of this kind and name in all manifests.
fn object(kind: &str, name: &str) -> Value {
    object_of(documents(), kind, name)
}

/// The one document of this kind and name.
fn object_of(documents: &[Value], kind: &str, name: &str) -> Value {
    let mut found =
        documents.iter().filter(|document| document["kind"] == kind && document["metadata"]["name"] == name);
    let one = found.next().unwrap_or_else(|| panic!("no {kind} {name}"));
    assert!(found.next().is_none(), "{kind} {name} exists twice");
    one.clone()
}

fn pod(document: &Value) -> &Value {
    if document["kind"] == "Pod" { &document["spec"] } else { &document["spec"]["template"]["spec"] }
}

/// The configuration of the pods.
fn configuration() -> Config {
    loaded(object("ConfigMap", "sluicegate")["data"]["sluicegate.toml"].as_str().unwrap())
}

fn loaded(text: &str) -> Config {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sluicegate.toml");
    std::fs::write(&path, text).unwrap();
    let token = [("SLUICEGATE_OPS__TOKEN".to_owned(), "0123456789abcdef0123456789abcdef".to_owned())];
    config::load(Some(&path), token, &[]).unwrap_or_else(|problems| panic!("{problems}"))
}

/// The seconds of a constant in the source.
fn bound((path, name): (&str, &str)) -> Duration {
    let text = Page::read(path).text;
    let value = text.split(&format!("const {name}: Duration = Duration::from_secs(")).nth(1);
    let value = value.unwrap_or_else(|| panic!("{path}: no {name}")).split(')').next().unwrap();
    Duration::from_secs(value.parse().unwrap())
}

/// How much longer than its drain a stop takes at most, without spans.
fn after_the_drain() -> Duration {
    AFTER_THE_DRAIN.map(bound).iter().sum()
}

/// The drain and everything after it: `run` waits for nothing else.
fn stop_takes_at_most(config: &Config) -> Duration {
    config.worker.drain_timeout + after_the_drain() + bound(SPANS)
}

/// The longest time that a request of any shipped row may be in flight.
fn longest_request() -> Duration {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/config/providers")).unwrap();
    let paths = folder.map(|entry| format!("config/providers/{}", entry.unwrap().file_name().into_string().unwrap()));
    let texts = paths.chain(["config/providers.example.toml".to_owned()]).map(|path| Page::read(&path).text);
    let rows: Vec<ProviderRow> = texts.flat_map(|text| parse_provider_file(&text).unwrap()).collect();
    assert!(rows.len() >= 8);
    rows.iter().map(|row| row.validate(0).unwrap().hold_max()).max().unwrap()
}

#[test]
fn every_variable_in_deploy_exists() {
    let keys = keys();
    let mut named = BTreeSet::new();
    for path in MANIFESTS.into_iter().chain([UNIT]) {
        let text = Page::read(path).text;
        for word in text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) {
            if word.starts_with("SLUICEGATE_") {
                assert_eq!(wrong(word, &keys), None, "{path}");
                named.insert(word.to_owned());
            }
        }
    }
    assert!(named.len() >= 4, "{named:?}");
}

#[test]
fn probes_and_selectors_have_targets() {
    let deployment = object("Deployment", "sluicegate");
    let container = &pod(&deployment)["containers"][0];
    let routes = Page::read("src/ops/mod.rs").text;
    for (probe, path) in [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")] {
        assert_eq!(container[probe]["httpGet"]["path"], path, "{probe}");
        assert!(routes.contains(&format!("\"{path}\"")), "{path} is no route");
    }
    let listen = configuration().ops.listen.unwrap();
    assert!(!listen.ip().is_loopback(), "probes come from outside the pod, so it must not listen on loopback");
    assert_eq!(container["ports"][0]["containerPort"], listen.port());
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    let service = object("Service", "sluicegate-ops");
    assert_eq!(&service["spec"]["selector"], labels);
    assert_eq!(service["spec"]["ports"][0]["targetPort"], container["ports"][0]["name"]);
    assert_eq!(&object("PodDisruptionBudget", "sluicegate")["spec"]["selector"]["matchLabels"], labels);
    assert_eq!(&deployment["spec"]["selector"]["matchLabels"], labels);
    let monitor = object("PodMonitor", "sluicegate");
    assert_eq!(&monitor["spec"]["selector"]["matchLabels"], labels);
    // The rules of alerts.yml select this job.
    assert_eq!(labels[monitor["spec"]["jobLabel"].as_str().unwrap()], "sluicegate");
    let scraped = &monitor["spec"]["podMetricsEndpoints"][0];
    assert_eq!(scraped["port"], container["ports"][0]["name"]);
    let token = &scraped["authorization"]["credentials"];
    let secret = object("Secret", token["name"].as_str().unwrap());
    assert!(secret["stringData"][token["key"].as_str().unwrap()].is_string());
    assert!(deployment["spec"]["replicas"].as_u64() >= Some(2), "with one replica, no pod could be evicted");
}

/// The drain is longer than any request, and the process's grace period is longer than the drain.
#[test]
fn grace_periods_exceed_the_drain() {
    let (pods, machine) = (configuration(), loaded(&Page::read(MACHINE).text));
    for config in [&pods, &machine] {
        let (drain, longest) = (config.worker.drain_timeout, longest_request());
        assert!(drain > longest, "a drain of {drain:?} against a request of {longest:?}");
    }
    let grace = pod(&object("Deployment", "sluicegate"))["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(Duration::from_secs(grace) > stop_takes_at_most(&pods), "{grace} s");
    let unit = Page::read(UNIT).text;
    let stop = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).unwrap().parse().unwrap();
    assert!(Duration::from_secs(stop) > stop_takes_at_most(&machine), "{stop} s");
    let compose = Page::read("docker-compose.yml").text;
    let stop = compose.lines().find_map(|line| line.trim().strip_prefix("stop_grace_period: ")).unwrap();
    let stop = stop.trim_end_matches('s').parse().unwrap();
    assert!(Duration::from_secs(stop) > stop_takes_at_most(&loaded("")), "{stop} s");
}

/// These are the pages that explain grace periods.
#[test]
fn stop_time_is_documented_consistently() {
    let (without, with) = (after_the_drain().as_secs(), (after_the_drain() + bound(SPANS)).as_secs());
    let stated = format!("{without} s ({with} s with traces)");
    for path in STOP_TIME_PAGES {
        let text = Page::read(path).text;
        let lines: Vec<&str> = text.lines().map(|line| line.trim().trim_start_matches('#').trim()).collect();
        assert!(lines.join(" ").contains(&stated), "{path} does not say `{stated}`");
    }
    let rows = Page::read("docs/deploying.md").table("# Deploying", "a stop waits for");
    let phases: Vec<u64> = rows.iter().filter_map(|row| row[1].strip_suffix(" s")?.parse().ok()).collect();
    assert_eq!(
        phases,
        AFTER_THE_DRAIN.into_iter().chain([SPANS]).map(|phase| bound(phase).as_secs()).collect::<Vec<_>>()
    );
    let drain = configuration().worker.drain_timeout.as_secs();
    let deployment = Page::read("deploy/kubernetes/deployment.yaml").text;
    let sum = format!("= {} s   the longest that a stop takes, {} s with traces", drain + without, drain + with);
    assert!(deployment.contains(&sum), "deployment.yaml does not say `{sum}`");
}

/// The unit's text on embedded mode: without a token, the installed file is rejected unless it listens on loopback.
#[test]
fn unit_documents_the_embedded_listen_address() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(MACHINE);
    let refused = config::load(Some(&file), [], &[]).unwrap_err().to_string();
    assert!(refused.contains("ops.listen") && refused.contains("ops.token"), "{refused}");
    let listen = "127.0.0.1:9464";
    let embedded = config::load(Some(&file), [], &[format!("ops.listen={listen}")]);
    let embedded = embedded.unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(embedded.ops.listen.unwrap().to_string(), listen);
    assert!(Page::read(UNIT).text.contains(&format!("listen = \"{listen}\"")));
}

/// More pods do not raise a limit: the row determines the highest useful number.
#[test]
fn replica_maximum_follows_the_formula() {
    let text = Page::read("deploy/keda/scaledobject.yaml").text;
    let number = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("# {name}:"))).unwrap();
        line.trim().parse().unwrap()
    };
    assert!(text.contains("maxReplicas = ceil(limit_per_s × p95_latency_s ÷ in-flight per pod)"));
    let scaled = object("ScaledObject", "sluicegate");
    let most = (number("limit_per_s") * number("p95_latency_s") / number("in_flight_per_pod")).ceil();
    assert_eq!(scaled["spec"]["maxReplicaCount"].as_f64(), Some(most.max(2.0)));
    let row = ProviderRow::default();
    assert_eq!(number("in_flight_per_pod").to_string(), row.workers.to_string());
    let trigger = &scaled["spec"]["triggers"][0]["metadata"];
    assert_eq!(trigger["value"], row.bucket_capacity.to_string());
    let in_ledger = &scaled["spec"]["triggers"][1]["metadata"];
    assert_eq!(in_ledger["threshold"], trigger["value"]);
    let (lane, query) = (trigger["queueName"].as_str().unwrap(), in_ledger["query"].as_str().unwrap());
    let provider = lane.rsplit('.').next().unwrap();
    assert_eq!(query, format!("max(sluicegate_waiting_jobs{{provider=\"{provider}\"}})"));
    let prefix = configuration().queue.prefix;
    assert!(trigger["queueName"].as_str().unwrap().starts_with(&format!("{prefix}.")));
    object("Deployment", scaled["spec"]["scaleTargetRef"]["name"].as_str().unwrap());
    // `cooldownPeriod` counts only on the way to no pods at all, which the minimum excludes.
    assert!(scaled["spec"]["cooldownPeriod"].is_null() && scaled["spec"]["minReplicaCount"].as_u64() >= Some(2));
    let slower = &scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"];
    assert!(slower["stabilizationWindowSeconds"].as_u64() >= Some(300), "{slower}");
    let authentication = object("TriggerAuthentication", "sluicegate-queue");
    let target = &authentication["spec"]["secretTargetRef"][0];
    let secret = object("Secret", target["name"].as_str().unwrap());
    assert!(secret["stringData"][target["key"].as_str().unwrap()].is_string());
}

/// `systemd-analyze` knows every setting of the unit, and finds few rights beyond its needs.
#[test]
fn the_unit_is_valid_and_hardened() {
    let text = Page::read(UNIT).text;
    let program = "/usr/local/bin/sluicegate";
    let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let args: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(args[0], program);
    Cli::from_arguments(args.iter().map(Into::into)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let unit = dir.path().join("sluicegate.service");
    // `systemd-analyze` requires the program, which is not installed here.
    std::fs::write(&unit, text.replace(program, env!("CARGO_BIN_EXE_sluicegate"))).unwrap();
    for rest in [&["verify", "--man=no"][..], &["security", "--offline=true", "--threshold=15", "--no-pager"]] {
        let output = Command::new("systemd-analyze").args(rest).arg(&unit).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.trim().is_empty(), "{rest:?}: {stderr}");
    }
    // The exit codes for which a restart fixes nothing.
    assert!(text.contains("RestartPreventExitStatus=2 78"));
}
